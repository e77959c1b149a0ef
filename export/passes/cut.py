"""Cut a graph at the project's operators into steps: ONNX subgraphs, and the operators between them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

import onnx_ir as ir

from tandemrt.engines.contract import decoder
from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.decoder import Decoder
from tandemrt.engines.contract.dtypes import from_onnx
from tandemrt.engines.validation.errors import InternalError
from tandemrt.plugins.operators.constants import DOMAIN

CONSTANTS, SUBGRAPH = "constants.onnx", "subgraph.{:02}.onnx"


def cut(model: ir.Model, folder: str = "", prefix: str = "") -> tuple[dict[str, ir.Model], Decoder]:
    """Return the subgraphs by file, in ``folder`` of the bundle, and the decoder that runs them.

    ``prefix`` begins the names of their files. Requires a graph with nodes in order and no nested graphs. Values
    between subgraphs need a dtype, and a shape in integers and symbols of the graph's inputs. ``model`` is not changed,
    and no weight is read or copied: subgraphs point to the same files. A node belongs to the subgraph of its first
    reader. A node that depends on no input (a packed weight, a cast) belongs to every subgraph that reads it.
    Raises InternalError if the graph has no operator of the project.
    """
    cutter = _Cutter(model.graph)
    if not cutter.operators:
        raise InternalError(f"graph {model.graph.name} must have nodes of the domain {DOMAIN} to be cut at")
    return cutter.cut(PurePosixPath(folder), prefix, model)


class _Cutter:
    """Assigns nodes to stages. Stage i holds the nodes before operator i; the last stage those after all operators."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self.operators = [node for node in graph if node.domain == DOMAIN]
        self._fixed = _independent(graph)
        self._stage = self._stages()

    def cut(self, folder: PurePosixPath, prefix: str, model: ir.Model) -> tuple[dict[str, ir.Model], Decoder]:
        read = _unique(value for node in self.operators for value in node.inputs if value in self._fixed)
        files: dict[str, ir.Model] = {}
        values, steps, constants = list(read), list[decoder.Step](), None
        if read:
            constants = decoder.Subgraph(file=str(folder / f"{prefix}{CONSTANTS}"), inputs=(), outputs=_names(read))
            files[constants.file] = self._model("constants", model, [], read)
        for stage in range(len(self.operators) + 1):
            inputs, outputs = self._passed(stage)
            if outputs:
                file = str(folder / f"{prefix}{SUBGRAPH.format(len(files) - bool(read))}")
                steps.append(decoder.Subgraph(file=file, inputs=_names(inputs), outputs=_names(outputs)))
                files[file] = self._model(PurePosixPath(file).stem, model, inputs, outputs)
                values += outputs
            if stage < len(self.operators):
                steps.append(_operator(self.operators[stage]))
                values += self.operators[stage].outputs
        named = {*self._graph.inputs, *self._graph.outputs}
        between = tuple(_binding(value) for value in values if value not in named)
        return files, Decoder(constants=constants, steps=tuple(steps), values=between)

    def _stages(self) -> dict[ir.Node, int]:
        """Return the stage of every node whose values are used: the stage of its first reader."""
        stages = {node: index for index, node in enumerate(self.operators)}
        last, results = len(self.operators), set(self._graph.outputs)
        for node in reversed(self._graph):
            if node in stages:
                continue
            readers = [stages[use.node] for value in node.outputs for use in value.uses() if use.node in stages]
            if results & set(node.outputs):
                readers.append(last)
            if readers:
                stages[node] = min(readers)
        return stages

    def _passed(self, stage: int) -> tuple[list[ir.Value], list[ir.Value]]:
        """Return the inputs and the outputs of the subgraph of ``stage``, in the graph's order."""
        inside = [node for node in self._nodes(stage) if not self._is_fixed(node)]
        read = {value for node in inside for value in node.inputs if value is not None and value not in self._fixed}
        computed = [value for node in inside for value in node.outputs]
        known = [*self._graph.inputs, *(value for node in self._graph for value in node.outputs)]
        results, within = set(self._graph.outputs), set(inside)
        outputs = [v for v in computed if v in results or any(use.node not in within for use in v.uses())]
        return [value for value in known if value in read and value not in computed], outputs

    def _nodes(self, stage: int) -> list[ir.Node]:
        return [node for node in self._graph if self._stage.get(node) == stage and node.domain != DOMAIN]

    def _is_fixed(self, node: ir.Node) -> bool:
        return all(value in self._fixed for value in node.outputs)

    def _model(self, name: str, model: ir.Model, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> ir.Model:
        """Return a model of the nodes between ``inputs`` and ``outputs``."""
        copies = {value: _copy(value) for value in inputs}
        nodes: list[ir.Node] = []
        initializers: dict[str, ir.Value] = {}
        for node in self._nodes_between(inputs, outputs):
            for value in node.inputs:
                if value is not None and value not in copies:  # other values come from an earlier node
                    copies[value] = initializers[str(value.name)] = _copy(value)
            copies |= {value: _copy(value) for value in node.outputs}
            nodes.append(_clone(node, copies))
        for value in outputs:
            if value.producer() is None:  # an initializer cannot be an output by itself
                stored = initializers[f"{value.name}.stored"] = _copy(value, f"{value.name}.stored")
                copies[value] = _copy(value)
                copies[value].const_value = None
                nodes.append(ir.node("Identity", [stored], outputs=[copies[value]], name=value.name))
        imports = {d: v for d, v in model.opset_imports.items() if d in {"", *(node.domain for node in nodes)}}
        graph = ir.Graph(
            [copies[value] for value in inputs],
            [copies[value] for value in outputs],
            nodes=nodes,
            initializers=list(initializers.values()),
            opset_imports=imports,
            name=name,
        )
        return ir.Model(graph, ir_version=model.ir_version, producer_name=model.producer_name)

    def _nodes_between(self, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> list[ir.Node]:
        """Return the nodes between ``inputs`` and ``outputs``, in the graph's order."""
        stops, wanted, kept = set(inputs), set(outputs), []
        for node in reversed(self._graph):
            if (wanted - stops) & set(node.outputs):
                kept.append(node)
                wanted |= {value for value in node.inputs if value is not None}
        return kept[::-1]


def _independent(graph: ir.Graph) -> set[ir.Value]:
    """Return the values that depend on no graph input."""
    fixed = set(graph.initializers.values())
    for node in graph:
        if node.domain != DOMAIN and all(value is None or value in fixed for value in node.inputs):
            fixed |= set(node.outputs)
    return fixed


def _operator(node: ir.Node) -> decoder.Operator:
    return decoder.Operator(
        name=node.op_type,
        inputs=tuple(None if value is None else str(value.name) for value in node.inputs),
        outputs=_names(node.outputs),
        attributes={name: attribute.value for name, attribute in node.attributes.items()},
    )


def _binding(value: ir.Value) -> Binding:
    dims = [] if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape.dims]
    if value.shape is None or value.dtype is None or None in dims:
        raise InternalError(f"{value} lies between subgraphs and must have a dtype and a shape; name its dimensions")
    return Binding(str(value.name), from_onnx(int(value.dtype)), tuple(dim for dim in dims if dim is not None))


def _copy(value: ir.Value, name: str | None = None) -> ir.Value:
    return ir.Value(name=name or value.name, shape=value.shape, type=value.type, const_value=value.const_value)


def _clone(node: ir.Node, copies: Mapping[ir.Value, ir.Value]) -> ir.Node:
    return ir.Node(
        node.domain,
        node.op_type,
        [None if value is None else copies[value] for value in node.inputs],
        node.attributes.values(),
        overload=node.overload,
        outputs=[copies[value] for value in node.outputs],
        name=node.name,
    )


def _names(values: Iterable[ir.Value]) -> tuple[str, ...]:
    return tuple(str(value.name) for value in values)


def _unique(values: Iterable[ir.Value | None]) -> list[ir.Value]:
    return list(dict.fromkeys(value for value in values if value is not None))
