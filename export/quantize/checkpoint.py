"""A checkpoint with its products' weights quantized, as one safetensors file."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from tandemrt.engines.errors import BadCheckpoint, quoted
from tandemrt.export.model.builder import GraphBuilder
from tandemrt.export.model.weights import Weights, stored_as
from tandemrt.export.quantize.blocks import BLOCK, Blocks, Form, quantize
from tandemrt.export.quantize.stored import parts_of, read_blocks, read_matrix, shape_of
from tandemrt.export.read.checkpoint import DTYPES as WRITTEN
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor, read_header
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.quantization.scheme import Scheme
from tandemrt.export.read.spec import ModelSpec

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_NAMES = {name: code for code, (name, _) in WRITTEN.items()}
# Together in the file what is one product in the graph, in its order (export/model/linear.py).
_ORDER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FILE = "model.safetensors"


@dataclass(frozen=True)
class Quantized:
    """``checkpoint`` is what was written. ``error`` is the root mean square of what rounding changed in the products'
    weights, relative to that of the weights. ``kept``: how many weights came in 4 bits and keep their values."""

    checkpoint: Checkpoint
    error: float
    kept: int


@dataclass(frozen=True)
class _Entry:
    """One tensor to write: ``kind`` of what ``product`` holds (Form.shapes), or ``source`` as it is stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    product: "_Product | None" = None
    kind: str = ""
    source: StoredTensor | None = None

    @property
    def header(self) -> tuple[str, str, tuple[int, ...], int]:
        width = {code: size for code, (_, size) in WRITTEN.items()}[_NAMES[self.dtype]]
        return self.name, _NAMES[self.dtype], self.shape, math.prod(self.shape) * width


@dataclass(frozen=True)
class _Product:
    """The weight [rows, inner] of ``module``, how it will be held, and how it comes; None: as floats."""

    module: str
    rows: int
    inner: int
    form: Form
    scheme: Scheme | None

    @property
    def comes_packed(self) -> bool:
        """Whether the checkpoint has it in 4 bits."""
        return self.scheme is not None and self.scheme.weight == "int4"


def write_quantized(checkpoint: Checkpoint, spec: ModelSpec, folder: Path, bits: int | None) -> Quantized:
    """Write ``checkpoint`` to a file in ``folder``: weights of products in blocks, everything else as it is stored.

    Weights that come in 4 bits keep their integers and scales, in another order. The others are rounded to ``bits``;
    None leaves them. One matrix is in memory at a time. The table of embeddings stays whole, also where the head shares
    it. Raises BadCheckpoint for a weight of a product that is not what the config says of it, or that is no matrix of
    floats, and a copy of a tied head that differs.
    """
    if spec.tied:
        Weights(checkpoint, GraphBuilder("tied"), "float32").same(_HEAD, _EMBEDDING)
    entries = list(_entries(checkpoint, spec, bits))
    file = folder / FILE
    changed = whole = 0.0
    made: dict[str, dict[str, npt.NDArray]] = {}
    with file.open("wb") as out:
        out.write(_header(entry.header for entry in entries))
        for entry in entries:
            if entry.source is not None:
                _copy(entry.source, out)
                continue
            product = entry.product
            assert product is not None
            if entry.kind == "integers":
                blocks, error, size = _blocks(product, checkpoint)
                made[product.module] = blocks.stored()
                changed, whole = changed + error, whole + size
            out.write(made[product.module].pop(entry.kind).tobytes())
    written = Checkpoint(checkpoint.folder, checkpoint.config, read_header(file), (file,))
    kept = {entry.product.module for entry in entries if entry.product and entry.product.comes_packed}
    return Quantized(written, math.sqrt(changed / whole) if whole else 0.0, len(kept))


