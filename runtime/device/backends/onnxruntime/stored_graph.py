"""Graphs in files of a bundle, and where their weights lie.

They are read as protobuf messages: the import of onnx_ir takes half a second, and no start needs more of it.
"""

from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import onnx

from tandemrt.engines.contract.dtypes import BYTES, from_onnx


class StoredWeight(NamedTuple):
    """A weight in a file: its ``dtype`` by name, and its ``offset`` in bytes."""

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BYTES[self.dtype]


def load_graph(path: Path) -> onnx.ModelProto:
    """Read a graph; its weights stay in their files."""
    model = onnx.ModelProto()
    model.ParseFromString(path.read_bytes())
    return model


def stored_tensor(tensor: onnx.TensorProto, folder: Path) -> StoredWeight | None:
    """Return where the weight lies; None if the graph in ``folder`` holds it itself."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return None
    entries = {entry.key: entry.value for entry in tensor.external_data}
    place = folder / entries["location"], int(entries.get("offset", 0))
    return StoredWeight(*place, from_onnx(tensor.data_type), tuple(tensor.dims))


def values(graph: onnx.GraphProto) -> Iterator[str]:
    """The names of a graph's inputs, its weights, and what its nodes compute, in the order of the file."""
    yield from (each.name for each in graph.input)
    yield from (each.name for each in graph.initializer)
    for node in graph.node:
        yield from filter(None, node.output)


def keep_outputs(graph: onnx.GraphProto, names: Iterable[str]) -> None:
    """Remove the other outputs of a graph without nested graphs, and what only they need."""
    needed = set(names)
    for at in reversed(range(len(graph.output))):
        if graph.output[at].name not in needed:
            del graph.output[at]
    for at in reversed(range(len(graph.node))):
        if needed.isdisjoint(graph.node[at].output):
            del graph.node[at]
        else:
            needed.update(graph.node[at].input)
    for at in reversed(range(len(graph.initializer))):
        if graph.initializer[at].name not in needed:
            del graph.initializer[at]
