"""``gated_linear`` on a CUDA device: the bits of ``linear`` and ``swiglu``, for any number of rows."""

import pytest
import torch

from tandemrt.plugins.kernels import gated_linear, linear, swiglu
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.operators.launch import Context
from tests.gpu.here import CAPABILITY, compute_capabilities, skipped_without_equal_bits

COUNTS = (1, 16, 320, gated_linear.MANY, 1000, 2049, 4500)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    folder = tmp_path_factory.mktemp("kernels")
    names = ["gated_linear", "linear", "swiglu"]
    compile_kernels(compute_capabilities(), folder, names=names, dtypes=["bfloat16", "float16"])
    return Context(torch.device("cuda", 0), folder, batch_invariant=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "inner"), [(8, 64), (200, 192), (1408, 2048), (6144, 4104), (14336, 4096)])
def test_gates_and_ups_have_the_bits_of_the_matmul_and_of_swiglu_among_any_others(
    context: Context, width: int, inner: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator("cuda").manual_seed(width)
    x, weight = (
        torch.randn(*shape, generator=generator, device="cuda").to(dtype)
        for shape in ((COUNTS[-1], inner), (2 * width, inner))
    )
    weight /= inner**0.5
    gate_up = torch.empty(len(x), 2 * width, dtype=dtype, device="cuda")
    with skipped_without_equal_bits():
        linear.launch({"x": x, "weight": weight, "out": gate_up}, {}, context).run()
    wanted = torch.empty(len(x), width, dtype=dtype, device="cuda")
    swiglu.launch({"gate_up": gate_up, "activated": wanted}, {}, context).run()
    gate, up = gate_up.double().chunk(2, dim=-1)
    torch.testing.assert_close(wanted.double(), torch.nn.functional.silu(gate) * up, atol=1e-6, rtol=0.005)
    for rows in COUNTS:
        out = torch.full((rows + 1, width), torch.nan, dtype=dtype, device="cuda")
        calls = [gated_linear.launch({"x": x[:rows], "weight": weight, "activated": out[:-1]}, {}, context)]
        if CAPABILITY == (9, 0):
            calls.append(gated_linear.GatedMatmul(context, x[:rows], weight, out[:-1]))
        for call in 3 * calls:  # a race would show in some of many runs
            call.run()
            assert torch.equal(out[:-1], wanted[:rows])
            assert out[-1].isnan().all()
            out.fill_(torch.nan)


@pytest.mark.skipif(CAPABILITY != (9, 0), reason="needs a Hopper GPU")
def test_our_kernel_computes_calls_that_fill_its_tiles(context: Context) -> None:
    weight = torch.zeros(28672, 4096, dtype=torch.bfloat16, device="cuda")
    fused = set()
    for rows in (256, 512, 640, 1000, 2048, 8000):
        x, out = (torch.zeros(rows, size, dtype=torch.bfloat16, device="cuda") for size in (4096, 14336))
        call = gated_linear.launch({"x": x, "weight": weight, "activated": out}, {}, context)
        fused |= {rows} if isinstance(call, gated_linear.GatedMatmul) else set()
    assert fused == {1000, 2048, 8000}
