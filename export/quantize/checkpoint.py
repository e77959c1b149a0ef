"""A checkpoint with its products' weights quantized, as one safetensors file."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tandemrt.engines.errors import BadCheckpoint, quoted
from tandemrt.export.model.builder import GraphBuilder
from tandemrt.export.model.weights import Weights, stored_as
from tandemrt.export.quantize.blocks import BLOCK, Blocks, Form, numbers_of, quantize
from tandemrt.export.quantize.stored import form_of, parts_of, read_blocks, read_matrix, shape_of
from tandemrt.export.quantize.writer import Entry, Progress, copied, write_safetensors
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor, read_header
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.quantization.scheme import Scheme
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tensors import named

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Together in the file what is one product in the graph, in its order (export/model/linear.py).
_ORDER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
FILE = "model.safetensors"


@dataclass(frozen=True)
class Quantized:
    """``checkpoint`` is what was written. ``error`` is the root mean square of what rounding changed in the products'
    weights, relative to that of the weights. ``kept``: how many weights came in 4 bits and keep their integers, and
    ``scales_error`` what rounding changed in their scales, in the same way."""

    checkpoint: Checkpoint
    error: float
    kept: int
    scales_error: float


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
        return self.scheme is not None and self.scheme.packed


def write_quantized(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    folder: Path,
    bits: int | None,
    progress: Progress | None = None,
    *,
    tiles: str | None = None,
) -> Quantized:
    """Write ``checkpoint`` to a file in ``folder``: weights of products in blocks, everything else as it is stored.

    Weights that come in 4 bits keep their integers and scales, in another order. The others are rounded to ``bits``;
    None leaves them. ``tiles``: for products on a GPU, with scales in this dtype (blocks.Form). One matrix is in memory
    at a time. The table of embeddings stays whole, also where the head shares it. Raises BadCheckpoint for a weight of
    a product that is not what the config says of it, or that is no matrix of floats, and a copy of a tied head that
    differs.
    """
    checkpoint = named(checkpoint, spec)
    if spec.tied:
        Weights(checkpoint, GraphBuilder("tied"), "float32").same(_HEAD, _EMBEDDING)
    products = sorted(_products(checkpoint, spec, bits, tiles), key=lambda product: _place(product.module))
    rounding = _Rounding(checkpoint)
    gone = {name for product in products for name in _parts(product)} - {_EMBEDDING}
    if spec.tied:
        gone.add(_HEAD)  # it is the embedding's
    rest = [copied(tensor) for tensor in checkpoint.tensors.values() if tensor.name not in gone]
    file = folder / FILE
    write_safetensors(file, [*_entries(products, rounding), *rest], progress=progress)
    written = Checkpoint(checkpoint.folder, checkpoint.config, read_header(file), (file,))
    kept = sum(product.comes_packed for product in products)
    return Quantized(written, rounding.weights.error, kept, rounding.scales.error)


@dataclass
class _Changed:
    """The sum of squares of what rounding ``changed`` so far, and that of what was rounded, ``whole``."""

    changed: float = 0.0
    whole: float = 0.0

    def add(self, found: npt.NDArray, before: npt.NDArray) -> None:
        self.changed += float(np.square(found - before, dtype=np.float64).sum())
        self.whole += float(np.square(before, dtype=np.float64).sum())

    @property
    def error(self) -> float:
        """The root mean square of the one, relative to that of the other."""
        return math.sqrt(self.changed / self.whole) if self.whole else 0.0


@dataclass
class _Rounding:
    """Reads weights as blocks, one at a time, and counts what that changed in ``weights`` that were rounded, and in
    ``scales`` of others."""

    checkpoint: Checkpoint
    weights: _Changed = field(default_factory=_Changed)
    scales: _Changed = field(default_factory=_Changed)
    _made: dict[str, npt.NDArray] = field(default_factory=dict)

    def part(self, product: _Product, kind: str) -> Iterator[bytes]:
        """The bytes of ``kind`` (Form.shapes) of a weight; its first kind is asked for first, and each once."""
        if f"{product.module} {kind}" not in self._made:
            stored = self._blocks(product).stored()
            self._made |= {f"{product.module} {kind}": values for kind, values in stored.items()}
        yield self._made.pop(f"{product.module} {kind}").tobytes()

    def _blocks(self, product: _Product) -> Blocks:
        tensors = self.checkpoint.tensors
        scales_in = numbers_of(product.form.scales)
        if product.scheme is not None and product.comes_packed:
            found = read_blocks(product.module, tensors, product.scheme)
            scales = found.scales.astype(scales_in).astype(np.float32)
            self.scales.add(scales, found.scales)
            return replace(found, form=product.form, scales=scales)
        matrix = read_matrix(product.module, tensors, product.scheme)
        blocks = quantize(matrix, product.form, scales_in)
        self.weights.add(blocks.restored, matrix)
        return blocks


def _entries(products: list[_Product], rounding: _Rounding) -> Iterator[Entry]:
    """What holds the weights: those of one product one behind the other, kind by kind."""
    for group in _groups(products):
        shapes = [product.form.shapes(product.rows, product.inner) for product in group]
        for kind in shapes[0]:
            for product, found in zip(group, shapes, strict=True):
                name = stored_as(f"{product.module}.weight", product.form.bits, kind)
                yield Entry(name, *found[kind], partial(rounding.part, product, kind))


def _products(checkpoint: Checkpoint, spec: ModelSpec, bits: int | None, tiles: str | None) -> Iterator[_Product]:
    """The products whose weights will be held in blocks."""
    quantization = read_quantization(checkpoint.config, checkpoint.folder)
    modules = sorted({name.rpartition(".")[0] for name in checkpoint.tensors})
    head = (_EMBEDDING if spec.tied else _HEAD).removesuffix(".weight")
    for module in modules:
        if module != head and module.rpartition(".")[2] not in _ORDER:
            continue
        scheme = quantization.scheme(module) if quantization else None
        if scheme is not None and scheme.packed:
            shape = shape_of(module, checkpoint.tensors, scheme)
            yield _Product(module, *shape, replace(form_of(scheme), tiles=tiles), scheme)
        elif bits is not None and f"{module}.weight" in checkpoint.tensors:
            shape = _matrix(checkpoint.tensors[f"{module}.weight"], scheme)
            yield _Product(module, *shape, Form(bits, BLOCK, tiles=tiles), scheme)


def _parts(product: _Product) -> tuple[str, ...]:
    """The tensors of the checkpoint that hold the weight."""
    if product.scheme is None:
        return (f"{product.module}.weight",)
    return parts_of(product.module, product.scheme)


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
    rows, inner = tensor.shape[::-1] if tensor.transposed else tensor.shape
    return rows, inner
