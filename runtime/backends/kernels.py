"""Adjusting, verifying and drafting by kernels of our own on a CUDA device: nothing waits or reads on the host."""

from collections.abc import Mapping

import torch

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.contract import Contract
from tandemrt.engines.manifest import EngineName
from tandemrt.plugins.kernels.adjust import AdjustLaunch
from tandemrt.plugins.kernels.module import KernelModule
from tandemrt.plugins.kernels.verify import Advance, ProposeLaunch, VerifyLaunch, Workspace
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

    def bind_advancing(
        self, tensors: Mapping[str, torch.Tensor], moving: Mapping[str, torch.Tensor], *, filters: bool = True
    ) -> VerifyLaunch:
        """See AdvancingEngine.bind_advancing."""
        check_tensors(self.contract, tensors, self.device)
        return VerifyLaunch(self._module, tensors, self._workspace, stats=filters, advance=Advance(**moving))


class AdjustEngine:
    """The engine "adjust"."""

    capturable = True

    def __init__(self, module: KernelModule, contract: Contract, device: torch.device) -> None:
        self.contract = contract
        self.device = device
        self._module = module

    @classmethod
    def open(cls, bundle: Bundle, device: torch.device) -> "AdjustEngine":
        """Load the kernels of ``bundle``. Raises BackendUnavailable if none fits the device."""
        return cls(KernelModule.open(bundle.kernels_dir, "adjust", device), bundle.contract("adjust"), device)

    def bind(self, tensors: Mapping[str, torch.Tensor], *, filters: bool = True) -> AdjustLaunch:  # noqa: ARG002
        """See Engine.bind; filters come later."""
        check_tensors(self.contract, tensors, self.device)
        return AdjustLaunch(self._module, tensors)
