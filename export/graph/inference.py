"""Shape inference of single standard nodes by ONNX, with a cache for equal nodes of all graphs."""

from collections.abc import Hashable
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

Dims: TypeAlias = tuple[int | str | None, ...]
Typed: TypeAlias = tuple[ir.DataType, Dims | None]

# A shape depends on no longer constant. Longer ones, such as rotary tables, would stay in the cache.
_MAX_CONSTANT = 64

_PLAIN = {getattr(ir.AttributeType, kind + plural) for kind in ("INT", "FLOAT", "STRING") for plural in ("", "S")}

# Layers, and the target and its draft, repeat the same nodes with other names, so most results are cached.
_KNOWN: dict[Hashable, tuple[Typed, ...]] = {}


def infer(node: ir.Node, opset: int) -> tuple[Typed, ...]:
    """Return dtype and shape of each output. Raises ONNX's own exception if the inputs do not fit the operator."""
    key = _key(node, opset)
    if key is None:
        return _inferred(node, opset)
    types = _KNOWN.get(key)
    if types is None:
        types = _KNOWN[key] = _inferred(node, opset)
    return types


def _inferred(node: ir.Node, opset: int) -> tuple[Typed, ...]:
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    inputs = [value for value in node.inputs if value is not None]
    types = {str(value.name): _type_proto(value) for value in inputs}
    data = {str(value.name): ir.to_proto(constant) for value in inputs if (constant := _constant(value)) is not None}
    imports = [onnx.helper.make_opsetid("", opset)]
    protos = onnx.shape_inference.infer_node_outputs(schema, ir.to_proto(node), types, data, opset_imports=imports)
    return tuple(_typed(protos[str(value.name)]) for value in node.outputs)


def _key(node: ir.Node, opset: int) -> Hashable | None:
    """Return the cache key, all inputs of the inference, or None if an attribute is a tensor or a graph."""
    if not all(attribute.type in _PLAIN for attribute in node.attributes.values()):
        return None
    attributes = tuple((name, _plain(attribute.value)) for name, attribute in sorted(node.attributes.items()))
    inputs = tuple(None if value is None else _of(value) for value in node.inputs)
    return opset, node.op_type, attributes, inputs, len(node.outputs)


def _of(value: ir.Value) -> Hashable:
    shape = None if value.shape is None else tuple(d if isinstance(d, int) else d.value for d in value.shape.dims)
    constant = _constant(value)
    return value.dtype, shape, None if constant is None else constant.tobytes()


def _constant(value: ir.Value) -> ir.Tensor | None:
    constant = value.const_value
    return constant if isinstance(constant, ir.Tensor) and constant.size <= _MAX_CONSTANT else None


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _type_proto(value: ir.Value) -> onnx.TypeProto:
    assert value.dtype is not None, f"{value.name} has no dtype"
    shape = None if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape.dims]
    return onnx.helper.make_tensor_type_proto(int(value.dtype), shape)


def _typed(proto: onnx.TypeProto) -> Typed:
    tensor_type = proto.tensor_type
    dims = tuple(_dim(dim) for dim in tensor_type.shape.dim) if tensor_type.HasField("shape") else None
    return ir.DataType(tensor_type.elem_type), dims


def _dim(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    return int(dim.dim_value) if dim.HasField("dim_value") else str(dim.dim_param) or None
