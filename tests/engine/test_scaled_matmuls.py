"""Checkpoints in float8 over a paged cache: matmuls are operators of the project and mean what the weights mean."""

import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tandemrt import LLM, SamplingParams
from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import EngineEntry
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe
from tandemrt.export.bundle.build import build
from tandemrt.export.bundle.kernels import kernels_for
from tandemrt.export.bundle.opening import open_models
from tandemrt.export.passes.cut import cut
from tandemrt.plugins.operators.float8 import FLOAT8 as NUMBERS
from tandemrt.plugins.reference.float8 import quantize_tokens, scaled_matmul
from tandemrt.runtime.device.backends.onnxruntime.executor import Executor
from tests.engine import quantized
from tests.engine.decoding import Decoder, expected_logits, make_checkpoint, open_steps
from tests.engine.test_quantized_checkpoints import FLOAT8, TOKENS
from tests.makers import tiny_checkpoint, write_recipe

SCALES = ["compressed-tensors, channel, inputs by token", "compressed-tensors, tensor, static inputs", "modelopt"]
PAGED = 'name = "onnxruntime-cuda"\ncompute_capabilities = ["9.0"]'


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.floats(1e-30, 1e30))
def test_quantizing_a_token_is_independent_and_loses_at_most_a_sixteenth(seed: int, tokens: int, size: float) -> None:
    x = (np.random.default_rng(seed).normal(size=(tokens, 32)) * size).astype(np.float32)
    quantized, scales = quantize_tokens(x)
    for token in range(tokens):
        alone = quantize_tokens(x[token])
        assert alone[0].tobytes() == quantized[token].tobytes()
        assert alone[1] == scales[token]
    restored = quantized.astype(np.float64) * scales
    least = scales.astype(np.float64) * 2.0**-10  # half of the smallest number above 0
    assert (np.abs(restored - x) <= np.maximum(np.abs(x) / 16, least) * 1.001).all()


def test_zeros_stay_zeros_and_a_static_scale_saturates() -> None:
    quantized, scales = quantize_tokens(np.zeros((2, 16), np.float32))
    assert not quantized.astype(np.float32).any()
    assert (scales > 0).all()
    bounded, given_scale = quantize_tokens(np.array([[1.0, 1e6]]), np.array([0.5]))
    assert bounded.astype(np.float32).tolist() == [[2.0, 448.0]]
    assert given_scale.tolist() == [[0.5]]


def test_scaled_matmul_equals_the_matmul_times_both_scales() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(3, 2, 64)), rng.normal(size=(16, 64))
    (quantized, scales), (weight_quantized, each) = quantize_tokens(x), quantize_tokens(weight)
    product = scaled_matmul(quantized, scales, weight_quantized.view(np.uint8), each[:, 0])
    exact = (quantized.astype(float) * scales) @ (weight_quantized.view(NUMBERS).astype(float) * each).T
    np.testing.assert_allclose(product, exact, rtol=1e-6)
    np.testing.assert_allclose(product, x @ weight.T, atol=1.0)


@pytest.mark.parametrize("case", SCALES)
def test_the_graph_and_its_steps_give_the_logits_that_the_checkpoint_means(tmp_path: Path, case: str) -> None:
    expected = expected_logits(FLOAT8[case].write(tmp_path), TOKENS)
    steps = Decoder(tmp_path, "paged", 1, open_engine=partial(open_steps, folder=tmp_path))
    for logits in (Decoder(tmp_path, "paged", batch=1)([TOKENS], [0])[0], steps([TOKENS], [0])[0]):
        # A last bit of an input can fall to the other side of a step of float8, a sixteenth of the value.
        assert (logits - expected).norm() < 0.01 * expected.norm()


