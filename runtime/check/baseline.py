"""The graphs of a decoder on onnxruntime's CPU provider in float32: what every engine made from it must compute.

Half precision is widened: the stored weights are the same, but sums are not rounded on the way, so what is measured
against this is the rounding of the engine alone. onnxruntime's CPU provider could not run bfloat16 anyway.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import torch

from tandemrt.engines.binding import Binding
from tandemrt.engines.bundle import Bundle
from tandemrt.engines.contract import Contract
from tandemrt.engines.decoder import Decoder, Operator, Step
from tandemrt.engines.dtypes import HALF, ONNX
from tandemrt.engines.errors import BadBundle
from tandemrt.engines.manifest import EngineName
from tandemrt.engines.operators import SCHEMAS
from tandemrt.plugins.launch import Context
from tandemrt.plugins.sessions import session_options
from tandemrt.runtime.backends.base import Engine
from tandemrt.runtime.backends.constants import constants_of
from tandemrt.runtime.backends.executor import Executor
from tandemrt.runtime.backends.onnxruntime import OnnxRuntimeEngine
from tandemrt.runtime.backends.pieces import OpenPiece
from tandemrt.runtime.backends.sessions import onnxruntime

_CPU = torch.device("cpu")
_FOLDER = "session.model_external_initializers_file_folder_path"


def open_baseline(bundle: Bundle, name: EngineName, threads: int | None, call: Mapping[str, int]) -> Engine:
    """Open what engine ``name`` was made of on the CPU, for calls up to the sizes (by symbol) of ``call``.

    A decoder in steps runs them as it is served, with its pieces widened and the operators' faces on a CPU. Raises
    BadBundle if a graph is not there or cannot run.
    """
    entry = bundle.engine(name)
    if entry.decoder is not None:
        return open_widened_steps(bundle.folder, entry.decoder, entry.contract, threads, call)
    path = bundle.path(name).with_suffix(".onnx")
    if not path.is_file():
        raise BadBundle(f"{path} must exist: the engine {name!r} is compared with its graph; build the bundle again")
    return open_widened(path, entry.contract, threads)


def open_whole_cache(bundle: Bundle, name: EngineName, threads: int | None, call: Mapping[str, int]) -> Engine:
    """As ``open_baseline``, of a decoder in steps whose cache is in float8: with one that rounds nothing."""
    entry = bundle.engine(name)
    assert entry.decoder is not None

    def whole(step: Step) -> Step:
        if not isinstance(step, Operator) or step.name != "float8_window_attention":
            return step
        attributes = {key: step.attributes[key] for key in SCHEMAS["window_attention"].attributes}
        return step.model_copy(update={"name": "window_attention", "attributes": attributes})

    def in_dtype(bindings: tuple[Binding, ...], names: Collection[str]) -> tuple[Binding, ...]:
        return tuple(replace(b, dtype=entry.dtype) if b.name in names else b for b in bindings)

    given = entry.contract
    caches = {name for step in entry.decoder.operators for pair in step.in_place().items() for name in pair}
    changed = {"steps": tuple(map(whole, entry.decoder.steps)), "values": in_dtype(entry.decoder.values, caches)}
    contract = Contract(in_dtype(given.inputs, caches), in_dtype(given.outputs, caches), given.aliases)
    return open_widened_steps(bundle.folder, entry.decoder.model_copy(update=changed), contract, threads, call)


def open_widened(path: Path, contract: Contract, threads: int | None) -> OnnxRuntimeEngine:
    """Open the graph at ``path``, whose bindings are ``contract``, in float32. Raises BadBundle if it cannot run."""
    return OnnxRuntimeEngine(_session(path, threads), in_float32(contract), _CPU)


def open_widened_steps(
    folder: Path, decoder: Decoder, contract: Contract, threads: int | None, call: Mapping[str, int]
) -> Executor:
    """Open the pieces of ``decoder`` in ``folder`` in float32. Raises BadBundle if one cannot run."""
    wide, bindings = decoder.model_copy(update={"values": _wide(decoder.values)}), in_float32(contract)
    pieces = {
        piece.file: OpenPiece.of(
            _session(folder / piece.file, threads), wide.contract_of(piece, bindings), folder / piece.file
        )
        for piece in decoder.pieces
        if piece is not decoder.constants
    }
    constants = constants_of(_session(folder / decoder.constants.file, threads)) if decoder.constants else {}
    return Executor(wide, bindings, pieces, constants, Context(_CPU, threads=threads), [call])


def rounds_to_8_bits(bundle: Bundle, name: EngineName) -> bool:
    """Whether engine ``name`` rounds what its products multiply, or keys and values, to 8 bits or to float8."""
    entry = bundle.engine(name)
    if entry.decoder is not None:
        rounding = ("quantize_tokens", "float8_window_attention")
        return any(step.name in rounding for step in entry.decoder.operators)
    if not (path := bundle.path(name).with_suffix(".onnx")).is_file():
        return False
    nodes = ir.traversal.RecursiveGraphIterator(ir.load(path).graph)
    return any(
        node.op_type in ("MatMulNBits", "QuantizeLinear")
        or (node.op_type == "Cast" and node.attributes["to"].value == ir.DataType.FLOAT8E4M3FN.value)
        for node in nodes
    )


def in_float32(contract: Contract) -> Contract:
    """The same bindings, with float32 wherever a half precision stood."""
    return Contract(_wide(contract.inputs), _wide(contract.outputs), contract.aliases)


def widened(path: Path) -> bytes:
    """Return the graph at ``path`` with float32 for every half precision; weights stay in their files and are cast."""
    model = ir.load(path)
    for value in _values(model.graph):
        _widen(value)
    for name, value in list(model.graph.initializers.items()):
        if value.const_value is None or value.const_value.dtype not in _TYPES:
            continue
        value.type = ir.TensorType(value.const_value.dtype)
        cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT.value}, name=f"{name}/widened")
        wide = cast.outputs[0]
        wide.name, wide.type, wide.shape = f"{name}/float32", ir.TensorType(ir.DataType.FLOAT), value.shape
        for use in list(value.uses()):
            if use.node is not cast:
                use.node.replace_input_with(use.idx, wide)
        model.graph.insert_before(model.graph[0], cast)
    for graph in (model.graph, *model.functions.values()):
        for node in ir.traversal.RecursiveGraphIterator(graph):
            _widen_attributes(node)
    return bytes(ir.to_proto(model).SerializeToString())


_TYPES = tuple(ir.DataType(ONNX[name]) for name in HALF)


def _session(path: Path, threads: int | None) -> "onnxruntime.InferenceSession":
    options = session_options(threads=threads, entries={_FOLDER: str(path.parent)})
    try:
        # Folding would keep a second, widened copy of all weights in memory.
        return onnxruntime.InferenceSession(
            widened(path), options, providers=["CPUExecutionProvider"], disabled_optimizers=["ConstantFolding"]
        )
    except Exception as error:  # onnxruntime raises a family of its own without a common public base
        raise BadBundle(f"{path}: onnxruntime cannot load this graph on the CPU: {error}; build it again") from error


def _wide(bindings: tuple[Binding, ...]) -> tuple[Binding, ...]:
    return tuple(replace(b, dtype="float32") if b.dtype in HALF else b for b in bindings)


def _values(graph: ir.Graph) -> list[ir.Value]:
    made = [output for node in ir.traversal.RecursiveGraphIterator(graph) for output in node.outputs]
    return [*graph.inputs, *made]


def _widen(value: ir.Value) -> None:
    if value.dtype in _TYPES:
        value.type = ir.TensorType(ir.DataType.FLOAT)


def _widen_attributes(node: ir.Node) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.is_ref():
            continue
        if name == "to" and attribute.value in [kind.value for kind in _TYPES]:
            node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT.value)
        if attribute.type is ir.AttributeType.TENSOR and attribute.value.dtype in _TYPES:
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(attribute.value.numpy().astype("float32")))
