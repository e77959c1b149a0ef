"""The plugins' PTX, launched as TensorRT launches it, equals the numpy definition; TensorRT itself is not needed."""

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from cuda.core import Device, ObjectCode

from tandemrt.plugins.kernels.module import Launch, current_stream
from tandemrt.plugins.reference import token_bitmask
from tandemrt.plugins.tensorrt.operators import PLUGINS
from tests.engine.operator_cases import case, reference_verify

TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int64": torch.int64}
BY_NAME = {operator.name: operator for operator in PLUGINS}
BATCHES = [*product([31, 32, 33, 1000, 2049], range(5)), (128_256, 2)]  # vocabulary, window
UNWRITTEN = -99


def execute(name, tensors, dtype):
    """Inputs, int32 scalars and outputs in the plugin's order, grid and block from the plugin's own function."""
    operator, device = BY_NAME[name], torch.device("cuda")
    inputs = {b.name: torch.from_numpy(np.ascontiguousarray(tensors[b.name])).to(device) for b in operator.inputs}
    inputs["logits"] = inputs["logits"].to(TORCH[dtype])
    shapes = {key: tuple(tensor.shape) for key, tensor in inputs.items()}
    outputs = [
        torch.full(shape, UNWRITTEN, dtype=TORCH.get(binding.dtype, TORCH[dtype]), device=device)
        for binding, shape in zip(operator.outputs, operator.output_shapes(shapes), strict=True)
    ]
    launch = operator.launch(shapes)
    scalars = [np.int32(value) for value in launch.scalars]
    kernel = load(name, dtype).get_kernel(operator.kernel(dtype))
    Launch(kernel, launch.grid, (launch.threads, 1, 1), *inputs.values(), *scalars, *outputs).run(
        current_stream(device)
    )
    return [output.float().cpu().numpy() if output.is_floating_point() else output.cpu().numpy() for output in outputs]


@cache
def load(name, dtype):
    torch.zeros(1, device="cuda")  # makes torch's context, which the kernels share
    Device(torch.cuda.current_device()).set_current()
    return ObjectCode.from_ptx(BY_NAME[name].ptx(dtype).encode())


def rounded(tensors, dtype):
    return tensors | {"logits": torch.from_numpy(tensors["logits"]).to(TORCH[dtype]).float().numpy()}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("vocab", "window"), BATCHES)
def test_the_bitmask_kernel_equals_its_definition(vocab, window, dtype):
    tensors = rounded(batch(vocab, window), dtype)
    [masked] = execute("token_bitmask", tensors, dtype)
    np.testing.assert_array_equal(masked, token_bitmask(tensors["logits"], tensors["bitmask"]))


@pytest.mark.parametrize("name", ["verify_draft", "verify_draft_probs"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("vocab", "window"), BATCHES)
def test_both_plugins_in_turn_equal_the_definition_of_verification(vocab, window, dtype, name):
    """Mixed rules, filters, dead rows, ragged drafts, per-request seeds; every output element is written."""
    tensors = rounded(batch(vocab, window), dtype)
    if name == "verify_draft":
        del tensors["draft_probs"]
    [masked] = execute("token_bitmask", tensors, dtype)
    tokens, count = execute(name, tensors | {"logits": masked}, dtype)
    expected_tokens, expected_count = reference_verify(tensors)
    np.testing.assert_array_equal(tokens, expected_tokens)
    np.testing.assert_array_equal(count, expected_count)


@cache
def batch(vocab, window):
    return case(vocab, window)
