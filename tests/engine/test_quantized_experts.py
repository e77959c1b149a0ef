"""Experts with weights of 4 and 8 bits over a paged cache: operators of the project, and what the weights mean."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe
from tandemrt.export.bundle.build import BuildReport, build
from tandemrt.export.bundle.opening import open_models
from tandemrt.export.quantize.per_channel import write_per_channel
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.reference.low_bit_experts import float8_values
from tests.engine import quantized
from tests.engine.decoding import Decoder, edit_config, expected_logits, make_checkpoint, open_steps
from tests.engine.test_quantized_checkpoints import FLOAT8, INT4, OTHERS, TOKENS, Float8
from tests.makers import VOCAB, tiny_tokenizer, write_recipe

SIZES = {"num_hidden_layers": 2, "hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 160, "num_experts": 4}
PAGED = 'name = "onnxruntime-cuda"\ncompute_capabilities = ["9.0"]'
CASES = {"gptq_v2, zero points": INT4["gptq_v2, zero points"]} | {
    case: OTHERS[case] for case in ("modelopt, W8A16", "modelopt, NVFP4", "quark, MXFP4")
}
OF_FLOAT8 = {
    "fp8, block": 0.12,  # by other matmuls, whose scales become one per output
    "compressed-tensors, tensor, static inputs": 1e-4,
}


def write(folder: Path, case: Any, **sizes: Any) -> Any:
    """Write a quantized Qwen3-MoE, and return the model with the weights and the inputs of matmuls that it means."""
    make_checkpoint("qwen3_moe", folder, sizes=SIZES | sizes)
    plain = folder / "plain"
    plain.mkdir()
    (plain / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    meant = quantized.rewrite(folder, case.config, case.store)
    assert any(".mlp.experts." in name for name in meant)
    save_file(tensors | {f"{name}.weight": each for name, each in meant.items()}, plain / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager").eval()
    if isinstance(case, Float8) and case.inputs is not None:
        static = 0.02 if case.input_scale else None
        for name, module in model.named_modules():
            if name.endswith("_proj") and isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(
                    lambda _, arguments: (quantized.rounded(arguments[0], static, case.inputs or 0),)
                )
    return model


def as_built(folder: Path, dtype: str = "float32") -> Path:
    """Write the checkpoint as a build for a GPU does, and return the folder."""
    checkpoint = Checkpoint.open(folder)
    quantization = read_quantization(checkpoint.config, folder)
    assert quantization is not None
    if quantization.is_packed:
        quantized.packed(folder, dtype)
        return folder / "packed"
    out = folder / "packed"
    out.mkdir()
    written = write_per_channel(checkpoint, ModelSpec.from_hf(checkpoint.config), quantization, out)
    (out / "config.json").write_text(json.dumps(written.checkpoint.config))
    return out


def logits(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return those of the whole graph and of its steps."""
    steps = Decoder(folder, "paged", 1, open_engine=partial(open_steps, folder=folder))
    return Decoder(folder, "paged", batch=1)([TOKENS], [0])[0], steps([TOKENS], [0])[0]


