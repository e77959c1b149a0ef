"""``dequantize``: a build writes quantized weights as unquantized ones, with the values that their format defines."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe
from tandemrt.export.bundle.build import build
from tandemrt.export.bundle.opening import open_models
from tandemrt.export.quantize.dequantized_checkpoint import write_dequantized
from tandemrt.export.quantize.stored_weights import read_low_bit, read_matrix
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.spec import ModelSpec
from tests.engine import quantized
from tests.engine.test_quantized_checkpoints import FLOAT8, GPTQ, INT4, MODELOPT, OTHERS, Integers
from tests.makers import tiny_checkpoint, write_recipe

BITSANDBYTES = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": None, "llm_int8_threshold": 6.0}
STATE = "quant_state.bitsandbytes__nf4"


@dataclass(frozen=True)
class FourBits:
    """bitsandbytes in 4 bits, with or without double quantization."""

    double: bool

    @property
    def config(self) -> dict[str, object]:
        options = {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
        return BITSANDBYTES | options | {"bnb_4bit_use_double_quant": self.double}

    def store(self, weight: torch.Tensor) -> tuple[quantized.Stored, torch.Tensor]:
        return quantized.nf4(weight, double=self.double)


@dataclass(frozen=True)
class EightBits:
    """bitsandbytes in int8: the largest value of each output becomes 127."""

    config = BITSANDBYTES | {"load_in_8bit": True, "load_in_4bit": False}

    def store(self, weight: torch.Tensor) -> tuple[quantized.Stored, torch.Tensor]:
        largest = weight.abs().amax(1)
        integers = (weight / largest[:, None] * 127).round()
        stored = {
            "weight": integers.to(torch.int8),
            "SCB": largest,
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }
        return stored, integers * (largest / 127)[:, None]


@dataclass(frozen=True)
class Reordered:
    """GPTQ with desc_act: each input belongs to any group."""

    config = GPTQ | {"group_size": 32, "sym": False, "desc_act": True}

    def store(self, weight: torch.Tensor) -> tuple[quantized.Stored, torch.Tensor]:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(4))
        stored, meant = Integers("gptq", 32, True, self.config).store(weight[:, order])
        back = order.argsort()
        integers = stored["qweight"].long()[:, None] >> (4 * torch.arange(8))[None, :, None] & 15
        stored["qweight"] = quantized.words(integers.flatten(0, 1)[back].T, 4).T
        stored["g_idx"] = stored["g_idx"][back]
        return stored, meant[:, back]


@dataclass(frozen=True)
class Mxfp8:
    """MXFP8 with scales named ``scale``."""

    config: dict[str, object]
    scale: str

    def store(self, weight: torch.Tensor) -> tuple[quantized.Stored, torch.Tensor]:
        stored, meant = quantized.mxfp8(weight)
        return {"weight": stored["weight"], self.scale: stored["weight_scale"]}, meant


MXFP8 = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "ignored_layers": ["lm_head"]}
CASES = {
    "nf4": FourBits(double=False),
    "nf4, double quantization": FourBits(double=True),
    "bitsandbytes, int8": EightBits(),
    "gptq, reordered": Reordered(),
    "fp8, block": FLOAT8["fp8, block"],
    "modelopt, NVFP4": OTHERS["modelopt, NVFP4"],
    "awq": INT4["awq"],
    "modelopt, MXFP8": Mxfp8(MODELOPT | {"quant_algo": "MXFP8"}, "weight_scale"),
    "mxfp8": Mxfp8(MXFP8, "weight_scale_inv"),
    "quark, MXFP4": OTHERS["quark, MXFP4"],
    "gptq, 8 bits, zero points": OTHERS["gptq, 8 bits, zero points"],
}


def store(folder: Path, case: str, **sizes: int) -> dict[str, torch.Tensor]:
    """Write a tiny checkpoint in the format of ``case``, and return the values that its weights mean."""
    tiny_checkpoint(folder, seed=1, **sizes)
    return quantized.rewrite(folder, CASES[case].config, CASES[case].store)


@pytest.mark.parametrize("case", CASES)
def test_dequantized_weights_have_the_values_of_their_format(tmp_path, case):
    meant = store(tmp_path / "from", case, hidden=128, head_dim=32)
    checkpoint = Checkpoint.open(tmp_path / "from")
    quantization = read_quantization(checkpoint.config, checkpoint.folder)
    spec = ModelSpec.from_hf(checkpoint.config)
    written = write_dequantized(checkpoint, spec, quantization, tmp_path, "float32")
    tensors = load_file(tmp_path / "model.safetensors")
    for module, weight in meant.items():
        torch.testing.assert_close(tensors[f"{module}.weight"], weight, rtol=1e-6, atol=1e-8)
    assert written.weights == len(meant)
    assert sorted(tensors) == sorted(load_file(tiny_checkpoint(tmp_path / "plain") / "model.safetensors"))
    assert read_quantization(written.checkpoint.config, written.checkpoint.folder) is None


def test_mxfp8_has_the_values_that_transformers_dequantizes(tmp_path):
    store(tmp_path, "mxfp8", head_dim=32)
    checkpoint, module = Checkpoint.open(tmp_path), "model.layers.0.mlp.down_proj"
    stored = load_file(tmp_path / "model.safetensors")
    pair = stored[f"{module}.weight"], stored[f"{module}.weight_scale_inv"]
    expected = Fp8Dequantize(None)._dequantize_one(*pair, torch.float32)
    dequantized = read_matrix(module, checkpoint.tensors, read_quantization(checkpoint.config, tmp_path).scheme(module))
    assert torch.equal(torch.from_numpy(dequantized), expected)


def test_a_dequantized_bundle_equals_that_of_the_unquantized_weights(tmp_path):
    meant = store(tmp_path / "from", "nf4")
    plain = tiny_checkpoint(tmp_path / "plain", seed=1)
    tensors = load_file(plain / "model.safetensors")
    save_file(tensors | {f"{module}.weight": weight for module, weight in meant.items()}, plain / "model.safetensors")
    texts = []
    for checkpoint, line in ((tmp_path / "from", "dequantize = true"), (plain, "")):
        file = write_recipe(tmp_path / f"{checkpoint.name}.toml", target=checkpoint)
        file.write_text(file.read_text().replace("[target]", f"[target]\n{line}"))
        report = build(Recipe.load(file), tmp_path / f"{checkpoint.name}-bundle")
        texts.append(quantized.texts_with_and_without_speculation(tmp_path / f"{checkpoint.name}-bundle")[0])
        if line:
            assert any("quantized weights (bitsandbytes) became float32: 0.00 GB" in note for note in report.notes)
    assert texts[0] == texts[1]


def test_scales_of_keys_and_values_survive(tmp_path):
    tiny_checkpoint(tmp_path / "from", seed=1)
    case = FLOAT8["modelopt"]
    quantized.rewrite(tmp_path / "from", MODELOPT | {"kv_cache_quant_algo": "FP8"}, case.store)
    checkpoint = Checkpoint.open(tmp_path / "from")
    quantization = read_quantization(checkpoint.config, checkpoint.folder)
    written = write_dequantized(checkpoint, ModelSpec.from_hf(checkpoint.config), quantization, tmp_path, "float32")
    written_quantization = read_quantization(written.checkpoint.config, written.checkpoint.folder)
    assert written_quantization.float8_cache
    assert written_quantization.rules == ()


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        ("mxfp8", {}, r"MXFP8 \(mxfp8\) have no matmuls on any backend; write target.dequantize = true"),
        ("nf4", {}, r"4-bit floats of bitsandbytes \(bitsandbytes\) have no matmuls on any backend; write target.deq"),
        (
            "gptq, 8 bits, zero points",
            {"dtype": "float16", "backend": 'name = "onnxruntime-cuda"'},
            "8-bit integers with zero points.*target.dequantize = t",
        ),
    ],
)
def test_a_rejected_checkpoint_names_the_option(tmp_path, case, options, message):
    store(tmp_path / "from", case, head_dim=32)
    file = write_recipe(tmp_path / "r.toml", target=tmp_path / "from", **options)
    with pytest.raises(BadRecipe, match=message):
        open_models(Recipe.load(file))
    file.write_text(file.read_text().replace("[target]", "[target]\ndequantize = true"))
    assert open_models(Recipe.load(file))[0].packed


def test_low_bit_dtypes_round_weights_again_without_the_option(tmp_path):
    store(tmp_path / "from", "nf4")
    file = write_recipe(tmp_path / "r.toml", target=tmp_path / "from", dtype="int8")
    report = build(Recipe.load(file), tmp_path / "bundle")
    assert any("int8 changed the weights by 0." in note for note in report.notes)
    file.write_text(file.read_text().replace("[target]", "[target]\ndequantize = true"))
    with pytest.raises(BadRecipe, match=r"target.dequantize needs target.dtype float32.*got 'int8'"):
        Recipe.load(file)


def test_low_bit_dtypes_round_mxfp8_again(tmp_path):
    meant = store(tmp_path / "from", "modelopt, MXFP8", hidden=128, head_dim=32)
    written = quantized.packed(tmp_path / "from", bits=8)
    assert not [name for name in written.tensors if name.endswith("weight_scale")]
    assert {f"{module}.weight" for module in meant}.isdisjoint(written.tensors)


def test_the_option_needs_quantized_weights(tmp_path):
    file = write_recipe(tmp_path / "r.toml", target=tiny_checkpoint(tmp_path / "from"))
    file.write_text(file.read_text().replace("[target]", "[target]\ndequantize = true"))
    with pytest.raises(BadRecipe, match=r"target\.dequantize needs a checkpoint with quantized weights"):
        open_models(Recipe.load(file))


@pytest.mark.parametrize(
    ("case", "name", "tensor", "message"),
    [
        ("nf4", f"weight.{STATE}", torch.tensor([123], dtype=torch.uint8), f"{STATE}' should hold JSON"),
        ("mxfp8", "weight_scale_inv", torch.full((64, 1), 255, dtype=torch.uint8), "exponents below 255.* 64 values"),
        ("mxfp8", "weight", torch.ones(64, 64), r"should be a float8_e4m3fn matrix .*, it is float32\[64, 64\]"),
        ("nf4", "weight.absmax", torch.ones(3), r"weight.absmax' should be float32\[\d+\]"),
        ("bitsandbytes, int8", "weight_format", torch.tensor(2, dtype=torch.uint8), "weight_format' should be 0, rows"),
    ],
)
def test_tensors_that_do_not_fit_are_rejected(tmp_path, case, name, tensor, message):
    store(tmp_path / "from", case)
    file = tmp_path / "from" / "model.safetensors"
    save_file(load_file(file) | {f"model.layers.0.mlp.up_proj.{name}": tensor}, file)
    checkpoint = Checkpoint.open(tmp_path / "from")
    quantization = read_quantization(checkpoint.config, checkpoint.folder)
    with pytest.raises(BadCheckpoint, match=message):
        write_dequantized(checkpoint, ModelSpec.from_hf(checkpoint.config), quantization, tmp_path, "float32")


def test_int8_of_bitsandbytes_runs_on_a_cpu_without_the_option(tmp_path):
    meant = store(tmp_path / "from", "bitsandbytes, int8", hidden=128, head_dim=32)
    checkpoint = Checkpoint.open(tmp_path / "from")
    quantization = read_quantization(checkpoint.config, checkpoint.folder)
    for module, weight in meant.items():
        dequantized = read_low_bit(module, checkpoint.tensors, quantization.scheme(module)).dequantized
        torch.testing.assert_close(torch.from_numpy(dequantized), weight, rtol=1e-6, atol=1e-8)
    report = build(Recipe.load(write_recipe(tmp_path / "r.toml", target=tmp_path / "from")), tmp_path / "bundle")
    assert any("8-bit integers" in note for note in report.notes)
    texts, _ = quantized.texts_with_and_without_speculation(tmp_path / "bundle")
    assert texts[0] == texts[1]
