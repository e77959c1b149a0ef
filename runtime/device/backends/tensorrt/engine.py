"""TensorRT and TensorRT-RTX engines on a CUDA device; both Python modules have the same API.

An engine has one execution context per set of shapes, made when such a call is first bound. All contexts of an engine
share one block of memory from torch, so its calls must share one stream.
"""

from typing import Any, cast

import torch

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import EngineName
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.tensorrt.library import logger
from tandemrt.engines.validation.errors import BackendUnavailable, InternalError
from tandemrt.plugins.operators.launch import Tensors
from tandemrt.plugins.tensors.protocol import Tensor
from tandemrt.runtime.device.backends.base import check_tensors
from tandemrt.runtime.device.backends.tensorrt.open import open_file, profiles_of, require_bindings
from tandemrt.runtime.device.backends.tensorrt.plan import Shape, choose_profile, require_profiles
from tandemrt.runtime.device.backends.tensorrt.rtx import Jit
from tandemrt.runtime.device.backends.tensorrt.scratch import ScratchMemory

Shapes = tuple[tuple[str, Shape], ...]


class TensorRtEngine:
    """One engine: weights on the device, memory of its contexts, and a context per set of shapes."""

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
        self._trt = trt
        self._engine = engine
        self._name = name
        self._narrow = narrow
        self._profiles = profiles_of(engine, contract)
        self._scratch = ScratchMemory(engine, name, device)
        self._nothing = torch.empty(256, dtype=torch.uint8, device=device)  # bound instead of empty tensors
        self._jit = Jit(trt, engine, key, self._scratch)
        self._contexts: dict[Shapes, _Context] = {}

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

    def bind(self, tensors: Tensors, *, filters: bool = True) -> "TensorRtCall":  # noqa: ARG002
        """See Engine.bind. Plugins ignore ``filters``. Aliased outputs are bound to their input's memory."""
        check_tensors(self.contract, tensors, self.device)
        shapes = tuple((b.name, tuple(tensors[b.name].shape)) for b in self.contract.inputs)
        if shapes not in self._contexts:
            self._contexts[shapes] = self._context(shapes)
        source = dict(self.contract.aliases)
        bindings = (*self.contract.inputs, *self.contract.outputs)
        bound = {b.name: tensors[source.get(b.name, b.name)] for b in bindings}
        copies = {n: torch.empty(bound[n].shape, dtype=torch.int32, device=self.device) for n in self._narrow}
        addresses = {
            name: (tensor if tensor.numel() else self._nothing).data_ptr() for name, tensor in (bound | copies).items()
        }
        narrowed = tuple((copy, cast("torch.Tensor", bound[name])) for name, copy in copies.items())
        return TensorRtCall(self._contexts[shapes], addresses, tuple(tensors.values()), narrowed)

    def _context(self, shapes: Shapes) -> "_Context":
        profile = choose_profile(self._profiles, dict(shapes))
        if profile is None:
            raise InternalError(f"engine {self._name!r}: no profile takes {dict(shapes)}")
        stream = torch.cuda.current_stream(self.device).cuda_stream
        context = self._shaped(shapes, profile, stream, own_graphs=False)
        if self._jit.active and not context.is_stream_capturable(stream):
            self.capturable = False
            context = self._shaped(shapes, profile, stream, own_graphs=True)
        return _Context(self._name, context, logger(self._trt), self.device)

    def _shaped(self, shapes: Shapes, profile: int, stream: int, *, own_graphs: bool) -> Any:
        log = logger(self._trt)
        log.clear()
        context = self._jit.create_context(own_graphs=own_graphs)
        if context is None:
            raise BackendUnavailable(f"engine {self._name!r}: no execution context: {log.summary()}")
        try:
            accepted = context.set_optimization_profile_async(profile, stream)
        except RuntimeError:  # what TensorRT 10 raises in place of returning False
            accepted = False
        if not (accepted and all(context.set_input_shape(name, shape) for name, shape in shapes)):
            raise InternalError(
                f"engine {self._name!r}: profile {profile} does not accept {dict(shapes)}: {log.summary()}"
            )
        self._scratch.provide(context)
        return context


class TensorRtCall:
    """Tensors bound to a context. Calls of the same shapes share the context.

    ``narrowed``: int32 copies of int64 inputs, with their sources, for an engine that has no int64.
    """

    def __init__(
        self,
        context: "_Context",
        addresses: dict[str, int],
        keep: tuple[Tensor, ...],
        narrowed: tuple[tuple[torch.Tensor, torch.Tensor], ...],
    ) -> None:
        self._context = context
        self._addresses = addresses
        self._keep = keep  # the bindings hold bare addresses
        self._narrowed = narrowed

    def run(self) -> None:
        """Enqueue one run on the device's current stream. Only the first run allocates and waits.

        Raises InternalError if TensorRT rejects the run, or if the first run is inside a CUDA graph capture.
        """
        for copy, source in self._narrowed:
            copy.copy_(source)
        self._context.enqueue(self._addresses)


class _Context:
    """An execution context of fixed shapes, and the tensor addresses that it is set to."""

    def __init__(self, name: EngineName, context: Any, log: Any, device: torch.device) -> None:
        self._name = name
        self._context = context
        self._log = log
        self._device = device
        self._bound: dict[str, int] = {}
        self._ran = False

    def enqueue(self, addresses: dict[str, int]) -> None:
        if not self._ran and torch.cuda.is_current_stream_capturing():
            raise InternalError(
                f"engine {self._name!r}: run once before capture; TensorRT allocates and compiles in a first run"
            )
        self._log.clear()
        if self._bound is not addresses:
            for name, address in addresses.items():
                if not self._context.set_tensor_address(name, address):
                    raise InternalError(f"engine {self._name!r}: {name} cannot be bound: {self._log.summary()}")
            self._bound = addresses
        # A rejected run leaves the old output values, so the result must be checked.
        if not self._context.execute_async_v3(torch.cuda.current_stream(self._device).cuda_stream):
            raise InternalError(f"engine {self._name!r}: TensorRT rejected the run: {self._log.summary()}")
        self._ran = True
