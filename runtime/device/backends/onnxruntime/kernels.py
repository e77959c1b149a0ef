"""Engines without weights on a CUDA device: each is one operator, run by a kernel instead of an ONNX graph.

Runs only enqueue work.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import EngineName
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.contract.draft_kinds import DRAFT_KINDS
from tandemrt.engines.contract.operators import WEIGHTLESS_ENGINES
from tandemrt.plugins.implementations import launcher
from tandemrt.plugins.operators.launch import Call, Context, Tensors
from tandemrt.runtime.device.backends.base import check_tensors


class KernelEngine:
    """An operator run by its kernels. Its runs must share one stream."""

    capturable = True

    def __init__(self, operator: str, contract: Contract, context: Context) -> None:
        """Raises BackendUnavailable if no kernels fit the device."""
        self.contract = contract
        self.device = context.device
        self._context = context
        self._launch = launcher(operator, context)

    @classmethod
    def open(cls, bundle: Bundle, name: EngineName, device: torch.device) -> "KernelEngine":
        """Load the kernels of ``bundle`` for engine ``name``. Raises BackendUnavailable if none fits the device."""
        limits = bundle.limits
        batch, rows = limits.batch, limits.num_draft_tokens + 1 if name.startswith("verify") else 1
        if rows == 1 and DRAFT_KINDS[bundle.draft.kind].masks:  # all tokens of a draft window are drawn at once
            batch *= max(1, limits.num_draft_tokens)
        context = Context(device, bundle.kernels_dir, sizes={"batch": batch, "window+1": rows})
        kind = AdvancingKernelEngine if name.startswith("verify") else KernelEngine
        return kind(WEIGHTLESS_ENGINES[name], bundle.contract(name), context)

    def bind(self, tensors: Tensors, *, needs_probs: bool = True) -> Call:
        """See Engine.bind."""
        return self._bound(tensors, {"needs_probs": needs_probs})

    def _bound(self, tensors: Tensors, hints: Mapping[str, Any]) -> Call:
        check_tensors(self.contract, tensors, self.device)
        return self._launch(tensors, hints, self._context)


class AdvancingKernelEngine(KernelEngine):
    """Verification whose kernel also advances the slots; see AdvancingEngine."""

    def bind_advancing(self, tensors: Tensors, moving: Tensors, *, needs_probs: bool = True) -> Call:
        """See AdvancingEngine.bind_advancing."""
        return self._bound(tensors, {"needs_probs": needs_probs, "advance": moving})
