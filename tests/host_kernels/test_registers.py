"""CUDA kernels work in registers on every GPU, in every dtype and head size."""

import pytest

from tests.engine.test_kernels import COMPILED, works_in_registers


@pytest.mark.parametrize(("kernel", "dtype", "capability", "head_dims"), COMPILED)
def test_a_kernel_works_in_registers(kernel, dtype, capability, head_dims):
    works_in_registers(kernel, dtype, capability, head_dims)
