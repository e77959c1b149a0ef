"""The engines without weights on a CUDA device: each is one operator, whose kernels take the place of its graph.

Nothing waits and nothing is read on the host.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.contract import Contract
from tandemrt.engines.drafts import DRAFTS
from tandemrt.engines.manifest import EngineName
from tandemrt.engines.operators import HEADS
from tandemrt.plugins.faces import launcher
from tandemrt.plugins.launch import Call, Context
from tandemrt.runtime.backends.base import check_tensors


class KernelEngine:
    """An operator by its kernels. Its runs must follow one another on one stream."""

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
        batch, rows = limits.batch, limits.window + 1 if name.startswith("verify") else 1
        if rows == 1 and DRAFTS[bundle.draft.kind].masks:  # a whole window is drawn at once
            batch *= max(1, limits.window)
        context = Context(device, bundle.kernels_dir, sizes={"batch": batch, "window+1": rows})
        kind = AdvancingKernelEngine if name.startswith("verify") else KernelEngine
        return kind(HEADS[name], bundle.contract(name), context)

    def bind(self, tensors: Mapping[str, torch.Tensor], *, filters: bool = True) -> Call:
        """See Engine.bind."""
        return self._bound(tensors, {"filters": filters})

    def _bound(self, tensors: Mapping[str, torch.Tensor], hints: Mapping[str, Any]) -> Call:
        check_tensors(self.contract, tensors, self.device)
        return self._launch(tensors, hints, self._context)


class AdvancingKernelEngine(KernelEngine):
    """Verification, which moves the slots on in the launch that decides their tokens."""

    def bind_advancing(
        self, tensors: Mapping[str, torch.Tensor], moving: Mapping[str, torch.Tensor], *, filters: bool = True
    ) -> Call:
        """See AdvancingEngine.bind_advancing."""
        return self._bound(tensors, {"filters": filters, "advance": moving})
