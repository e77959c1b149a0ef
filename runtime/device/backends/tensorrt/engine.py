"""TensorRT and TensorRT-RTX engines on a CUDA device; both Python modules have the same API.

All execution contexts of an engine share one block of memory from torch, so its calls must share one stream.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import EngineName
from tandemrt.engines.contract.contract import Contract
from tandemrt.plugins.operators.launch import Tensors
from tandemrt.plugins.tensors.devices.cuda import CudaDevice
from tandemrt.plugins.tensors.protocol import Tensor
from tandemrt.runtime.device.backends.base import check_tensors
from tandemrt.runtime.device.backends.tensorrt.contexts import Contexts, ExecutionContext
from tandemrt.runtime.device.backends.tensorrt.open import open_file, profiles_of, require_bindings
from tandemrt.runtime.device.backends.tensorrt.plan import require_profiles


class TensorRtEngine:
    """One engine: weights on the device, and its execution contexts."""

    def __init__(
        self,
        trt: Any,
        engine: Any,
        name: EngineName,
        contract: Contract,
        device: torch.device,
        *,
        key: str,
        narrow: tuple[str, ...] = (),
    ) -> None:
        self.contract = contract
        self.device = device
        self.capturable = True
        self._narrow = narrow
        self._nothing = torch.empty(256, dtype=torch.uint8, device=device)  # bound instead of empty tensors
        self.profiles = profiles_of(engine, contract)
        self._contexts = Contexts(trt, engine, name, self.profiles, device, key=key)

    @classmethod
    def open(cls, bundle: Bundle, name: EngineName, device: torch.device) -> "TensorRtEngine":
        """Open an engine of ``bundle`` on ``device`` and check that it covers the bundle's limits.

        Raises BackendUnavailable (module, release, GPU, memory) or BadBundle (bindings, profiles).
        """
        trt, engine = open_file(bundle, name, device)
        contract = bundle.contract(name)
        narrow = require_bindings(name, engine, contract, reports_aliases=bundle.engine(name).reports_aliases)
        require_profiles(name, contract, bundle.limits, profiles_of(engine, contract))
        key = bundle.manifest.files[bundle.engine(name).files[0]].sha256
        return cls(trt, engine, name, contract, device, key=key, narrow=narrow)

    def bind(self, tensors: Tensors, *, needs_probs: bool = True) -> "TensorRtCall":  # noqa: ARG002
        """See Engine.bind. Plugins ignore ``needs_probs``. Aliased outputs are bound to their input's memory."""
        check_tensors(self.contract, tensors, self.device)
        shapes = tuple((b.name, tuple(tensors[b.name].shape)) for b in self.contract.inputs)
        profile = self._contexts.profile(shapes)
        self._contexts.of(shapes, profile)  # which tells whether its runs can be captured
        self.capturable = self._contexts.capturable
        source = dict(self.contract.aliases)
        bindings = (*self.contract.inputs, *self.contract.outputs)
        bound = {b.name: tensors[source.get(b.name, b.name)] for b in bindings}
        copies = {n: torch.empty(bound[n].shape, dtype=torch.int32, device=self.device) for n in self._narrow}
        addresses = {
            name: (tensor if tensor.numel() else self._nothing).data_ptr() for name, tensor in (bound | copies).items()
        }
        narrowed = tuple((copy, cast("torch.Tensor", bound[name])) for name, copy in copies.items())
        context = partial(self._contexts.of, shapes, profile)
        return TensorRtCall(context, self.device, addresses, tuple(tensors.values()), narrowed)


class TensorRtCall:
    """Tensors bound to an engine.

    ``context`` returns an execution context with their shapes; other calls may use it in between. ``narrowed``: int32
    copies of int64 inputs, with their sources, for an engine that has no int64.
    """

    def __init__(
        self,
        context: Callable[[], ExecutionContext],
        device: torch.device,
        addresses: dict[str, int],
        keep: tuple[Tensor, ...],
        narrowed: tuple[tuple[torch.Tensor, torch.Tensor], ...],
    ) -> None:
        self._context = context
        self._device = CudaDevice(device)
        self._addresses = addresses
        self._keep = keep  # the bindings hold bare addresses
        self._narrowed = narrowed

    def run(self) -> None:
        """Enqueue one run on the device's current stream. Only the first run of a context allocates and waits.

        Raises InternalError if TensorRT rejects the run, or if the first run is inside a CUDA graph capture.
        """
        for copy, source in self._narrowed:
            copy.copy_(source)
        self._context().enqueue(self._addresses, self._device)
