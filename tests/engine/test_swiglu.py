"""The gated activation: implementations without a GPU equal the reference."""

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from tandemrt.plugins.functions import OPSET
from tandemrt.plugins.functions.swiglu import swiglu as swiglu_function
from tandemrt.plugins.operators.constants import DOMAIN
from tandemrt.plugins.reference.swiglu import swiglu

TYPES = {np.float32: ir.DataType.FLOAT, np.float16: ir.DataType.FLOAT16}


@pytest.fixture(scope="module")
def gate_up() -> np.ndarray:
    values = np.random.default_rng(3).normal(size=(3, 5, 2 * 37)) * 4
    values[0, 0, :4] = [-90000, 90000, 0, -1e-8]
    return values


def test_swiglu_is_silu_of_the_first_half_times_the_second(gate_up: np.ndarray) -> None:
    values = torch.from_numpy(gate_up)
    expected = torch.nn.functional.silu(values[..., :37]) * values[..., 37:]
    np.testing.assert_allclose(swiglu(gate_up), expected.numpy(), rtol=1e-14)


def test_swiglu_rounds_once() -> None:
    values = np.array([[1.5, 3.0]], ml_dtypes.bfloat16)
    exact = 1.5 / (1 + np.exp(-1.5)) * 3.0
    assert swiglu(values)[0, 0] == ml_dtypes.bfloat16(exact)


def test_halves_of_unequal_width_are_refused() -> None:
    with pytest.raises(ValueError, match="even last dimension"):
        swiglu(np.zeros((2, 5)))


@pytest.mark.parametrize("dtype", TYPES)
def test_the_function_body_equals_the_reference(gate_up: np.ndarray, dtype: type) -> None:
    values = np.clip(gate_up, -60000, 60000).astype(dtype)
    [activated] = _session(dtype).run(None, {"x": values})
    np.testing.assert_allclose(activated, swiglu(values), rtol=8 * np.finfo(dtype).eps, atol=4e-6)


def _session(dtype: type) -> onnxruntime.InferenceSession:
    x = ir.val("x", dtype=TYPES[dtype], shape=("batch", "query", "width2"))
    y = ir.val("y", dtype=TYPES[dtype], shape=("batch", "query", "width"))
    node = ir.node("swiglu", [x], domain=DOMAIN, outputs=[y])
    graph = ir.Graph([x], [y], nodes=[node], name="activation", opset_imports={"": OPSET, DOMAIN: 1})
    model = ir.Model(graph, ir_version=11, functions=[swiglu_function()])
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
