"""compressed-tensors: we read what the library writes, it reads what we write, and both compute the same logits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tandemrt.export.bundle.publish import publish
from tandemrt.export.quantize.stored_weights import read_low_bit, read_matrix
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.quantization.config import read_quantization
from tests.engine.decoding import VOCAB, Decoder, expected_logits, make_checkpoint
from tests.engine.quantized import SIZES, packed

pytest.importorskip("compressed_tensors")

TOKENS = torch.randint(0, VOCAB, (30,), generator=torch.Generator().manual_seed(0)).tolist()


def written_by_the_library(preset: str, folder: Path) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model = make_checkpoint("qwen2", folder / "unquantized", sizes=SIZES)
    groups = {"group_0": preset_name_to_scheme(preset, ["Linear"])}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        if (how := getattr(module, "quantization_scheme", None)) is not None:
            low, high = _ranges(module.weight.data, how.weights)
            whole = {}
            if hasattr(module, "weight_global_scale"):
                module.weight_global_scale.data = generate_gparam(low.amin().reshape(1), high.amax().reshape(1))
                whole = {"global_scale": module.weight_global_scale.data}
            module.weight_scale.data = calculate_qparams(low, high, how.weights, **whole)[0]
            if hasattr(module, "input_global_scale"):
                module.input_global_scale.data.fill_(50.0)
            if hasattr(module, "input_scale"):
                module.input_scale.data.fill_(0.02)
            module.quantization_status = "frozen"
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder / "quantized")
    compressor.update_config(folder / "quantized")


def written_by_us(scheme: str, folder: Path) -> None:
    make_checkpoint("qwen2", folder / "unquantized", torch.bfloat16, sizes=SIZES)
    publish(folder / "unquantized", folder / "quantized", scheme, group=32)


def _ranges(weight: torch.Tensor, how: object) -> tuple[torch.Tensor, torch.Tensor]:
    if how.strategy == "block":
        blocks = weight.unfold(0, 128, 128).unfold(1, 128, 128)
        return blocks.amin((2, 3)), blocks.amax((2, 3))
    if how.strategy in ("group", "tensor_group"):
        blocks = weight.unflatten(1, (-1, how.group_size))
        return blocks.amin(-1), blocks.amax(-1)
    if how.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    return weight.amin().reshape(1), weight.amax().reshape(1)


def as_the_library_computes(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("write", "scheme"),
    [*((written_by_the_library, preset) for preset in ("FP8_DYNAMIC", "FP8", "FP8_BLOCK")), (written_by_us, "fp8")],
)
def test_float8_gives_the_logits_of_transformers(tmp_path, write, scheme):
    write(scheme, tmp_path)
    expected = expected_logits(as_the_library_computes(tmp_path / "quantized"), TOKENS)
    logits = Decoder(tmp_path / "quantized", "grouped", batch=1)([TOKENS], [0])[0]
    assert (logits - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize(
    ("write", "scheme"),
    [
        *((written_by_the_library, preset) for preset in ("W4A16", "W8A16")),
        (written_by_us, "int4"),
    ],
)
def test_packed_weights_give_the_logits_of_transformers_but_for_rounded_inputs(tmp_path, write, scheme):
    write(scheme, tmp_path)
    expected = expected_logits(as_the_library_computes(tmp_path / "quantized"), TOKENS)
    packed(tmp_path / "quantized")
    logits = Decoder(tmp_path / "quantized" / "packed", "grouped", batch=1)([TOKENS], [0])[0]
    assert (logits - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("preset", ["W8A8", "W8A16", "NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP8"])
def test_weights_have_the_values_that_the_library_decompresses(tmp_path, preset):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme

    written_by_the_library(preset, tmp_path)
    checkpoint, module = Checkpoint.open(tmp_path / "quantized"), "model.layers.0.mlp.gate_proj"
    stored = load_file(tmp_path / "quantized" / "model.safetensors")
    own = {name.removeprefix(f"{module}."): tensor for name, tensor in stored.items() if name.startswith(module)}
    group = checkpoint.config["quantization_config"]["config_groups"]["group_0"]
    decompress = BaseCompressor.get_value_from_registry(group["format"]).decompress
    expected = decompress(own, preset_name_to_scheme(preset, ["Linear"]))["weight"]
    quantization = read_quantization(checkpoint.config, checkpoint.folder)
    scheme = quantization.scheme(module)
    weight = (
        read_low_bit(module, checkpoint.tensors, scheme).dequantized
        if scheme.packed
        else read_matrix(module, checkpoint.tensors, scheme)
    )
    # The library multiplies 4-bit floats by their scales in bfloat16.
    tolerance = 2**-7 if "FP4" in preset else 1e-6
    np.testing.assert_allclose(weight, expected.float().numpy(), rtol=tolerance)
    assert bool(quantization.notes()) == (preset in ("W8A8", "NVFP4", "MXFP4", "MXFP8"))


def test_a_float4_bundle_gives_the_logits_of_its_dequantized_weights(tmp_path):
    written_by_the_library("NVFP4", tmp_path)
    checkpoint = Checkpoint.open(tmp_path / "quantized")
    quantization = read_quantization(checkpoint.config, checkpoint.folder)
    model = make_checkpoint("qwen2", tmp_path / "again", sizes=SIZES)
    with torch.no_grad():
        for module, part in model.named_modules():
            if module.endswith("_proj"):
                matrix = read_low_bit(module, checkpoint.tensors, quantization.scheme(module)).dequantized
                part.weight.copy_(torch.from_numpy(matrix.copy()))
    packed(tmp_path / "quantized")
    logits = Decoder(tmp_path / "quantized" / "packed", "grouped", batch=1)([TOKENS], [0])[0]
    expected = expected_logits(model, TOKENS)
    assert (logits - expected).norm() < 0.02 * expected.norm()
