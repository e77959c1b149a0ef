"""A thin layer over onnx-ir: write a graph as a sequence of expressions.

ONNX's shape inference types every new node, so a wrong dtype or shape raises at the line that appends the node. The
layers of a decoder (export/model/layers.py) are functions that take a builder and values and return values.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import onnx_ir as ir

from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.dtypes import ONNX
from tandemrt.engines.validation.errors import InternalError
from tandemrt.export.graph.inference import infer
from tandemrt.plugins.operators.constants import DOMAIN

OPSET = 24  # the first opset with Attention over a padded cache and with TensorScatter
IR_VERSION = 11
LIBRARY = "com.microsoft"  # the domain of onnxruntime's own operators, for CPU and CUDA
Made = TypeVar("Made")
Attribute: TypeAlias = int | float | str | Sequence[int] | Sequence[float] | ir.Graph | ir.TensorProtocol

DTYPES = {name: ir.DataType(element_type) for name, element_type in ONNX.items()}


class GraphBuilder:
    """Collects the inputs, initializers and nodes of one graph; ``model`` closes it.

    The builder makes all names: a node is named by its scope and operator, as in ``layers.3/attention/MatMul_2``.
    """

    def __init__(self, name: str, opset: int = OPSET) -> None:
        self.name = name
        self.opsets = {"": opset}
        self.inputs: list[ir.Value] = []
        self.outputs: list[ir.Value] = []
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        # What ``once`` made, in this graph and the nested ones being written.
        self._made: list[dict[Hashable, Any]] = [{}]
        self._functions: dict[ir.OperatorIdentifier, ir.Function] = {}
        self._scope: list[str] = []
        self._counts: dict[str, int] = {}

    def op(
        self, op_type: str, *inputs: ir.Value | None, domain: str = "", version: int = 1, **attributes: Attribute
    ) -> ir.Value:
        """Append a node with one output and return that output. ``None`` omits an optional input.

        Raises InternalError, naming the node, when ONNX finds that the inputs do not fit the operator. A node of
        another ``domain`` has no schema, so its output stays untyped.
        """
        return self.ops(op_type, *inputs, outputs=1, domain=domain, version=version, **attributes)[0]

    def ops(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        outputs: int,
        domain: str = "",
        version: int = 1,
        **attributes: Attribute,
    ) -> tuple[ir.Value, ...]:
        """Append a node with several outputs; otherwise like ``op``."""
        if domain:
            self.opsets.setdefault(domain, version)
        name = self._fresh(op_type)
        results = [ir.Value(name=name if i == 0 else f"{name}.{i}") for i in range(outputs)]
        node = ir.node(op_type, inputs, attributes, domain=domain, outputs=results, name=name)
        self.nodes.append(node)
        if not domain:
            self._infer(node)
        return tuple(results)

    def custom(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        domain: str,
        outputs: Sequence[tuple[str, Sequence[int | str]] | None],
        **attributes: Attribute,
    ) -> tuple[ir.Value, ...]:
        """Append a node of another domain. The caller types its outputs with dtype and shape.

        None stands for an unused output, which is not returned.
        """
        results = self.ops(op_type, *inputs, outputs=len(outputs), domain=domain, version=1, **attributes)
        for value, typed in zip(results, outputs, strict=True):
            if typed is None:
                value.name = ""
            else:
                value.dtype, value.shape = DTYPES[typed[0]], ir.Shape(typed[1])
        return tuple(value for value, typed in zip(results, outputs, strict=True) if typed is not None)

    def cast(self, value: ir.Value, dtype: str) -> ir.Value:
        """Return ``value`` in ``dtype``; the value itself if it has that dtype."""
        wanted = DTYPES[dtype]
        return value if value.dtype == wanted else self.op("Cast", value, to=int(wanted))

    def constant(self, values: object, dtype: str = "int64") -> ir.Value:
        """Return a small initializer that is stored in the graph file. Equal constants share one initializer."""
        array = np.asarray(values, dtype=DTYPES[dtype].numpy())
        key = (dtype, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"constant_{len(self._constants)}"
            self._constants[key] = self._initializer(ir.tensor(array, dtype=DTYPES[dtype], name=name))
        return self._constants[key]

    def external(
        self, name: str, dtype: str, shape: Sequence[int], location: str, offset: int, nbytes: int
    ) -> ir.Value:
        """Return an initializer whose bytes stay in another file: ``nbytes`` at ``offset`` of the file ``location``.

        ``location`` is relative to the folder of the graph file. The same name returns the same value again.
        """
        if name in self.initializers:
            return self.initializers[name]
        dims = ir.Shape(shape)
        return self._initializer(ir.ExternalTensor(location, offset, nbytes, DTYPES[dtype], shape=dims, name=name))

    def input(self, binding: Binding) -> ir.Value:
        """Declare the graph input of a binding of the contract."""
        value = ir.val(binding.name, dtype=DTYPES[binding.dtype], shape=binding.shape)
        self.inputs.append(value)
        return value

    def output(self, binding: Binding, value: ir.Value) -> None:
        """Make ``value`` the graph output of ``binding``. Raises InternalError for another dtype or shape."""
        dims = [] if value.shape is None else list(value.shape.dims)
        agree = len(dims) == len(binding.shape) and all(
            mine == theirs
            for mine, theirs in zip(binding.shape, dims, strict=True)
            if isinstance(mine, int) and isinstance(theirs, int)
        )
        if value.dtype != DTYPES[binding.dtype] or not agree:
            raise InternalError(f"graph {self.name}: output should be {binding}, but {value} was built")
        value.name = binding.name
        value.shape = ir.Shape(binding.shape)
        self.outputs.append(value)

    def branch(
        self,
        condition: ir.Value,
        then: Callable[[], Sequence[ir.Value]],
        otherwise: Callable[[], Sequence[ir.Value]],
    ) -> tuple[ir.Value, ...]:
        """Append an ``If``: one of two nested graphs runs. Both must return outputs of the same dtypes and shapes.

        Each may read every value made so far, and must make the values that it returns. Constants and weights used
        inside belong to the outer graph.
        """
        name = self._fresh("If")
        graphs = [self._subgraph(f"{name}.{kind}", write) for kind, write in (("then", then), ("else", otherwise))]
        results = [ir.Value(name=f"{name}.{i}", type=v.type, shape=v.shape) for i, v in enumerate(graphs[0].outputs)]
        attributes = {"then_branch": graphs[0], "else_branch": graphs[1]}
        self.nodes.append(ir.node("If", [condition], attributes, outputs=results, name=name))
        return tuple(results)

    def loop(self, count: ir.Value, step: Callable[[ir.Value], ir.Value]) -> ir.Value:
        """Append a ``Loop``: return the results of ``step`` for 0, 1, … below ``count``, stacked in a first dimension.

        ``step`` may read every value made so far.
        """
        name = self._fresh("Loop")
        at = ir.Value(name=f"{name}.at", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
        go = ir.Value(name=f"{name}.go", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
        body = self._subgraph(f"{name}.body", lambda: (self.op("Identity", go), step(at)), inputs=[at, go])
        step_result = body.outputs[1]
        result = ir.Value(name=name, type=step_result.type, shape=ir.Shape(["steps", *dims_of(step_result)]))
        self.nodes.append(ir.node("Loop", [count, None], {"body": body}, outputs=[result], name=name))
        return result

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return what ``make`` returned when it was first called for ``key`` in this graph or a graph around it."""
        for values in self._made:
            if key in values:
                return cast("Made", values[key])
        return cast("Made", self._made[-1].setdefault(key, make()))

    def _subgraph(
        self, name: str, write: Callable[[], Sequence[ir.Value]], inputs: Sequence[ir.Value] = ()
    ) -> ir.Graph:
        outer, self.nodes = self.nodes, []
        self._made.append({})
        try:
            outputs = write()
        finally:
            nodes, self.nodes = self.nodes, outer
            self._made.pop()
        return ir.Graph(inputs, outputs, nodes=nodes, name=name)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of all nodes appended inside, for readability and error messages."""
        self._scope.append(name)
        yield
        self._scope.pop()

    def add_function(self, name: str, build: Callable[[], ir.Function], overload: str = "") -> None:
        """Add the body of an operator of the project, which ``build`` returns, for the first of its nodes."""
        if (identifier := (DOMAIN, name, overload)) not in self._functions:
            self._functions[identifier] = build()

    def model(self, functions: Sequence[ir.Function] = ()) -> ir.Model:
        """Close the graph. ``functions`` are further bodies for nodes of other domains."""
        graph = ir.Graph(
            self.inputs,
            self.outputs,
            nodes=self.nodes,
            initializers=list(self.initializers.values()),
            opset_imports=self.opsets,
            name=self.name,
        )
        return ir.Model(
            graph, ir_version=IR_VERSION, producer_name="tandemrt", functions=[*functions, *self._functions.values()]
        )

    def _initializer(self, tensor: ir.TensorProtocol) -> ir.Value:
        value = ir.Value(name=tensor.name, const_value=tensor, shape=tensor.shape, type=ir.TensorType(tensor.dtype))
        self.initializers[str(tensor.name)] = value
        return value

    def _fresh(self, op_type: str) -> str:
        stem = "/".join([*self._scope, op_type])
        count = self._counts[stem] = self._counts.get(stem, -1) + 1
        return f"{stem}_{count}" if count else stem

    def _infer(self, node: ir.Node) -> None:
        try:
            types = infer(node, self.opsets[""])
        except Exception as error:
            shown = ", ".join(str(value) for value in node.inputs if value is not None)
            raise InternalError(
                f"graph {self.name}: node {node.name} does not fit its inputs ({shown}): {error}"
            ) from error
        for value, (dtype, dims) in zip(node.outputs, types, strict=True):
            value.dtype = dtype
            value.shape = None if dims is None else ir.Shape(dims)


def save_model(model: ir.Model, path: Path) -> None:
    """Write the graph file. External initializers keep their locations; no weight is read or copied."""
    path.write_bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def dims_of(value: ir.Value) -> tuple[int | str, ...]:
    """Return the shape of ``value`` in integers and symbols. The shape must be set."""
    assert value.shape is not None, f"{value.name} has no shape"
    return tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape.dims)


def without_trailing_none(inputs: Sequence[ir.Value | None]) -> list[ir.Value | None]:
    """Return the inputs of a node without omitted ones at the end."""
    kept = list(inputs)
    while kept[-1] is None:
        kept.pop()
    return kept


def width_of(value: ir.Value) -> int:
    """Return the last dimension of ``value``, which must be an integer."""
    return int(dims_of(value)[-1])
