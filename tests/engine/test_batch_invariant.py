"""``backend.batch_invariant``: every matmul of the target is a step, so that what multiplies can be chosen.

That a token's bits are then the same in any call is held where they are made: tests/gpu/test_batch_invariant_gpu.py.
"""

import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadRecipe
from tandemrt.export.bundle.build import BuildReport, build
from tandemrt.export.bundle.graphs import graphs
from tandemrt.export.bundle.opening import open_models
from tandemrt.export.bundle.publish import publish
from tandemrt.export.bundle.vision import open_tower
from tandemrt.export.compile.backends import CompiledEngine, compile_graph
from tandemrt.export.graph.builder import GraphBuilder
from tandemrt.export.model.decoder import build_decoder
from tandemrt.export.passes.batch_invariance import make_batch_invariant
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.kernels import float8_matmul, matmul_trials
from tandemrt.plugins.kernels.cudnn_attention import longest_run
from tandemrt.plugins.kernels.prompt_rows import split_rows
from tandemrt.plugins.operators.launch import Context
from tandemrt.runtime.device.backends.onnxruntime.executor import Executor
from tests.engine import quantized
from tests.engine.decoding import Decoder, expected_logits, fused, make_checkpoint, open_steps
from tests.engine.test_quantized_checkpoints import FLOAT8
from tests.makers import tiny_checkpoint, tiny_hybrid, tiny_latent, tiny_tokenizer, tiny_vision, write_recipe

TOKENS = [3, 1, 60, 12, 7, 7, 0, 41]
SIZES = {"vocab_size": 64}  # a multiple of 8, as matmuls by cuBLASLt need


def open_matmul_steps(model: ir.Model, contract: Contract, folder: Path) -> Executor:
    make_batch_invariant(model)
    return open_steps(model, contract, folder)


@pytest.mark.parametrize(
    ("case", "more"),
    [
        ("llama biased with linear scaling", {}),
        ("qwen3 tied with yarn", {}),
        ("qwen2", {}),
        ("qwen2_moe", {"num_experts": 8}),  # a shared expert, whose gate has one output
        ("qwen2_moe", {"num_experts": 6, "shared_expert_intermediate_size": 24}),  # one that is like the others
        ("glm4_moe", {}),
    ],
)
def test_the_steps_give_the_logits_of_the_checkpoint(tmp_path: Path, case: str, more: dict[str, int]) -> None:
    expected = expected_logits(make_checkpoint(case, tmp_path, sizes=SIZES | more), TOKENS)
    decode = Decoder(tmp_path, "paged", 1, open_engine=partial(open_matmul_steps, folder=tmp_path))
    torch.testing.assert_close(decode([TOKENS], [0])[0], expected, atol=1e-4, rtol=0)


def test_a_matmul_whose_outputs_are_no_multiple_of_8_is_refused_by_name(tmp_path: Path) -> None:
    make_checkpoint("qwen2", tmp_path, sizes={"vocab_size": 61})
    with pytest.raises(BadRecipe, match=r"must be multiples of 8; '.*head.*' has \[61, 64\]; drop it"):
        Decoder(tmp_path, "paged", 1, open_engine=partial(open_matmul_steps, folder=tmp_path))


@pytest.mark.parametrize(
    ("outputs", "inputs", "valid"),
    [(8, 8, True), (16, 24, True), (9, 8, False), (8, 9, False), (4, 8, True), (4, 9, False), ("outputs", 8, False)],
)
def test_outputs_and_inputs_of_a_matmul_are_multiples_of_8(outputs: int | str, inputs: int, valid: bool) -> None:
    """Of 4 outputs, the rows of the weight are repeated."""
    b = GraphBuilder("g")
    x = b.input(Binding("x", "float32", ("tokens", inputs)))
    weight = b.input(Binding("weight", "float32", (outputs, inputs)))
    b.output(Binding("y", "float32", ("tokens", outputs)), b.op("MatMul", x, b.op("Transpose", weight, perm=[1, 0])))
    with nullcontext() if valid else pytest.raises(BadRecipe, match="inputs and outputs of matmuls must be multiples"):
        assert make_batch_invariant(b.model()) == 1


