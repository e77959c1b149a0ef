"""The machine that a checkpoint without a recipe is built for."""

from dataclasses import dataclass

from tandemrt.engines.recipe.backends import BACKENDS, CPU, CUDA
from tandemrt.engines.validation.errors import BackendUnavailable, BadRequest, quoted
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of, gpus


@dataclass(frozen=True)
class Machine:
    """The backend that runs here, and its free memory in bytes."""

    backend: str
    memory: int

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

        if backend not in (None, CPU, CUDA):
            raise BadRequest(
                f"backend: a checkpoint without a recipe is built for {CPU} or {CUDA}, received {quoted(backend)}; "
                "write a recipe (docs/guide.md)"
            )
        # The second question imports torch.
        has_gpu = "CUDAExecutionProvider" in onnxruntime.get_available_providers() and bool(gpus())
        if backend == CUDA and not has_gpu:
            raise BackendUnavailable(
                f"backend: {CUDA} needs a GPU here, whose memory sets the limits; to build for another machine, write "
                "a recipe (docs/guide.md)"
            )
        if has_gpu and backend != CPU:
            return cls(CUDA, gpus()[0].free_memory())
        return cls(CPU, device_of(torch.device("cpu")).free_memory())
