"""Execution contexts of one TensorRT engine."""

from collections.abc import Sequence
from typing import Any

import torch

from tandemrt.engines.bundle.manifest import EngineName
from tandemrt.engines.validation.errors import BackendUnavailable, InternalError
from tandemrt.plugins.tensorrt.modules import logger
from tandemrt.plugins.tensors.devices.cuda import CudaDevice
from tandemrt.runtime.device.backends.tensorrt.plan import Profile, Shape, choose_profile
from tandemrt.runtime.device.backends.tensorrt.rtx import Jit
from tandemrt.runtime.device.backends.tensorrt.scratch import ScratchMemory

Shapes = tuple[tuple[str, Shape], ...]
SPARE = 2  # a phase that is captured may call an engine with two shapes of a profile


class Contexts:
    """Contexts of all calls. They share one block of scratch memory, so calls must share one stream.

    A new context takes 300 ms, other shapes in a context 0.3 ms, and prompts have as many shapes as lengths. So at most
    SPARE contexts of a profile are in no CUDA graph: a new call's shapes replace those of the least recently used one.
    A context that a graph recorded keeps its shapes.
    """

    def __init__(
        self, trt: Any, engine: Any, name: EngineName, profiles: Sequence[Profile], device: torch.device, *, key: str
    ) -> None:
        self.capturable = True
        self._trt = trt
        self._name = name
        self._profiles = profiles
        ranks = {input_: len(least) for input_, (least, _, _) in profiles[0].items()}
        # The last dimension of pairs (bindings.paired), which calls do not have.
        self._pairs = {input_: tuple(engine.get_tensor_shape(input_))[rank:] for input_, rank in ranks.items()}
        self._device = CudaDevice(device)
        self._scratch = ScratchMemory(engine, name, device)
        self._jit = Jit(trt, engine, key, self._scratch)
        self._contexts: dict[Shapes, ExecutionContext] = {}  # the most recently used is last

    def profile(self, shapes: Shapes) -> int:
        """Return the profile for calls of ``shapes``. Raises InternalError if there is none."""
        profile = choose_profile(self._profiles, dict(shapes))
        if profile is None:
            raise InternalError(f"engine {self._name!r}: no profile takes {dict(shapes)}")
        return profile

    def of(self, shapes: Shapes, profile: int) -> "ExecutionContext":
        """Return the context of ``shapes``, which ``profile`` takes."""
        context = self._contexts.pop(shapes, None)
        if context is None:
            spare = [each for each in self._contexts.values() if each.profile == profile and not each.recorded]
            if len(spare) < SPARE:
                context = ExecutionContext(self._name, self._new(shapes, profile), self._trt, profile, shapes)
            else:
                context = spare[0]
                del self._contexts[context.shapes]
                self._set_shapes(context.context, shapes)
                context.reset(shapes)
        self._contexts[shapes] = context
        return context

    def _new(self, shapes: Shapes, profile: int) -> Any:
        stream = self._device.current_stream()
        context = self._created(shapes, profile, stream, own_graphs=False)
        if self._jit.active and not context.is_stream_capturable(stream):
            self.capturable = False
            context = self._created(shapes, profile, stream, own_graphs=True)
        return context

    def _created(self, shapes: Shapes, profile: int, stream: int, *, own_graphs: bool) -> Any:
        log = logger(self._trt)
        log.clear()
        context = self._jit.create_context(own_graphs=own_graphs)
        if context is None:
            raise BackendUnavailable(f"engine {self._name!r}: no execution context: {log.summary()}")
        try:
            accepted = context.set_optimization_profile_async(profile, stream)
        except RuntimeError:  # what TensorRT 10 raises in place of returning False
            accepted = False
        if not accepted:
            raise InternalError(f"engine {self._name!r}: no profile {profile}: {log.summary()}")
        self._set_shapes(context, shapes)
        return context

    def _set_shapes(self, context: Any, shapes: Shapes) -> None:
        log = logger(self._trt)
        log.clear()
        if not all(context.set_input_shape(name, (*shape, *self._pairs[name])) for name, shape in shapes):
            raise InternalError(f"engine {self._name!r}: its profile does not accept {dict(shapes)}: {log.summary()}")
        self._scratch.provide(context)


class ExecutionContext:
    """TensorRT's execution context, and the shapes and addresses that it is set to.

    ``recorded``: a CUDA graph contains a run.
    """

    def __init__(self, name: EngineName, context: Any, trt: Any, profile: int, shapes: Shapes) -> None:
        self.context = context
        self.profile = profile
        self.recorded = False
        self._name = name
        self._log = logger(trt)
        self.reset(shapes)

    def reset(self, shapes: Shapes) -> None:
        """Note the shapes that the context has now. With them it has no addresses and did not run yet."""
        self.shapes = shapes
        self._bound: dict[str, int] = {}
        self._ran = False

    def enqueue(self, addresses: dict[str, int], device: CudaDevice) -> None:
        """Enqueue a run on the current stream of ``device``. See TensorRtCall.run."""
        recording = device.is_capturing()
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
        if not self.context.execute_async_v3(device.current_stream()):
            raise InternalError(f"engine {self._name!r}: TensorRT rejected the run: {self._log.summary()}")
        self._ran = True
        self.recorded |= recording
