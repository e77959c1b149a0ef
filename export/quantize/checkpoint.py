"""A checkpoint with its products' weights quantized, as one safetensors file."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tandemrt.engines.errors import BadCheckpoint, quoted
from tandemrt.export.model.builder import DTYPES, GraphBuilder
from tandemrt.export.model.weights import SCALES, STORED, Weights
from tandemrt.export.quantize.blocks import BLOCK, blocks_in, quantize
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor, read_header
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.safetensors import copy_bytes, header

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Together in the file what is one product in the graph, in its order (export/model/linear.py).
_ORDER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FILE = "model.safetensors"


@dataclass(frozen=True)
class Quantized:
    """``checkpoint`` is what was written. ``error`` is the root mean square of what rounding changed in the products'
    weights, relative to that of the weights."""

    checkpoint: Checkpoint
    error: float


@dataclass(frozen=True)
class _Entry:
    """One tensor to write, or the bytes and scales of one, which lie one behind the other's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: StoredTensor

    @property
    def header(self) -> tuple[str, str, tuple[int, ...]]:
        return self.name, self.dtype, self.shape


def write_quantized(checkpoint: Checkpoint, spec: ModelSpec, folder: Path) -> Quantized:
    """Write ``checkpoint`` to a file in ``folder``: weights of products in 8 bits, everything else as it is stored.

    One matrix is in memory at a time. The table of embeddings stays whole, also where the head shares it. Raises
    BadCheckpoint for a weight of a product that is no matrix of floats, or a copy of a tied head that differs.
    """
    if spec.tied:
        Weights(checkpoint, GraphBuilder("tied"), "float32").same(_HEAD, _EMBEDDING)
    entries = list(_entries(checkpoint, spec))
    file = folder / FILE
    changed = whole = 0.0
    with file.open("wb") as out:
        out.write(header(entry.header for entry in entries))
        scales: list[npt.NDArray[np.float32]] = []
        for entry in entries:
            if entry.name.endswith(STORED):
                matrix = _read(entry.source)
                integers, scale, restored = quantize(matrix)
                changed += float(np.square(restored - matrix, dtype=np.float64).sum())
                whole += float(np.square(matrix, dtype=np.float64).sum())
                out.write(integers.tobytes())
                scales.append(scale)
            elif entry.name.endswith(SCALES):
                out.write(scales.pop(0).tobytes())
            else:
                copy_bytes(entry.source, out)
    written = Checkpoint(checkpoint.folder, checkpoint.config, read_header(file), (file,))
    return Quantized(written, math.sqrt(changed / whole) if whole else 0.0)


def _entries(checkpoint: Checkpoint, spec: ModelSpec) -> Iterator[_Entry]:
    """Everything to write, in the file's order."""
    products = sorted((t for t in checkpoint.tensors.values() if _is_product(t, spec)), key=_place)
    elsewhere = {_HEAD, *(tensor.name for tensor in products)} - {_EMBEDDING}  # a tied head is the embedding's
    for group in _groups(products):
        for tensor in group:
            rows, inner = _matrix(tensor)
            yield _Entry(f"{tensor.name}{STORED}", "uint8", (rows, blocks_in(inner), BLOCK), tensor)
        for tensor in group:
            rows, inner = _matrix(tensor)
            yield _Entry(f"{tensor.name}{SCALES}", "float32", (rows, blocks_in(inner)), tensor)
    for tensor in checkpoint.tensors.values():
        if tensor.name not in elsewhere:
            yield _Entry(tensor.name, tensor.dtype, tensor.shape, tensor)


def _is_product(tensor: StoredTensor, spec: ModelSpec) -> bool:
    head = _EMBEDDING if spec.tied else _HEAD
    return tensor.name == head or tensor.name.endswith(tuple(f".{kind}.weight" for kind in _ORDER))


def _place(tensor: StoredTensor) -> tuple[str, int]:
    layer, _, kind = tensor.name.removesuffix(".weight").rpartition(".")
    return layer, _ORDER.index(kind) if kind in _ORDER else 0


def _groups(products: list[StoredTensor]) -> Iterator[list[StoredTensor]]:
    """Those that may be one product: queries, keys and values, and gate and up; each other one by itself."""
    group: list[StoredTensor] = []
    for tensor in products:
        kind = tensor.name.removesuffix(".weight").rpartition(".")[2]
        if kind not in ("k_proj", "v_proj", "up_proj") and group:
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


def _matrix(tensor: StoredTensor) -> tuple[int, int]:
    if len(tensor.shape) != 2 or tensor.dtype not in ("float32", "float16", "bfloat16"):
        raise BadCheckpoint(
            f"{tensor.file}: tensor {quoted(tensor.name)} should be a matrix of float32, float16 or bfloat16 to be "
            f"quantized, it is {tensor.dtype}{list(tensor.shape)}; choose another dtype"
        )
    return tensor.shape[0], tensor.shape[1]


def _read(tensor: StoredTensor) -> npt.NDArray[np.float32]:
    stored = ir.ExternalTensor(
        tensor.file.name,
        tensor.offset,
        tensor.nbytes,
        DTYPES[tensor.dtype],
        shape=ir.Shape(tensor.shape),
        name=tensor.name,
        base_dir=tensor.file.parent,
    )
    values: npt.NDArray[np.float32] = stored.numpy().astype(np.float32)
    return values
