"""Weights of a graph: initializers that point into the checkpoint's safetensors files."""

import re
from collections.abc import Sequence
from copy import copy
from itertools import pairwise
from pathlib import PurePosixPath

import numpy as np
import onnx_ir as ir

from tandemrt.engines.contract.dtypes import COMPUTE
from tandemrt.engines.validation.errors import BadCheckpoint, clipped, quoted
from tandemrt.export.graph.builder import GraphBuilder
from tandemrt.export.graph.low_bit_format import LowBitFormat, k_quant_format, packed_tensor_name
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.quantization.kv_cache import cache_scales, is_cache_scale
from tandemrt.export.read.quantization.scheme import Scheme
from tandemrt.export.read.values import require_scales
from tandemrt.plugins.operators import float4
from tandemrt.plugins.operators.float_tiles import OUTPUTS, tiled_shape
from tandemrt.plugins.operators.int4_layout import CHUNK, GROUP_SIZES
from tandemrt.plugins.operators.k_quants_layout import K_QUANTS
from tandemrt.plugins.operators.low_bit_interleaved import GROUP_SIZES as INTERLEAVED_GROUPS
from tandemrt.plugins.operators.tables4 import TABLES

_GATES = re.compile(r"\.mlp\.(?:gate|shared_expert_gate)$")
_COPIED = 1 << 16  # most values of joined biases
# Old checkpoints store frequencies and masks; config.json defines them.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.(?:rotary_emb\.inv_freq|bias|masked_bias)")

_TILES = ".tiles"
_READ = 1 << 24  # bytes at a time
_NUMBERS = ("int8", "int6", "int5", "int4", "float4", "float8", *K_QUANTS, *TABLES)  # of low-bit formats
_OF_GROUPS = ("scales", "zeros", "offsets", "subscales")  # kinds of tensors (LowBitFormat.shapes)
EXPERTS = ".mlp.experts."  # in the names of their weights


def tiles_name(name: str) -> str:
    """Return the name of the tensor that holds the weight ``name`` in tiles."""
    return f"{name}{_TILES}"


