"""Weights in 4 or 8 bits over a paged cache: matmuls are operators of the project and mean what the weights mean."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe
from tandemrt.export.bundle.build import BuildReport, build
from tandemrt.export.bundle.opening import open_models
from tandemrt.export.graph.low_bit_format import LowBitFormat
from tandemrt.export.model.scaled_matmul import unsupported
from tandemrt.export.quantize.float4 import Float4Matrix
from tandemrt.export.quantize.groups import QuantizedMatrix
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.plugins.kernels.low_bit_matmul import launch_int4 as launch
from tandemrt.plugins.operators.float8 import FLOAT8
from tandemrt.plugins.operators.launch import Context
from tandemrt.plugins.reference.float4 import float4_matmul
from tandemrt.plugins.reference.int4 import int4_matmul
from tandemrt.plugins.reference.int8 import int8_matmul
from tests.engine import quantized
from tests.engine.decoding import Decoder, edit_config, expected_logits, make_checkpoint, open_steps
from tests.engine.test_quantized_checkpoints import FLOAT8 as FLOAT8_CASES
from tests.engine.test_quantized_checkpoints import INT4, OTHERS, STATIC, TOKENS
from tests.makers import tiny_checkpoint, write_recipe

PAGED = 'name = "onnxruntime-cuda"\ncompute_capabilities = ["9.0"]'


@given(st.integers(0, 2**32 - 1), st.sampled_from([32, 64, 128]), st.integers(1, 5), st.booleans())
def test_int4_matmul_equals_the_matmul_of_the_dequantized_weight(
    seed: int, group_size: int, groups: int, zeros: bool
) -> None:
    """Whole chunks and others, whose padding changes nothing."""
    rng, width, inner = np.random.default_rng(seed), 3, group_size * groups
    middles = rng.integers(0, 16, (width, groups), dtype=np.uint8) if zeros else None
    integers = rng.integers(0, 16, (width, groups, group_size), dtype=np.uint8)
    scales = rng.uniform(0.1, 1, (width, groups)).astype(np.float32)
    matrix = QuantizedMatrix(LowBitFormat(4, group_size, zeros, tiles="float32"), inner, integers, scales, middles)
    stored, shapes = matrix.stored(), matrix.form.shapes(width, inner)
    assert {kind: (str(array.dtype), array.shape) for kind, array in stored.items()} == shapes
    x = rng.normal(size=(2, inner)).astype(np.float32)
    product = int4_matmul(x, stored[f"tiles{group_size}"], stored["scales"], stored.get("zeros"), group_size=group_size)
    np.testing.assert_allclose(product, x @ matrix.dequantized.T, rtol=1e-4, atol=1e-4)


@given(st.integers(0, 2**32 - 1), st.sampled_from([32, 64, 128]), st.integers(1, 5))
def test_int8_matmul_equals_the_matmul_of_the_dequantized_weight(seed: int, group_size: int, groups: int) -> None:
    rng, width, inner = np.random.default_rng(seed), 3, group_size * groups
    integers = rng.integers(0, 256, (width, groups, group_size), dtype=np.uint8)
    scales = rng.uniform(0.01, 0.1, (width, groups)).astype(np.float32)
    matrix = QuantizedMatrix(LowBitFormat(8, group_size, tiles="float32"), inner, integers, scales)
    stored, shapes = matrix.stored(), matrix.form.shapes(width, inner)
    assert {kind: (str(array.dtype), array.shape) for kind, array in stored.items()} == shapes
    x = rng.normal(size=(2, inner)).astype(np.float32)
    product = int8_matmul(x, stored[f"tiles{group_size}"], stored["scales"], group_size=group_size)
    np.testing.assert_allclose(product, x @ matrix.dequantized.T, rtol=1e-4, atol=1e-4)


@given(st.integers(0, 2**32 - 1), st.sampled_from([16, 32]), st.integers(1, 9))
def test_float4_matmul_equals_the_matmul_of_the_dequantized_weight(seed: int, group_size: int, groups: int) -> None:
    rng, width, inner = np.random.default_rng(seed), 3, group_size * groups
    codes = rng.integers(0, 16, (width, groups, group_size), dtype=np.uint8)
    scales = rng.integers(0, 127, (width, groups), dtype=np.uint8).view(FLOAT8).astype(np.float32)
    matrix = Float4Matrix(codes, scales, rng.uniform(0.001, 0.01, (width, 1)).astype(np.float32))
    stored, shapes = matrix.stored(), LowBitFormat(4, group_size, tiles="float32", floats=True).shapes(width, inner)
    assert {kind: (str(array.dtype), array.shape) for kind, array in stored.items()} == shapes
    x = rng.normal(size=(2, inner)).astype(np.float32)
    product = float4_matmul(x, stored[f"tiles{group_size}"], stored["scales"], stored["factors"], group_size=group_size)
    np.testing.assert_allclose(product, x @ matrix.as_integers.dequantized.T, rtol=1e-4, atol=1e-4)


# Every layout of tiles: sizes of groups, with zero points and without.
OF_4_BITS = ("compressed-tensors, groups of 32", "gptq_v2, zero points", "awq, symmetric", "awq")
LOW_BIT = {case: INT4[case] for case in OF_4_BITS} | {
    case: OTHERS[case] for case in ("gptq, 8 bits", "modelopt, W8A16", "modelopt, NVFP4", "quark, MXFP4")
}


@pytest.mark.parametrize("case", LOW_BIT)
def test_the_graph_and_its_steps_give_the_logits_that_the_checkpoint_means(tmp_path: Path, case: str) -> None:
    expected = expected_logits(LOW_BIT[case].write(tmp_path), TOKENS)
    quantized.packed(tmp_path, "float32")
    folder = tmp_path / "packed"
    steps = Decoder(folder, "paged", 1, open_engine=partial(open_steps, folder=folder))
    for logits in (Decoder(folder, "paged", batch=1)([TOKENS], [0])[0], steps([TOKENS], [0])[0]):
        assert (logits - expected).norm() < 1e-5 * expected.norm()


def test_matmuls_with_and_without_zero_points_share_a_model(tmp_path: Path) -> None:
    """A checkpoint in AWQ has some, and a head that is rounded when the bundle is built has none."""
    make_checkpoint("qwen2", tmp_path, sizes=quantized.SIZES | {"vocab_size": 64})
    quantized.rewrite(tmp_path, INT4["awq"].config, INT4["awq"].store)
    names = quantized.packed(tmp_path, "float32", bits=4).tensors
    assert 0 < len([n for n in names if ".int4.zeros" in n]) < len([n for n in names if ".int4.tiles" in n])
    folder = tmp_path / "packed"
    whole, steps = (
        Decoder(folder, "paged", 1),
        Decoder(folder, "paged", 1, open_engine=partial(open_steps, folder=folder)),
    )
    torch.testing.assert_close(whole([TOKENS], [0])[0], steps([TOKENS], [0])[0])


def test_modules_in_float8_and_in_4_bits_share_a_model(tmp_path: Path) -> None:
    """MIXED_PRECISION of ModelOpt."""
    model = make_checkpoint("qwen2", tmp_path, sizes=quantized.SIZES)
    cases = {"FP8": FLOAT8_CASES["modelopt"], "NVFP4": OTHERS["modelopt, NVFP4"]}
    tensors, layers = load_file(tmp_path / "model.safetensors"), {}
    for module in [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]:
        algorithm = "FP8" if module.endswith("down_proj") else "NVFP4"
        layers[module] = {"quant_algo": algorithm}
        stored, meant = cases[algorithm].store(tensors.pop(f"{module}.weight"))
        tensors |= {f"{module}.{kind}": tensor for kind, tensor in stored.items()}
        model.get_submodule(module).weight.data.copy_(meant)
        if algorithm == "FP8":
            model.get_submodule(module).register_forward_pre_hook(
                lambda _, arguments: (quantized.rounded(arguments[0], STATIC, 0),)
            )
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    edit_config(tmp_path, quantization_config=config)
    assert unsupported(read_quantization(Checkpoint.open(tmp_path).config, tmp_path)) is None
    quantized.packed(tmp_path, "float32")
    folder = tmp_path / "packed"
    steps = Decoder(folder, "paged", 1, open_engine=partial(open_steps, folder=folder))
    expected = expected_logits(model, TOKENS)
    assert (steps([TOKENS], [0])[0] - expected).norm() < 1e-4 * expected.norm()


def test_widths_that_no_gpu_matmul_supports_are_refused_by_name(tmp_path: Path) -> None:
    target = tiny_checkpoint(tmp_path / "t", vocab=323, layers=1, head_dim=32)
    recipe = write_recipe(tmp_path / "r.toml", target=target, dtype="int4", backend=PAGED)
    with pytest.raises(BadCheckpoint, match=r"lm_head: .* of 32 and outputs of 8; it has 32 and 323; .*another dtype"):
        build(Recipe.load(recipe), tmp_path / "bundle")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> BuildReport:
    """A target that comes in 4 bits, head and all, and a draft as well; float16, which a CPU can run."""
    folder, case = tmp_path_factory.mktemp("int4"), INT4["gptq_v2, zero points"]
    target, draft = quantized.write_pair(folder, case.config | {"lm_head": True}, case.store)
    recipe = write_recipe(folder / "r.toml", target=target, draft=draft, dtype="float16", backend=PAGED)
    return build(Recipe.load(recipe), folder / "bundle")


LAYER = ["int4_matmul", "window_attention", "int4_matmul", "int4_matmul", "swiglu", "int4_matmul"]


def test_every_matmul_is_one_operator_including_the_lm_head(report: BuildReport) -> None:
    for name, layers in (("target", 2), ("draft", 1)):
        decoder = report.manifest.engines[name].decoder
        assert decoder is not None
        assert [step.name for step in decoder.operators] == [*layers * LAYER, "int4_matmul"]
    assert "kernels/int4.sm_90.cubin" in report.manifest.kernels
    assert not [file for file in report.manifest.kernels if "float8" in file]


def test_a_checkpoint_keeps_its_values_if_the_dtype_represents_its_scales(report: BuildReport) -> None:
    packed = "quantized weights (gptq) were repacked, their values are the same"
    assert report.notes[:2] == (f"target: 15 {packed}", f"draft: 8 {packed}")


def test_a_build_says_that_4_bit_matmuls_are_not_batch_invariant(report: BuildReport) -> None:
    [note] = report.notes[2:]
    assert note.startswith("target: speculation may change last bits, and so texts: short prompts through 4-bit")


def test_rounds_speculate_invisibly(report: BuildReport) -> None:
    texts, accepted = quantized.texts_with_and_without_speculation(report.folder)
    assert texts[0] == texts[1]
    assert accepted > 0


def test_a_build_rounds_other_weights_computes_in_bfloat16_and_reports_the_change(tmp_path: Path) -> None:
    target, draft = (tiny_checkpoint(tmp_path / name, layers=1, head_dim=32) for name in "td")
    quantized.rewrite(target, FLOAT8_CASES["fp8, block"].config, FLOAT8_CASES["fp8, block"].store)
    quantized.rewrite(draft, INT4["gptq_v2, zero points"].config, INT4["gptq_v2, zero points"].store)
    drafting = f'kind = "model"\ncheckpoint = "{draft}"\ndtype = "bfloat16"'
    backend = f"{PAGED}\nbatch_invariant = true"
    recipe = write_recipe(tmp_path / "r.toml", target=target, dtype="int4", drafting=drafting, backend=backend)
    report = build(Recipe.load(recipe), tmp_path / "out")
    assert report.manifest.engines["target"].batch_invariant
    rounded, packed = report.notes
    match = re.fullmatch(r"target: int4 changed the weights by ([\d.]+)% \(root mean square\)", rounded)
    assert match is not None
    assert 5 < float(match[1]) < 15
    changed = r"their scales changed by 0\.[0-3]\d% \(bfloat16; root mean square\)"
    assert re.fullmatch(rf"draft: 7 quantized weights \(gptq\) were repacked, {changed}", packed)
    for name in ("target", "draft"):
        engine = report.manifest.engines[name]
        assert engine.dtype == "bfloat16"
        assert engine.decoder is not None
        assert {step.name for step in engine.decoder.operators} == set(LAYER)
    assert not [file for file in report.manifest.kernels if "float8" in file]


def test_floats_of_4_bits_and_integers_of_8_have_operators_of_their_own(tmp_path: Path) -> None:
    cases = {"target": OTHERS["modelopt, NVFP4"], "draft": OTHERS["gptq, 8 bits"]}
    for name, case in cases.items():
        tiny_checkpoint(tmp_path / name, layers=1, hidden=128, head_dim=32)
        quantized.rewrite(tmp_path / name, case.config, case.store)
    sources = {name: tmp_path / name for name in cases}
    report = build(
        Recipe.load(write_recipe(tmp_path / "r.toml", **sources, dtype="float16", backend=PAGED)), tmp_path / "out"
    )
    for name, operator in (("target", "float4_matmul"), ("draft", "int8_matmul")):
        decoder = report.manifest.engines[name].decoder
        assert decoder is not None
        assert {step.name for step in decoder.operators if step.name.endswith("_matmul")} == {operator}
    kernels = " ".join(report.manifest.kernels)
    assert [name for name in ("int4", "int8", "float4") if f"kernels/{name}.sm_90" in kernels] == ["int8", "float4"]
    packed = "7 quantized weights ({}) were repacked, their values are the same"
    assert {f"target: {packed.format('modelopt')}", f"draft: {packed.format('gptq')}"} <= set(report.notes)
    texts, accepted = quantized.texts_with_and_without_speculation(report.folder)
    assert texts[0] == texts[1]
    assert accepted > 0


def test_zero_points_of_8_bits_are_refused_with_a_way_out(tmp_path: Path) -> None:
    case = OTHERS["gptq, 8 bits, zero points"]
    target = tiny_checkpoint(tmp_path / "t", layers=1, head_dim=32)
    quantized.rewrite(target, case.config, case.store)
    recipe = Recipe.load(write_recipe(tmp_path / "r.toml", target=target, dtype="float16", backend=PAGED))
    with pytest.raises(BadRecipe, match=r"has 8-bit integers with zero points, .*target\.dequantize = true"):
        open_models(recipe)


def test_scales_of_mxfp4_that_lie_far_below_their_rows_largest_become_zero_and_the_error_says_so() -> None:
    powers = np.ldexp(np.float32(1), np.array([[0, -17], [0, -18], [-120, -126]])).astype(np.float32)
    factors = powers.max(axis=1, keepdims=True) / np.float32(256)
    matrix = Float4Matrix(np.zeros((3, 2, 32), np.uint8), powers / factors, factors)
    kept = matrix.stored_scales.astype(np.float32) * factors
    np.testing.assert_array_equal(kept, [[1, 2**-17], [1, 0], [2**-120, 2**-126]])


def test_4_bits_in_float32_are_refused_on_a_gpu(tmp_path: Path) -> None:
    target, case = tiny_checkpoint(tmp_path / "t", layers=1, head_dim=32), INT4["gptq_v2, zero points"]
    quantized.rewrite(target, case.config, case.store)
    recipe = Recipe.load(write_recipe(tmp_path / "r.toml", target=target, backend=PAGED))
    message = r"in 4 or 8 bits needs target\.dtype 'bfloat16' or 'float16' on .* got 'float32'"
    with pytest.raises(BadRecipe, match=message):
        open_models(recipe)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.ones(2, 128)}, r"x: bfloat16 or float16 is needed, got torch\.float32"),
        ({"x": torch.ones(2, 130).half()}, r"inputs in multiples of 32, .* are needed, got 130, 16 and 32"),
        ({"out": torch.ones(2, 12).half()}, r"outputs of 8 .* are needed, got 128, 12 and 32"),
        ({"scales": torch.ones(16, 8).half()}, r"scales: \(16, 4\) is needed, got \(16, 8\)"),
        ({"weight": torch.ones(16, 128, dtype=torch.uint8)}, r"weight: \(16, 64\) is needed, got \(16, 128\)"),
    ],
)
def test_kernels_refuse_shapes_that_do_not_match(changes: dict[str, torch.Tensor], message: str) -> None:
    tensors = {"x": torch.ones(2, 128).half(), "scales": torch.ones(16, 4).half(), "out": torch.ones(2, 16).half()}
    tensors["weight"] = torch.ones(16, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        launch(tensors | changes, {"group_size": 32}, Context(torch.device("cpu")))


def test_a_bundle_of_unquantized_weights_has_no_int4_kernels(tmp_path: Path) -> None:
    target = tiny_checkpoint(tmp_path / "t", layers=1, head_dim=32)
    recipe = write_recipe(tmp_path / "r.toml", target=target, backend=PAGED)
    kernels = build(Recipe.load(recipe), tmp_path / "out").manifest.kernels
    assert not [file for file in kernels if "int4" in file]
