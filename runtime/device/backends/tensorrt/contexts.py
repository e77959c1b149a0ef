"""Execution contexts of one TensorRT engine, by the shapes of its calls."""

from typing import Any

import torch

from tandemrt.engines.bundle.manifest import EngineName
from tandemrt.engines.validation.errors import BackendUnavailable, InternalError
from tandemrt.plugins.tensorrt.modules import logger
from tandemrt.runtime.device.backends.tensorrt.plan import Profile, Shape, choose_profile
from tandemrt.runtime.device.backends.tensorrt.rtx import Jit
from tandemrt.runtime.device.backends.tensorrt.scratch import ScratchMemory

Shapes = tuple[tuple[str, Shape], ...]
MOST_UNRECORDED = 16


class Contexts:
    """A context per set of shapes. All share one block of scratch memory, so calls must share one stream.

    Prompts have as many shapes as lengths. So at most MOST_UNRECORDED contexts are in no CUDA graph: the least recently
    used one gets the shapes of a new call. A context that a graph recorded keeps its shapes.
    """

    def __init__(
        self, trt: Any, engine: Any, name: EngineName, profiles: list[Profile], device: torch.device, *, key: str
    ) -> None:
        self.capturable = True
        self._trt = trt
        self._name = name
        self._profiles = profiles
        ranks = {name: len(least) for name, (least, _, _) in profiles[0].items()}
        # The last dimension of pairs (contract.paired), which calls do not have.
        self._pairs = {name: tuple(engine.get_tensor_shape(name))[rank:] for name, rank in ranks.items()}
        self._device = device
        self._scratch = ScratchMemory(engine, name, device)
        self._jit = Jit(trt, engine, key, self._scratch)
        self._contexts: dict[Shapes, Context] = {}  # the most recently used is last

    def of(self, shapes: Shapes) -> "Context":
        """Return the context of ``shapes``. Raises InternalError if no profile takes them."""
        context = self._contexts.pop(shapes, None) or self._new(shapes)
        self._contexts[shapes] = context
        return context

    def _new(self, shapes: Shapes) -> "Context":
        profile = choose_profile(self._profiles, dict(shapes))
        if profile is None:
            raise InternalError(f"engine {self._name!r}: no profile takes {dict(shapes)}")
        stream = torch.cuda.current_stream(self._device).cuda_stream
        unrecorded = [known for known, context in self._contexts.items() if not context.recorded]
        if len(unrecorded) >= MOST_UNRECORDED:
            context = self._contexts.pop(unrecorded[0])
            self._set(context.context, shapes, profile, stream)
            context.forget()
            return context
        created = self._created(shapes, profile, stream, own_graphs=False)
        if self._jit.active and not created.is_stream_capturable(stream):
            self.capturable = False
            created = self._created(shapes, profile, stream, own_graphs=True)
        return Context(self._name, created, logger(self._trt), self._device)

    def _created(self, shapes: Shapes, profile: int, stream: int, *, own_graphs: bool) -> Any:
        log = logger(self._trt)
        log.clear()
        context = self._jit.create_context(own_graphs=own_graphs)
        if context is None:
            raise BackendUnavailable(f"engine {self._name!r}: no execution context: {log.summary()}")
        self._set(context, shapes, profile, stream)
        return context

    def _set(self, context: Any, shapes: Shapes, profile: int, stream: int) -> None:
        log = logger(self._trt)
        log.clear()
        try:
            accepted = context.set_optimization_profile_async(profile, stream)
        except RuntimeError:  # what TensorRT 10 raises in place of returning False
            accepted = False
        full = [(name, (*shape, *self._pairs[name])) for name, shape in shapes]
        if not (accepted and all(context.set_input_shape(name, shape) for name, shape in full)):
            raise InternalError(
                f"engine {self._name!r}: profile {profile} does not accept {dict(shapes)}: {log.summary()}"
            )
        self._scratch.provide(context)


class Context:
    """An execution context of TensorRT, and the tensor addresses that it is set to.

    ``recorded``: a CUDA graph contains a run.
    """

    def __init__(self, name: EngineName, context: Any, log: Any, device: torch.device) -> None:
        self.context = context
        self.recorded = False
        self._name = name
        self._log = log
        self._device = device
        self.forget()

    def forget(self) -> None:
        """Note that the context has new shapes: it has no addresses and did not run yet."""
        self._bound: dict[str, int] = {}
        self._ran = False

    def enqueue(self, addresses: dict[str, int]) -> None:
        """Enqueue a run on the device's current stream. See TensorRtCall.run."""
        recording = torch.cuda.is_current_stream_capturing()
        if recording and not self._ran:
            raise InternalError(
                f"engine {self._name!r}: run once before capture; TensorRT allocates and compiles in a first run"
            )
        self._log.clear()
        if self._bound is not addresses:
            for name, address in addresses.items():
                if not self.context.set_tensor_address(name, address):
                    raise InternalError(f"engine {self._name!r}: {name} cannot be bound: {self._log.summary()}")
            self._bound = addresses
        # A rejected run leaves the old output values, so the result must be checked.
        if not self.context.execute_async_v3(torch.cuda.current_stream(self._device).cuda_stream):
            raise InternalError(f"engine {self._name!r}: TensorRT rejected the run: {self._log.summary()}")
        self._ran = True
        self.recorded |= recording
