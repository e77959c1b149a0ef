"""The weights of a graph: initializers that point into the checkpoint's own safetensors files."""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePosixPath

import onnx_ir as ir

from tandemrt.engines.dtypes import COMPUTE
from tandemrt.engines.errors import BadCheckpoint, clipped, quoted
from tandemrt.export.model.builder import GraphBuilder
from tandemrt.export.quantize.blocks import Form
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor
from tandemrt.export.read.quantization.cache import cache_scales, is_cache_scale
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.quantization.scheme import Scheme
from tandemrt.export.read.values import require_scales
from tandemrt.plugins.reference.int4 import BLOCKS

_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # old Llama files store what config says


class Weights:
    """Hands out the tensors of a checkpoint as graph values and remembers which were asked for.

    ``folder`` is where the checkpoint's files will lie, relative to the graph file. ``scaled_products``: products of
    weights in float8 are operators of the project, instead of standard ones.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        builder: GraphBuilder,
        dtype: str,
        folder: str = "",
        *,
        scaled_products: bool = False,
    ) -> None:
        self.scaled_products = scaled_products
        self.checkpoint = checkpoint
        self.builder = builder
        self.dtype = dtype
        self.folder = PurePosixPath(folder)
        self.quantization = read_quantization(checkpoint.config, checkpoint.folder)
        self._used: set[str] = set()

    def stored(self, name: str, shape: Sequence[int]) -> ir.Value:
        """The tensor as it is stored. Raises BadCheckpoint if it is missing, of another shape or quantized."""
        tensor = self._claim(name, shape)
        return self._external(name, tensor.dtype, shape, tensor, tensor.nbytes)

    def __call__(self, name: str, shape: Sequence[int]) -> ir.Value:
        """The tensor in the compute dtype: a Cast right behind the initializer if it is stored in another."""
        return self.builder.cast(self.stored(name, shape), self.dtype)

    def stacked(
        self, names: Sequence[str], rows: Sequence[int], shape: Sequence[int] = (), *, name: str | None = None
    ) -> ir.Value:
        """Tensors [rows_i, *shape] as one, in the compute dtype and in this order.

        One initializer, called ``name`` or after all of them, where the file holds them one behind the other, as files
        sorted by name do for gate and up; else a Concat, which engines fold when they load: a copy of these weights.
        """
        parts = [self._claim(name, (count, *shape)) for name, count in zip(names, rows, strict=True)]
        whole = self._adjacent(names, parts, name)
        if whole is not None:
            return self.builder.cast(whole, self.dtype)
        values = [self(name, (count, *shape)) for name, count in zip(names, rows, strict=True)]
        return self.builder.op("Concat", *values, axis=0)

    def transposed(self, name: str) -> bool:
        """Whether the matrix ``name`` is stored as [inputs, outputs]. Raises BadCheckpoint if it is missing."""
        return self._find(name).transposed

    def scheme(self, module: str) -> Scheme | None:
        """How the checkpoint's quantization_config says that the weight of ``module`` is stored; None: whole."""
        return None if self.quantization is None else self.quantization.scheme(module)

    def as_it_lies(self, name: str, dtypes: Sequence[str], *shapes: tuple[int, ...], numbers: bool = False) -> ir.Value:
        """The tensor in the first of ``shapes``, stored in any of them and in one of ``dtypes``.

        ``numbers``: all of its values must be finite and above zero, as scales are. Raises BadCheckpoint, by name.
        """
        shape = next((s for s in shapes if s == self._find(name).shape), shapes[0])
        tensor = self._claim(name, shape, dtypes)
        if numbers:
            require_scales(tensor)
        return self._external(name, tensor.dtype, shapes[0], tensor, tensor.nbytes)

    def float8_bytes(self, names: Sequence[str], rows: Sequence[int], inner: int) -> ir.Value:
        """Weights [rows_i, inner] in float8_e4m3fn as one, byte by byte, uint8: ONNX joins no float8."""
        parts = [self._claim(name, (count, inner), ("float8_e4m3fn",)) for name, count in zip(names, rows, strict=True)]
        each = [
            self._external(f"{name}.bytes", "uint8", part.shape, part, part.nbytes)
            for name, part in zip(names, parts, strict=True)
        ]
        return each[0] if len(each) == 1 else self.builder.op("Concat", *each, axis=0)

    def cache_scales(self, attention: str) -> tuple[float, float]:
        """What keys and values of ``attention`` are divided by in a cache in float8."""
        return cache_scales(self.checkpoint.tensors, attention)

    def form(self, name: str) -> Form | None:
        """The integers in which export/quantize/ wrote the weight ``name``; None: it did not."""
        tensors = self.checkpoint.tensors
        for bits in (8, 4):
            zeros = stored_as(name, bits, "zeros") in tensors
            if (integers := tensors.get(stored_as(name, bits, "integers"))) is not None:
                return Form(bits, integers.shape[-1] * 8 // bits, zeros)
            for block in BLOCKS:
                if stored_as(name, bits, f"tiles{block}") in tensors:
                    return Form(bits, block, zeros, tensors[stored_as(name, bits, "scales")].dtype)
        return None

    def blocks(self, names: Sequence[str], rows: Sequence[int], inner: int, form: Form) -> tuple[ir.Value, ...]:
        """Weights [rows_i, inner] of one form as one: integers, scales and, if it has any, zero points."""
        found = []
        for kind in form.shapes(0, inner):
            wanted = [stored_as(name, form.bits, kind) for name in names]
            shapes = [form.shapes(count, inner)[kind] for count in rows]
            parts = [self._claim(n, shape, (dtype,)) for n, (dtype, shape) in zip(wanted, shapes, strict=True)]
            whole = self._adjacent(wanted, parts)
            assert whole is not None, "quantized weights of one product lie one behind the other"
            found.append(whole)
        return tuple(found)

    def _adjacent(
        self, names: Sequence[str], parts: Sequence[StoredTensor], name: str | None = None
    ) -> ir.Value | None:
        """Tensors that the file holds one behind the other as one; None if they lie elsewhere."""
        for one, two in pairwise(parts):
            if (one.file, one.offset + one.nbytes, one.dtype) != (two.file, two.offset, two.dtype):
                return None
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        nbytes = sum(part.nbytes for part in parts)
        return self._external(name or "+".join(names), parts[0].dtype, shape, parts[0], nbytes)

    def same(self, copy: str, name: str) -> None:
        """Accept ``copy``, if the checkpoint has it, as a copy of ``name``. Raises BadCheckpoint if it differs."""
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
        """Tensors, if the checkpoint has them, that have no place in this graph: they are read elsewhere."""
        self._used.update(names)

    def finish(self) -> None:
        """Raise BadCheckpoint if the checkpoint holds a tensor that the graph did not use."""
        left = [n for n in self.checkpoint.tensors if n not in self._used and not _DERIVED.fullmatch(n)]
        if self.quantization is not None and self.quantization.float8_cache:
            left = [name for name in left if not is_cache_scale(name)]  # another cache has no use for them
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


def stored_as(name: str, bits: int, kind: str) -> str:
    """What export/quantize/ calls the tensor of ``kind`` (blocks.Form.shapes) of the weight ``name``."""
    return f"{name}.int{bits}.{kind}"


def _equal_bytes(one: StoredTensor, other: StoredTensor, step: int = 1 << 24) -> bool:
    with one.file.open("rb") as left, other.file.open("rb") as right:
        left.seek(one.offset)
        right.seek(other.offset)
        sizes = (min(step, one.nbytes - begin) for begin in range(0, one.nbytes, step))
        return all(left.read(size) == right.read(size) for size in sizes)
