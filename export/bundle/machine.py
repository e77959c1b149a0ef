"""The machine that a checkpoint without a recipe is built for."""

from dataclasses import dataclass

from tandemrt.engines.recipe.backend import DefaultLimits
from tandemrt.engines.recipe.backends import BACKENDS
from tandemrt.engines.validation.errors import BackendUnavailable, BadRequest, quoted
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of, gpus


@dataclass(frozen=True)
class Machine:
    """The backend that runs here, and its free memory in bytes."""

    backend: str
    memory: int

    @property
    def limits(self) -> DefaultLimits:
        """What a default recipe for the backend allows."""
        limits = BACKENDS[self.backend].default_limits
        assert limits is not None
        return limits

    @property
    def on_cpu(self) -> bool:
        """Whether the backend runs on a CPU, over a linear cache."""
        return BACKENDS[self.backend].device == "cpu"

    @classmethod
    def here(cls, backend: str | None = None) -> "Machine":
        """Return this machine with ``backend``; None: the GPU's if torch and onnxruntime can use one, else the CPU's.

        Raises BackendUnavailable for a GPU that is not here, and BadRequest for a backend that needs a recipe.
        """
        import onnxruntime

        names = {each.device: name for name, each in BACKENDS.items() if each.default_limits is not None}
        if backend is not None and backend not in names.values():
            raise BadRequest(
                f"backend: a checkpoint without a recipe is built for {' or '.join(names.values())}, received "
                f"{quoted(backend)}; write a recipe (docs/guide.md)"
            )
        # The second question imports torch.
        has_gpu = "CUDAExecutionProvider" in onnxruntime.get_available_providers() and bool(gpus())
        if backend == names["cuda"] and not has_gpu:
            raise BackendUnavailable(
                f"backend: {backend} needs a GPU here, whose memory sets the limits; to build for another machine, "
                "write a recipe (docs/guide.md)"
            )
        if has_gpu and backend != names["cpu"]:
            return cls(names["cuda"], gpus()[0].free_memory())
        return cls(names["cpu"], device_of(torch.device("cpu")).free_memory())
