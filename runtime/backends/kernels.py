"""Verification and drafting by kernels of our own on a CUDA device: nothing waits, nothing is read on the host."""

from collections.abc import Mapping

import torch

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.contract import Contract
from tandemrt.engines.manifest import EngineName
from tandemrt.plugins.kernels.module import KernelModule
from tandemrt.plugins.kernels.verify import ProposeLaunch, VerifyLaunch, Workspace
from tandemrt.runtime.backends.base import check_tensors

HEADS = ("verify", "verify_probs", "propose", "propose_probs")  # the engines that kernels take the place of


class KernelEngine:
    """One of ``HEADS``. Its runs must follow one another on one stream."""

    capturable = True

    def __init__(
        self, module: KernelModule, contract: Contract, device: torch.device, *, batch: int, rows: int
    ) -> None:
        self.contract = contract
        self.device = device
        self._module = module
        self._workspace = Workspace(batch, rows, device)
        self._verifies = any(binding.name == "tokens" for binding in contract.outputs)

    @classmethod
    def open(cls, bundle: Bundle, name: EngineName, device: torch.device) -> "KernelEngine":
        """Load the kernels of ``bundle`` for engine ``name``. Raises BackendUnavailable if none fits the device."""
        module, limits = KernelModule.open(bundle.kernels_dir, "verify", device), bundle.limits
        rows = limits.window + 1 if name.startswith("verify") else 1
        return cls(module, bundle.contract(name), device, batch=limits.batch, rows=rows)

    def bind(self, tensors: Mapping[str, torch.Tensor], *, filters: bool = True) -> VerifyLaunch | ProposeLaunch:
        """See Engine.bind."""
        check_tensors(self.contract, tensors, self.device)
        if self._verifies:
            return VerifyLaunch(self._module, tensors, self._workspace, stats=filters)
        return ProposeLaunch(self._module, tensors, self._workspace, stats=filters)