@pytest.mark.parametrize("operator", ["Gemm", "Einsum", "ReduceMean"])
def test_an_operator_that_is_not_batch_invariant_is_refused_by_name(tmp_path: Path, operator: str) -> None:
    make_checkpoint("qwen2", tmp_path, sizes=SIZES)

    def with_a_matmul_of_its_own(model: ir.Model, contract: Contract) -> Executor:
        step = next(node for node in model.graph if node.op_type == "MatMul")
        step.op_type = operator
        return open_matmul_steps(model, contract, tmp_path)

    with pytest.raises(
        BadRecipe, match=rf"{operator}, the operator of '.*', has no batch-invariant implementation; drop it"
    ):
        Decoder(tmp_path, "paged", 1, open_engine=with_a_matmul_of_its_own)


def paged_graph(case: str, folder: Path, dtype: str) -> ir.Model:
    make_checkpoint(case, folder, sizes=SIZES)
    checkpoint = Checkpoint.open(folder)
    spec = ModelSpec.from_hf(checkpoint.config)
    return fused(build_decoder(spec, checkpoint, dtype=dtype, capacity=40, lowering="paged"), "paged")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "case", ["gemma3", "olmo2", "exaone4", "phi3", "arcee", "granite", "mistral tied", "glm4_moe", "dots1"]
)
def test_every_step_of_a_family_is_known_to_be_batch_invariant(tmp_path: Path, case: str, dtype: str) -> None:
    model = paged_graph(case, tmp_path, dtype)
    make_batch_invariant(model)
    assert not {"MatMul", "RMSNormalization", "ReduceSum"} & {node.op_type for node in model.graph}


@pytest.mark.parametrize("experts", [256, 257])
def test_a_router_of_many_experts_is_refused_because_equal_scores_have_no_order(tmp_path: Path, experts: int) -> None:
    model = paged_graph("glm4_moe", tmp_path, "bfloat16")
    ranked = next(node.inputs[0] for node in model.graph if node.op_type == "TopK")
    assert ranked is not None
    ranked.shape = ir.Shape(["tokens", experts])
    with nullcontext() if experts <= 256 else pytest.raises(BadRecipe, match=r"TopK, the operator of '.*', has no"):
        make_batch_invariant(model)


@pytest.mark.parametrize(("attribute", "value"), [("axis", 1), ("stash_type", 10)])
def test_a_norm_that_a_residual_norm_cannot_be_is_refused(tmp_path: Path, attribute: str, value: int) -> None:
    model = paged_graph("qwen2", tmp_path, "float16")
    norm = next(node for node in model.graph if node.op_type == "RMSNormalization")
    norm.attributes.add(ir.AttrInt64(attribute, value))
    with pytest.raises(BadRecipe, match=r"RMSNormalization, the operator of '.*', has no batch-inv"):
        make_batch_invariant(model)


def test_a_bundle_has_no_matmul_of_the_target_in_a_subgraph_and_leaves_the_draft_as_it_is(tmp_path: Path) -> None:
    sources = [tiny_checkpoint(tmp_path / name, layers=n, head_dim=32) for name, n in (("t", 2), ("d", 1))]
    backend = 'name = "onnxruntime-cuda"\ncompute_capabilities = ["9.0"]'
    recipe = write_recipe(tmp_path / "r.toml", target=sources[0], draft=sources[1], backend=backend, dtype="bfloat16")
    bundle = Bundle.open(build(Recipe.load(recipe), tmp_path / "bundle").folder)
    target, draft = bundle.engine("target"), bundle.engine("draft")
    assert (target.batch_invariant, draft.batch_invariant) == (True, False)
    assert target.decoder is not None
    layer = ["linear", "window_attention", "linear", "gated_linear", "linear"]
    assert [step.name for step in target.decoder.operators] == [*2 * layer, "linear"]
    for subgraph in target.decoder.subgraphs:
        nodes = onnx.load(bundle.folder / subgraph.file, load_external_data=False).graph.node
        assert not {"MatMul", "FusedMatMul"} & {node.op_type for node in nodes}
    assert {"kernels/linear.sm_90.cubin", "kernels/gated_linear.sm_90.cubin"} <= {*bundle.manifest.kernels}