class Weights:
    """Returns tensors of a checkpoint as graph values and records which were used.

    ``folder`` is the location of the checkpoint's files in the bundle, relative to the graph file. ``scaled_matmuls``:
    use the project's operators for float8 weights instead of standard ones.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        builder: GraphBuilder,
        dtype: str,
        folder: str = "",
        *,
        scaled_matmuls: bool = False,
    ) -> None:
        self.scaled_matmuls = scaled_matmuls
        self.checkpoint = checkpoint
        self.builder = builder
        self.dtype = dtype
        self.folder = PurePosixPath(folder)
        self.quantization = read_quantization(checkpoint.config, checkpoint.folder)
        self._used: set[str] = set()

    def in_dtype(self, dtype: str) -> "Weights":
        """Return the same weights in another compute dtype; both record together which were used."""
        other = copy(self)
        other.dtype = dtype
        return other

    def stored(self, name: str, shape: Sequence[int]) -> ir.Value:
        """Return the tensor as it is stored. Raises BadCheckpoint if it is missing, misshapen or quantized."""
        tensor = self._claim(name, shape)
        if tensor.columns is None:
            return self._external(name, tensor.dtype, shape, tensor, tensor.nbytes)
        (inputs, count), (first, every) = tensor.shape, tensor.columns  # engines cut the columns when they load
        whole = self._external(name, tensor.dtype, (inputs, every), tensor, tensor.nbytes)
        ends = (self.builder.constant([at]) for at in (first, first + count, 1))
        return self.builder.op("Slice", whole, *ends)

    def __call__(self, name: str, shape: Sequence[int]) -> ir.Value:
        """Return the tensor in the compute dtype, cast if it is stored in another dtype."""
        return self.builder.cast(self.stored(name, shape), self.dtype)

    def stacked(
        self, names: Sequence[str], rows: Sequence[int], shape: Sequence[int] = (), *, name: str | None = None
    ) -> ir.Value:
        """Return tensors [rows_i, *shape] as one, in the compute dtype and in this order.

        If the tensors are adjacent in the file (gate and up in a file sorted by name are), the result is one
        initializer, called ``name`` or after all tensors. Biases that are not are copied into the graph, because
        onnxruntime joins them in every run on a GPU. Other weights are a Concat, which engines fold when they load.
        """
        parts = [self._claim(name, (count, *shape)) for name, count in zip(names, rows, strict=True)]
        joined = self._adjacent(names, parts, name)
        if joined is not None:
            return self.builder.cast(joined, self.dtype)
        if not shape and len({part.dtype for part in parts}) == 1 and sum(rows) <= _COPIED:
            read = [
                self.checkpoint.read(name, part.shape, (part.dtype,)) for name, part in zip(names, parts, strict=True)
            ]
            return self.builder.cast(self.builder.constant(np.concatenate(read), parts[0].dtype), self.dtype)
        values = [self(name, (count, *shape)) for name, count in zip(names, rows, strict=True)]
        return self.builder.op("Concat", *values, axis=0)

    def transposed(self, name: str) -> bool:
        """Return whether the matrix ``name`` is stored as [inputs, outputs]. Raises BadCheckpoint if it is missing."""
        return self._find(name).transposed

    def scheme(self, module: str) -> Scheme | None:
        """Return how the quantization_config stores the weight of ``module``; None: unquantized.

        Tools leave routers and gates of experts unquantized even where no pattern of their configs says so.
        """
        weight = self.checkpoint.tensors.get(f"{module}.weight")
        if self.quantization is None or (weight is not None and weight.dtype in COMPUTE and _GATES.search(module)):
            return None
        return self.quantization.scheme(*self.checkpoint.names_of(module))

    def unconverted(
        self, name: str, dtypes: Sequence[str], *shapes: tuple[int, ...], require_positive: bool = False
    ) -> ir.Value:
        """Return the tensor in the first of ``shapes``. It may be stored in any of them, in one of ``dtypes``.

        ``require_positive``: all values must be finite and positive, as scales are. Raises BadCheckpoint, by name.
        """
        shape = next((s for s in shapes if s == self._find(name).shape), shapes[0])
        tensor = self._claim(name, shape, dtypes)
        if require_positive:
            require_scales(tensor)
        return self._external(name, tensor.dtype, shapes[0], tensor, tensor.nbytes)

    def float8_bytes(self, names: Sequence[str], rows: Sequence[int], inner: int) -> ir.Value:
        """Return float8_e4m3fn weights [rows_i, inner] as one uint8 tensor; ONNX cannot concatenate float8."""
        parts = [self._claim(name, (count, inner), ("float8_e4m3fn",)) for name, count in zip(names, rows, strict=True)]
        each = [
            self._external(f"{name}.bytes", "uint8", part.shape, part, part.nbytes)
            for name, part in zip(names, parts, strict=True)
        ]
        return each[0] if len(each) == 1 else self.builder.op("Concat", *each, axis=0)

    def cache_scales(self, attention: str) -> tuple[float, float]:
        """Return the scales of keys and values of ``attention`` in a float8 cache."""
        return cache_scales(self.checkpoint.tensors, attention)

    def tiles(self, names: Sequence[str], rows: Sequence[int], inner: int) -> ir.Value | None:
        """Return weights [rows_i, inner] as one in tiles, if export/quantize/float_tiles.py wrote them so.

        None also where tiles would hold outputs of two weights.
        """
        wanted = [tiles_name(name) for name in names]
        parts = [self.checkpoint.tensors.get(name) for name in wanted]
        stored = [part for part in parts if part is not None]
        if len(stored) < len(parts) or any(count % OUTPUTS for count in rows[:-1]):
            return None
        joined = self._adjacent(wanted, stored)
        for name, count, part in zip(names, rows, stored, strict=True):
            if joined is None or part.shape != tiled_shape(count, inner):
                return None
            self._used.add(name)
        return joined

    def low_bit_format(self, name: str) -> LowBitFormat | None:
        """Return the low-bit format in which export/quantize/ wrote the weight ``name``, or None."""
        tensors = self.checkpoint.tensors
        for bits in (8, 6, 5, 4):
            numbers = f"int{bits}"
            zeros = packed_tensor_name(name, numbers, "zeros") in tensors
            if (integers := tensors.get(packed_tensor_name(name, numbers, "integers"))) is not None:
                return LowBitFormat(bits, integers.shape[-1] * 8 // bits, zeros)
            for group_size in GROUP_SIZES:
                if packed_tensor_name(name, numbers, f"tiles{group_size}") in tensors:
                    return LowBitFormat(
                        bits, group_size, zeros, tensors[packed_tensor_name(name, numbers, "scales")].dtype
                    )
            for group_size in INTERLEAVED_GROUPS.get(bits, ()):
                if packed_tensor_name(name, numbers, f"interleaved{group_size}") in tensors:
                    return self._interleaved(name, bits, group_size)
        for table in TABLES:
            for group_size in INTERLEAVED_GROUPS[4]:
                if packed_tensor_name(name, table, f"interleaved{group_size}") in tensors:
                    return self._interleaved(name, 4, group_size, table)
        for group_size in float4.GROUP_SIZES:
            if packed_tensor_name(name, "float4", f"tiles{group_size}") in tensors:
                return LowBitFormat(4, group_size, tiles=self.dtype, floats=True)
        for numbers, quant in K_QUANTS.items():
            if packed_tensor_name(name, numbers, f"tiles{quant.group}") in tensors:
                return k_quant_format(numbers, self.dtype)
        if packed_tensor_name(name, "float8", f"tiles{CHUNK}") in tensors:
            return LowBitFormat(8, CHUNK, tiles=self.dtype, floats=True)
        return None

    def _interleaved(self, name: str, bits: int, group_size: int, table: str = "") -> LowBitFormat:
        names = {kind: packed_tensor_name(name, table or f"int{bits}", kind) for kind in _OF_GROUPS}
        kinds = {kind: self.checkpoint.tensors.get(stored) for kind, stored in names.items()}
        scales, subscales = kinds["scales"], kinds["subscales"]
        return LowBitFormat(
            bits,
            group_size,
            zeros=kinds["zeros"] is not None,
            interleaved=True,
            offsets=kinds["offsets"] is not None,
            groups_per_scale=subscales.shape[1] // scales.shape[1] if scales and subscales else 1,
            table=table,
        )

    def quantized(self, module: str) -> LowBitFormat | Scheme | None:
        """Return how the weight of ``module`` is quantized, by export/quantize/ or in the checkpoint, or None."""
        return self.low_bit_format(f"{module}.weight") or self.scheme(module)

    def low_bit_formats(self, *, experts: bool | None = None) -> tuple[LowBitFormat, ...]:
        """Return the low-bit formats of weights that export/quantize/ wrote; ``experts``: of theirs, or of others."""
        ends = [packed_tensor_name("", numbers, "scales") for numbers in _NUMBERS]
        names = [name.removesuffix(end) for name in self.checkpoint.tensors for end in ends if name.endswith(end)]
        names = [name for name in names if experts is None or (EXPERTS in name) == experts]
        formats = {low_bit_format for name in names if (low_bit_format := self.low_bit_format(name)) is not None}
        return tuple(sorted(formats, key=repr))

    def low_bit_tensors(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        inner: int,
        low_bit_format: LowBitFormat,
        *,
        name: str | None = None,
    ) -> tuple[ir.Value, ...]:
        """Return weights [rows_i, inner] of one low-bit format as one, kind by kind (LowBitFormat.shapes).

        ``name``: of the joined weights; None: all names.
        """
        tensors = []
        for kind in low_bit_format.shapes(0, inner):
            wanted = [packed_tensor_name(name, low_bit_format.numbers, kind) for name in names]
            shapes = [low_bit_format.shapes(count, inner)[kind] for count in rows]
            parts = [self._claim(n, shape, (dtype,)) for n, (dtype, shape) in zip(wanted, shapes, strict=True)]
            joined_name = None if name is None else packed_tensor_name(name, low_bit_format.numbers, kind)
            joined = self._adjacent(wanted, parts, joined_name)
            if joined is None:  # ranges of rows of adjacent weights
                each = [self._external(part.name, part.dtype, part.shape, part, part.nbytes) for part in parts]
                joined = self.builder.op("Concat", *each, axis=0)
            tensors.append(joined)
        return tuple(tensors)

    def _adjacent(
        self, names: Sequence[str], parts: Sequence[StoredTensor], name: str | None = None
    ) -> ir.Value | None:
        """Return tensors that are adjacent in one file as one initializer, or None if they are not adjacent."""
        for one, two in pairwise(parts):
            if (one.file, one.offset + one.nbytes, one.dtype) != (two.file, two.offset, two.dtype):
                return None
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        nbytes = sum(part.nbytes for part in parts)
        return self._external(name or "+".join(names), parts[0].dtype, shape, parts[0], nbytes)

    def same(self, copy: str, name: str) -> None:
        """Mark ``copy``, if it exists, as used. Raises BadCheckpoint if it differs from the tensor ``name``."""
        if copy not in self.checkpoint.tensors:
            return
        self._used.add(copy)
        one, other = self._find(copy), self._find(name)
        if one.shape != other.shape or one.dtype != other.dtype or not _equal_bytes(one, other):
            raise BadCheckpoint(
                f"{one.file}: config.json says that {quoted(copy)} is {quoted(name)} (tie_word_embeddings), but the "
                "stored tensors differ; set tie_word_embeddings to false if the model was trained that way"
            )

    def skip(self, *names: str) -> None:
        """Mark tensors as used that only other graphs read."""
        self._used.update(names)

    def finish(self) -> None:
        """Raise BadCheckpoint if the checkpoint holds a tensor that the graph did not use."""
        left = [n for n in self.checkpoint.tensors if n not in self._used and not _DERIVED.fullmatch(n)]
        left = [name for name in left if not name.endswith(_TILES)]  # copies of weights
        if self.quantization is not None and self.quantization.float8_cache:
            # Scales of a float8 cache are unused with another cache dtype.
            left = [name for name in left if not is_cache_scale(name)]
        if left:
            shown = clipped(", ".join(sorted(left)[:5])) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            raise BadCheckpoint(
                f"{self.checkpoint.folder}: {len(left)} tensor(s) have no place in the model that config.json "
                f"describes: {shown}; the config and the weights do not belong together, or the model "
                "has parts that the exporter does not implement"
            )

    def _claim(self, name: str, shape: Sequence[int], dtypes: Sequence[str] = COMPUTE) -> StoredTensor:
        tensor = self._find(name)
        if tensor.shape != tuple(shape):
            raise BadCheckpoint(
                f"{tensor.file}: tensor {quoted(name)} should have shape {list(shape)} by config.json, "
                f"it has {quoted(list(tensor.shape))}"
            )
        if tensor.dtype not in dtypes:
            raise BadCheckpoint(
                f"{tensor.file}: tensor {quoted(name)} should be {', '.join(dtypes)}, it is "
                f"{clipped(tensor.dtype)}; what its quantization_config says of it does not hold"
            )
        self._used.add(name)
        return tensor

    def _external(self, name: str, dtype: str, shape: Sequence[int], first: StoredTensor, nbytes: int) -> ir.Value:
        location = str(self.folder / first.file.name)
        return self.builder.external(name, dtype, shape, location, first.offset, nbytes)

    def _find(self, name: str) -> StoredTensor:
        if name not in self.checkpoint.tensors:
            raise BadCheckpoint(
                f"{self.checkpoint.folder}: tensor {quoted(name)} is missing, the model that config.json describes "
                "needs it"
            )
        return self.checkpoint.tensors[name]


def _equal_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    with one.file.open("rb") as left, other.file.open("rb") as right:
        left.seek(one.offset)
        right.seek(other.offset)
        sizes = (min(_READ, one.nbytes - begin) for begin in range(0, one.nbytes, _READ))
        return all(left.read(size) == right.read(size) for size in sizes)
