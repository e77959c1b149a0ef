"""Write a checkpoint with quantized matmul weights as one safetensors file."""

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tandemrt.engines.options.build_listener import Progress
from tandemrt.engines.parallel.threads import map_ahead
from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.graph.builder import GraphBuilder
from tandemrt.export.graph.low_bit_format import LowBitFormat, numpy_dtype, packed_tensor_name
from tandemrt.export.graph.weights import Weights
from tandemrt.export.quantize.groups import GROUP_SIZE, QuantizedMatrix, quantize
from tandemrt.export.quantize.matmuls import EMBEDDING, HEAD, groups, matmul_modules, place, place_on_gpu
from tandemrt.export.quantize.stored_weights import (
    is_quantized,
    is_rounded_again,
    low_bit_parts,
    packed_format,
    read_float4,
    read_matrix,
    shape_of,
    tensor_names,
)
from tandemrt.export.quantize.writer import Entry, copied, write_safetensors
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor, read_header
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.quantization.scheme import Scheme
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tensors import with_graph_names
from tandemrt.plugins.operators.low_bit_interleaved import GROUP_SIZES

FILE = "model.safetensors"


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """The written ``checkpoint``, and how exact it is.

    ``error``: the root mean square of the change of the rounded matmul weights, relative to the root mean square of
    these weights. ``kept``: the number of weights that were stored in 4 or 8 bits and keep their numbers.
    ``scales_error``: the same relative error for the scales of the kept weights.
    """

    checkpoint: Checkpoint
    error: float
    kept: int
    scales_error: float


@dataclass(frozen=True)
class _Matmul:
    """The weight [rows, inner] of ``module``: its written format ``form`` and its stored ``scheme``; None: floats.

    ``keeps``: the written weight has the integers and scales of the stored one; otherwise it is rounded.
    """

    module: str
    rows: int
    inner: int
    form: LowBitFormat
    scheme: Scheme | None
    keeps: bool = False

    @property
    def is_packed(self) -> bool:
        """Whether the checkpoint stores the weight in 4 to 8 bits."""
        return self.scheme is not None and self.scheme.packed


def write_quantized(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    folder: Path,
    bits: int | None,
    progress: Progress | None = None,
    *,
    tiles: str | None = None,
    interleaved: bool = False,
    rounds_again: bool = False,
) -> QuantizedCheckpoint:
    """Write ``checkpoint`` to a file in ``folder`` with quantized matmul weights; other tensors are copied.

    Weights stored in 4 to 8 bits keep their numbers and scales, in another order. Other weights are rounded to
    ``bits``; None leaves them unquantized. ``tiles``: write tiles for matmuls on a GPU, with scales in this dtype
    (LowBitFormat). ``interleaved``: write weights of 4 to 8 bits for the operator low_bit_int8_matmul.
    ``rounds_again``: round weights stored in more than ``bits``, too. One matrix is in memory at a time. An unquantized
    embedding table stays so, also where lm_head shares it. Raises BadCheckpoint for a matmul weight that contradicts
    its config or is not a matrix of floats, and for a copy of a tied lm_head that differs.
    """
    checkpoint = with_graph_names(checkpoint, spec)
    if spec.tied:
        Weights(checkpoint, GraphBuilder("tied"), "float32").same(HEAD, EMBEDDING)
        tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name != HEAD}  # a copy
        checkpoint = replace(checkpoint, tensors=tensors)
    modules = set(matmul_modules(checkpoint, spec))
    matmuls = _matmuls(checkpoint, modules, bits, tiles, interleaved, rounds_again=rounds_again)
    return _write(checkpoint, [*matmuls], folder, progress)


def write_rounded(
    checkpoint: Checkpoint, modules: Iterable[str], folder: Path, bits: int, *, interleaved: bool
) -> QuantizedCheckpoint:
    """Do what ``write_quantized`` does, with the weights of ``modules`` as those that are rounded."""
    matmuls = _matmuls(checkpoint, set(modules), bits, None, interleaved, rounds_again=False)
    return _write(checkpoint, [*matmuls], folder, None)


