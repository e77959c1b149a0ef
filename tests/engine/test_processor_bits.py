"""C kernels give the same bits with AVX-512 and, as on other processors, without it."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandemrt.plugins.implementations import launcher
from tandemrt.plugins.onnxruntime import custom_operators
from tandemrt.plugins.operators.int4_interleaved import by_tile, interleaved
from tandemrt.plugins.operators.launch import Context, Tensors
from tests.engine.implementation_cases import KINDS, allocated, cases, to_numpy, to_torch

OPTIONS = custom_operators._OPTIONS
# Rows of x and weights at the ends of what 8 and 4 bits hold, inputs that are no numbers or tiny, and others.
INPUTS = ("normal", "largest", "least", "alternating", "zeros", "nan", "infinite", "tiny", "huge")
WEIGHTS = {"random": (0, 16), "zeros": (0, 1), "largest": (15, 16)}  # ranges of integers


@pytest.fixture(autouse=True)
def usual_library() -> Iterator[None]:
    yield
    custom_operators._OPTIONS = OPTIONS
    custom_operators._library.cache_clear()


def computed(operator: str, tensors: Tensors, attributes: Mapping[str, Any], *options: str) -> Mapping[str, np.ndarray]:
    """Return what ``tensors`` are after a call of a library that is compiled with ``options``."""
    custom_operators._OPTIONS = (*OPTIONS, *options)
    custom_operators._library.cache_clear()
    context = Context(torch.device("cpu"), threads=1)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    launcher(operator, context)(copies, attributes, context).run()
    return {name: to_numpy(tensor) for name, tensor in copies.items()}


def assert_equal_bits(operator: str, tensors: Tensors, attributes: Mapping[str, Any]) -> None:
    expected = computed(operator, tensors, attributes, "-DNO_AVX512")
    for name, values in computed(operator, tensors, attributes).items():
        np.testing.assert_array_equal(values, expected[name], f"{operator}: {name}")
        if values.dtype == np.float32:  # above, 0 equals -0
            numbers = ~np.isnan(values)
            np.testing.assert_array_equal(np.signbit(values[numbers]), np.signbit(expected[name][numbers]), name)


@pytest.mark.parametrize("operator", custom_operators.OPERATORS)
def test_an_operator_gives_the_same_bits_without_avx512(operator: str) -> None:
    for dtype in KINDS if operator == "tiled_matmul" else ["float32"]:
        for case in cases(operator, dtype):
            tensors, _ = allocated(operator, case, torch.device("cpu"))
            assert_equal_bits(operator, tensors, case.attributes)


def inputs_of(kind: str, rows: int, inner: int, rng: np.random.Generator) -> np.ndarray:
    x = rng.normal(size=(rows, inner)).astype(np.float32)
    everywhere = {"largest": 3.0, "least": -3.0, "zeros": 0.0}
    scales = {"tiny": 1e-32, "huge": 3e37}
    if kind in everywhere:
        x[:] = everywhere[kind]
    elif kind in scales:
        x *= np.float32(scales[kind])
    elif kind == "alternating":
        x = np.where(np.arange(inner) % 2, np.float32(-3), np.float32(3)) * np.ones((rows, 1), np.float32)
    elif kind != "normal":
        x[rng.integers(rows), rng.integers(inner)] = np.nan if kind == "nan" else -np.inf
    return x


@example(rows=33, inner=4096, width=24, steps_of_group=1, zeros=False, inputs="largest", weights="largest", seed=0)
@settings(max_examples=60)
@given(
    rows=st.integers(1, 70),
    inner=st.integers(1, 300),
    width=st.integers(1, 100),
    steps_of_group=st.integers(1, 4),
    zeros=st.booleans(),
    inputs=st.sampled_from(INPUTS),
    weights=st.sampled_from([*WEIGHTS]),
    seed=st.integers(0, 99),
)
def test_a_matmul_of_any_shape_gives_the_same_bits_without_avx512(
    rows: int, inner: int, width: int, steps_of_group: int, zeros: bool, inputs: str, weights: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    group = 32 * steps_of_group
    groups = -(-inner // group)
    arrays = {
        "x": inputs_of(inputs, rows, inner, rng),
        "weight": interleaved(rng.integers(*WEIGHTS[weights], (width, inner), dtype=np.uint8)),
        "scales": by_tile(rng.normal(size=(width, groups)).astype(np.float32)),
        "out": np.zeros((rows, width), np.float32),
    }
    if zeros:
        arrays["zeros"] = by_tile(rng.integers(0, 256, (width, groups), dtype=np.uint8))
    tensors = {name: to_torch(array) for name, array in arrays.items()}
    assert_equal_bits("int4_int8_matmul", tensors, {"group_size": group, "width": width})
