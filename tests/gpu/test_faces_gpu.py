"""Every operator with kernels, on a CUDA device: the cases of its other faces, against the definition."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cuda.bindings import driver

from tandemrt.engines.operators import SCHEMAS
from tandemrt.plugins.faces import FACES
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.launch import Context
from tests.engine.face_cases import KINDS, LARGEST, cases, hold
from tests.gpu.here import CAPABILITY, compute_capabilities, needs_float8


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    folder: Path = tmp_path_factory.mktemp("kernels")
    compile_kernels(compute_capabilities(), folder, head_dims=[32])
    return Context(torch.device("cuda", 0), folder, sizes=LARGEST)


PRODUCTS = ("float8_product", "scaled_product")  # their sums are too large for float16, and tensor cores round them


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("operator", [name for name, faces in FACES.items() if faces.cuda])
def test_the_kernels_equal_the_definition(operator: str, dtype: str, context: Context) -> None:
    if operator == "int4_product" and dtype == "float32":
        pytest.skip("products in 4 bits are computed in bfloat16 and float16")
    if SCHEMAS[operator].compute_capability > CAPABILITY:
        pytest.skip("needs a later GPU, as its schema says")
    for case in cases(operator, dtype):
        if operator not in PRODUCTS:
            hold(operator, case, context)
        elif dtype != "float16":
            hold(operator, replace(case, kind="bfloat16"), context)


@needs_float8
def test_a_product_in_float16_is_refused(context: Context) -> None:
    [*_, case] = cases("float8_product", "float16")
    with pytest.raises(ValueError, match=r"product: bfloat16 or float32 is needed, got torch\.float16"):
        hold("float8_product", case, context)


def test_a_kernel_of_int4_keeps_the_most_shared_memory_that_a_launch_was_allowed(context: Context) -> None:
    """A launch that asked for less made one that had asked for more fail."""
    module, name = context.module("int4"), "int4_product_64_bf16"
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    for shared in (90_000, 60_000):
        kernel = module.kernel(name, shared=shared)
        assert driver.cuKernelGetAttribute(attribute, kernel.handle, driver.CUdevice(0))[1] == 90_000