def test_widths_that_no_gpu_matmul_supports_are_refused_by_name(tmp_path: Path) -> None:
    case = FLOAT8[SCALES[0]]
    make_checkpoint("qwen2", tmp_path, sizes={"intermediate_size": 72})
    quantized.rewrite(tmp_path, case.config, case.store)
    with pytest.raises(BadCheckpoint, match=r"mlp\.gate_proj: .* in multiples of 16; it has 64 and 72"):
        Decoder(tmp_path, "paged", batch=1)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Target and draft in float8, their heads too."""
    folder, case = tmp_path_factory.mktemp("float8"), FLOAT8[SCALES[0]]
    target, draft = quantized.write_pair(folder, {**case.config, "ignore": []}, case.store)
    recipe = write_recipe(folder / "r.toml", target=target, draft=draft, backend=PAGED)
    return Bundle.open(build(Recipe.load(recipe), folder / "bundle").folder)


LAYER = [
    *("scaled_matmul", "window_attention", "quantize_tokens", "float8_matmul"),
    *("quantized_norm", "float8_matmul", "quantized_swiglu", "float8_matmul", "quantized_norm"),
]


def test_one_operator_scales_and_quantizes_between_two_matmuls(bundle: Bundle) -> None:
    for name, layers in (("target", 2), ("draft", 1)):
        decoder = bundle.engine(name).decoder
        assert decoder is not None
        assert [step.name for step in decoder.operators] == ["quantize_tokens", *layers * LAYER, "scaled_matmul"]
    assert "kernels/float8.sm_90.cubin" in bundle.manifest.kernels


def test_a_value_with_another_reader_keeps_its_scales(tmp_path: Path) -> None:
    """The last norm precedes an unquantized lm_head."""
    FLOAT8[SCALES[0]].write(tmp_path)
    cut_up: list[str] = []

    def open_engine(model: ir.Model, contract: Contract) -> Executor:
        cut_up.extend(step.name for step in cut(model)[1].operators)
        return open_steps(model, contract, tmp_path)

    Decoder(tmp_path, "paged", 1, open_engine=open_engine)
    assert cut_up == ["quantize_tokens", *LAYER, *LAYER[:-2], "scaled_matmul"]


def test_rounds_speculate_invisibly(bundle: Bundle) -> None:
    texts, accepted = quantized.texts_with_and_without_speculation(bundle.folder)
    assert texts[0] == texts[1]
    assert accepted > 0


def test_a_bundle_of_unquantized_weights_has_no_float8_kernels(tmp_path: Path) -> None:
    target = tiny_checkpoint(tmp_path / "t", layers=1, head_dim=32)
    recipe = write_recipe(tmp_path / "r.toml", target=target, backend=PAGED)
    kernels = build(Recipe.load(recipe), tmp_path / "out").manifest.kernels
    assert not [file for file in kernels if "float8" in file]
    assert "kernels/swiglu.sm_90.cubin" in kernels


def test_gpus_without_float8_alone_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    target, case = tiny_checkpoint(tmp_path / "t", layers=1, head_dim=32), FLOAT8[SCALES[0]]
    quantized.rewrite(target, case.config, case.store)
    for wanted, refused in ((["8.0", "8.6"], True), (["8.6", "9.0"], False)):
        backend = f'name = "onnxruntime-cuda"\ncompute_capabilities = {json.dumps(wanted)}'
        recipe = Recipe.load(
            write_recipe(tmp_path / "r.toml", target=target, backend=backend, dtype="bfloat16"), kv_dtype="float8_e4m3"
        )
        if not refused:
            built = EngineEntry(
                file="target.onnx",
                backend="onnxruntime-cuda",
                built_for="",
                dtype="bfloat16",
                contract=Contract((), ()),
            )
            files = kernels_for(recipe, open_models(recipe), built)
            kernels = {each.name: each.compute_capabilities for each in files}
            assert kernels["float8"] == kernels["attention_float8"] == ("9.0",)  # there is nothing in older code
            assert kernels["swiglu"] == ("8.6", "9.0")
            continue
        with pytest.raises(BadRecipe, match=r"needs compute capability 8\.9 or later; got 8\.0, 8\.6 in"):
            open_models(recipe)


def test_static_and_per_token_scales_together_are_refused_by_name(tmp_path: Path) -> None:
    target, config = tiny_checkpoint(tmp_path / "t", layers=1, head_dim=32), FLOAT8[SCALES[0]].config
    by_token, static = (FLOAT8[case].config["config_groups"]["group_0"] for case in SCALES[:2])
    groups = {"group_0": by_token | {"targets": ["re:.*down_proj"]}, "group_1": static | {"targets": ["Linear"]}}
    quantized.rewrite(target, {**config, "config_groups": groups}, FLOAT8[SCALES[0]].store)
    recipe = Recipe.load(write_recipe(tmp_path / "r.toml", target=target, backend=PAGED))
    with pytest.raises(BadRecipe, match=r"has static scales of inputs together with scales per token, for which "):
        open_models(recipe)


def test_scales_of_blocks_become_one_per_output_and_the_build_reports_the_change(tmp_path: Path) -> None:
    target, case = tiny_checkpoint(tmp_path / "t", layers=1, hidden=256, head_dim=32), FLOAT8["fp8, block"]
    meant = quantized.rewrite(target, case.config, case.store)
    report = build(Recipe.load(write_recipe(tmp_path / "r.toml", target=target, backend=PAGED)), tmp_path / "out")
    note, _ = report.notes
    match = re.fullmatch(r"target: scales of blocks became one per output, .* by ([\d.]+)% .*, .* one per token", note)
    assert match is not None
    assert 0.5 < float(match[1]) < 4
    tensors = load_file(tmp_path / "out" / "target" / "model.safetensors")
    for module, weight in meant.items():
        restored = tensors[f"{module}.weight"].float() * tensors[f"{module}.weight_scale"]
        assert (restored - weight).norm() < 0.04 * weight.norm()
        assert f"{module}.weight_scale_inv" not in tensors
    with LLM(tmp_path / "out", device="cpu", threads=1) as llm:
        assert llm.generate("x", SamplingParams(max_tokens=4)).finish_reason != "error"