def built(folder: Path, target: Path, backend: str, dtype: str) -> BuildReport:
    text = f'name = "onnxruntime-cuda"\ncompute_capabilities = ["9.0"]\n{backend}'
    recipe = write_recipe(folder / "r.toml", target=target, backend=text, dtype=dtype)
    return build(Recipe.load(recipe), folder / "bundle")


def test_a_target_that_cannot_be_batch_invariant_is_built_without_and_the_build_says_why(tmp_path: Path) -> None:
    target = tiny_checkpoint(tmp_path / "t", vocab=268, head_dim=32)
    report = built(tmp_path, target, "", "bfloat16")
    assert not report.manifest.engines["target"].batch_invariant
    assert not [file for file in report.manifest.kernels if "linear" in file]
    (note,) = [note for note in report.notes if "speculation may change last bits" in note]
    assert re.search(r"must be multiples of 8; '.*' has \[268, 32\]", note)
    with pytest.raises(BadRecipe, match=r"batch_invariant = true is not possible: inputs and outputs of matmuls must"):
        built(tmp_path, target, "batch_invariant = true", "bfloat16")


@pytest.mark.parametrize(("backend", "dtype"), [("batch_invariant = false", "bfloat16"), ("", "float32")])
def test_batch_invariance_is_off_where_a_recipe_says_so_or_has_other_matmuls(
    tmp_path: Path, backend: str, dtype: str
) -> None:
    report = built(tmp_path, tiny_checkpoint(tmp_path / "t", head_dim=32), backend, dtype)
    assert not report.manifest.engines["target"].batch_invariant


def compiled(folder: Path, target: Path, backend: str, dtype: str) -> CompiledEngine:
    """Compile the target's graph, without kernels."""
    text = f'name = "onnxruntime-cuda"\n{backend}'
    recipe = Recipe.load(write_recipe(folder / "r.toml", target=target, backend=text, dtype=dtype))
    model, *drafts = open_models(recipe)
    tower, _ = open_tower(recipe, model)
    models = (model if tower is None else tower.read_by(model), *drafts)
    graph = next(graph for graph in graphs(recipe, models) if graph.name == "target")
    (folder / "out" / "target").mkdir(parents=True)
    return compile_graph(graph, recipe, folder / "out")


@pytest.mark.parametrize("required", [False, True])
def test_a_recipe_can_require_what_is_off_for_its_cost(tmp_path: Path, required: bool) -> None:
    backend = "batch_invariant = true" if required else ""
    result = compiled(tmp_path, tiny_checkpoint(tmp_path / "t", layers=1, head_dim=32), backend, "float32")
    assert result.engine.batch_invariant is required
    assert any("few rows of float32 matmuls would be slower" in note for note in result.notes) is not required


def test_float8_weights_have_it_by_default(tmp_path: Path) -> None:
    target, case = tiny_checkpoint(tmp_path / "t", head_dim=32), FLOAT8["compressed-tensors, channel, inputs by token"]
    quantized.rewrite(target, case.config, case.store)
    assert compiled(tmp_path, target, "", "bfloat16").engine.batch_invariant


def test_experts_have_it_by_default(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 272}
    make_checkpoint("qwen3_moe", tmp_path, sizes=sizes | {"num_experts": 8})
    tiny_tokenizer(tmp_path)
    assert compiled(tmp_path, tmp_path, "", "bfloat16").engine.batch_invariant


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_a_model_that_reads_images_has_it_by_default(tmp_path: Path, kind: str) -> None:
    """Its queries and keys are normed and rotated before the attention operator."""
    assert compiled(tmp_path, tiny_vision(tmp_path / "t", kind), "", "bfloat16").engine.batch_invariant


