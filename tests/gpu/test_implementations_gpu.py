"""Every operator with kernels, on a CUDA device: the cases of its other implementations, against the reference."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cuda.bindings import driver

from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.plugins.implementations import IMPLEMENTATIONS
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.kernels.module import KernelModule
from tandemrt.plugins.operators.launch import Context
from tests.engine.implementation_cases import HALF_PRECISION, KINDS, LARGEST, cases, hold
from tests.gpu.here import CAPABILITY, compute_capabilities, needs_float8


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    folder: Path = tmp_path_factory.mktemp("kernels")
    compile_kernels(compute_capabilities(), folder, head_dims=[32])
    return Context(torch.device("cuda", 0), folder, sizes=LARGEST)


MATMULS = ("float8_matmul", "scaled_matmul")  # their sums are too large for float16, and tensor cores round them


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("operator", [name for name, row in IMPLEMENTATIONS.items() if row.cuda])
def test_the_kernels_equal_the_definition(operator: str, dtype: str, context: Context) -> None:
    if operator in HALF_PRECISION and dtype == "float32":
        pytest.skip("weights in 4 or 8 bits are multiplied in bfloat16 and float16")
    if SCHEMAS[operator].compute_capability > CAPABILITY:
        pytest.skip("needs a later GPU, as its schema says")
    for case in cases(operator, dtype):
        if operator not in MATMULS:
            hold(operator, case, context)
        elif dtype != "float16":
            hold(operator, replace(case, kind="bfloat16"), context)


@needs_float8
def test_a_matmul_in_float16_is_refused(context: Context) -> None:
    [*_, case] = cases("float8_matmul", "float16")
    with pytest.raises(ValueError, match=r"out: bfloat16 or float32 is needed, got torch\.float16"):
        hold("float8_matmul", case, context)


def test_a_kernel_of_int4_keeps_the_most_shared_memory_that_a_launch_was_allowed(context: Context) -> None:
    """A launch that asked for less made one that had asked for more fail."""
    module, name = KernelModule.of(context, "int4"), "matmul_64_bf16"
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    for shared in (90_000, 60_000):
        kernel = module.kernel(name, shared=shared)
        assert driver.cuKernelGetAttribute(attribute, kernel.handle, driver.CUdevice(0))[1] == 90_000
