"""Matmuls with stored weights, one by one and packed."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import save_file

from tandemrt.engines.contract.contract import Binding
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.graph.builder import GraphBuilder, save_model
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.linear import Linear, merge_linears
from tandemrt.export.read.checkpoint import Checkpoint

WIDE, NARROW, INTO = 5, 3, 7


@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_matmul_equals_its_concatenated_parts(tmp_path: Path, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (WIDE, INTO), "b.weight": (NARROW, INTO)} | (
        {"a.bias": (WIDE,), "b.bias": (NARROW,)} if bias else {}
    )
    stored = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")

    b = GraphBuilder("g")
    w = Weights(Checkpoint.open(tmp_path), b, "float32")
    x = b.input(Binding("x", "float32", ("batch", "query", INTO)))
    parts = Linear.stored("a", WIDE, bias=bias), Linear.stored("b", NARROW, bias=bias)
    for name, matmul in {"a": parts[0], "b": parts[1], "both": merge_linears(*parts)}.items():
        b.output(Binding(name, "float32", ("batch", "query", matmul.width)), matmul(b, x, w))
    w.finish()
    save_model(b.model(), tmp_path / "g.onnx")

    session = onnxruntime.InferenceSession(tmp_path / "g.onnx", providers=["CPUExecutionProvider"])
    inputs = torch.randn(2, 3, INTO, generator=generator)
    one, other, both = session.run(None, {"x": inputs.numpy()})
    np.testing.assert_allclose(both, np.concatenate([one, other], axis=-1), rtol=1e-5, atol=1e-6)
    expected = torch.nn.functional.linear(inputs, stored["a.weight"], stored.get("a.bias"))
    np.testing.assert_allclose(one, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_a_single_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(WIDE, INTO), "b.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    b = GraphBuilder("g")
    w = Weights(Checkpoint.open(tmp_path), b, "float32")
    Linear.stored("a", WIDE)(b, b.input(Binding("x", "float32", ("batch", "query", INTO))), w)
    with pytest.raises(BadCheckpoint, match=r"1 tensor\(s\) have no place .*: b\.weight;"):
        w.finish()


def test_matmuls_with_and_without_a_bias_are_not_packed() -> None:
    with pytest.raises(AssertionError, match="all matmuls have a bias or none"):
        merge_linears(Linear.stored("a", WIDE, bias=True), Linear.stored("b", NARROW))