def test_weights_in_4_bits_have_it_if_a_recipe_requires_it(tmp_path: Path) -> None:
    """In a model whose attention has a gate, the rows of queries and gates are put in order."""
    sizes = {"hidden": 256, "intermediate_size": 256, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    publish(tiny_hybrid(tmp_path / "whole", **sizes), tmp_path / "t", "int4")
    report = built(tmp_path, tmp_path / "t", "batch_invariant = true", "bfloat16")
    assert report.manifest.engines["target"].batch_invariant


def test_latent_attention_is_built_without_it(tmp_path: Path) -> None:
    """Its matmuls by the weights of each head have no batch-invariant implementation."""
    target = tiny_latent(tmp_path / "t")
    result = compiled(tmp_path, target, "", "bfloat16")
    assert not result.engine.batch_invariant
    (note,) = [note for note in result.notes if "speculation may change last bits" in note]
    assert "MatMul, the operator of 'layers.0/attention/MatMul" in note


def test_a_recipe_is_refused_where_attention_sums_in_no_fixed_order(tmp_path: Path) -> None:
    backend = 'name = "onnxruntime-cuda"\ncache = "linear"\nbatch_invariant = true'
    file = write_recipe(tmp_path / "r.toml", target=tmp_path, backend=backend, dtype="bfloat16")
    with pytest.raises(BadRecipe, match=r"backend\.batch_invariant needs .*'linear'"):
        Recipe.load(file)


@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral"])
def test_experts_have_it_if_a_recipe_requires_it(tmp_path: Path, case: str) -> None:
    make_checkpoint(case, tmp_path, sizes=SIZES | {"num_experts": 8, "num_local_experts": 8})
    checkpoint = Checkpoint.open(tmp_path)
    spec = ModelSpec.from_hf(checkpoint.config)
    model = fused(build_decoder(spec, checkpoint, dtype="bfloat16", capacity=40, lowering="paged"), "paged")
    make_batch_invariant(model)
    prompts = [value for value in model.graph.inputs if value.name == "prompt_rows"]
    experts = [node for node in model.graph if node.op_type == "experts"]
    first, last = ([value for value in node.inputs[4:] if value is not None] for node in experts)
    assert (first, last) == (prompts, [])  # the last layer computes the rows with logits, whatever they are


def test_rows_of_prompts_are_the_last_ones_of_a_call() -> None:
    def split(prompts: int) -> list[tuple[list[int], int] | None]:
        tensors = {"x": torch.arange(6).view(1, 3, 2), "weight": torch.zeros(4, 2)}
        parts = split_rows(tensors | {"prompt_rows": torch.zeros(prompts, dtype=torch.int32)}, ("x",))
        return [None if part is None else (part["x"].flatten().tolist(), len(part["weight"])) for part in parts]

    assert split(0) == [([0, 1, 2, 3, 4, 5], 4), None]
    assert split(1) == [([0, 1, 2, 3], 4), ([4, 5], 4)]
    assert split(3) == [None, ([0, 1, 2, 3, 4, 5], 4)]


def test_a_matmul_in_float8_whose_sums_have_no_room_is_refused() -> None:
    x, weight = (torch.zeros(rows, 32).to(torch.float8_e4m3fn) for rows in (3, 16))
    tensors = {"quantized": x, "weight": weight.view(torch.uint8), "out": torch.zeros(3, 16, dtype=torch.float16)}
    context = Context(torch.device("cpu"), sizes={"batch": 1}, batch_invariant=True)
    with pytest.raises(ValueError, match=r"out: bfloat16 or float32 is needed, got torch\.float16"):
        float8_matmul.launch(tensors, {}, context)


@pytest.mark.parametrize(("chunk", "longest"), [(64, 2048), (2048, 2048), (2049, 4096), (5000, 8192)])
def test_a_plan_for_prompts_does_not_follow_from_how_many_tokens_a_call_has(chunk: int, longest: int) -> None:
    context = Context(torch.device("cpu"), sizes={"query": chunk}, batch_invariant=True)
    assert {longest_run(tokens, context) for tokens in (1, 64, 2049, 5000, 20_000)} == {longest}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_algorithms_are_compared_on_values_that_the_checkpoint_does_not_decide(dtype: torch.dtype) -> None:
    broken = torch.full((16, 32), torch.nan).to(dtype)
    drawn, again = matmul_trials.random_like(broken), matmul_trials.random_like(torch.zeros(16, 32).to(dtype))
    assert (drawn.dtype, drawn.shape) == (dtype, broken.shape)
    assert drawn.float().isfinite().all()
    assert len(drawn.float().unique()) > 16
    assert torch.equal(drawn.view(torch.uint8), again.view(torch.uint8))
