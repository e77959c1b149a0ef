"""``tandemrt export quantize``: rewrite a checkpoint in the format of compressed-tensors.

transformers with the package compressed-tensors, vLLM, SGLang and TandemRT load the result.
"""

import json
import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tandemrt.engines.options.build_listener import Progress
from tandemrt.engines.validation.errors import BadCheckpoint, BadRequest, quoted
from tandemrt.export.graph.low_bit_format import LowBitFormat
from tandemrt.export.quantize.compressed_tensors import SchemeName, quantization_config
from tandemrt.export.quantize.groups import quantize
from tandemrt.export.quantize.writer import Entry, copied, write_safetensors
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.quantization.scheme import GROUPS
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.values import read_values
from tandemrt.export.staging import staged

_LARGEST = np.float32(448)  # of float8_e4m3fn
# The quantized weights: matmuls of layers, but not those of decays and updates of delta nets; a draft's own lm_head.
_QUANTIZED_OF_MODEL = re.compile(r"model\.layers\..*(_proj|\.in_proj_(qkvz?|z))\.weight")
_QUANTIZED_OF_HEAD = re.compile(r"(layers|midlayer)\..*_proj\.weight|lm_head\.weight")
_UNQUANTIZED_OF_HEAD = re.compile(r"(fc|markov_head\.(markov_w2|gate_proj|joint_proj)|confidence_head\.proj)\.weight")
_UNQUANTIZED_OF_MODEL = re.compile(r"model\.layers\..*\.weight")
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")  # weights, and lists of them


@dataclass(frozen=True)
class Published:
    """The written checkpoint. ``errors``: per quantized weight, the root mean square of the rounding error relative to
    that of the weight. ``before`` and ``after`` are bytes of weights.
    """

    folder: Path
    errors: dict[str, float]
    before: int
    after: int


