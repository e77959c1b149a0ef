"""The weights of a graph: initializers that point into the checkpoint's own safetensors files."""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePosixPath

import onnx_ir as ir

from tandemrt.engines.dtypes import COMPUTE
from tandemrt.engines.errors import BadCheckpoint, clipped, quoted
from tandemrt.export.model.builder import GraphBuilder
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor

STORED, SCALES = ".int8", ".int8.scales"  # behind the name of a weight that export/quantize/ wrote
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # old Llama files store what config says


class Weights:
    """Hands out the tensors of a checkpoint as graph values and remembers which were asked for.

    ``folder`` is where the checkpoint's files will lie, relative to the graph file.
    """

    def __init__(self, checkpoint: Checkpoint, builder: GraphBuilder, dtype: str, folder: str = "") -> None:
        self.checkpoint = checkpoint
        self.builder = builder
        self.dtype = dtype
        self.folder = PurePosixPath(folder)
        self._used: set[str] = set()

    def stored(self, name: str, shape: Sequence[int]) -> ir.Value:
        """The tensor as it is stored. Raises BadCheckpoint if it is missing, of another shape or quantized."""
        tensor = self._claim(name, shape)
        return self._external(name, tensor.dtype, shape, tensor, tensor.nbytes)

    def __call__(self, name: str, shape: Sequence[int]) -> ir.Value:
        """The tensor in the compute dtype: a Cast right behind the initializer if it is stored in another."""
        return self.builder.cast(self.stored(name, shape), self.dtype)

    def stacked(self, names: Sequence[str], rows: Sequence[int], shape: Sequence[int] = ()) -> ir.Value:
        """Tensors [rows_i, *shape] as one, in the compute dtype and in this order.

        One initializer where the file holds them one behind the other, as files sorted by name do for gate and up;
        else a Concat, which engines fold when they load: a copy of these weights.
        """
        parts = [self._claim(name, (count, *shape)) for name, count in zip(names, rows, strict=True)]
        whole = self._adjacent(names, parts)
        if whole is not None:
            return self.builder.cast(whole, self.dtype)
        values = [self(name, (count, *shape)) for name, count in zip(names, rows, strict=True)]
        return self.builder.op("Concat", *values, axis=0)

    def is_quantized(self, name: str) -> bool:
        """Whether the checkpoint holds the weight ``name`` in 8 bits (export/quantize/)."""
        return f"{name}{STORED}" in self.checkpoint.tensors

    def quantized(
        self, names: Sequence[str], rows: Sequence[int], blocks: tuple[int, int]
    ) -> tuple[ir.Value, ir.Value]:
        """Quantized weights of ``rows`` rows of ``blocks`` (how many, values of each) as one: bytes and scales."""
        found = []
        for kind, dtype, shape in ((STORED, "uint8", blocks), (SCALES, "float32", blocks[:1])):
            wanted = [f"{name}{kind}" for name in names]
            parts = [self._claim(n, (count, *shape), (dtype,)) for n, count in zip(wanted, rows, strict=True)]
            whole = self._adjacent(wanted, parts)
            assert whole is not None, "quantized weights of one product lie one behind the other"
            found.append(whole)
        return found[0], found[1]

    def _adjacent(self, names: Sequence[str], parts: Sequence[StoredTensor]) -> ir.Value | None:
        """Tensors that the file holds one behind the other as one; None if they lie elsewhere."""
        for one, two in pairwise(parts):
            if (one.file, one.offset + one.nbytes, one.dtype) != (two.file, two.offset, two.dtype):
                return None
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        nbytes = sum(part.nbytes for part in parts)
        return self._external("+".join(names), parts[0].dtype, shape, parts[0], nbytes)

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
                f"{clipped(tensor.dtype)}; quantized checkpoints are not supported"
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


def _equal_bytes(one: StoredTensor, other: StoredTensor, step: int = 1 << 24) -> bool:
    with one.file.open("rb") as left, other.file.open("rb") as right:
        left.seek(one.offset)
        right.seek(other.offset)
        sizes = (min(step, one.nbytes - begin) for begin in range(0, one.nbytes, step))
        return all(left.read(size) == right.read(size) for size in sizes)
