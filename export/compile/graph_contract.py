"""The bindings of a saved graph, compared with its contract."""

from pathlib import Path

import onnx

from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.contract.dtypes import from_onnx
from tandemrt.engines.validation.errors import InternalError


def differences(path: Path, expected: Contract) -> list[str]:
    """Return the differences between the bindings of a graph file and ``expected``, one line each. Weights are not
    read.
    """
    graph = onnx.load(path, load_external_data=False).graph
    # The runtime binds outputs to the memory of inputs; a graph file has no such field.
    return expected.differences(Contract(_bindings(graph.input), _bindings(graph.output), expected.aliases))


def require_contract(path: Path, expected: Contract) -> None:
    """Raise InternalError unless the bindings of a graph file are ``expected``."""
    lines = differences(path, expected)
    if lines:
        raise InternalError(f"{path.name} must have the bindings of its contract: {'; '.join(lines)}")


def _bindings(values: list[onnx.ValueInfoProto]) -> tuple[Binding, ...]:
    return tuple(_binding(value) for value in values)


def _binding(value: onnx.ValueInfoProto) -> Binding:
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in tensor.shape.dim)
    return Binding(value.name, from_onnx(tensor.elem_type), shape)
