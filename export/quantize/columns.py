"""Write the parts of tensors that a rank of a tensor-parallel target holds and that are no range of a file.

These are columns of the matrices that it multiplies its part of the inputs by, and several ranges of rows. Columns of
weights of 4 or 8 bits are whole chunks of 128 inputs, so their bytes keep their order
(plugins/operators/int4_layout.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from tandemrt.engines.bundle.manifest import COLUMNS
from tandemrt.engines.options.build_listener import Progress
from tandemrt.export.quantize.groups import nibbles
from tandemrt.export.quantize.writer import Entry, write_safetensors
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor, read_header
from tandemrt.export.read.shard import Shard, columns_of, part_of_rows, rows_of
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.values import read_values
from tandemrt.plugins.operators.int4_layout import scales_of_output, unpacked

_TILES, _FLOAT8 = ".tiles", ".float8."  # in the names of packed weights; scales of float8 are not padded
_STEP = 1 << 24  # bytes of a matrix that are read at a time


def write_shards(
    checkpoint: Checkpoint, spec: ModelSpec, folder: Path, ranks: int, progress: Progress | None = None
) -> tuple[Shard, ...]:
    """Write ``columns.RANK.safetensors`` for every rank into ``folder`` and return the shards, in their order.

    ``checkpoint`` has the names of the graph, of a model ``spec``.
    """
    shards = []
    tiles = {name.rpartition(".")[0]: tensor for name, tensor in checkpoint.tensors.items() if _TILES in name}
    for rank in range(ranks):
        file = folder / f"{COLUMNS}{rank}.safetensors"
        entries = []
        for name, tensor in sorted(checkpoint.tensors.items()):
            rows = rows_of(tensor, name, spec, rank, ranks)
            if Shard.is_split_by_inputs(name):
                entries.append(_columns(tensor, tiles, rank, ranks))
            elif rows is not None and len(rows) > 1:
                entries.append(_ranges(name, tensor, rows))
        write_safetensors(file, entries, progress=progress)
        shards.append(Shard(rank, ranks, read_header(file)))
    return tuple(shards)


def _ranges(name: str, tensor: StoredTensor, rows: Sequence[tuple[int, int]]) -> Entry:
    """Return the ``rows`` of ``tensor``, ranges of them, as one tensor."""
    parts = [part_of_rows(tensor, *each) for each in rows]

    def data() -> Iterator[bytes]:
        with tensor.file.open("rb") as source:
            for part in parts:
                source.seek(part.offset)
                for begin in range(0, part.nbytes, _STEP):
                    yield source.read(min(_STEP, part.nbytes - begin))

    return Entry(name, tensor.dtype, (sum(count for _, count in rows), *tensor.shape[1:]), data)


def _columns(tensor: StoredTensor, tiles: Mapping[str, StoredTensor], rank: int, ranks: int) -> Entry:
    matrix, _, kind = tensor.name.rpartition(".")
    if kind in ("scales", "zeros"):
        return _groups(tensor, tiles[matrix], rank, ranks)
    rows, width = tensor.shape
    item = tensor.nbytes // (rows * width)
    first, count = columns_of(tensor, rank, ranks)

    def data() -> Iterator[bytes]:
        step = max(1, _STEP // (width * item))
        with tensor.file.open("rb") as source:
            source.seek(tensor.offset)
            for begin in range(0, rows, step):
                read = np.fromfile(source, np.uint8, min(step, rows - begin) * width * item)
                yield read.reshape(-1, width * item)[:, first * item : (first + count) * item].tobytes()

    return Entry(tensor.name, tensor.dtype, (rows, count), data)


def _groups(tensor: StoredTensor, tiles: StoredTensor, rank: int, ranks: int) -> Entry:
    """Return the scales or zero points of the columns that ``rank`` holds of ``tiles``."""
    values_per_byte = 1 if ".int8." in tiles.name or _FLOAT8 in tiles.name else 2
    size, inner = int(tiles.name.rpartition(_TILES)[2]), values_per_byte * tiles.shape[1] // ranks
    count = inner // size
    stored = count if _FLOAT8 in tiles.name else scales_of_output(inner, size)
    zeros = tensor.name.endswith(".zeros")

    def data() -> Iterator[bytes]:
        values = unpacked(read_values(tensor)) if zeros else read_values(tensor)
        part = values[:, rank * count : (rank + 1) * count]
        part = np.pad(part, [(0, 0), (0, stored - count)])
        yield (nibbles(part) if zeros else part).tobytes()

    return Entry(tensor.name, tensor.dtype, (tensor.shape[0], stored // 2 if zeros else stored), data)
