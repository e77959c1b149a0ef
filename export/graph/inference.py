"""Shape inference of single standard nodes by ONNX, with a cache for equal nodes."""

from collections.abc import Hashable
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

Dims: TypeAlias = tuple[int | str | None, ...]
Typed: TypeAlias = tuple[ir.DataType, Dims | None]


class Inference:
    """Infers dtypes and shapes of nodes. Layers repeat the same nodes with other names, so most results are cached."""

    def __init__(self, opset: int) -> None:
        self._opset = opset
        self._known: dict[Hashable, tuple[Typed, ...]] = {}

    def __call__(self, node: ir.Node) -> tuple[Typed, ...]:
        """Return dtype and shape of each output. Raises ONNX's own exception if the inputs do not fit the operator."""
        key = _key(node)
        if key is not None and key in self._known:
            return self._known[key]
        found = self._inferred(node)
        if key is not None:
            self._known[key] = found
        return found

    def _inferred(self, node: ir.Node) -> tuple[Typed, ...]:
        schema = onnx.defs.get_schema(node.op_type, self._opset, "")
        given = [value for value in node.inputs if value is not None]
        types = {str(value.name): _type_proto(value) for value in given}
        data = {str(v.name): ir.to_proto(v.const_value) for v in given if isinstance(v.const_value, ir.Tensor)}
        imports = [onnx.helper.make_opsetid("", self._opset)]
        found = onnx.shape_inference.infer_node_outputs(schema, ir.to_proto(node), types, data, opset_imports=imports)
        return tuple(_typed(found[str(value.name)]) for value in node.outputs)


def _key(node: ir.Node) -> Hashable | None:
    """Return the cache key, all inputs of the inference, or None if a part cannot be hashed."""
    attributes = tuple((name, _plain(attribute.value)) for name, attribute in sorted(node.attributes.items()))
    inputs = tuple(None if value is None else _of(value) for value in node.inputs)
    key = (node.op_type, attributes, inputs, len(node.outputs))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _of(value: ir.Value) -> Hashable:
    shape = None if value.shape is None else tuple(d if isinstance(d, int) else d.value for d in value.shape.dims)
    data = value.const_value.tobytes() if isinstance(value.const_value, ir.Tensor) else None
    return value.dtype, shape, data


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _type_proto(value: ir.Value) -> onnx.TypeProto:
    assert value.dtype is not None, f"{value.name} has no dtype"
    shape = None if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape.dims]
    return onnx.helper.make_tensor_type_proto(int(value.dtype), shape)


def _typed(proto: onnx.TypeProto) -> Typed:
    found = proto.tensor_type
    dims = tuple(_dim(dim) for dim in found.shape.dim) if found.HasField("shape") else None
    return ir.DataType(found.elem_type), dims


def _dim(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    return int(dim.dim_value) if dim.HasField("dim_value") else str(dim.dim_param) or None
