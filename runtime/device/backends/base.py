"""The Engine protocol: bind tensors once, run many times. Each backend implements it in one module."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.validation.errors import InternalError
from tandemrt.plugins.operators.launch import Call as Call  # exported
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of


class Engine(Protocol):
    """A model or operator that is loaded on a device and ready to run."""

    contract: Contract
    device: torch.device
    capturable: bool  # whether CUDA graphs can capture its runs, because they only enqueue work

    def bind(self, tensors: Mapping[str, torch.Tensor], *, needs_probs: bool = True) -> Call:
        """Bind every input and output of the contract by name.

        ``needs_probs`` False: no request in the call uses a filter or the rejection rule, so that the largest score is
        enough.

        Outputs that the contract aliases to an input share its memory and are left out. The tensors must be contiguous,
        on the engine's device, and outlive the call. Raises InternalError if a tensor does not fit the contract.
        """


def prompt_rows(engine: Engine) -> int:
    """Rows of logits that a prefill call computes (they are never read): 0 on a CPU with a linear cache, else 1.

    Graphs for a CPU skip the logits if there are no rows (export/model/grouped_attention.py). Other graphs are compiled
    for at least one row.
    """
    paged = any(binding.name == "block_table" for binding in engine.contract.inputs)
    return int(paged or not device_of(engine.device).on_host)


@runtime_checkable
class ProfiledEngine(Engine, Protocol):
    """An engine that was compiled for ranges of sizes (calls.decoder_uses): a prefill call has one prompt."""

    profiles: Sequence[Mapping[str, Any]]


@runtime_checkable
class AdvancingEngine(Engine, Protocol):
    """A verification engine that can also do the work of SlotState.advance."""

    def bind_advancing(
        self, tensors: Mapping[str, torch.Tensor], moving: Mapping[str, torch.Tensor], *, needs_probs: bool = True
    ) -> Call:
        """Bind as ``bind`` does; a run also updates ``moving`` (SlotState.advance_tensors) like SlotState.advance."""


@runtime_checkable
class CheckedEngine(Engine, Protocol):
    """An engine whose results may turn out wrong after a run has returned."""

    def check(self) -> None:
        """Raise if the results of earlier runs may be wrong."""

    def on_failure(self, call: Callable[[BaseException], None]) -> None:
        """Let ``call`` be called once no later run is possible, in any thread, with what runs raise from then on."""

    def end_waits(self, overdue: Callable[[], bool]) -> None:
        """Let runs wait for a shorter time while ``overdue``, called in any thread, returns that a request must end."""

    @property
    def problem(self) -> str | None:
        """What keeps a run from its end, if that is known. May be read from any thread."""


@runtime_checkable
class SplitEngine(Engine, Protocol):
    """An engine that several processes run, each with its part of the caches."""

    def keep_states(self, caches: Mapping[str, torch.Tensor], slot: int, place: int) -> None:
        """Copy what the other processes have of the recurrent states of ``slot``, to the numbered ``place``.

        ``caches``: the tensors of this process, by their names in the contract.
        """

    def restore_states(self, caches: Mapping[str, torch.Tensor], slot: int, place: int) -> None:
        """Set what the other processes have of the recurrent states of ``slot`` to the copy at ``place``."""


def check_tensors(contract: Contract, tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, int]:
    """Return the size of every symbol. Raises InternalError unless ``tensors`` fit ``contract`` exactly."""
    aliased = {output for output, _ in contract.aliases}
    bindings = [b for b in (*contract.inputs, *contract.outputs) if b.name not in aliased]
    unknown = set(tensors) - {b.name for b in bindings}
    if unknown:
        raise InternalError(f"bind: {sorted(unknown)} are not bindings of this engine")
    sizes: dict[str, int] = {}
    for binding in bindings:
        if binding.name not in tensors:
            raise InternalError(f"bind: {binding} is missing")
        tensor = tensors[binding.name]
        if str(tensor.dtype) != f"torch.{binding.dtype}" or tensor.dim() != len(binding.shape):
            raise InternalError(f"bind: {binding} received {tensor.dtype}{list(tensor.shape)}")
        if not tensor.is_contiguous() or tensor.device.type != device.type:
            raise InternalError(f"bind: {binding} must be contiguous and on {device}, received {tensor.device}")
        for dim, size in zip(binding.shape, tensor.shape, strict=True):
            expected = dim if isinstance(dim, int) else sizes.setdefault(dim, size)
            if size != expected:
                raise InternalError(f"bind: {binding} must have {dim} = {expected}, received {list(tensor.shape)}")
    return sizes
