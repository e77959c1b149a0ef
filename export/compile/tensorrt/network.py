"""Parse a graph into a strongly typed network, and describe the network."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.export.compile.tensorrt.worker import aliases
from tandemrt.plugins.tensorrt.bindings import dtype_of
from tandemrt.plugins.tensorrt.modules import logger

# TensorRT's own layers for operations that other backends compute from many small operators.
NATIVE = {"attention": "ATTENTION_INPUT", "cache update": "KV_CACHE_UPDATE", "rotary embedding": "ROTARY_EMBEDDING"}


def parse(trt: Any, builder: Any, onnx_path: Path) -> Any:
    """Parse ``onnx_path``. Raises BackendUnavailable with the nodes that cannot be parsed, the cause and the fix."""
    log = logger(trt)
    log.clear()
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(onnx_path)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        shown = "; ".join(
            f"node {e.node_name()} ({e.node_operator()}): {e.desc()}" if e.node_name() else e.desc() for e in errors
        )
        raise BackendUnavailable(f"{trt.__name__} {trt.__version__} cannot read {onnx_path}: {shown}; {log.summary()}")
    return network


def contract_of(network: Any) -> Contract:
    """Return the bindings of a network. An output aliases an input if a layer updates that input in place."""

    def bindings(tensors: list[Any]) -> tuple[Binding, ...]:
        return tuple(Binding(t.name, dtype_of(t.dtype.name), symbols(t)) for t in tensors)

    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    return Contract(bindings(inputs(network)), bindings(outputs), tuple(aliases(network)))


def native_layers(counts: Mapping[str, int]) -> dict[str, int]:
    """Count the attentions, cache updates, rotary embeddings and plugins that are single TensorRT layers."""
    plugins = sum(count for kind, count in counts.items() if kind.startswith("PLUGIN"))
    return {name: counts.get(kind, 0) for name, kind in NATIVE.items()} | {"plugin": plugins}


def inputs(network: Any) -> list[Any]:
    return [network.get_input(i) for i in range(network.num_inputs)]


def symbols(tensor: Any) -> tuple[int | str, ...]:
    """Return a shape with the names of its dynamic dimensions, -1 for a dimension without a name."""
    return tuple(tensor.get_dimension_name(i) or -1 if size < 0 else size for i, size in enumerate(tensor.shape))