@pytest.mark.parametrize("case", CASES)
def test_the_graph_and_its_steps_give_the_logits_that_the_checkpoint_means(tmp_path: Path, case: str) -> None:
    expected = expected_logits(write(tmp_path, CASES[case]), TOKENS)
    for actual in logits(as_built(tmp_path)):
        assert (actual - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("case", OF_FLOAT8)
def test_experts_in_float8_keep_their_values(tmp_path: Path, case: str) -> None:
    """Every token selects all experts, so that rounding of other matmuls selects no others."""
    expected = expected_logits(write(tmp_path, FLOAT8[case], num_experts=4, num_experts_per_tok=4), TOKENS)
    for actual in logits(as_built(tmp_path)):
        assert (actual - expected).norm() < OF_FLOAT8[case] * expected.norm()


def test_float8_weights_of_experts_keep_their_values(tmp_path: Path) -> None:
    """Blocks of 128 x 128 that end before a weight does, in another order."""
    write(tmp_path, FLOAT8["fp8, block"])
    meant = load_file(tmp_path / "plain" / "model.safetensors")
    stored = load_file(as_built(tmp_path) / "model.safetensors")
    names = [name for name in meant if ".mlp.experts." in name]
    assert names
    for name in names:
        tiles, scales = (stored[f"{name}.float8.{kind}"].numpy() for kind in ("tiles128", "scales"))
        values = float8_values(tiles, scales, 128)[:, : meant[name].shape[1]]
        torch.testing.assert_close(torch.from_numpy(values), meant[name].double())


def test_a_bundle_of_quantized_experts_gives_equal_texts_with_speculation(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, OTHERS["modelopt, NVFP4"], dtype="float16", draft=tmp_path / "target")
    report = build(Recipe.load(recipe), tmp_path / "bundle")
    assert operators(report) == {"float4_experts"}
    texts, accepted = quantized.texts_with_and_without_speculation(report.folder)
    assert texts[0] == texts[1]
    assert accepted > 0


@pytest.mark.parametrize(
    ("case", "dtype", "operator", "note"),
    [
        (FLOAT8["fp8, block"], "bfloat16", "float8_experts", "weights of experts keep their values"),
        (None, "int4", "int4_experts", "target: int4 changed the weights by"),
    ],
)
def test_a_build_reports_what_became_of_experts(
    tmp_path: Path, case: Any, dtype: str, operator: str, note: str
) -> None:
    recipe = recipe_of(tmp_path, case, dtype=dtype, batch=100)
    recipe.write_text(recipe.read_text().replace("prefill_chunk = 16\n", ""))
    report = build(Recipe.load(recipe), tmp_path / "bundle")
    assert operators(report) == {operator}
    assert report.manifest.limits.prefill_chunk == 8192, "a call reads the weights of all experts, so it is large"
    assert note in "\n".join(report.notes)
    (constants,) = report.folder.rglob("constants.onnx")
    stored = [tensor.name for tensor in onnx.load(constants, load_external_data=False).graph.initializer]
    joined = [name for name in stored if ".mlp.experts." in name]
    assert len(joined) == 4, "numbers and scales of both weights, of all experts at once"


def operators(report: BuildReport) -> set[str]:
    """Return the operators of experts in the target."""
    decoder = report.manifest.engines["target"].decoder
    assert decoder is not None
    return {step.name for step in decoder.operators if step.name.endswith("experts")}


def test_unequal_and_unsupported_experts_are_refused_by_name(tmp_path: Path) -> None:
    case = INT4["gptq"]
    recipe = recipe_of(tmp_path, case, dtype="float32")
    with pytest.raises(BadRecipe, match=r"has experts, which need target\.dtype 'bfloat16' or 'float16' on a GPU"):
        open_models(Recipe.load(recipe))
    name = "model.layers.0.mlp.experts.2.up_proj"
    edit_config(tmp_path / "target", quantization_config=case.config | {"dynamic": {rf"-:{name}": {}}})
    file = tmp_path / "target" / "model.safetensors"
    tensors = {key: each for key, each in load_file(file).items() if not key.startswith(name)}
    plain = load_file(tmp_path / "target" / "plain" / "model.safetensors")
    save_file(tensors | {f"{name}.weight": plain[f"{name}.weight"]}, file)
    write_recipe(recipe, target=tmp_path / "target", backend=PAGED, dtype="bfloat16")
    with pytest.raises(BadCheckpoint, match="the experts of a layer must be quantized alike for a GPU"):
        build(Recipe.load(recipe), tmp_path / "bundle")


def recipe_of(folder: Path, case: Any, **recipe: Any) -> Path:
    """Write a recipe with a target of quantized experts in one layer."""
    target = folder / "target"
    target.mkdir()
    sizes = {"num_hidden_layers": 1, "hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64}
    sizes["vocab_size"] = VOCAB
    if case is None:
        make_checkpoint("qwen3_moe", target, sizes=SIZES | sizes)
    else:
        write(target, case, **sizes)
    tiny_tokenizer(target)
    return write_recipe(folder / "r.toml", target=target, backend=PAGED, **recipe)
