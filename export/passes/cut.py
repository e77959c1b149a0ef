"""Cut a paged decoder at its kernels: the pieces that onnxruntime runs, and the constants that the kernels read."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import onnx
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

from tandemrt.engines import segments
from tandemrt.engines.errors import InternalError
from tandemrt.engines.manifest import Segments
from tandemrt.export.model.builder import IR_VERSION, LIBRARY
from tandemrt.plugins.operators import DOMAIN


def cut(path: Path, folder: Path) -> Segments:
    """Write the pieces of the decoder at ``path`` beside it; return where they are, relative to ``folder``.

    What depends on no input and is read in several pieces (a packed weight, a cast) is in each of them. No weight is
    read or copied: the pieces point where the whole graph points.
    """
    whole = onnx.load(path, load_external_data=False)
    attention = [node for node in whole.graph.node if (node.domain, node.op_type) == (DOMAIN, "window_attention")]
    if not attention:
        raise InternalError(f"{path.name} must have window_attention nodes to be cut at; it has none")
    cutter = _Cutter(whole, layers=len(attention))
    files = []
    for piece, outputs in enumerate(_outputs(len(attention))):
        files.append(path.with_name(f"segment.{piece:02}.onnx"))
        files[-1].write_bytes(cutter.piece(files[-1].stem, outputs))
    constants = path.with_name("constants.onnx")
    constants.write_bytes(cutter.constants(attention))
    said = [
        {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute} for node in attention
    ]
    return Segments(
        files=tuple(file.relative_to(folder).as_posix() for file in files),
        constants=constants.relative_to(folder).as_posix(),
        heads=said[0]["heads"],
        kv_heads=said[0]["kv_heads"],
        head_dim=cutter.types[attention[0].input[1]].type.tensor_type.shape.dim[3].dim_value,
        scale=said[0]["scale"],
        epsilon=said[0]["epsilon"],
        sliding_window=tuple(each["sliding_window"] for each in said),
    )


def _outputs(layers: int) -> Iterator[tuple[str, ...]]:
    """The names of what each piece gives, in order."""
    for layer in range(layers):
        yield segments.hidden(layer), segments.qkv(layer)
        yield segments.residual(layer), segments.gate_up(layer)
    yield ("logits",)


class _Cutter:
    """``types`` are those of every named value of the graph."""

    def __init__(self, model: onnx.ModelProto, layers: int) -> None:
        graph = model.graph
        self.types = {info.name: info for info in (*graph.input, *graph.output, *graph.value_info)}
        self._opsets = {opset.domain: opset.version for opset in model.opset_import}
        self._weights = {tensor.name: tensor for tensor in graph.initializer}
        self._nodes = _transposed_products(graph.node)
        names = (segments.hidden, segments.residual, segments.mixed, segments.activated)
        # In the order in which a piece declares them.
        self._stops = [info.name for info in graph.input] + [name(layer) for layer in range(layers) for name in names]

    def piece(self, name: str, outputs: Sequence[str]) -> bytes:
        """The model of what lies between ``outputs`` and the kernels or inputs in front of them."""
        nodes, reads = self._behind(outputs, set(self._stops) - set(outputs))
        inputs = [self.types[stop] for stop in self._stops if stop in reads and stop not in outputs]
        return self._model(name, nodes, reads, inputs, [self.types[output] for output in outputs])

    def constants(self, attention: Sequence[NodeProto]) -> bytes:
        """The model, without inputs, of what the attention nodes read that depends on no input."""
        sources = dict(zip((segments.COSINE, segments.SINE), attention[0].input[5:7], strict=True))
        for layer, node in enumerate(attention):
            sources |= dict(zip((segments.q_norm(layer), segments.k_norm(layer)), node.input[7:9], strict=False))
        nodes, reads = self._behind(list(sources.values()), set())
        nodes += [helper.make_node("Identity", [source], [name], name=name) for name, source in sources.items()]
        outputs = [self._renamed(source, name) for name, source in sources.items()]
        return self._model("constants", nodes, reads | set(sources.values()), [], outputs)

    def _behind(self, outputs: Sequence[str], stops: Collection[str]) -> tuple[list[NodeProto], set[str]]:
        """The nodes that ``outputs`` need, in the graph's order, and every name they read; nothing beyond ``stops``."""
        kept, wanted = [], set(outputs)
        for node in reversed(self._nodes):
            if wanted & set(node.output) - set(stops):
                kept.append(node)
                wanted |= set(node.input)
        return kept[::-1], wanted

    def _model(
        self,
        name: str,
        nodes: Sequence[NodeProto],
        reads: Collection[str],
        inputs: Sequence[ValueInfoProto],
        outputs: Sequence[ValueInfoProto],
    ) -> bytes:
        weights = [tensor for key, tensor in self._weights.items() if key in reads]
        known = {info.name for info in (*inputs, *outputs)}
        made = {output for node in nodes for output in node.output} - known
        infos = [self.types[value] for value in made if value in self.types]
        graph: GraphProto = helper.make_graph(nodes, name, inputs, outputs, weights, value_info=infos)
        domains = {node.domain for node in nodes}
        opsets = [
            helper.make_opsetid(domain, self._opsets[domain]) for domain in self._opsets if domain in {"", *domains}
        ]
        model = helper.make_model(graph, ir_version=IR_VERSION, producer_name="tandemrt", opset_imports=opsets)
        return bytes(model.SerializeToString(deterministic=True))

    def _renamed(self, source: str, name: str) -> ValueInfoProto:
        if source in self._weights:
            tensor: TensorProto = self._weights[source]
            return helper.make_tensor_value_info(name, tensor.data_type, tensor.dims)
        info = ValueInfoProto()
        info.CopyFrom(self.types[source])
        info.name = name
        return info


def _transposed_products(nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """``nodes`` with every MatMul by a transposed weight as one FusedMatMul, which reads a weight as it is stored.

    onnxruntime would turn every weight around when it loads, and a window is no faster for it (docs/benchmarks.md).
    """
    turned: Mapping[str, str] = {node.output[0]: node.input[0] for node in nodes if node.op_type == "Transpose"}

    def fused(node: NodeProto) -> NodeProto:
        if node.op_type != "MatMul" or node.input[1] not in turned:
            return node
        inputs = [node.input[0], turned[node.input[1]]]
        return helper.make_node("FusedMatMul", inputs, node.output, name=node.name, domain=LIBRARY, transB=1)

    return [fused(node) for node in nodes]
