"""What the loop asks of an engine: bind tensors once, run many times. A backend is one file that provides it."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from tandemrt.engines.contract import Contract
from tandemrt.engines.errors import InternalError
from tandemrt.plugins.launch import Call as Call  # exported
from tandemrt.plugins.tensors import torch


class Engine(Protocol):
    """A compiled graph that is open on a device."""

    contract: Contract
    device: torch.device
    capturable: bool  # runs only enqueue work, so that they can be captured into a CUDA graph

    def bind(self, tensors: Mapping[str, torch.Tensor], *, filters: bool = True) -> Call:
        """Bind every input and output of the contract by name.

        ``filters`` False promises that no row whose result is used samples with top-k, top-p or min-p, or is verified
        by the rejection rule: without them, a law need not be known, only its largest score.

        Outputs that the contract aliases to an input share its memory and are not given. The tensors must be
        contiguous, on the engine's device, and outlive the call. Raises InternalError on any disagreement.
        """


def prompt_rows(engine: Engine) -> int:
    """How many rows of a prompt's chunk a decoder is asked to score, though nobody reads their logits.

    None on a CPU with a linear cache: such a graph may know a prompt by it (export/model/grouped_attention.py), and
    computes no logits. Others are compiled for one row at least.
    """
    paged = any(binding.name == "block_table" for binding in engine.contract.inputs)
    return int(paged or engine.device.type != "cpu")


@runtime_checkable
class AdvancingEngine(Engine, Protocol):
    """An engine of verification that can also move the slots on by what it emits."""

    def bind_advancing(
        self, tensors: Mapping[str, torch.Tensor], moving: Mapping[str, torch.Tensor], *, filters: bool = True
    ) -> Call:
        """As bind; a run also does to ``moving`` (SlotState.moving) what SlotState.advance does."""


def check_tensors(contract: Contract, tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, int]:
    """Return every symbol's size. Raises InternalError unless ``tensors`` are exactly what ``contract`` asks for."""
    aliased = {output for output, _ in contract.aliases}
    bindings = [b for b in (*contract.inputs, *contract.outputs) if b.name not in aliased]
    unknown = set(tensors) - {b.name for b in bindings}
    if unknown:
        raise InternalError(f"bind: {sorted(unknown)} are not bindings of this engine")
    sizes: dict[str, int] = {}
    for binding in bindings:
        if binding.name not in tensors:
            raise InternalError(f"bind: {binding} is not given")
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
