"""Launchers of CUDA kernels pass what the kernels declare: every case of every operator, bound without a GPU."""

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandemrt.plugins.implementations import IMPLEMENTATIONS
from tandemrt.plugins.kernels import experts, experts_low_bit, experts_ordered
from tandemrt.plugins.kernels import module as module_of_kernels
from tandemrt.plugins.kernels.module import KernelModule, Launch
from tandemrt.plugins.operators.constants import HEAD_DIMS, KEY_DIMS
from tandemrt.plugins.operators.launch import Context
from tandemrt.plugins.tensors.devices.device import Device
from tests.engine.implementation_cases import HALF_PRECISION, KINDS, LARGEST, LOW_BIT_EXPERTS, allocated, cases
from tests.engine.test_kernels import expected
from tests.recorded import require_recorded

CPU = torch.device("cpu")
PASSED_AS = {torch.Tensor: "u64", type(None): "u64", np.int32: "u32", np.uint32: "u32", np.float32: "f32"}
CUBLASLT = ("linear", "gated_linear")  # which call it for all or most rows
OPERATORS = sorted(name for name, row in IMPLEMENTATIONS.items() if row.cuda and name not in CUBLASLT)
FEW = 16  # rows; a float8 matmul of more calls cuBLASLt


class Kernels:
    """In place of KernelModule: names and parameters of the kernels of one file, on a GPU with ``architecture``."""

    shared_memory, sm_count, device = 232_448, 132, CPU

    def __init__(self, name: str, architecture: int) -> None:
        self.architecture = architecture
        sizes = KEY_DIMS if name == "linear_attention" else HEAD_DIMS
        self._entries = {entry: has for dtype in KINDS for entry, has in expected(name, dtype, sizes).items()}

    def kernel(self, name: str, *, shared: int = 0) -> tuple[str, str]:
        assert 0 <= shared <= self.shared_memory
        return name, self._entries[name]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_launcher_passes_the_arguments_that_its_kernels_declare(
    operator: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[str] = []
    bound = _bound(operator, dtype, monkeypatch, launches=launches)
    assert bound or operator in ("all_gather", "all_reduce"), "one rank has nothing to launch"
    require_recorded(f"launches/{operator} {dtype}", launches)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_launcher_answers_tensors_of_other_shapes_as_before(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[str] = []
    _stand_in(monkeypatch, lambda _, kernel, *__, **___: answers.append(kernel[0]), lambda *_: None)
    case = next(cases(operator, "bfloat16"))
    allowed, _ = allocated(operator, case, CPU)
    for name, tensor in allowed.items():
        for change in ("wider", "narrower", "longer", "shorter", "int64"):
            answers.append(f"{name} {change}")
            try:
                _bind(operator, {**allowed, name: _changed(tensor, change)}, case.attributes, invariant=False)
            except ValueError as error:
                answers.append(str(error))
            except Exception as error:  # of torch, or of the stand-in for a kernel
                answers.append(type(error).__name__)
    require_recorded(f"other tensors/{operator}", answers)


@pytest.mark.parametrize("operator", LOW_BIT_EXPERTS)
def test_a_launcher_dequantizes_the_weights_of_experts_for_many_rows(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts_low_bit, "_MANY_PAIRS", 0)
    assert "gather_bf16" in _bound(operator, "bfloat16", monkeypatch)


@pytest.mark.parametrize("prompts", [0, 1])
@pytest.mark.parametrize("operator", ["experts", *LOW_BIT_EXPERTS])
def test_batch_invariant_experts_group_the_rows_of_prompts_and_no_others(
    operator: str, prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "_same_bits", lambda *_: False)
    bound = _bound(operator, "bfloat16", monkeypatch, prompt_rows=torch.zeros(prompts, dtype=torch.int32))
    assert ("gather_bf16" in bound) == bool(prompts)
    assert any(name.startswith("gate_up") for name in bound), "rows of windows have other kernels"


@pytest.mark.parametrize("same_bits", [True, False])
def test_batch_invariant_experts_group_any_rows_that_get_the_same_bits(
    same_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "_same_bits", lambda *_: same_bits)
    monkeypatch.setattr(experts, "fill_groups", lambda *_: True)
    assert ("gather_bf16" in _bound("experts", "bfloat16", monkeypatch, prompt_rows=torch.zeros(0))) == same_bits


def test_experts_keep_the_rows_that_fit_into_shared_memory() -> None:
    assert [experts_ordered.rows_of_an_item(inner, 232_448) for inner in (2048, 2880, 7168)] == [32, 16, 8]
    assert experts_ordered.rows_of_an_item(4096, 101_376) == 8
    assert experts_ordered.rows_of_an_item(14_336, 232_448) == 0, "Mixtral's weights are streamed"


def test_experts_stream_the_weights_of_few_rows_and_of_rows_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = torch.zeros(0, dtype=torch.int32)
    monkeypatch.setattr(experts, "_same_bits", lambda *_: False)
    monkeypatch.setattr(experts, "_STREAMED", 1_000)
    assert "gate_up_ordered_bf16" not in _bound("experts", "bfloat16", monkeypatch)
    assert "gate_up_bf16" not in _bound("experts", "bfloat16", monkeypatch, prompt_rows=windows)
    monkeypatch.setattr(experts, "_STREAMED", 0)
    assert "gate_up_bf16" not in _bound("experts", "bfloat16", monkeypatch)
    monkeypatch.setattr(experts, "rows_of_an_item", lambda *_: 0)
    assert "gate_up_bf16" in _bound("experts", "bfloat16", monkeypatch, prompt_rows=windows)


def _bound(
    operator: str,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
    prompt_rows: torch.Tensor | None = None,
    launches: list[str] | None = None,
) -> set[str]:
    """Bind every case, batch-invariant if there are ``prompt_rows``, and return the names of the kernels.

    ``launches`` gets a text for each launch: when it was bound, and when it ran.
    """
    bound: set[str] = set()
    tensors: dict[str, torch.Tensor] = {}

    def bind_launch(launch: Launch, *arguments: Any, **options: Any) -> None:
        bound.add(_checked(*arguments))
        launch._keep = (len(bound),)
        if launches is not None:
            launches.append(_shown(tensors, *arguments, **options))

    def run_launch(launch: Launch, _: object) -> None:
        if launches is not None:
            launches.append(f"run {launch._keep}")

    _stand_in(monkeypatch, bind_launch, run_launch)
    for case in cases(operator, "bfloat16" if operator in HALF_PRECISION else dtype):
        if "quantized" in case.inputs and len(case.inputs["quantized"]) > FEW:
            continue
        tensors.clear()
        tensors |= allocated(operator, case, CPU)[0]
        if prompt_rows is not None:
            tensors["prompt_rows"] = prompt_rows
        for architecture in (80, 90):
            monkeypatch.setattr(Device, "capability", divmod(architecture, 10))
            monkeypatch.setattr(KernelModule, "of", lambda _, name, of=architecture: Kernels(name, of))
            _bind(operator, tensors, case.attributes, invariant=prompt_rows is not None)
    return bound


def _stand_in(monkeypatch: pytest.MonkeyPatch, bind: Callable[..., None], run: Callable[..., None]) -> None:
    """Let launches be bound and run by these functions, on no GPU."""
    monkeypatch.setattr(Launch, "__init__", bind)
    monkeypatch.setattr(Launch, "run", run)
    monkeypatch.setattr(module_of_kernels, "_stream", lambda _: None)
    monkeypatch.setattr(Device, "current_stream", lambda _: 0, raising=False)
    monkeypatch.setattr(Device, "processors", Kernels.sm_count)
    monkeypatch.setattr(Device, "capability", (9, 0))
    monkeypatch.setattr(KernelModule, "of", lambda _, name: Kernels(name, 90))


def _bind(operator: str, tensors: dict[str, torch.Tensor], attributes: Mapping[str, Any], *, invariant: bool) -> None:
    module, _, name = str(IMPLEMENTATIONS[operator].cuda).partition(":")
    bind = getattr(import_module(f"tandemrt.plugins.{module}"), name)
    bind(tensors, attributes, Context(CPU, Path(), sizes=LARGEST, batch_invariant=invariant)).run()


def _changed(tensor: torch.Tensor, change: str) -> torch.Tensor:
    if change == "int64":
        return tensor.to(torch.int64)
    axis = -1 if change in ("wider", "narrower") else 0
    if change in ("narrower", "shorter") or not tensor.numel():
        return tensor.narrow(axis, 0, max(0, tensor.shape[axis] - 1)).contiguous()
    return torch.cat([tensor.view(torch.int8) if tensor.element_size() == 1 else tensor] * 2, axis).view(tensor.dtype)


def _shown(tensors: Mapping[str, torch.Tensor], kernel: tuple[str, str], *arguments: Any, **options: Any) -> str:
    names = {tensor.data_ptr(): name for name, tensor in tensors.items()}
    shown = (
        f"{names.get(each.data_ptr(), 'workspace')}:{each.dtype}{[*each.shape]}" if isinstance(each, torch.Tensor)
        else str(each)
        for each in arguments
    )  # fmt: skip
    return f"{kernel[0]} {' '.join(shown)} {options}"


def _checked(kernel: tuple[str, str], grid: Any, block: Any, *arguments: Any) -> str:
    name, parameters = kernel
    declared = [kind for count, kind in re.findall(r"(\d+) (\w+)", parameters) for _ in range(int(count))]
    kinds = [torch.Tensor if isinstance(each, torch.Tensor) else type(each) for each in arguments]
    assert [PASSED_AS.get(kind, kind) for kind in kinds] == declared, name
    assert all(isinstance(size, int) and size > 0 for size in (*grid, *block)), name
    return name