def _write(
    checkpoint: Checkpoint, unsorted: list[_Matmul], folder: Path, progress: Progress | None
) -> QuantizedCheckpoint:
    order = place_on_gpu if any(matmul.form.tiles for matmul in unsorted) else place
    matmuls = sorted(unsorted, key=lambda matmul: order(matmul.module))
    rounding = _Rounding(checkpoint)
    # A tied head that is rounded here is a copy of the embedding.
    replaced = {name for m in matmuls for name in _tensor_names(m) if m.is_packed or name != EMBEDDING}
    rest = [copied(tensor) for tensor in checkpoint.tensors.values() if tensor.name not in replaced]
    file = folder / FILE
    write_safetensors(file, [*_entries(matmuls, rounding), *rest], progress=progress)
    written = replace(checkpoint, tensors=read_header(file), files=(file,))
    kept = sum(matmul.keeps for matmul in matmuls)
    return QuantizedCheckpoint(written, rounding.weights.error, kept, rounding.scales.error)


@dataclass(frozen=True)
class _RelativeError:
    """Sums of squares: of the changes by rounding, ``changed``, and of the values before it, ``total``."""

    changed: float = 0.0
    total: float = 0.0

    @classmethod
    def of(cls, after: npt.NDArray, before: npt.NDArray) -> "_RelativeError":
        """Return the error of values ``after`` rounding."""
        changed, total = (float(np.square(values, dtype=np.float64).sum()) for values in (after - before, before))
        return cls(changed, total)

    def __add__(self, other: "_RelativeError") -> "_RelativeError":
        return _RelativeError(self.changed + other.changed, self.total + other.total)

    @property
    def error(self) -> float:
        """The root mean square of the changes, relative to the root mean square of the values."""
        return math.sqrt(self.changed / self.total) if self.total else 0.0


@dataclass(frozen=True)
class _Part:
    """Some rows of a quantized weight: the arrays to write, by kind, and the error of its values or scales."""

    arrays: dict[str, npt.NDArray]
    error: _RelativeError


@dataclass
class _Rounding:
    """Quantizes weights one at a time and measures the errors.

    ``weights``: the error of the rounded weights. ``scales``: the error of the scales of weights that keep their
    integers.
    """

    checkpoint: Checkpoint
    weights: _RelativeError = _RelativeError()
    scales: _RelativeError = _RelativeError()
    _made: dict[str, npt.NDArray] = field(default_factory=dict)

    def part(self, matmul: _Matmul, kind: str) -> Iterator[bytes]:
        """Yield the bytes of ``kind`` (LowBitFormat.shapes) of a weight; call it once per kind, in their order."""
        if f"{matmul.module} {kind}" not in self._made:
            others: dict[str, list[npt.NDArray]] = {}
            reads = _parts(matmul, self.checkpoint.tensors)
            for part in map_ahead(lambda read: read(), reads, os.cpu_count() or 1):
                yield part.arrays[kind].tobytes()
                for other in part.arrays.keys() - {kind}:
                    others.setdefault(other, []).append(part.arrays[other])
                if matmul.keeps:
                    self.scales += part.error
                else:
                    self.weights += part.error
            self._made |= {f"{matmul.module} {other}": np.concatenate(parts) for other, parts in others.items()}
        else:
            yield self._made.pop(f"{matmul.module} {kind}").tobytes()


def _parts(matmul: _Matmul, tensors: Mapping[str, StoredTensor]) -> Iterator[Callable[[], _Part]]:
    """Yield functions that read and quantize a weight, or some rows of it, in any thread."""
    scheme, scales_in = matmul.scheme, numpy_dtype(matmul.form.scales)
    if scheme is None or not matmul.keeps:
        yield partial(_rounded, matmul, tensors)
    elif matmul.form.floats:
        yield partial(_floats, matmul.module, tensors, scheme)
    else:
        for read in low_bit_parts(matmul.module, tensors, scheme):
            yield partial(_repacked, read, matmul.form, scales_in)


def _rounded(matmul: _Matmul, tensors: Mapping[str, StoredTensor]) -> _Part:
    matrix = read_matrix(matmul.module, tensors, matmul.scheme)
    quantized = quantize(matrix, matmul.form, numpy_dtype(matmul.form.scales))
    return _Part(quantized.stored(), _RelativeError.of(quantized.dequantized, matrix))


