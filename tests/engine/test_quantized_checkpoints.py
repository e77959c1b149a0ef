"""Quantized checkpoints: every storage format, compared with the definition of the library that writes it."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from tandemrt import LLM, SamplingParams
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe
from tandemrt.export.bundle.build import build
from tandemrt.export.bundle.opening import open_models
from tandemrt.export.quantize.stored_weights import read_low_bit, read_matrix
from tandemrt.export.read.checkpoint import Checkpoint, read_header
from tandemrt.export.read.quantization.config import METHODS, read_quantization
from tests.engine import quantized
from tests.engine.decoding import VOCAB, Decoder, edit_config, expected_logits
from tests.listeners import Recorded
from tests.makers import tiny_checkpoint, write_recipe

TOKENS = torch.randint(0, VOCAB, (30,), generator=torch.Generator().manual_seed(0)).tolist()
STATIC = 0.02  # the static scale of inputs
PROJECTION = "model.layers.1.self_attn.q_proj"


def float8_group(per: str, **inputs: object) -> dict[str, object]:
    """Return a quantization_config of compressed-tensors as llm-compressor writes it."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": per, "dynamic": False}
    if per == "block":
        weights |= {"block_structure": [96, 128]}  # the last block of 256 outputs has 64
    activations = {"num_bits": 8, "type": "float", "symmetric": True, **inputs} if inputs else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def int4_group(group: int, symmetric: bool) -> dict[str, object]:
    said = json.loads(json.dumps(float8_group("channel")))
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    said["config_groups"]["group_0"] |= {"weights": {**weights, "actorder": None}, "format": "pack-quantized"}
    return said | {"format": "pack-quantized"}


@dataclass(frozen=True)
class Float8:
    """A float8 storage format: its config, group shape, scale names, and rounding of inputs."""

    config: dict[str, object]
    block: tuple[int, int]
    scale: str = "weight_scale"
    input_scale: str | None = None
    shape: tuple[int, ...] | None = None  # of the scales, if it differs from the number of groups
    inputs: int | None = 0  # values per scale; None: unquantized inputs

    def store(self, weight: torch.Tensor) -> tuple[quantized.Stored, torch.Tensor]:
        bits, scale, meant = quantized.float8(weight, self.block)
        stored = {"weight": bits, self.scale: scale if self.shape is None else scale.reshape(self.shape)}
        return stored | ({self.input_scale: torch.tensor(STATIC)} if self.input_scale else {}), meant

    def write(self, folder: Path, family: str = "qwen2") -> PreTrainedModel:
        static = STATIC if self.input_scale else None
        rounds = None if self.inputs is None else lambda x: quantized.rounded(x, static, self.inputs or 0)
        return quantized.write(folder, self.config, self.store, rounds, family)


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
QWEN = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
QUARK_SPEC = {"dtype": "fp8_e4m3", "ch_axis": None, "group_size": None, "is_dynamic": False, "qscheme": "per_tensor"}
MX_SPEC = {"dtype": "fp4", "ch_axis": -1, "group_size": 32, "qscheme": "per_group", "scale_format": "e8m0"}


def quark(weight: dict[str, object], inputs: dict[str, object]) -> dict[str, object]:
    """Return a quantization_config as Quark writes it."""
    common = {"observer_cls": "PerTensorMinMaxObserver", "round_method": "half_even", "symmetric": True}
    specs = {"weight": weight | common, "input_tensors": inputs | common, "output_tensors": None, "bias": None}
    return {
        "quant_method": "quark",
        "global_quant_config": specs,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head"],
        "algo_config": None,
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        "quant_mode": "eager_mode",
        "version": "0.8",
    }


