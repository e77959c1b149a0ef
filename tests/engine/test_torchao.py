"""torchao's FP8 and int8, in the tensors that transformers 5 saves with torchao 0.18."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.quantize.stored_weights import read_matrix
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.quantization.torchao import read_torchao
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tensors import with_graph_names
from tests.engine import quantized
from tests.engine.decoding import Decoder, expected_logits
from tests.engine.test_quantized_checkpoints import PROJECTION, TOKENS

BY_ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
FLOAT8 = {"_type": "torch.dtype", "_data": "float8_e4m3fn"}


def config(kind: str, **data: object) -> dict[str, Any]:
    default = {"_type": kind, "_version": 2, "_data": {"set_inductor_config": True, **data}}
    return {
        "quant_method": "torchao",
        "quant_type": {"default": default},
        "modules_to_not_convert": None,
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }


def in_float8(weight: torch.Tensor) -> tuple[quantized.Stored, torch.Tensor]:
    values, scale, meant = quantized.float8(weight, (1, 0))
    return {"_weight_qdata": values, "_weight_scale": scale}, meant


def in_int8(weight: torch.Tensor, zero: int = 0) -> tuple[quantized.Stored, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    integers = (weight / scale).round().to(torch.int8)
    zeros = torch.full(scale.shape, zero, dtype=torch.int8)
    stored = {"_weight_qdata": integers, "_weight_scale": scale, "_weight_zero_point": zeros}
    return stored, integers.float() * scale


INT8 = config("Int8WeightOnlyConfig", granularity=BY_ROW, group_size=None)
CASES = {
    "float8": (
        config(
            "Float8DynamicActivationFloat8WeightConfig",
            activation_dtype=FLOAT8,
            weight_dtype=FLOAT8,
            granularity=[BY_ROW, BY_ROW],
            kernel_preference={"_type": "KernelPreference", "_data": "AUTO"},
        ),
        in_float8,
        lambda x: quantized.rounded(x, None, 0),
    ),
    "int8": (INT8, in_int8, None),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_and_logits_are_those_of_the_checkpoint(tmp_path: Path, case: str) -> None:
    said, store, inputs = CASES[case]
    model = quantized.write(tmp_path, said, store, inputs)
    checkpoint = Checkpoint.open(tmp_path)
    named = with_graph_names(checkpoint, ModelSpec.from_hf(checkpoint.config)).tensors
    scheme = read_quantization(checkpoint.config, tmp_path).scheme(PROJECTION)  # type: ignore[union-attr]
    dequantized = torch.from_numpy(read_matrix(PROJECTION, named, scheme))
    torch.testing.assert_close(dequantized, model.get_submodule(PROJECTION).weight, rtol=1e-6, atol=0)
    expected, folder = expected_logits(model, TOKENS), tmp_path
    if case == "int8":
        quantized.packed(tmp_path)
        folder = tmp_path / "packed"
    logits = Decoder(folder, "grouped", batch=1)([TOKENS], [0])[0]
    assert (logits - expected).norm() < 0.02 * expected.norm()


def test_zero_points_are_rejected(tmp_path: Path) -> None:
    quantized.write(tmp_path, INT8, partial(in_int8, zero=1))
    with pytest.raises(BadCheckpoint, match="weight_zero_point' should hold zeros"):
        quantized.packed(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [
        ("weight_dtype", FLOAT8, "float8_e5m2"),
        ("activation_dtype", FLOAT8, "float8_e5m2"),
        ("packing_format", "PLAIN", "OPAQUE"),
        ("act_mapping_type", "SYMMETRIC", "ASYMMETRIC"),
        ("group_size", None, 32),
        ("activation_value_lb", None, 0.5),
        ("activation_value_ub", None, 0.5),
        ("granularity", [BY_ROW, BY_ROW], [BY_ROW, {"_type": "PerTensor"}]),
        ("granularity", BY_ROW, {"_type": "PerGroup"}),
    ],
)
def test_each_field_is_accepted_with_its_value_alone(name: str, value: object, other: object) -> None:
    kind = "Float8DynamicActivationFloat8WeightConfig"
    assert read_torchao(config(kind, **{name: value}), "here").method == "torchao"
    with pytest.raises(BadCheckpoint, match=rf"here: .*{name}"):
        read_torchao(config(kind, **{name: other}), "here")


def test_unknown_fields_and_quantized_embeddings_are_rejected() -> None:
    with pytest.raises(BadCheckpoint, match="weight_scheme"):
        read_torchao(config("Int8WeightOnlyConfig", weight_scheme=1), "here")
    with pytest.raises(BadCheckpoint, match="include_input_output_embeddings"):
        read_torchao(INT8 | {"include_input_output_embeddings": True}, "here")
