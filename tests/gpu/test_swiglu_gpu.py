"""The kernel of the gated activation against its reference."""

from pathlib import Path

import pytest
import torch

from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.kernels.module import KernelModule
from tandemrt.plugins.kernels.swiglu import SwigluLauncher
from tandemrt.plugins.reference.swiglu import swiglu
from tests.gpu.here import compute_capabilities

EPSILON = {torch.float32: 4e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> KernelModule:
    folder: Path = tmp_path_factory.mktemp("kernels")
    compile_kernels(compute_capabilities(), folder, names=["swiglu"])
    return KernelModule.open(folder, "swiglu")


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("shape", [(1, 1, 14336), (3, 5, 37), (64, 5, 1000), (1, 512, 192), (70_000, 8)])
def test_the_kernel_equals_the_reference_and_writes_nothing_else(
    module: KernelModule, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    gate_up = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator, device="cuda").mul_(5).to(dtype)
    room = torch.full((gate_up.numel() // 2 + 64,), 77.0, dtype=dtype, device="cuda")
    activated = room[: gate_up.numel() // 2].view(shape)
    SwigluLauncher(module, gate_up, activated).run()
    expected = torch.from_numpy(swiglu(gate_up.double().cpu().numpy()))
    torch.testing.assert_close(activated.double().cpu(), expected, rtol=EPSILON[dtype], atol=1e-6)
    assert (room[gate_up.numel() // 2 :] == 77.0).all()


def test_a_kernel_that_was_not_compiled_is_refused_by_name(tmp_path: Path) -> None:
    compile_kernels(compute_capabilities(), tmp_path, names=["swiglu"], dtypes=["float16"])
    module = KernelModule.open(tmp_path, "swiglu")
    module.kernel("swiglu_fp16")
    with pytest.raises(BackendUnavailable, match=r"kernel swiglu_bf16 is not in the bundle, .* build it again"):
        module.kernel("swiglu_bf16")
