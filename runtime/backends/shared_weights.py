"""Weights that several sessions read: loaded once, and given to each in place of its own copy."""

from math import prod
from pathlib import Path
from threading import Lock

import numpy as np

from tandemrt.engines.dtypes import ONNX
from tandemrt.engines.errors import BadBundle
from tandemrt.engines.manifest import Engine, SharedWeight
from tandemrt.plugins.tensors import torch, viewed
from tandemrt.runtime.backends.sessions import onnxruntime

Initializers = dict[str, "onnxruntime.OrtValue"]


class SharedWeights:
    """The weights of a bundle in ``folder`` on a ``device``. Whoever opens a session with one keeps it."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder = folder
        self._device = device
        self._loaded: dict[SharedWeight, onnxruntime.OrtValue] = {}
        self._loading = Lock()

    def of(self, engine: Engine) -> Initializers:
        """What the sessions of ``engine`` are given, by the names of initializers. Raises BadBundle for a cut file."""
        return {name: self._value(weight) for name, weight in engine.shared.items()}

    def _value(self, weight: SharedWeight) -> "onnxruntime.OrtValue":
        with self._loading:
            if weight not in self._loaded:
                self._loaded[weight] = self._load(weight)
            return self._loaded[weight]

    def _load(self, weight: SharedWeight) -> "onnxruntime.OrtValue":
        dtype = getattr(torch, weight.dtype)
        nbytes = prod(weight.shape) * dtype.itemsize
        path = self._folder / weight.file
        stored = np.fromfile(path, np.uint8, nbytes, offset=weight.offset)
        if stored.size < nbytes:
            raise BadBundle(f"{path}: is shorter than its manifest says; build the bundle again")
        if self._device.type == "cpu":
            shaped = stored.view(np.dtype(weight.dtype)).reshape(weight.shape)
            return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(shaped, ONNX[weight.dtype])
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        tensor.copy_(torch.from_numpy(stored))
        return onnxruntime.OrtValue.from_dlpack(viewed(tensor, dtype).view(weight.shape))
