"""Graphs that are equal but for the names of their values and their vectors, such as the norms of all layers.

They can share a session: onnxruntime needs a tenth of a second for each, and a decoder has two norms per layer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from tandemrt.engines.contract.dtypes import from_onnx
from tandemrt.engines.validation.errors import BadBundle
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.dtypes import viewed


@dataclass(frozen=True)
class RenamedGraph:
    """``content``: a graph whose vectors are inputs. ``names``: the new names of its inputs and outputs, by old ones.

    ``vectors``: those weights on the device, by new names. Equal graphs have equal ``content``.
    """

    content: bytes
    names: Mapping[str, str]
    vectors: Mapping[str, torch.Tensor]


def renamed_graph(path: Path, device: torch.device) -> RenamedGraph | None:
    """Rename the graph in ``path``; None if it has no weights, or other weights than vectors in files.

    Raises BadBundle if a file of weights is too short.
    """
    model = ir.load(path)
    graph = model.graph
    weights = list(graph.initializers.values())
    if not weights or not all(isinstance(each.const_value, ir.ExternalTensor) for each in weights):
        return None
    if any(each.const_value.shape.rank() != 1 for each in weights if each.const_value is not None):
        return None
    own = [*graph.inputs, *graph.outputs]
    names: dict[str, str] = {}
    for number, value in enumerate(_values(graph)):
        names[str(value.name)] = f"value{number}"
    vectors = {}
    for weight in weights:
        assert isinstance(weight.const_value, ir.ExternalTensor)
        vectors[names[str(weight.name)]] = _read(weight.const_value, device)
        graph.initializers.pop(str(weight.name))
        weight.const_value = None
        graph.inputs.append(weight)
    outside = {str(value.name): names[str(value.name)] for value in own}
    for value in list(_values(graph)):
        value.name = names[str(value.name)]
    for node in graph:
        node.name = None
    graph.name = "shared"
    return RenamedGraph(ir.to_proto(model).SerializeToString(deterministic=True), outside, vectors)


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    """The inputs of a graph, its weights, and what its nodes compute, in the order of the file."""
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from (output for output in node.outputs if output.name)


def _read(stored: ir.ExternalTensor, device: torch.device) -> torch.Tensor:
    values = np.fromfile(stored.path, np.uint8, stored.nbytes, offset=stored.offset or 0)
    if values.size < stored.nbytes:
        raise BadBundle(f"{stored.path}: is shorter than its graph requires; build the bundle again")
    dtype = getattr(torch, from_onnx(int(stored.dtype)))
    read: torch.Tensor = viewed(torch.from_numpy(values).to(device), dtype)
    return read
