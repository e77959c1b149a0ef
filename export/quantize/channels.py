"""Weights in float8 with a scale per block, written anew with a scale per output: what products on a GPU take."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tandemrt.export.quantize.checkpoint import FILE
from tandemrt.export.quantize.publish import quantization_config
from tandemrt.export.quantize.stored import parts_of, read_matrix
from tandemrt.export.quantize.writer import Entry, Progress, copied, write_safetensors
from tandemrt.export.read.checkpoint import Checkpoint, read_header
from tandemrt.export.read.quantization.scheme import Quantization, Scheme
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tensors import named

_LARGEST = np.float32(448)  # of float8_e4m3fn


@dataclass(frozen=True)
class ByChannel:
    """``checkpoint`` is what was written. ``error`` is the root mean square of what rounding anew changed in the
    weights, relative to that of the weights."""

    checkpoint: Checkpoint
    error: float


def write_by_channel(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    quantization: Quantization,
    folder: Path,
    progress: Progress | None = None,
) -> ByChannel:
    """Write ``checkpoint`` to a file in ``folder``: weights in float8 with a scale per output, the rest as it is.

    Its config says so, and that inputs have one scale per token. One matrix is in memory at a time. Raises
    BadCheckpoint for a weight that is not what the config says of it.
    """
    checkpoint = named(checkpoint, spec)
    modules = sorted({name.rpartition(".")[0] for name in checkpoint.tensors})
    schemes = {module: scheme for module in modules if (scheme := quantization.scheme(module)) is not None}
    # A config speaks of norms too, by the pattern of their names; what is quantized has scales.
    schemes = {module: each for module, each in schemes.items() if f"{module}.{each.scale}" in checkpoint.tensors}
    gone = {name for module, scheme in schemes.items() for name in parts_of(module, scheme)}
    kept = [copied(tensor) for tensor in checkpoint.tensors.values() if tensor.name not in gone]
    rounding = _Rounding(checkpoint)
    entries = [entry for module, scheme in schemes.items() for entry in rounding.entries(module, scheme)]
    file = folder / FILE
    write_safetensors(file, [*entries, *kept], progress=progress)
    said = _config(list(schemes), float8_cache=quantization.float8_cache)
    config = {**checkpoint.config, "quantization_config": said}
    written = Checkpoint(checkpoint.folder, config, read_header(file), (file,))
    return ByChannel(written, math.sqrt(rounding.changed / rounding.whole) if rounding.whole else 0.0)


@dataclass
class _Rounding:
    """Rounds weights anew, one at a time. ``changed``: the sum of squares of what that changed so far, and ``whole``
    that of what was rounded."""

    checkpoint: Checkpoint
    changed: float = 0.0
    whole: float = 0.0
    _scales: dict[str, npt.NDArray] = field(default_factory=dict)

    def entries(self, module: str, scheme: Scheme) -> Iterator[Entry]:
        """What is written of a weight: its numbers, then their scales."""
        rows, inner = self.checkpoint.tensors[f"{module}.weight"].shape
        yield Entry(f"{module}.weight", "float8_e4m3fn", (rows, inner), partial(self._numbers, module, scheme))
        yield Entry(f"{module}.weight_scale", "float32", (rows, 1), partial(self._of_numbers, module))

    def _numbers(self, module: str, scheme: Scheme) -> Iterator[bytes]:
        matrix = read_matrix(module, self.checkpoint.tensors, scheme)
        largest = np.abs(matrix).max(axis=1, keepdims=True)
        scales = np.where(largest > 0, largest / _LARGEST, np.float32(1)).astype(np.float32)
        numbers = (matrix / scales).clip(-_LARGEST, _LARGEST).astype(ml_dtypes.float8_e4m3fn)
        self._scales[module] = scales
        self.changed += float(np.square(numbers.astype(np.float32) * scales - matrix, dtype=np.float64).sum())
        self.whole += float(np.square(matrix, dtype=np.float64).sum())
        yield numbers.tobytes()

    def _of_numbers(self, module: str) -> Iterator[bytes]:
        yield self._scales.pop(module).tobytes()


def _config(modules: Sequence[str], *, float8_cache: bool) -> dict[str, object]:
    """What config.json says of these modules' weights, and of keys and values."""
    said = quantization_config("fp8", 0)
    said["config_groups"]["group_0"]["targets"] = list(modules)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    return said | {"ignore": [], "kv_cache_scheme": scheme if float8_cache else None}