BY_OUTPUT = QUARK_SPEC | {"qscheme": "per_channel", "ch_axis": 0}
BY_TOKEN = QUARK_SPEC | {"qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True}
FLOAT8 = {
    "compressed-tensors, channel, inputs by token": Float8(
        float8_group("channel", strategy="token", dynamic=True), (1, 0)
    ),
    "compressed-tensors, channel, inputs whole": Float8(float8_group("channel"), (1, 0), inputs=None),
    "compressed-tensors, tensor, static inputs": Float8(
        float8_group("tensor", strategy="tensor", dynamic=False), (0, 0), input_scale="input_scale", shape=(1,)
    ),
    "compressed-tensors, block, inputs in groups": Float8(
        float8_group("block", strategy="group", group_size=128, dynamic=True), (96, 128), inputs=128
    ),
    "fp8, block": Float8(QWEN, (128, 128), "weight_scale_inv", inputs=128),
    "fp8, tensor, static inputs": Float8(
        QWEN | {"activation_scheme": "static", "weight_block_size": None, "modules_to_not_convert": ["lm_head"]},
        (0, 0),
        "weight_scale_inv",
        "activation_scale",
        (),
    ),
    "fbgemm_fp8": Float8({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, (1, 0)),
    "modelopt": Float8(MODELOPT, (0, 0), input_scale="input_scale", shape=()),
    "quark": Float8(quark(QUARK_SPEC, QUARK_SPEC), (0, 0), input_scale="input_scale", shape=()),
    "quark, by output and token": Float8(quark(BY_OUTPUT, BY_TOKEN), (1, 0), shape=(-1,)),
}


@pytest.mark.parametrize("case", FLOAT8)
def test_float8_logits_match_the_dequantized_checkpoint(tmp_path, case):
    expected = expected_logits(FLOAT8[case].write(tmp_path), TOKENS)
    logits = Decoder(tmp_path, "grouped", batch=1)([TOKENS], [0])[0]
    # The last bit of an input can move it across a rounding boundary of float8, a sixteenth of the value.
    assert (logits - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("case", FLOAT8)
def test_float8_weights_can_be_read_as_float32(tmp_path, case):
    model = FLOAT8[case].write(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    scheme = read_quantization(checkpoint.config, tmp_path).scheme(PROJECTION)
    weight = read_matrix(PROJECTION, checkpoint.tensors, scheme)
    np.testing.assert_array_equal(weight, model.get_submodule(PROJECTION).weight.detach().numpy())


def test_a_token_has_the_same_bits_in_any_window_and_batch(tmp_path):
    FLOAT8["compressed-tensors, channel, inputs by token"].write(tmp_path)
    rows, length = 5, 10
    texts = torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1)).tolist()

    def scored(batch: int, window: int) -> torch.Tensor:
        decode = Decoder(tmp_path, "grouped", batch=batch)
        parts = [decode([t[at : at + window] for t in texts[:batch]], [at] * batch) for at in range(0, length, window)]
        return torch.cat(parts, dim=1)[0]

    alone = scored(1, 1)
    for batch, window in ((1, 5), (2, 1), (5, 5)):
        assert torch.equal(scored(batch, window), alone), (batch, window)


GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "damp_percent": 0.1, "checkpoint_format": "gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "modules_to_not_convert": None}


@dataclass(frozen=True)
class Integers:
    """A storage format of integers: its layout, group size (0: all inputs), zero points, config, and bits."""

    layout: str
    group: int
    zeros: bool
    config: dict[str, object]
    bits: int = 4

    def store(self, weight: torch.Tensor) -> tuple[quantized.Stored, torch.Tensor]:
        group = self.group or weight.shape[1]
        integers, scale, zero = quantized.integers(weight, group, self.zeros, self.bits)
        meant = (integers.unflatten(1, (-1, group)) - zero[..., None]) * scale[..., None]
        return quantized.pack(self.layout, integers, scale, zero, zeros=self.zeros, bits=self.bits), meant.flatten(1)

    def write(self, folder: Path) -> PreTrainedModel:
        return quantized.write(folder, self.config, self.store)


@dataclass(frozen=True)
class Nvfp4:
    """ModelOpt's NVFP4."""

    config: dict[str, object]

    def store(self, weight: torch.Tensor) -> tuple[quantized.Stored, torch.Tensor]:
        return quantized.nvfp4(weight)

    def write(self, folder: Path, family: str = "qwen2") -> PreTrainedModel:
        return quantized.write(folder, self.config, self.store, family=family)


@dataclass(frozen=True)
class QuarkMxfp4:
    """Quark's MXFP4."""

    config = quark(MX_SPEC, MX_SPEC | {"is_dynamic": True})

    def store(self, weight: torch.Tensor) -> tuple[quantized.Stored, torch.Tensor]:
        return quantized.mxfp4(weight)

    def write(self, folder: Path) -> PreTrainedModel:
        return quantized.write(folder, self.config, self.store)


GPTQ_V2 = GPTQ | {"group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"}
INT4 = {
    "compressed-tensors, groups of 32": Integers("compressed-tensors", 32, False, int4_group(32, True)),
    "compressed-tensors, groups of 128, zero points": Integers("compressed-tensors", 128, True, int4_group(128, False)),
    "gptq": Integers("gptq", 64, False, GPTQ | {"group_size": 64, "sym": True}),
    "gptq, zero points": Integers("gptq", 128, True, GPTQ | {"group_size": 128, "sym": False}),
    "gptq_v2, zero points": Integers("gptq_v2", 32, True, GPTQ_V2),
    "awq": Integers("awq", 128, True, AWQ | {"group_size": 128, "zero_point": True}),
    "awq, symmetric": Integers("awq", 64, False, AWQ | {"group_size": 64, "zero_point": False}),
}
AUTO_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "data_type": "int",
    "packing_format": "auto_round:auto_gptq",
    "autoround_version": "0.9",
    "iters": 200,
}
OTHERS = {
    "gptq, 8 bits": Integers("gptq", 128, False, GPTQ | {"bits": 8, "group_size": 128, "sym": True}, 8),
    "gptq, 8 bits, zero points": Integers("gptq", 32, True, GPTQ | {"bits": 8, "group_size": 32, "sym": False}, 8),
    "gptq, one group": Integers("gptq", 0, False, GPTQ | {"group_size": -1, "sym": True}),
    "awq, gemv": Integers("awq_gemv", 64, True, AWQ | {"version": "gemv", "group_size": 64, "zero_point": True}),
    "auto-round": Integers("gptq", 128, False, AUTO_ROUND),
    "auto-round, as awq": Integers(
        "awq", 32, True, AUTO_ROUND | {"group_size": 32, "sym": False, "packing_format": "auto_round:auto_awq"}
    ),
    "modelopt, W8A16": Integers("integers", 0, False, MODELOPT | {"quant_algo": "W8A16"}, 8),
    "modelopt, NVFP4": Nvfp4(MODELOPT | {"quant_algo": "W4A16_NVFP4", "group_size": 16}),
    "quark, MXFP4": QuarkMxfp4(),
}


@pytest.mark.parametrize("case", INT4 | OTHERS)
def test_repacked_weights_keep_their_values(tmp_path, case):
    model = (INT4 | OTHERS)[case].write(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    scheme = read_quantization(checkpoint.config, tmp_path).scheme(PROJECTION)
    result = read_low_bit(PROJECTION, checkpoint.tensors, scheme)
    meant = model.get_submodule(PROJECTION).weight.detach().numpy()
    np.testing.assert_allclose(result.dequantized, meant, rtol=3e-7 if "NVFP4" in case else 0)  # a product of scales

    expected = expected_logits(model, TOKENS)
    quantized.packed(tmp_path)
    result = Decoder(tmp_path / "packed", "grouped", batch=1)([TOKENS], [0])[0]
    assert (result - expected).norm() < 0.02 * expected.norm()  # inputs are rounded to 8 bits


@pytest.mark.parametrize("case", ["compressed-tensors, channel, inputs by token", "modelopt", "modelopt, NVFP4"])
def test_a_quantized_gemma_4_has_the_logits_of_the_dequantized_checkpoint(tmp_path, case):
    expected = expected_logits((FLOAT8 | OTHERS)[case].write(tmp_path, "gemma4 dense"), TOKENS)
    if case in OTHERS:
        quantized.packed(tmp_path)
    result = Decoder(tmp_path / ("packed" if case in OTHERS else ""), "grouped", batch=1)([TOKENS], [0])[0]
    assert (result - expected).norm() < 0.02 * expected.norm()


def test_a_4_bit_checkpoint_keeps_its_unquantized_tensors(tmp_path):
    INT4["awq"].write(tmp_path)
    before, after = Checkpoint.open(tmp_path).tensors, quantized.packed(tmp_path).tensors
    assert after["lm_head.weight"].shape == before["lm_head.weight"].shape
    assert not [name for name in after if "qweight" in name or "qzeros" in name]


def edited(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for kind, tensor in changes.items():
        tensors[f"{PROJECTION}.{kind}"] = tensor
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.0, "above 0; 1 of 256 are not, the first is 0.0"),
        (float("nan"), "finite.*nan"),
        (float("inf"), "finite.*inf"),
    ],
)
def test_an_invalid_scale_is_rejected(tmp_path, value, message):
    FLOAT8["compressed-tensors, channel, inputs whole"].write(tmp_path)
    scale = load_file(tmp_path / "model.safetensors")[f"{PROJECTION}.weight_scale"]
    scale[7] = value
    edited(tmp_path, weight_scale=scale)
    with pytest.raises(BadCheckpoint, match=rf"'{PROJECTION}.weight_scale' should hold scales.*{message}"):
        Decoder(tmp_path, "grouped", batch=1)


