"""Write the body of an ONNX function as expressions.

``Body`` collects nodes; ``BodyValue`` wraps a value so that ``a + b``, ``a >= b``, ``a & b`` append the standard
operator. Constants are numpy scalars or arrays, and the node gets their dtype: there is no promotion.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.plugins.operators.constants import DOMAIN

OPSET = 24
FLOAT32, FLOAT64 = ir.DataType.FLOAT, ir.DataType.DOUBLE
INT64, UINT8, BOOL = ir.DataType.INT64, ir.DataType.UINT8, ir.DataType.BOOL
UINT32, UINT64 = ir.DataType.UINT32, ir.DataType.UINT64


class BodyValue:
    """A value inside a body. Shapes broadcast as in numpy."""

    def __init__(self, body: "Body", value: ir.Value) -> None:
        self.body = body
        self.value = value

    def __add__(self, other: Any) -> "BodyValue":
        return self.body.op("Add", self, other)

    def __sub__(self, other: Any) -> "BodyValue":
        return self.body.op("Sub", self, other)

    def __mul__(self, other: Any) -> "BodyValue":
        return self.body.op("Mul", self, other)

    def __truediv__(self, other: Any) -> "BodyValue":
        return self.body.op("Div", self, other)

    def __neg__(self) -> "BodyValue":
        return self.body.op("Neg", self)

    def __lt__(self, other: Any) -> "BodyValue":
        return self.body.op("Less", self, other)

    def __gt__(self, other: Any) -> "BodyValue":
        return self.body.op("Greater", self, other)

    def __ge__(self, other: Any) -> "BodyValue":
        return self.body.op("GreaterOrEqual", self, other)

    def equals(self, other: Any) -> "BodyValue":
        return self.body.op("Equal", self, other)

    def __and__(self, other: Any) -> "BodyValue":
        return self.body.op("And", self, other)

    def __or__(self, other: Any) -> "BodyValue":
        return self.body.op("Or", self, other)

    def __invert__(self) -> "BodyValue":
        return self.body.op("Not", self)

    def __rshift__(self, bits: Any) -> "BodyValue":
        return self.body.op("BitShift", self, bits, direction="RIGHT")

    def bits_and(self, other: Any) -> "BodyValue":
        return self.body.op("BitwiseAnd", self, other)

    def bits_xor(self, other: Any) -> "BodyValue":
        return self.body.op("BitwiseXor", self, other)

    def cast(self, dtype: ir.DataType) -> "BodyValue":
        return self.body.op("Cast", self, to=int(dtype))

    def expand_dims(self, *axes: int) -> "BodyValue":
        return self.body.op("Unsqueeze", self, np.array(axes, np.int64))

    def squeeze(self, axis: int) -> "BodyValue":
        return self.body.op("Squeeze", self, np.array([axis], np.int64))

    def first(self, size: Any, axis: int) -> "BodyValue":
        """Return the first ``size`` (int64 [1]) entries along an axis."""
        return self.body.op("Slice", self, np.array([0], np.int64), size, np.array([axis], np.int64))

    def size(self, axis: int) -> "BodyValue":
        """Return the length of an axis, int64 [1]."""
        end: dict[str, Any] = {} if axis == -1 else {"end": axis + 1}
        return self.body.op("Shape", self, start=axis, **end)

    def any(self) -> "BodyValue":
        """Return whether any element of a bool tensor is true, bool []."""
        return self.body.op("ReduceMax", self.cast(FLOAT32), keepdims=0) > np.float32(0)

    def max_last(self, keepdims: bool = True) -> "BodyValue":
        return self.body.op("ReduceMax", self, np.array([-1], np.int64), keepdims=int(keepdims))

    def min_last(self) -> "BodyValue":
        return self.body.op("ReduceMin", self, np.array([-1], np.int64), keepdims=1)

    def sum_last(self) -> "BodyValue":
        return self.body.op("ReduceSum", self, np.array([-1], np.int64), keepdims=1)

    def argmax_last(self) -> "BodyValue":
        """Return the index of the largest entry of the last axis, the first of equal ones; int64."""
        return self.body.op("ArgMax", self, axis=-1, keepdims=0)

    def exp(self) -> "BodyValue":
        """Return the exponential in float64."""
        return self.body.op("Exp", self.cast(FLOAT64))

    def log(self) -> "BodyValue":
        return self.body.op("Log", self)

    def at_rows(self, rows: "BodyValue") -> "BodyValue":
        """Return ``self[b, rows[b]]`` for every b: [batch, rows, …] and [batch] to [batch, …]."""
        return self.body.op("GatherND", self, rows.expand_dims(-1), batch_dims=1)

    def at_last(self, indices: "BodyValue") -> "BodyValue":
        """Return ``take_along_axis`` on the last axis."""
        return self.body.op("GatherElements", self, indices, axis=-1)


class Body:
    """One function body: named inputs, nodes in order, named outputs."""

    def __init__(self, name: str, inputs: Sequence[str]) -> None:
        self.name = name
        self.inputs = [BodyValue(self, ir.Value(name=each)) for each in inputs]
        self._nodes: list[ir.Node] = []
        self._attributes: list[ir.Attr] = []
        self._count = 0

    @classmethod
    def of(cls, operator: str, *, without: Sequence[str] = ()) -> "Body":
        """Begin the body of an operator of the project, with its inputs except the optional ones in ``without``."""
        return cls(operator, [b.name for b in SCHEMAS[operator].inputs if b.name not in without])

    @classmethod
    def up_to(cls, operator: str, present: Collection[str]) -> "Body":
        """Begin the body of an operator with its inputs up to the last optional one in ``present``.

        A node may leave out optional inputs in between; the body must not read these.
        """
        schema = SCHEMAS[operator]
        names = [binding.name for binding in schema.inputs]
        while names[-1] in schema.optional and names[-1] not in present:
            names.pop()
        return cls(operator, names)

    def __getitem__(self, name: str) -> "BodyValue":
        """Return the input ``name``."""
        return next(value for value in self.inputs if value.value.name == name)

    def attribute(self, name: str, kind: ir.AttributeType, target: str) -> ir.Attr:
        """Declare an attribute of the function; the result gives its value to attribute ``target`` of a node."""
        if name not in (each.name for each in self._attributes):
            self._attributes.append(ir.Attr(name, kind, None))
        return ir.RefAttr(target, name, kind)

    def integer(self, name: str) -> BodyValue:
        """Declare an integer attribute of the function and return its value, int64 [1]."""
        return self.op("Constant", value_int=self.attribute(name, ir.AttributeType.INT, "value_int")).expand_dims(0)

    def number(self, name: str) -> BodyValue:
        """Declare a float attribute of the function and return its value, float32 []."""
        return self.op("Constant", value_float=self.attribute(name, ir.AttributeType.FLOAT, "value_float"))

    def function(self, overload: str = "", /, **outputs: BodyValue) -> ir.Function:
        """Finish the body. Keywords name the outputs; ``overload`` is ONNX's, to tell functions of one name apart."""
        # Add no Identity after a node: it would copy an output that is updated in place.
        tensors = [tensor if tensor.value.producer() else self.op("Identity", tensor) for tensor in outputs.values()]
        values = [tensor.value for tensor in tensors]
        for value, name in zip(values, outputs, strict=True):
            value.name = name
        inputs = [tensor.value for tensor in self.inputs]
        imports = {"": OPSET, DOMAIN: 1}
        graph = ir.Graph(inputs, values, nodes=self._nodes, opset_imports=imports, name=self.name)
        return ir.Function(DOMAIN, self.name, overload, graph=graph, attributes=self._attributes)

    def op(self, op_type: str, *operands: Any, domain: str = "", **attributes: Any) -> BodyValue:
        """Append a node with one output."""
        return self.ops(op_type, *operands, outputs=1, domain=domain, **attributes)[0]

    def ops(self, op_type: str, *operands: Any, outputs: int, domain: str = "", **attributes: Any) -> list[BodyValue]:
        """Append a node with several outputs."""
        inputs = [self._value(operand) for operand in operands]
        results = [ir.Value(name=self._fresh()) for _ in range(outputs)]
        self._nodes.append(ir.node(op_type, inputs, attributes, domain=domain, outputs=results))
        return [BodyValue(self, value) for value in results]

    def matmul(self, a: BodyValue, b: BodyValue) -> BodyValue:
        """Return ``a @ b`` with the same bits for a row of ``a`` [..., rows, inner], whatever the other rows are.

        onnxruntime's kernel for a single row rounds differently from the one for several, so a single row gets a second
        one. The order of a sum over ``inner`` may still depend on the number of threads where a thread gets at most 64
        columns of ``b`` and ``inner`` is above 128.
        """
        count = a.size(-2)
        missing = self.op("Max", -count + np.int64(2), np.array([0], np.int64))
        zeros = np.array([0], np.int64)
        padded = self.op("Pad", a, self.concat(zeros, missing, axis=0), np.float32(0), np.array([-2], np.int64))
        return self.op("MatMul", padded, b).first(count, axis=-2)

    def call(self, function: str, *operands: Any) -> BodyValue:
        """Append a call of another function of the domain that has a single output."""
        return self.op(function, *operands, domain=DOMAIN)

    def where(self, condition: BodyValue, yes: Any, no: Any) -> BodyValue:
        return self.op("Where", condition, yes, no)

    def concat(self, *parts: Any, axis: int) -> BodyValue:
        return self.op("Concat", *parts, axis=axis)

    def arange(self, size: BodyValue) -> BodyValue:
        """Return 0, 1, … below ``size`` (int64 [1]); int64."""
        return self.op("Range", np.int64(0), size.squeeze(0), np.int64(1))

    def full(self, shape: BodyValue, value: np.generic) -> BodyValue:
        return self.op("Expand", value, shape)

    def branch(
        self,
        condition: BodyValue,
        then: Callable[[], Sequence[BodyValue]],
        otherwise: Callable[[], Sequence[BodyValue]],
    ) -> list[BodyValue]:
        """``If``: only one of the two bodies runs. Both may use every value made before."""
        graphs = [self._subgraph(write) for write in (then, otherwise)]
        return self.ops("If", condition, outputs=len(graphs[0].outputs), then_branch=graphs[0], else_branch=graphs[1])

    def _subgraph(self, write: Callable[[], Sequence[BodyValue]]) -> ir.Graph:
        outer, self._nodes = self._nodes, []
        outputs = [self.op("Identity", tensor).value for tensor in write()]
        nodes, self._nodes = self._nodes, outer
        return ir.Graph([], outputs, nodes=nodes, name=self._fresh())

    def _value(self, operand: Any) -> ir.Value:
        if isinstance(operand, BodyValue):
            return operand.value
        constant = ir.Value(name=self._fresh())
        # Set the type here: inferring the types of all constants took a fifth of a build.
        value = ir.AttrTensor("value", ir.Tensor(np.asarray(operand)))
        self._nodes.append(ir.Node("", "Constant", [], [value], outputs=[constant]))
        return constant

    def _fresh(self) -> str:
        self._count += 1
        return f"{self.name}_{self._count}"
