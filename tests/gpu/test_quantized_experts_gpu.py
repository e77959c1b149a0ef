"""Experts with weights in 4 and 8 bits on a CUDA device: kernels, logits, texts with speculation and CUDA graphs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.plugins.implementations import launcher, reference
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.operators.launch import Context
from tests.engine.implementation_cases import LOW_BIT_EXPERTS, to_numpy
from tests.engine.test_quantized_checkpoints import FLOAT8, INT4, OTHERS
from tests.engine.test_quantized_experts import as_built, write
from tests.gpu.here import compute_capabilities, needs_float8
from tests.gpu.low_bit import low_bit_experts
from tests.gpu.quantized_logits import check_logits
from tests.gpu.rounds import by_graphs_and_eagerly, check_invisible, paged, texts
from tests.makers import VOCAB, tiny_checkpoint, tiny_tokenizer, write_recipe

COUNT, CHOSEN = 6, 2
SIZES = [(256, 96), (2336, 160), (160, 1184)]  # hidden size and width; some have more chunks than warps share
CASES = {
    "int4": (INT4["gptq_v2, zero points"], "float16", 0.01),
    "int8": (OTHERS["modelopt, W8A16"], "bfloat16", 0.03),
    "NVFP4": (OTHERS["modelopt, NVFP4"], "bfloat16", 0.03),
    "MXFP4": (OTHERS["quark, MXFP4"], "float16", 0.01),
}
FP8 = {
    "blocks": (FLOAT8["fp8, block"], "bfloat16", 0.15),  # other matmuls get one scale per output
    "channels": (FLOAT8["compressed-tensors, channel, inputs by token"], "bfloat16", 0.1),
}

NUMBERS = [name.removesuffix("_experts") for name in LOW_BIT_EXPERTS]
Tensors = dict[str, torch.Tensor]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    names = ["attention", "swiglu", "experts", "float8", "int4", "int8", "float4", *(f"experts_{n}" for n in NUMBERS)]
    compile_kernels(compute_capabilities(), folder, names=names, dtypes=["bfloat16", "float16"], head_dims=[64])
    return folder


def through_experts(operator: str, tensors: Tensors, attributes: dict[str, int], context: Context) -> torch.Tensor:
    mixed = torch.full_like(tensors["x"], torch.nan)
    launcher(operator, context)(tensors | {"mixed": mixed}, attributes, context).run()
    return mixed


@pytest.mark.parametrize(("hidden", "width"), SIZES)
@pytest.mark.parametrize("operator", LOW_BIT_EXPERTS)
def test_any_number_of_rows_gives_what_the_definition_gives(
    kernels: Path, operator: str, hidden: int, width: int
) -> None:
    """The last bit for few rows, whose weights are not rounded; a little more for many."""
    tensors, attributes = low_bit_experts(operator, COUNT, hidden, width, rows=300, chosen=CHOSEN)
    context = Context(torch.device("cuda", 0), kernels)
    numbers = {name: to_numpy(each[:20] if name in ("x", "router_logits") else each) for name, each in tensors.items()}
    expected = torch.from_numpy(reference(operator)(**numbers, **attributes).astype("float32"))
    for rows in (20, 300):
        few = tensors | {name: tensors[name][:rows] for name in ("x", "router_logits")}
        mixed = through_experts(operator, few, attributes, context)[:20].float().cpu()
        assert (mixed - expected).norm() < (0.004 if rows == 20 else 0.008) * expected.norm(), rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operator", LOW_BIT_EXPERTS)
def test_a_row_has_the_same_bits_in_any_company(kernels: Path, operator: str, dtype: torch.dtype) -> None:
    tensors, attributes = low_bit_experts(operator, COUNT, *SIZES[1], rows=700, chosen=CHOSEN, dtype=dtype)
    context = Context(torch.device("cuda", 0), kernels, batch_invariant=True)
    everything = through_experts(operator, tensors, attributes, context)
    assert everything.isfinite().all()
    for rows in (slice(0, 1), slice(3, 8), slice(4, 14), slice(5, 38), slice(100, 165), slice(300, 700)):
        few = tensors | {name: tensors[name][rows].clone() for name in ("x", "router_logits")}
        assert torch.equal(through_experts(operator, few, attributes, context), everything[rows]), rows


@pytest.mark.parametrize("operator", LOW_BIT_EXPERTS)
def test_a_row_of_a_prompt_has_the_same_bits_beside_windows_and_other_prompts(kernels: Path, operator: str) -> None:
    tensors, attributes = low_bit_experts(operator, COUNT, *SIZES[1], rows=700, chosen=CHOSEN)
    context = Context(torch.device("cuda", 0), kernels, batch_invariant=True)

    def mixed(rows: slice, prompts: int) -> torch.Tensor:
        few = tensors | {name: tensors[name][rows].clone() for name in ("x", "router_logits")}
        few["prompt_rows"] = torch.zeros(prompts, dtype=torch.int32, device="cuda")
        return through_experts(operator, few, attributes, context)

    of_prompts, of_windows = mixed(slice(0, 700), 700), mixed(slice(0, 700), 0)
    assert (of_prompts - of_windows).norm() < 0.015 * of_windows.norm()
    for first, last in ((0, 1), (3, 8), (5, 38), (300, 700)):
        assert torch.equal(mixed(slice(first, last), last - first), of_prompts[first:last]), (first, last)
    both = mixed(slice(0, 700), 600)
    assert torch.equal(both[:100], of_windows[:100])
    assert torch.equal(both[100:], of_prompts[100:])


@pytest.mark.parametrize("rows", [3, 40, 600])
def test_a_captured_call_follows_changed_routing(kernels: Path, rows: int) -> None:
    context = Context(torch.device("cuda", 0), kernels)
    tensors, attributes = low_bit_experts("float8_experts", COUNT, *SIZES[0], rows=rows, chosen=CHOSEN)
    tensors["mixed"] = torch.empty_like(tensors["x"])
    call = launcher("float8_experts", context)(tensors, attributes, context)
    call.run()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.graph(graph, stream=stream):
        call.run()
    for seed in (1, 2):
        generator = torch.Generator("cuda").manual_seed(seed)
        tensors["router_logits"].normal_(generator=generator)
        tensors["mixed"].fill_(77)
        graph.replay()
        replayed = tensors["mixed"].clone()
        call.run()
        assert torch.equal(replayed, tensors["mixed"])


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=needs_float8) for name in FP8)])
def test_logits_are_those_that_the_checkpoint_means(tmp_path: Path, kernels: Path, case: str) -> None:
    """Every token selects all experts, so that rounding selects no others."""
    form, dtype, near = (CASES | FP8)[case]
    model = write(tmp_path, form, num_experts=4, num_experts_per_tok=4, max_position_embeddings=256)
    check_logits(as_built(tmp_path, dtype), model, kernels, dtype, near=near)


@pytest.fixture(scope="module", params=["int4", "NVFP4", pytest.param("blocks", marks=needs_float8)])
def bundle(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return bundle_of(tmp_path_factory.mktemp("bundle"), (CASES | FP8)[request.param][0])


def bundle_of(folder: Path, form: Any) -> Path:
    target = folder / "target"
    target.mkdir()
    sizes = {"vocab_size": VOCAB, "num_experts": 8, "moe_intermediate_size": 64, "max_position_embeddings": 256}
    write(target, form, **sizes)
    tiny_tokenizer(target)
    draft = tiny_checkpoint(folder / "draft", layers=1, seed=1, head_dim=32)
    backend = paged() + "\nbatch_invariant = true"
    recipe = folder / "r.toml"
    write_recipe(recipe, target=target, draft=draft, backend=backend, dtype="bfloat16", prefill_chunk=64)
    return build(Recipe.load(recipe), folder / "bundle").folder


def test_speculation_and_batch_mates_change_no_text(bundle: Path) -> None:
    check_invisible(bundle, texts(12, words=lambda i: i % 7))


def test_cuda_graphs_change_no_token(bundle: Path) -> None:
    by_graphs, eagerly = by_graphs_and_eagerly(bundle)
    assert by_graphs == eagerly