def test_scales_of_another_shape_are_rejected(tmp_path):
    FLOAT8["fp8, block"].write(tmp_path)
    edited(tmp_path, weight_scale_inv=torch.ones(2, 3))
    with pytest.raises(BadCheckpoint, match=r"weight_scale_inv' should have shape \[2, 2\].*\[2, 3\]"):
        Decoder(tmp_path, "grouped", batch=1)


@pytest.mark.parametrize("method", sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))
def test_every_method_of_transformers_is_read_or_rejected_with_its_reason(method):
    if method.removesuffix("_4bit").removesuffix("_8bit") in METHODS:
        return
    with pytest.raises(BadCheckpoint, match=rf"quant_method is '{method}': the exporter does not implement .+; .+"):
        read_quantization({"quantization_config": {"quant_method": method}}, Path())


def test_weights_that_contradict_the_config_are_rejected(tmp_path):
    FLOAT8["fp8, block"].write(tmp_path)
    edited(tmp_path, weight=torch.ones(256, 256))
    with pytest.raises(BadCheckpoint, match=r"q_proj.weight' should be float8_e4m3fn, it is float32"):
        Decoder(tmp_path, "grouped", batch=1)


def test_another_packing_order_is_rejected_by_its_shape(tmp_path):
    INT4["awq"].write(tmp_path)
    edit_config(tmp_path, quantization_config=GPTQ | {"group_size": 128, "sym": False})
    with pytest.raises(
        BadCheckpoint, match=r"'model.layers.0.*scales' should be .*\[\d+, \d+\] by .*it is float16\[2, \d+\]"
    ):
        quantized.packed(tmp_path)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"bits": 4}, r"k_proj\.g_idx' should be int32\[64\] by its quantization_config, it is int32\[32\]"),
        ({"group_size": 64}, "inputs that are a multiple of its group size, 64"),
        ({"sym": True}, "qzeros should all be 128 where sym is true"),
    ],
)
def test_a_config_that_contradicts_packed_weights_is_rejected_before_anything_is_written(tmp_path, field, message):
    case, model = OTHERS["gptq, 8 bits, zero points"], tiny_checkpoint(tmp_path / "model", layers=1)
    quantized.rewrite(model, case.config, case.store)
    edit_config(model, quantization_config=case.config | field)
    heard = Recorded()
    with pytest.raises(BadCheckpoint, match=message):
        build(Recipe.load(write_recipe(tmp_path / "r.toml", target=model)), tmp_path / "out", listener=heard)
    assert heard.titles == ["Read the checkpoints"]


