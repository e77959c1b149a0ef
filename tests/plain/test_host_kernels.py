"""Sources of low-bit kernels as C++ for a CPU: tests/host_kernels runs them."""

import re

import pytest

from tandemrt.plugins.kernels.compile import SOURCES
from tests.host_kernels.experts import EXPERTS
from tests.host_kernels.matmuls import GROUPS
from tests.host_kernels.translate import HOST, translated

# Of headers, in functions that these kernels do not call; they end the process.
UNUSED = {"ex2.approx.ftz.f32", "rcp.approx.ftz.f32", "lg2.approx.f32", "max.bf16x2", "max.f16x2", "{", "prmt.b32"}
UNUSED |= {"atom.add.acq_rel.gpu.global.u32", "cp.async.cg.shared.global.L2::256B", "cp.async.ca.shared.global"}


@pytest.mark.parametrize("name", [*GROUPS, *EXPERTS])
def test_every_instruction_of_a_kernel_becomes_a_call_of_the_host(name: str) -> None:
    text = translated(SOURCES / f"{name}.cu")
    assert not re.search(r"\basm\b", text)
    assert set(re.findall(r"[^_](ptx_\w+)\(", text)) <= set(re.findall(r"(ptx_\w+)", HOST.read_text()))
    assert set(re.findall(r'fail\("(.+?)"\)', text)) <= UNUSED