def _entries(checkpoint: Checkpoint, spec: ModelSpec, bits: int | None) -> Iterator[_Entry]:
    """Everything to write, in the file's order."""
    products = sorted(_products(checkpoint, spec, bits), key=lambda product: _place(product.module))
    gone = {name for product in products for name in _parts(product)} - {_EMBEDDING}
    for group in _groups(products):
        shapes = [product.form.shapes(product.rows, product.inner) for product in group]
        for kind in shapes[0]:
            for product, found in zip(group, shapes, strict=True):
                name = stored_as(f"{product.module}.weight", product.form.bits, kind)
                yield _Entry(name, *found[kind], product=product, kind=kind)
    for tensor in checkpoint.tensors.values():
        # A tied head is the embedding's.
        if tensor.name not in gone and (tensor.name != _HEAD or not spec.tied):
            yield _Entry(tensor.name, tensor.dtype, tensor.shape, source=tensor)


def _products(checkpoint: Checkpoint, spec: ModelSpec, bits: int | None) -> Iterator[_Product]:
    """The products whose weights will be held in blocks."""
    quantization = read_quantization(checkpoint.config, checkpoint.folder)
    modules = sorted({name.rpartition(".")[0] for name in checkpoint.tensors})
    head = (_EMBEDDING if spec.tied else _HEAD).removesuffix(".weight")
    for module in modules:
        if module != head and module.rpartition(".")[2] not in _ORDER:
            continue
        scheme = quantization.scheme(module) if quantization else None
        if scheme is not None and scheme.weight == "int4":
            form = Form(4, scheme.block[1], not scheme.symmetric)
            yield _Product(module, *shape_of(module, checkpoint.tensors, scheme), form, scheme)
        elif bits is not None and f"{module}.weight" in checkpoint.tensors:
            yield _Product(module, *_matrix(checkpoint.tensors[f"{module}.weight"], scheme), Form(bits, BLOCK), scheme)


def _parts(product: _Product) -> tuple[str, ...]:
    """The tensors of the checkpoint that hold the weight."""
    if product.scheme is None:
        return (f"{product.module}.weight",)
    return parts_of(product.module, product.scheme)


def _blocks(product: _Product, checkpoint: Checkpoint) -> tuple[Blocks, float, float]:
    """The weight in blocks, the sum of squares of what that changed, and that of what was rounded."""
    if product.scheme is not None and product.comes_packed:
        return read_blocks(product.module, checkpoint.tensors, product.scheme), 0.0, 0.0
    matrix = read_matrix(product.module, checkpoint.tensors, product.scheme)
    blocks = quantize(matrix, product.form)
    error = np.square(blocks.restored - matrix, dtype=np.float64).sum()
    return blocks, float(error), float(np.square(matrix, dtype=np.float64).sum())


def _place(module: str) -> tuple[str, int]:
    layer, _, kind = module.rpartition(".")
    return layer, _ORDER.index(kind) if kind in _ORDER else 0


def _groups(products: list[_Product]) -> Iterator[list[_Product]]:
    """Those that may be one product: queries, keys and values, and gate and up, of one form; each other by itself."""
    group: list[_Product] = []
    for product in products:
        alone = product.module.rpartition(".")[2] not in ("k_proj", "v_proj", "up_proj")
        if group and (alone or product.form != group[0].form):
            yield group
            group = []
        group.append(product)
    if group:
        yield group


def _matrix(tensor: StoredTensor, scheme: Scheme | None) -> tuple[int, int]:
    dtypes = ("float32", "float16", "bfloat16") if scheme is None else ("float8_e4m3fn",)
    if len(tensor.shape) != 2 or tensor.dtype not in dtypes:
        raise BadCheckpoint(
            f"{tensor.file}: tensor {quoted(tensor.name)} should be a matrix of {' or '.join(dtypes)} to be "
            f"quantized, it is {tensor.dtype}{list(tensor.shape)}; choose another dtype"
        )
    return tensor.shape[0], tensor.shape[1]


def _copy(tensor: StoredTensor, out: BinaryIO, step: int = 1 << 24) -> None:
    with tensor.file.open("rb") as source:
        source.seek(tensor.offset)
        for begin in range(0, tensor.nbytes, step):
            out.write(source.read(min(step, tensor.nbytes - begin)))


def _header(entries: Iterable[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    said, begin = {}, 0
    for name, dtype, shape, nbytes in entries:
        said[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + nbytes]}
        begin += nbytes
    text = json.dumps(said).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
