"""Rewrite float8 weights for a GPU: of matmuls with a scale per output, of experts in the order of their operator."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tandemrt.engines.options.build_listener import Progress
from tandemrt.export.graph.weights import EXPERTS
from tandemrt.export.quantize.checkpoint import FILE
from tandemrt.export.quantize.compressed_tensors import quantization_config
from tandemrt.export.quantize.float8_experts import expert_entries
from tandemrt.export.quantize.stored_weights import read_matrix, tensor_names
from tandemrt.export.quantize.writer import Entry, copied, write_safetensors
from tandemrt.export.read.checkpoint import Checkpoint, read_header
from tandemrt.export.read.quantization.scheme import Quantization, Scheme
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tensors import with_graph_names

_LARGEST = np.float32(448)  # of float8_e4m3fn


@dataclass(frozen=True)
class PerChannelCheckpoint:
    """The written ``checkpoint``, and the ``error`` of the second rounding.

    ``error``: the root mean square of the change of the weights, relative to the root mean square of the weights.
    ``experts``: the number of weights of experts.
    """

    checkpoint: Checkpoint
    error: float
    experts: int


def write_per_channel(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    quantization: Quantization,
    folder: Path,
    progress: Progress | None = None,
) -> PerChannelCheckpoint:
    """Write ``checkpoint`` to a file in ``folder`` with one float8 scale per output; other tensors are copied.

    The config of the result states this format, with one scale per token for inputs. Matmuls that have no group scales
    stay as they are, and so does the config. Experts keep numbers and scales, in the order of the operator
    float8_experts. One matrix is in memory at a time. Raises BadCheckpoint for a weight that contradicts its config.
    """
    checkpoint = with_graph_names(checkpoint, spec)
    modules = sorted({name.rpartition(".")[0] for name in checkpoint.tensors})
    scheme_of_module = {module: quantization.scheme(*checkpoint.names_of(module)) for module in modules}
    schemes = {module: scheme for module, scheme in scheme_of_module.items() if scheme is not None}
    # A pattern of the config may also match norms; only quantized modules have scales.
    schemes = {module: each for module, each in schemes.items() if f"{module}.{each.scale}" in checkpoint.tensors}
    experts = {module: scheme for module, scheme in schemes.items() if EXPERTS in f"{module}."}
    rounded = {module: scheme for module, scheme in schemes.items() if module not in experts}
    if not quantization.has_group_scales:
        rounded = {}
    replaced = {name for each in (experts, rounded) for m, scheme in each.items() for name in tensor_names(m, scheme)}
    kept = [copied(tensor) for tensor in checkpoint.tensors.values() if tensor.name not in replaced]
    rounding = _Rounding(checkpoint)
    entries = [entry for module, scheme in rounded.items() for entry in rounding.entries(module, scheme)]
    file = folder / FILE
    write_safetensors(file, [*expert_entries(checkpoint, experts), *entries, *kept], progress=progress)
    tensors = read_header(file)
    written = replace(checkpoint, tensors=tensors, files=(file,))
    if quantization.has_group_scales:
        scheme_config = _config(list(rounded), float8_cache=quantization.float8_cache)
        config = {**checkpoint.config, "quantization_config": scheme_config}
        written = Checkpoint(checkpoint.folder, config, tensors, (file,))
    error = math.sqrt(rounding.changed / rounding.total) if rounding.total else 0.0
    return PerChannelCheckpoint(written, error, len(experts))


@dataclass
class _Rounding:
    """Rounds weights a second time, one weight at a time.

    ``changed``: the sum of squares of the changes so far. ``total``: the sum of squares of the rounded weights.
    """

    checkpoint: Checkpoint
    changed: float = 0.0
    total: float = 0.0
    _scales: dict[str, npt.NDArray] = field(default_factory=dict)

    def entries(self, module: str, scheme: Scheme) -> Iterator[Entry]:
        """Yield the tensors of one weight: the float8 values, then their scales."""
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
        self.total += float(np.square(matrix, dtype=np.float64).sum())
        yield numbers.tobytes()

    def _of_numbers(self, module: str) -> Iterator[bytes]:
        yield self._scales.pop(module).tobytes()


def _config(modules: Sequence[str], *, float8_cache: bool) -> dict[str, object]:
    """Return the quantization_config for the weights of ``modules``, and for keys and values."""
    config = quantization_config("fp8", 0)
    config["config_groups"]["group_0"]["targets"] = list(modules)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    return config | {"ignore": [], "kv_cache_scheme": scheme if float8_cache else None}