def test_reordered_columns_are_rejected(tmp_path):
    INT4["gptq"].write(tmp_path)
    order = torch.arange(256, dtype=torch.int32) // 64
    order[[3, 200]] = order[[200, 3]]
    edited(tmp_path, g_idx=order)
    with pytest.raises(BadCheckpoint, match=r"g_idx should give .* input 3 is in group 3; .*desc_act = false"):
        quantized.packed(tmp_path)


def test_4_bits_need_a_backend_with_4_bit_matmuls(tmp_path):
    INT4["gptq"].write(tmp_path)
    with pytest.raises(BadCheckpoint, match=r"4-bit weights run on backend onnxruntime-cpu only"):
        Decoder(tmp_path, "length", batch=1)


def test_a_bundle_of_quantized_checkpoints_has_notes_and_speculates_invisibly(tmp_path):
    target = tiny_checkpoint(tmp_path / "target", seed=1)
    quantized.rewrite(target, (float8 := FLOAT8["compressed-tensors, channel, inputs by token"]).config, float8.store)
    draft = tiny_checkpoint(tmp_path / "draft", layers=1, seed=1)
    quantized.rewrite(draft, GPTQ_V2, INT4["gptq_v2, zero points"].store)
    report = build(Recipe.load(write_recipe(tmp_path / "r.toml", target=target, draft=draft)), tmp_path / "out")
    assert report.notes == (
        "target: weights are stored as fp8 (compressed-tensors), their bytes stay where they are; inputs of matmuls "
        "are rounded as the config says (token)",
        "draft: 7 quantized weights (gptq) were repacked, their values are the same",
    )
    assert report.manifest.files["target/model.safetensors"].size == (target / "model.safetensors").stat().st_size
    texts = []
    for window in (0, 4):
        with LLM(tmp_path / "out", threads=1, num_draft_tokens=window) as llm:
            outputs = llm.generate(["json", "long " * 9], SamplingParams(temperature=0.8, seed=3, max_tokens=16))
            texts.append([output.token_ids for output in outputs])
    assert texts[0] == texts[1]


