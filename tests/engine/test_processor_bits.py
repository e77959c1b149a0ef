"""C kernels give the same bits with AVX-512 and, as on other processors, without it, or without vectors."""

import platform
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandemrt.plugins.implementations import launcher
from tandemrt.plugins.onnxruntime import custom_operators
from tandemrt.plugins.operators.launch import Context, Tensors
from tests.engine.implementation_cases import KINDS, allocated, cases, interleaved_weight, to_numpy, to_torch

OPTIONS = custom_operators._OPTIONS
# A processor without AVX-512 compiles one library.
ALL: tuple[tuple[str, ...], ...] = ((), ("-DNO_AMX",), ("-DNO_AVX512",))
LIBRARIES = ALL[:1] if "-DNO_AVX512" in custom_operators._processor_options() else ALL
FUSED = ("-mfma",) if platform.machine() == "x86_64" else ()
# Rows of x at the ends of what 8 bits hold, inputs that are no numbers or tiny, and others.
INPUTS = ("normal", "largest", "least", "alternating", "zeros", "nan", "infinite", "tiny", "huge")


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


def assert_equal_bits(operator: str, tensors: Tensors, attributes: Mapping[str, Any], *without: str) -> None:
    """Compare with a library that is compiled with ``without``."""
    expected = computed(operator, tensors, attributes, *without)
    for options in LIBRARIES:
        for name, values in computed(operator, tensors, attributes, *options).items():
            np.testing.assert_array_equal(values, expected[name], f"{operator}: {name} {options}")
            if values.dtype == np.float32:  # above, 0 equals -0
                numbers = ~np.isnan(values)
                np.testing.assert_array_equal(np.signbit(values[numbers]), np.signbit(expected[name][numbers]), name)


@pytest.mark.parametrize("operator", custom_operators.OPERATORS)
def test_an_operator_gives_the_same_bits_without_avx512(operator: str) -> None:
    for dtype in KINDS if operator == "tiled_matmul" else ["float32"]:
        for case in cases(operator, dtype):
            tensors, _ = allocated(operator, case, torch.device("cpu"))
            assert_equal_bits(operator, tensors, case.attributes, "-DNO_AVX512")


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


# Kinds of values of groups, and bits, of the forms of weights.
FORMS = [(4, ()), (4, ("zeros",)), (4, ("offsets",)), (5, ()), (5, ("offsets", "subscales", "suboffsets"))]
FORMS += [(8, ()), (4, ("table",)), (6, ("subscales",)), (6, ("offsets", "subscales", "suboffsets"))]


@example(rows=33, steps=128, padding=0, width=24, groups=128, form=(4, ()), inputs="largest", largest=True, seed=0)
@example(rows=9, steps=32, padding=0, width=24, groups=32, form=(8, ()), inputs="least", largest=True, seed=0)
@example(rows=5, steps=32, padding=0, width=24, groups=64, form=FORMS[-1], inputs="largest", largest=True, seed=0)
@settings(max_examples=60)
@given(
    rows=st.integers(1, 70),
    steps=st.integers(1, 9),
    padding=st.integers(0, 31),
    width=st.integers(1, 100),
    groups=st.integers(1, 18),
    form=st.sampled_from(FORMS),
    inputs=st.sampled_from(INPUTS),
    largest=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_matmul_of_any_shape_gives_the_same_bits_by_portable_code(
    rows: int,
    steps: int,
    padding: int,
    width: int,
    groups: int,
    form: tuple[int, tuple[str, ...]],
    inputs: str,
    largest: bool,
    seed: int,
) -> None:
    """``largest``: all integers are, so that sums would overflow first."""
    rng, (bits, more) = np.random.default_rng(seed), form
    part = 16 if bits == 6 else 32
    inner = 32 * steps - padding
    group = part * -(-32 * steps // part // groups)
    weight = interleaved_weight(rng, width, inner, group, bits, more=more)
    if largest:
        weight["weight"][:] = 255
    arrays = {"x": inputs_of(inputs, rows, inner, rng), **weight, "out": np.zeros((rows, width), np.float32)}
    tensors = {name: to_torch(array) for name, array in arrays.items()}
    attributes = {"bits": bits, "group_size": group, "width": width}
    assert_equal_bits("low_bit_int8_matmul", tensors, attributes, "-DPORTABLE", *FUSED)  # products and sums at once
