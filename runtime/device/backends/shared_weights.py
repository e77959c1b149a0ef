"""Weights that sessions or processes share: loaded or mapped once, passed to a session instead of its own copy."""

import mmap
from contextlib import suppress
from math import prod
from pathlib import Path
from threading import Lock

import numpy as np

from tandemrt.engines.bundle.manifest import Engine, SharedWeight
from tandemrt.engines.contract.dtypes import BYTES, ONNX
from tandemrt.engines.validation.errors import BadBundle
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.dtypes import viewed
from tandemrt.runtime.device.backends.sessions import onnxruntime

Initializers = dict[str, "onnxruntime.OrtValue"]


class SharedWeights:
    """The shared weights of the bundle in ``folder`` on ``device``. Sessions do not keep them alive; callers do.

    A GPU holds copies. On a CPU sessions read the weights where their file is mapped.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder = folder
        self._device = device
        self._loaded: dict[SharedWeight, onnxruntime.OrtValue] = {}
        self._mapped: dict[Path, np.ndarray] = {}  # bytes
        self._loading = Lock()

    def of(self, engine: Engine) -> Initializers:
        """The shared initializers of ``engine`` by name. Raises BadBundle for a truncated file."""
        return {name: self._value(weight) for name, weight in engine.shared.items()}

    def _value(self, weight: SharedWeight) -> "onnxruntime.OrtValue":
        with self._loading:
            if weight not in self._loaded:
                self._loaded[weight] = self._load(weight)
            return self._loaded[weight]

    def _load(self, weight: SharedWeight) -> "onnxruntime.OrtValue":
        path = self._folder / weight.file
        nbytes = prod(weight.shape) * BYTES[weight.dtype]
        if path.stat().st_size < weight.offset + nbytes:
            raise BadBundle(f"{path}: is shorter than its manifest requires; build the bundle again")
        if self._device.type == "cpu":
            stored = self._map(path)[weight.offset : weight.offset + nbytes]
            shaped = stored.view(f"u{BYTES[weight.dtype]}").reshape(weight.shape)  # numpy lacks some dtypes
            return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(shaped, ONNX[weight.dtype])
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        tensor.copy_(torch.from_numpy(np.fromfile(path, np.uint8, nbytes, offset=weight.offset)))
        return onnxruntime.OrtValue.from_dlpack(viewed(tensor, getattr(torch, weight.dtype)).view(weight.shape))

    def _map(self, path: Path) -> np.ndarray:
        """Map a whole file: a weight alone would not have huge pages at its ends."""
        if path not in self._mapped:
            with path.open("rb") as file:
                content = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
            if hasattr(mmap, "MADV_HUGEPAGE"):  # only Linux
                with suppress(OSError):  # a kernel without huge pages
                    content.madvise(mmap.MADV_HUGEPAGE)  # also for what is read from the disk from now on
            self._mapped[path] = np.frombuffer(content, np.uint8)
        return self._mapped[path]
