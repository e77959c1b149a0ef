"""Experts on a GPU beyond the cases of every implementation: company, capture, and as many rows as a prompt has."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tandemrt.plugins.kernels import experts
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.kernels.experts_grouped import WITH_KERNELS, GroupedMixture
from tandemrt.plugins.operators.constants import ACTIVATIONS, SILU_EXPERTS
from tandemrt.plugins.operators.launch import Context
from tandemrt.plugins.reference.experts import experts as reference
from tests.gpu.here import CAPABILITY, compute_capabilities

HIDDEN, WIDTH, EXPERTS, CHOSEN = 256, 136, 16, 3
GIVEN = {"per_token": CHOSEN, "normalized": 1, **SILU_EXPERTS}
CLAMPED = {**GIVEN, "interleaved": 1, "alpha": 1.702, "limit": 1.5, "offset": 1.0}  # as in gpt-oss
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    folder: Path = tmp_path_factory.mktemp("kernels")
    compile_kernels(compute_capabilities(), folder, names=["experts", "swiglu"])
    return Context(torch.device("cuda", 0), folder)


def tensors(
    rows: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, *, hidden: int = HIDDEN, width: int = WIDTH
) -> Tensors:
    generator = torch.Generator("cuda").manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device="cuda")
        return (values if shape[0] == rows else values / shape[-1] ** 0.5).to(dtype)

    weights = {"gate_up": drawn(2 * EXPERTS * width, hidden), "down": drawn(EXPERTS * hidden, width)}
    inputs = {"x": drawn(rows, hidden), "router_logits": drawn(rows, EXPERTS), **weights}
    return inputs | {"mixed": torch.full_like(inputs["x"], 77)}


def with_biases(inputs: Tensors) -> Tensors:
    """Add biases of both weights, and factors."""
    generator = torch.Generator("cuda").manual_seed(9)
    sizes = {"gate_up_bias": 2 * EXPERTS * WIDTH, "down_bias": EXPERTS * HIDDEN, "expert_factors": EXPERTS}
    drawn = {name: torch.randn(size, generator=generator, device="cuda") for name, size in sizes.items()}
    return inputs | {name: each.to(inputs["x"].dtype) for name, each in drawn.items()}


def part(inputs: Tensors, rows: slice) -> Tensors:
    each = {name: inputs[name][rows].clone() for name in ("x", "router_logits", "mixed")}
    return {**inputs, **each}


@pytest.fixture(scope="module")
def invariant(context: Context) -> Context:
    return Context(context.device, context.kernels, batch_invariant=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("popular", [0.0, 3.0])
@pytest.mark.parametrize(("hidden", "width"), [(HIDDEN, WIDTH), (2048, 768), (2880, 720)])
def test_a_token_has_the_same_bits_in_any_company(
    invariant: Context, dtype: torch.dtype, popular: float, hidden: int, width: int
) -> None:
    """Few rows of many experts, items of any number of rows, and where grouped matmuls take over."""
    inputs = tensors(1500, dtype, hidden=hidden, width=width)
    inputs["router_logits"][:, 5] += popular
    experts.launch(inputs, GIVEN, invariant).run()
    assert inputs["mixed"].isfinite().all()
    for rows in (slice(0, 1), slice(3, 8), slice(40, 61), slice(100, 333), slice(375, 1500)):
        few = part(inputs, rows)
        experts.launch(few, GIVEN, invariant).run()
        assert torch.equal(few["mixed"], inputs["mixed"][rows]), rows


def test_many_rows_of_one_expert_equal_the_reference(context: Context) -> None:
    inputs = tensors(700, torch.float32)
    inputs["router_logits"][:, 5] = 9  # of everybody
    experts.launch(inputs, GIVEN, context).run()
    rows = [0, 31, 32, 350, 699]
    numbers = {name: tensor.cpu().numpy() for name, tensor in inputs.items() if name != "mixed"}
    few = numbers | {name: numbers[name][rows] for name in ("x", "router_logits")}
    np.testing.assert_allclose(inputs["mixed"][rows].cpu().numpy(), reference(**few, **GIVEN), rtol=1e-4, atol=1e-5)


needs_grouped_matmuls = pytest.mark.skipif(
    CAPABILITY[0] not in WITH_KERNELS, reason="torch's grouped matmuls have no kernel for this GPU"
)


@pytest.mark.skipif(CAPABILITY[0] != 9, reason="grouped matmuls of other GPUs may add inputs in another order")
@pytest.mark.parametrize("attributes", [GIVEN, GIVEN | ACTIVATIONS["gelu_tanh"]])
def test_grouped_matmuls_give_the_bits_of_matmuls_in_order(invariant: Context, attributes: dict[str, float]) -> None:
    inputs = tensors(600)
    assert isinstance(experts.launch(inputs, attributes, invariant), GroupedMixture)


@needs_grouped_matmuls
@pytest.mark.parametrize("attributes", [CLAMPED, GIVEN | ACTIVATIONS["gelu_tanh"]])
def test_biased_experts_of_many_rows_are_near_those_of_few(context: Context, attributes: dict[str, float]) -> None:
    inputs = with_biases(tensors(600))
    call = experts.launch(inputs, attributes, context)
    assert isinstance(call, GroupedMixture)
    call.run()
    few = part(inputs, slice(0, 20))
    experts.launch(few, attributes, context).run()
    torch.testing.assert_close(inputs["mixed"][:20], few["mixed"], rtol=2**-5, atol=2**-5)
    numbers = {name: each.float().cpu().numpy() for name, each in few.items() if name != "mixed"}
    torch.testing.assert_close(
        few["mixed"].float().cpu(), torch.from_numpy(reference(**numbers, **attributes)), rtol=2**-5, atol=2**-5
    )


@needs_grouped_matmuls
def test_no_grouped_matmuls_where_torch_would_wait_for_the_host(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = tensors(600)
    assert isinstance(experts.launch(inputs, GIVEN, context), GroupedMixture)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (12, 0))
    assert not isinstance(experts.launch(inputs, GIVEN, context), GroupedMixture)


@pytest.mark.parametrize("rows", [3, 40, 600])
def test_a_captured_call_follows_changed_routing(context: Context, rows: int) -> None:
    inputs = tensors(rows)
    call, stream = experts.launch(inputs, GIVEN, context), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    call.run()  # libraries choose their kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call.run()
    for seed in (1, 2):
        other = tensors(rows, seed=seed)
        inputs["x"].copy_(other["x"])
        inputs["router_logits"].copy_(other["router_logits"])
        inputs["mixed"].fill_(77)
        graph.replay()
        replayed = inputs["mixed"].clone()
        call.run()
        assert torch.equal(replayed, inputs["mixed"])


def test_sizes_without_kernels_are_refused(context: Context) -> None:
    inputs = tensors(2)
    with pytest.raises(ValueError, match=r"gate_up, down: \[4352, 256\] and \[4096, 136\] are needed for 16 experts"):
        experts.launch({**inputs, "down": inputs["down"][:-1]}, GIVEN, context)
    with pytest.raises(ValueError, match="at most 32 of 512 experts are needed, got 256, 136 and 17 of 16"):
        experts.launch(inputs, {**GIVEN, "per_token": 17}, context)