def publish(
    folder: Path,
    out: Path,
    scheme: SchemeName,
    *,
    group: int = 128,
    progress: Progress | None = None,
) -> Published:
    """Quantize the matmuls of the layers of the checkpoint in ``folder``; embeddings, norms and lm_head stay
    unquantized.

    In a draft that reads its target's features (it has ``fc``) its own lm_head, a third of its run time, is quantized
    as well. ``fc``, which runs once per step, and DSpark's heads stay unquantized.

    *fp8*: float8_e4m3fn with a scale per output; inputs are quantized per token at run time; needs no data. *int4*:
    integers with a scale per ``group`` inputs, each found by search. ``progress`` receives the number of finished
    weights and of all weights. The checkpoint appears at ``out`` when it is complete. Raises BadCheckpoint, by name,
    for a checkpoint that is already quantized or that the exporter cannot read, and BadRequest for ``out`` or
    ``group``.
    """
    checkpoint = Checkpoint.open(folder)
    of_head = "fc.weight" in checkpoint.tensors
    _require_unquantized(checkpoint, scheme, of_head=of_head)
    if group not in GROUPS:
        raise BadRequest(f"group must be one of {', '.join(map(str, GROUPS))}; got {group}")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise BadRequest(f"out must be free or an empty folder; {out} holds something. Choose another place with --out")
    matmuls = _matmuls(checkpoint, _QUANTIZED_OF_HEAD if of_head else _QUANTIZED_OF_MODEL)
    maker = _Maker(scheme, group, matmuls, progress)
    if progress is not None:
        progress("weights", 0, len(matmuls))
    with staged(out) as place:
        for file in sorted(checkpoint.folder.iterdir()):
            if file.is_file() and not file.name.endswith(_NOT_COPIED):
                shutil.copyfile(file, place / file.name)
        for shard in checkpoint.files:
            tensors = [tensor for tensor in checkpoint.tensors.values() if tensor.file == shard]
            entries = [entry for tensor in tensors for entry in maker.entries(tensor)]
            write_safetensors(place / shard.name, entries, {"format": "pt"})
            maker.shards |= {entry.name: shard.name for entry in entries}
        after = sum((place / shard.name).stat().st_size for shard in checkpoint.files)
        if len(checkpoint.files) > 1:
            index = {"metadata": {"total_size": after}, "weight_map": maker.shards}
            (place / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        others = _unquantized(checkpoint, matmuls, _UNQUANTIZED_OF_HEAD if of_head else _UNQUANTIZED_OF_MODEL)
        config = {**checkpoint.config, "quantization_config": quantization_config(scheme, group, unquantized=others)}
        (place / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    before = sum(shard.stat().st_size for shard in checkpoint.files)
    return Published(out, maker.errors, before, after)


def _require_unquantized(checkpoint: Checkpoint, scheme: SchemeName, *, of_head: bool) -> None:
    """Raise BadCheckpoint for a model that is not quantized here, and BadRequest for a scheme that it cannot have."""
    folder = checkpoint.folder
    if quantization := read_quantization(checkpoint.config, folder):
        method = quantization.method
        raise BadCheckpoint(f"{folder}: is quantized already ({method}); give the checkpoint it was made from")
    if of_head and scheme != "fp8":
        raise BadRequest(f"scheme must be fp8 for a draft that reads its target's states; got {scheme}")
    if not of_head and ModelSpec.from_hf(checkpoint.config).experts is not None:
        raise BadCheckpoint(
            f"{folder}: has experts, which are not quantized here; use llm-compressor, or another model"
        )


def _matmuls(checkpoint: Checkpoint, quantized: re.Pattern[str]) -> set[str]:
    """Return the names of the weights to quantize. Raises BadCheckpoint if there are none."""
    matmuls = {name for name in checkpoint.tensors if quantized.fullmatch(name)}
    if not matmuls:
        raise BadCheckpoint(
            f"{checkpoint.folder}: must have matmuls to quantize, weights whose names match {quantized.pattern}; got "
            f"{quoted(sorted(checkpoint.tensors))}; quantize it with llm-compressor, or give another checkpoint"
        )
    return matmuls


def _unquantized(checkpoint: Checkpoint, matmuls: Collection[str], others: re.Pattern[str]) -> list[str]:
    """Return the modules that config.json lists as unquantized: matrices that match ``others``, and lm_head."""
    names = sorted(
        name
        for name, tensor in checkpoint.tensors.items()
        if name not in matmuls and len(tensor.shape) == 2 and others.fullmatch(name)
    )
    names += ["lm_head.weight"] if "lm_head.weight" not in matmuls else []
    return [name.removesuffix(".weight") for name in names]


class _Maker:
    """Creates the safetensors entries of each tensor, and records the quantization errors."""

    def __init__(
        self,
        scheme: SchemeName,
        group: int,
        matmuls: Collection[str],
        progress: Progress | None,
    ) -> None:
        self.errors: dict[str, float] = {}
        self.shards: dict[str, str] = {}
        self._scheme, self._group, self._matmuls, self._progress = scheme, group, matmuls, progress
        self._made: dict[str, npt.NDArray] = {}

    def entries(self, tensor: StoredTensor) -> Iterator[Entry]:
        """Yield the entries to write for ``tensor``."""
        if tensor.name not in self._matmuls:
            yield copied(tensor)
            return
        rows, inner = _shape(tensor)
        module = tensor.name.removesuffix(".weight")
        # The checkpoint's own dtype, as torch computes, except float16, in which small scales lose bits.
        dtype = "bfloat16" if tensor.dtype == "bfloat16" else "float32"
        if self._scheme == "fp8":
            kinds: dict[str, tuple[str, tuple[int, ...]]] = {
                "weight": ("float8_e4m3fn", (rows, inner)),
                "weight_scale": (dtype, (rows, 1)),
            }
        else:
            if inner % self._group:
                raise BadCheckpoint(
                    f"{module}: has {inner} inputs, which is no multiple of {self._group}; choose another --group"
                )
            kinds = {
                "weight_packed": ("int32", (rows, inner // 8)),
                "weight_scale": (dtype, (rows, inner // self._group)),
                "weight_shape": ("int64", (2,)),
            }
        for kind, (of, shape) in kinds.items():
            yield Entry(f"{module}.{kind}", of, shape, partial(self._part, tensor, kind, dtype))

    def _part(self, tensor: StoredTensor, kind: str, dtype: str) -> Iterator[bytes]:
        if kind in ("weight", "weight_packed"):
            self._quantize(tensor, np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype))
        yield self._made.pop(kind).tobytes()

    def _quantize(self, tensor: StoredTensor, scales_in: np.dtype) -> None:
        module, matrix = tensor.name.removesuffix(".weight"), read_values(tensor).astype(np.float32)
        if self._scheme == "fp8":
            largest = np.abs(matrix).max(axis=1, keepdims=True) / _LARGEST
            scale = np.where(largest > 0, largest, np.float32(1)).astype(scales_in)
            scale_used = scale.astype(np.float32)
            quantized = (matrix / scale_used).clip(-_LARGEST, _LARGEST).astype(ml_dtypes.float8_e4m3fn)
            self._made = {"weight": quantized, "weight_scale": scale}
            dequantized = quantized.astype(np.float32) * scale_used
        else:
            grouped = quantize(matrix, LowBitFormat(4, self._group), scales_in)
            one = np.where(grouped.scales > 0, grouped.scales, np.float32(1)).astype(scales_in)
            self._made = {
                "weight_packed": grouped.stored()["integers"],
                "weight_scale": one,
                "weight_shape": np.array(matrix.shape, np.int64),
            }
            dequantized = grouped.dequantized
        total = float(np.square(matrix, dtype=np.float64).sum())
        changed = float(np.square(dequantized - matrix, dtype=np.float64).sum())
        self.errors[module] = (changed / total) ** 0.5 if total else 0.0
        if self._progress is not None:
            self._progress(module, len(self.errors), len(self._matmuls))


def _shape(tensor: StoredTensor) -> tuple[int, int]:
    if len(tensor.shape) != 2 or tensor.dtype not in ("float32", "float16", "bfloat16"):
        raise BadCheckpoint(
            f"{tensor.file}: tensor {quoted(tensor.name)} should be a matrix of float32, float16 or bfloat16, it is "
            f"{tensor.dtype}{list(tensor.shape)}"
        )
    return tensor.shape[0], tensor.shape[1]
