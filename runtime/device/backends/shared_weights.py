"""Weights that several sessions share: loaded once, passed to each session instead of its own copy."""

from math import prod
from pathlib import Path
from threading import Lock

import numpy as np

from tandemrt.engines.bundle.manifest import Engine, SharedWeight
from tandemrt.engines.contract.dtypes import ONNX
from tandemrt.engines.validation.errors import BadBundle
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.dtypes import viewed
from tandemrt.runtime.device.backends.sessions import onnxruntime

Initializers = dict[str, "onnxruntime.OrtValue"]


class SharedWeights:
    """The shared weights of the bundle in ``folder`` on ``device``. Sessions do not keep them alive; callers do."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder = folder
        self._device = device
        self._loaded: dict[SharedWeight, onnxruntime.OrtValue] = {}
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
        dtype = getattr(torch, weight.dtype)
        nbytes = prod(weight.shape) * dtype.itemsize
        path = self._folder / weight.file
        stored = np.fromfile(path, np.uint8, nbytes, offset=weight.offset)
        if stored.size < nbytes:
            raise BadBundle(f"{path}: is shorter than its manifest requires; build the bundle again")
        if self._device.type == "cpu":
            shaped = stored.view(np.dtype(weight.dtype)).reshape(weight.shape)
            return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(shaped, ONNX[weight.dtype])
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        tensor.copy_(torch.from_numpy(stored))
        return onnxruntime.OrtValue.from_dlpack(viewed(tensor, dtype).view(weight.shape))
