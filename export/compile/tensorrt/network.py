"""TensorRTNetworkFromOnnx: parse a graph into a strongly typed network, and say what is in it."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandemrt.engines.binding import Binding
from tandemrt.engines.contract import Contract
from tandemrt.engines.dtypes import from_tensorrt
from tandemrt.engines.errors import BackendUnavailable
from tandemrt.engines.tensorrt.library import logger

# Layers that TensorRT has of its own for what other backends compute from many small operators.
NATIVE = {"attention": "ATTENTION_INPUT", "cache update": "KV_CACHE_UPDATE", "rotary embedding": "ROTARY_EMBEDDING"}


def parse(trt: Any, builder: Any, onnx_path: Path) -> Any:
    """Parse ``onnx_path``. Raises BackendUnavailable with the nodes that cannot be read, the cause and the fix."""
    log = logger(trt)
    log.forget()
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(onnx_path)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        shown = "; ".join(
            f"node {e.node_name()} ({e.node_operator()}): {e.desc()}" if e.node_name() else e.desc() for e in errors
        )
        raise BackendUnavailable(f"{trt.__name__} {trt.__version__} cannot read {onnx_path}: {shown}; {log.said()}")
    return network


def contract_of(trt: Any, network: Any) -> Contract:
    """The bindings of a network. An output aliases an input where a layer updates that input in place."""

    def bindings(tensors: list[Any]) -> tuple[Binding, ...]:
        return tuple(Binding(t.name, from_tensorrt(t.dtype.name), symbols(t)) for t in tensors)

    updates = [layer for layer in layers(network) if layer.type == trt.LayerType.KV_CACHE_UPDATE]
    aliases = tuple((layer.get_output(0).name, layer.get_input(0).name) for layer in updates)
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    return Contract(bindings(inputs(network)), bindings(outputs), aliases)


def count_layers(network: Any) -> dict[str, int]:
    """The network's layers by kind, as parsed; what the builder fuses them to is in the engine."""
    return dict(sorted(Counter(layer.type.name for layer in layers(network)).items()))


def native_layers(counts: Mapping[str, int]) -> dict[str, int]:
    """How many attentions, cache updates, rotary embeddings and plugins are layers of TensorRT itself."""
    plugins = sum(count for kind, count in counts.items() if kind.startswith("PLUGIN"))
    return {name: counts.get(kind, 0) for name, kind in NATIVE.items()} | {"plugin": plugins}


def inputs(network: Any) -> list[Any]:
    return [network.get_input(i) for i in range(network.num_inputs)]


def layers(network: Any) -> list[Any]:
    return [network.get_layer(i) for i in range(network.num_layers)]


def symbols(tensor: Any) -> tuple[int | str, ...]:
    """A shape with the names of its dynamic dimensions, -1 where one has no name."""
    return tuple(tensor.get_dimension_name(i) or -1 if size < 0 else size for i, size in enumerate(tensor.shape))