def _floats(module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme) -> _Part:
    floats = read_float4(module, tensors, scheme)
    scales, rounded = floats.scales * floats.factors, floats.stored_scales.astype(np.float32) * floats.factors
    return _Part(floats.stored(), _RelativeError.of(rounded, scales))


def _repacked(read: Callable[[], QuantizedMatrix], form: LowBitFormat, scales_in: npt.DTypeLike) -> _Part:
    packed = read()
    scales = packed.scales.astype(scales_in).astype(np.float32)
    matrix = replace(packed, scales=scales).in_form(form)
    return _Part(matrix.stored(), _RelativeError.of(scales, packed.scales))


def _entries(matmuls: list[_Matmul], rounding: _Rounding) -> Iterator[Entry]:
    """Yield the tensors to write: kind by kind, the weights of one matmul of the graph next to each other."""
    on_gpu = any(matmul.form.tiles for matmul in matmuls)
    for group in groups(matmuls, lambda matmul: matmul.module, lambda matmul: matmul.form, on_gpu=on_gpu):
        shapes = [matmul.form.shapes(matmul.rows, matmul.inner) for matmul in group]
        for kind in shapes[0]:
            for matmul, shapes_of_kinds in zip(group, shapes, strict=True):
                name = packed_tensor_name(f"{matmul.module}.weight", matmul.form.numbers, kind)
                yield Entry(name, *shapes_of_kinds[kind], partial(rounding.part, matmul, kind))


def _matmuls(
    checkpoint: Checkpoint,
    rounded: Collection[str],
    bits: int | None,
    tiles: str | None,
    interleaved: bool,
    *,
    rounds_again: bool,
) -> Iterator[_Matmul]:
    """Yield the matmuls with weights that the written checkpoint quantizes."""
    quantization = read_quantization(checkpoint.config, checkpoint.folder)
    tensors = checkpoint.tensors
    for module in sorted({name.rpartition(".")[0] for name in tensors}):
        scheme = quantization.scheme(*checkpoint.names_of(module)) if quantization else None
        if scheme is not None and scheme.packed and (module in rounded or is_quantized(module, tensors, scheme)):
            shape = shape_of(module, tensors, scheme)
            form = packed_format(scheme, shape[1], on_gpu=tiles is not None)
            keeps = not (rounds_again and is_rounded_again(form, bits))
            if bits is not None and not keeps:
                form = LowBitFormat(bits, GROUP_SIZE)
            yield _Matmul(module, *shape, _laid_out(form, tiles, interleaved), scheme, keeps)
        elif bits is not None and module in rounded and f"{module}.weight" in tensors:
            shape = (
                shape_of(module, tensors, scheme)
                if scheme is not None and scheme.weight == "table4"
                else _matrix(tensors[f"{module}.weight"], scheme)
            )
            yield _Matmul(module, *shape, _laid_out(LowBitFormat(bits, GROUP_SIZE), tiles, interleaved), scheme)


def _laid_out(form: LowBitFormat, tiles: str | None, interleaved: bool) -> LowBitFormat:
    fits = interleaved and form.group_size in GROUP_SIZES.get(form.bits, ())
    if form.table and not fits:  # only low_bit_int8_matmul looks up integers
        form = replace(form, bits=8, table="")
    return replace(form, tiles=tiles, interleaved=fits)


def _tensor_names(matmul: _Matmul) -> tuple[str, ...]:
    """Return the names of the checkpoint's tensors that store the weight."""
    if matmul.scheme is None:
        return (f"{matmul.module}.weight",)
    return tensor_names(matmul.module, matmul.scheme)


def _matrix(tensor: StoredTensor, scheme: Scheme | None) -> tuple[int, int]:
    dtypes = ("float32", "float16", "bfloat16") if scheme is None else ("float8_e4m3fn",)
    if len(tensor.shape) != 2 or tensor.dtype not in dtypes:
        raise BadCheckpoint(
            f"{tensor.file}: tensor {quoted(tensor.name)} should be a matrix of {' or '.join(dtypes)} to be "
            f"quantized, it is {tensor.dtype}{list(tensor.shape)}; choose another dtype"
        )
    rows, inner = tensor.shape[::-1] if tensor.transposed else tensor.shape
    return rows, inner