def test_a_draft_stored_in_8_bits_is_rounded_to_the_4_that_its_recipe_asks_for(tmp_path):
    case = OTHERS["gptq, 8 bits, zero points"]
    model = tiny_checkpoint(tmp_path / "model", layers=1, seed=1)
    quantized.rewrite(model, case.config, case.store)
    recipe = write_recipe(tmp_path / "r.toml", target=model, draft=model, dtype="int4")
    heard = Recorded()
    notes = build(Recipe.load(recipe), tmp_path / "out", listener=heard).notes
    assert "Pack the target's weights" in heard.titles
    assert "Quantize the weights of draft to int4" in heard.titles
    assert [note.startswith(("target: 7 quantized", "target: int4 changed", "draft: int4")) for note in notes] == [
        True
    ] * 3
    stored = {role: read_header(tmp_path / "out" / role / "model.safetensors") for role in ("target", "draft")}
    types = {role: {name.split(".")[-2] for name in names if "q_proj" in name} for role, names in stored.items()}
    assert types == {"target": {"int8"}, "draft": {"int4"}}


def test_an_ignored_module_stays_unquantized(tmp_path):
    case = FLOAT8["compressed-tensors, channel, inputs by token"]
    model = case.write(tmp_path)
    left, kept = (
        "model.layers.0.self_attn.k_proj",
        torch.randn(128, 256, generator=torch.Generator().manual_seed(3)) / 16,
    )
    matmul = model.get_submodule(left)
    matmul._forward_pre_hooks.clear()
    matmul.weight.data = kept
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"{left}.weight_scale"]
    save_file(tensors | {f"{left}.weight": kept}, tmp_path / "model.safetensors")
    edit_config(tmp_path, quantization_config=case.config | {"ignore": ["lm_head", left]})
    expected = expected_logits(model, TOKENS)
    logits = Decoder(tmp_path, "grouped", batch=1)([TOKENS], [0])[0]
    assert (logits - expected).norm() < 0.01 * expected.norm()


CUDA = 'name = "onnxruntime-cuda"'
RTX = 'name = "tensorrt-rtx"\ncompute_capabilities = ["8.9", "12.0"]'


@pytest.mark.parametrize(
    ("case", "backend", "message"),
    [
        (
            INT4["gptq_v2, zero points"],
            CUDA + '\ncache = "linear"',
            r"\(gptq\) needs backend.name 'onnxruntime-cpu' or 'onnxruntime-cuda' with cache = 'paged'; got",
        ),
        (
            FLOAT8["compressed-tensors, channel, inputs whole"],
            CUDA,
            "has float8 weights with unquantized inputs",
        ),
        (FLOAT8["modelopt"], CUDA, r"needs target.dtype 'bfloat16' on a GPU: .*got 'float16'"),
        (FLOAT8["modelopt"], CUDA + '\ncache = "linear"', r"needs .*'onnxruntime-cuda' with cache = 'paged'; got"),
        (INT4["gptq_v2, zero points"], RTX, r"\(gptq\) needs weights in float8"),
        (FLOAT8["compressed-tensors, channel, inputs by token"], RTX, "inputs that are unquantized, or have static"),
        (FLOAT8["modelopt"], RTX.replace("8.9", "8.6"), "needs compute capability 8.9 or later; got 8.6 in"),
    ],
)
def test_backends_without_quantized_matmuls_are_rejected_before_the_build(tmp_path, case, backend, message):
    target = tiny_checkpoint(tmp_path / "target")
    quantized.rewrite(target, case.config, case.store)
    recipe = Recipe.load(write_recipe(tmp_path / "r.toml", target=target, dtype="float16", backend=backend))
    with pytest.raises(BadRecipe, match=message):
        open_models(recipe)


def test_tensorrt_rtx_builds_float8_matmuls_ahead_of_time(tmp_path):
    target, case = tiny_checkpoint(tmp_path / "target", layers=1), FLOAT8["modelopt"]
    quantized.rewrite(target, case.config, case.store)
    recipe = Recipe.load(write_recipe(tmp_path / "r.toml", target=target, dtype="float16", backend=RTX))
    build(recipe, tmp_path / "out")
    report = json.loads((tmp_path / "out" / "target" / "model.inspect.json").read_text())
    layers = report["network_layers"]
    assert report["built_for"] == "sm_89+sm_120"
    assert (layers["QUANTIZE"], layers["DEQUANTIZE"]) == (7, 14)  # the inputs of each matmul, and its weight too
