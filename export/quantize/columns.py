"""Write the columns of the matrices that a rank of a tensor-parallel target multiplies its part of the inputs by."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tandemrt.engines.bundle.manifest import COLUMNS
from tandemrt.export.quantize.writer import Entry, Progress, write_safetensors
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor, read_header
from tandemrt.export.read.shard import Shard, columns_of

_STEP = 1 << 24  # bytes of a matrix that are read at a time


def write_shards(
    checkpoint: Checkpoint, folder: Path, ranks: int, progress: Progress | None = None
) -> tuple[Shard, ...]:
    """Write ``columns.RANK.safetensors`` for every rank into ``folder`` and return the shards, in their order.

    ``checkpoint`` has the names of the graph.
    """
    wanted = [tensor for name, tensor in sorted(checkpoint.tensors.items()) if Shard.is_split_by_inputs(name)]
    shards = []
    for rank in range(ranks):
        file = folder / f"{COLUMNS}{rank}.safetensors"
        write_safetensors(file, [_part(tensor, rank, ranks) for tensor in wanted], progress=progress)
        shards.append(Shard(rank, ranks, read_header(file)))
    return tuple(shards)


def _part(tensor: StoredTensor, rank: int, ranks: int) -> Entry:
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
