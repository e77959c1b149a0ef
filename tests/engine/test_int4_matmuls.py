"""Weights in 4 bits over a paged cache: matmuls are an operator of the project and mean what the weights mean."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe
from tandemrt.export.bundle.build import BuildReport, build
from tandemrt.export.bundle.opening import open_models
from tandemrt.export.graph.low_bit_format import LowBitFormat
from tandemrt.export.quantize.groups import QuantizedMatrix
from tandemrt.plugins.kernels.int4_matmul import launch
from tandemrt.plugins.operators.launch import Context
from tandemrt.plugins.reference.int4 import int4_matmul
from tests.engine import quantized
from tests.engine.decoding import Decoder, expected_logits, make_checkpoint, open_steps
from tests.engine.test_quantized_checkpoints import FLOAT8, INT4, TOKENS
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
    held = QuantizedMatrix(LowBitFormat(4, group_size, zeros, tiles="float32"), inner, integers, scales, middles)
    stored, shapes = held.stored(), held.form.shapes(width, inner)
    assert {kind: (str(array.dtype), array.shape) for kind, array in stored.items()} == shapes
    x = rng.normal(size=(2, inner)).astype(np.float32)
    found = int4_matmul(x, stored[f"tiles{group_size}"], stored["scales"], stored.get("zeros"), group_size=group_size)
    np.testing.assert_allclose(found, x @ held.dequantized.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", INT4)
def test_the_graph_and_its_steps_give_the_logits_that_the_checkpoint_means(tmp_path: Path, case: str) -> None:
    expected = expected_logits(INT4[case].write(tmp_path), TOKENS)
    quantized.packed(tmp_path, "float32")
    folder = tmp_path / "packed"
    steps = Decoder(folder, "paged", 1, open_engine=partial(open_steps, folder=folder))
    for found in (Decoder(folder, "paged", batch=1)([TOKENS], [0])[0], steps([TOKENS], [0])[0]):
        assert (found - expected).norm() < 1e-5 * expected.norm()


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
    packed = "weights of 4 bits (gptq) were repacked, their values are the same"
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
    quantized.rewrite(target, FLOAT8["fp8, block"].config, FLOAT8["fp8, block"].store)
    quantized.rewrite(draft, INT4["gptq_v2, zero points"].config, INT4["gptq_v2, zero points"].store)
    drafting = f'kind = "model"\ncheckpoint = "{draft}"\ndtype = "bfloat16"'
    backend = f"{PAGED}\nbatch_invariant = true"
    recipe = write_recipe(tmp_path / "r.toml", target=target, dtype="int4", drafting=drafting, backend=backend)
    report = build(Recipe.load(recipe), tmp_path / "out")
    assert report.manifest.engines["target"].batch_invariant
    rounded, packed = report.notes
    found = re.fullmatch(r"target: int4 changed the weights by ([\d.]+)% \(root mean square\)", rounded)
    assert found is not None
    assert 5 < float(found[1]) < 15
    changed = r"their scales changed by 0\.[0-3]\d% \(bfloat16; root mean square\)"
    assert re.fullmatch(rf"draft: 7 weights of 4 bits \(gptq\) were repacked, {changed}", packed)
    for name in ("target", "draft"):
        engine = report.manifest.engines[name]
        assert engine.dtype == "bfloat16"
        assert engine.decoder is not None
        assert {step.name for step in engine.decoder.operators} == set(LAYER)
    assert not [file for file in report.manifest.kernels if "float8" in file]


def test_4_bits_in_float32_are_refused_on_a_gpu(tmp_path: Path) -> None:
    target, case = tiny_checkpoint(tmp_path / "t", layers=1, head_dim=32), INT4["gptq_v2, zero points"]
    quantized.rewrite(target, case.config, case.store)
    recipe = Recipe.load(write_recipe(tmp_path / "r.toml", target=target, backend=PAGED))
    with pytest.raises(BadRecipe, match=r"in 4 bits needs target\.dtype 'bfloat16' or 'float16' on .* got 'float32'"):
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
    given = {"x": torch.ones(2, 128).half(), "scales": torch.ones(16, 4).half(), "out": torch.ones(2, 16).half()}
    given["weight"] = torch.ones(16, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        launch(given | changes, {"group_size": 32}, Context(torch.device("cpu")))


def test_a_bundle_of_unquantized_weights_has_no_int4_kernels(tmp_path: Path) -> None:
    target = tiny_checkpoint(tmp_path / "t", layers=1, head_dim=32)
    recipe = write_recipe(tmp_path / "r.toml", target=target, backend=PAGED)
    kernels = build(Recipe.load(recipe), tmp_path / "out").manifest.kernels
    assert not [file for file in kernels if "int4" in file]
