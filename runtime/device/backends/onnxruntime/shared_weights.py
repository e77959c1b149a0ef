"""Weights that sessions or processes share: loaded or mapped once, passed to a session instead of its own copy."""

import mmap
import os
from contextlib import suppress
from math import prod
from pathlib import Path
from threading import Lock
from typing import BinaryIO

import numpy as np

from tandemrt.engines.bundle.manifest import EngineEntry, SharedWeight
from tandemrt.engines.contract.dtypes import BYTES, ONNX
from tandemrt.engines.validation.errors import BadBundle
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.plugins.tensors.dtypes import viewed
from tandemrt.runtime.device.backends.onnxruntime.sessions import onnxruntime

Initializers = dict[str, "onnxruntime.OrtValue"]


class SharedWeights:
    """The shared weights of the bundle in ``folder`` on ``device``. Sessions do not keep them alive; callers do.

    A GPU holds copies. On a CPU sessions read the weights where their file is mapped.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder = folder
        self._device = device
        self._loaded: dict[SharedWeight, onnxruntime.OrtValue] = {}
        self._mapped: dict[str, np.ndarray] = {}  # bytes of whole files
        self._loading = Lock()

    def of(self, engine: EngineEntry) -> Initializers:
        """The shared initializers of ``engine`` by name. Raises BadBundle for a truncated file."""
        return {name: self._value(weight) for name, weight in engine.shared.items()}

    def _value(self, weight: SharedWeight) -> "onnxruntime.OrtValue":
        with self._loading:
            if weight not in self._loaded:
                self._loaded[weight] = self._load(weight)
            return self._loaded[weight]

    def _load(self, weight: SharedWeight) -> "onnxruntime.OrtValue":
        nbytes = prod(weight.shape) * BYTES[weight.dtype]
        if device_of(self._device).on_host:
            stored = self._whole(weight.file)[weight.offset : weight.offset + nbytes]
        else:
            stored = np.fromfile(self._folder / weight.file, np.uint8, nbytes, offset=weight.offset)
        if stored.size < nbytes:
            raise BadBundle(
                f"{self._folder / weight.file}: is shorter than its manifest requires; build the bundle again"
            )
        if device_of(self._device).on_host:
            shaped = stored.view(f"u{BYTES[weight.dtype]}").reshape(weight.shape)  # numpy lacks some dtypes
            return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(shaped, ONNX[weight.dtype])
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        tensor.copy_(torch.from_numpy(stored))
        return onnxruntime.OrtValue.from_dlpack(viewed(tensor, getattr(torch, weight.dtype)).view(weight.shape))

    def _whole(self, name: str) -> np.ndarray:
        """Return the bytes of a file, mapped as a whole: a weight alone would not have huge pages at its ends."""
        if name not in self._mapped:
            with (self._folder / name).open("rb") as file:
                self._mapped[name] = _mapped(file)
        return self._mapped[name]


def _mapped(file: BinaryIO) -> np.ndarray:
    if not os.fstat(file.fileno()).st_size:
        return np.empty(0, np.uint8)  # an empty file cannot be mapped
    content = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # only Linux
        with suppress(OSError):  # a kernel without huge pages
            content.madvise(mmap.MADV_HUGEPAGE)  # also for what is read from the disk from now on
    return np.frombuffer(content, np.uint8)
