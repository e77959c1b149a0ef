"""Open the graph of a decoder on onnxruntime's CPU provider in float32, as the reference for engines built from it.

The weights are the stored ones, in half precision. All computation is in float32, so a difference is the rounding of
the engine alone. onnxruntime's CPU provider does not run bfloat16.
"""

import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import onnx_ir as ir
import torch

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import EngineEntry, EngineName
from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.contract.decoder import Decoder, Operator, Step
from tandemrt.engines.contract.dtypes import BYTES, HALF, ONNX
from tandemrt.engines.contract.operators import COLLECTIVES, SCHEMAS
from tandemrt.engines.validation.errors import BadBundle, InternalError
from tandemrt.plugins.onnxruntime.sessions import session_options
from tandemrt.plugins.operators.launch import Call, Context
from tandemrt.plugins.operators.shared_ranks import SharedRanks, shared_bytes
from tandemrt.plugins.tensors.torch import Tensor
from tandemrt.runtime.device.backends.base import Engine
from tandemrt.runtime.device.backends.onnxruntime.constants import constants_of
from tandemrt.runtime.device.backends.onnxruntime.engine import OnnxRuntimeEngine
from tandemrt.runtime.device.backends.onnxruntime.executor import Executor
from tandemrt.runtime.device.backends.onnxruntime.sessions import onnxruntime
from tandemrt.runtime.device.backends.onnxruntime.subgraphs import OpenSubgraph

_CPU = torch.device("cpu")
_FOLDER = "session.model_external_initializers_file_folder_path"


def open_reference(
    bundle: Bundle, name: EngineName, threads: int | None, call: Mapping[str, int], *, rounded: bool = False
) -> Engine:
    """Open the graph of engine ``name`` on the CPU, for calls up to the sizes (by symbol) in ``call``.

    ``rounded``: see float32_graph; not for a target over several ranks.

    A decoder that was cut into steps runs in the same steps, with float32 subgraphs and CPU implementations of the
    operators. Raises BadBundle if a graph is missing or cannot run.
    """
    entry = bundle.engine(name)
    if name == "target" and bundle.manifest.ranks:
        return RankedReference.open(bundle, threads, call)
    if entry.decoder is not None:
        return open_float32_steps(bundle.folder, entry.decoder, entry.contract, threads, call, rounded=rounded)
    path = bundle.path(name).with_suffix(".onnx")
    if not path.is_file():
        raise BadBundle(f"{path} must exist: the engine {name!r} is compared with its graph; build the bundle again")
    return open_float32(path, entry.contract, threads, rounded=rounded)


def open_reference_unquantized_cache(
    bundle: Bundle, name: EngineName, threads: int | None, call: Mapping[str, int]
) -> Engine:
    """Like ``open_reference`` for a decoder in steps with a float8 cache, but with a cache in ``dtype`` instead."""
    entry = bundle.engine(name)
    assert entry.decoder is not None

    def unquantized(step: Step) -> Step:
        if not isinstance(step, Operator) or step.name != "float8_window_attention":
            return step
        attributes = {key: step.attributes[key] for key in SCHEMAS["window_attention"].attributes}
        return step.model_copy(update={"name": "window_attention", "attributes": attributes})

    def in_dtype(bindings: tuple[Binding, ...], names: Collection[str]) -> tuple[Binding, ...]:
        return tuple(replace(b, dtype=entry.dtype) if b.name in names else b for b in bindings)

    stored = entry.contract
    caches = {name for step in entry.decoder.operators for pair in step.in_place().items() for name in pair}
    changed = {"steps": tuple(map(unquantized, entry.decoder.steps)), "values": in_dtype(entry.decoder.values, caches)}
    contract = Contract(in_dtype(stored.inputs, caches), in_dtype(stored.outputs, caches), stored.aliases)
    return open_float32_steps(bundle.folder, entry.decoder.model_copy(update=changed), contract, threads, call)


def open_float32(path: Path, contract: Contract, threads: int | None, *, rounded: bool = False) -> OnnxRuntimeEngine:
    """Open the graph at ``path`` with the bindings ``contract`` in float32; ``rounded``: see float32_graph.

    Raises BadBundle if it cannot run.
    """
    return OnnxRuntimeEngine(_session(path, threads, rounded=rounded), float32_contract(contract), _CPU)


def open_float32_steps(
    folder: Path,
    decoder: Decoder,
    contract: Contract,
    threads: int | None,
    call: Mapping[str, int],
    ranks: SharedRanks | None = None,
    *,
    rounded: bool = False,
) -> Executor:
    """Open the subgraphs of ``decoder`` in ``folder`` in float32. Raises BadBundle if one cannot run.

    ``ranks``: for the decoder of one rank of a tensor-parallel target. ``rounded``: see float32_graph.
    """
    in_float32, bindings = (
        decoder.model_copy(update={"values": _float32_bindings(decoder.values)}),
        float32_contract(contract),
    )
    subgraphs = {
        subgraph.file: OpenSubgraph.of(
            _session(folder / subgraph.file, threads, rounded=rounded),
            in_float32.contract_of(subgraph, bindings),
            folder / subgraph.file,
        )
        for subgraph in decoder.subgraphs
        if subgraph is not decoder.constants
    }
    constants = constants_of(_session(folder / decoder.constants.file, threads)) if decoder.constants else {}
    return Executor(in_float32, bindings, subgraphs, constants, Context(_CPU, threads=threads, ranks=ranks), [call])


class RankedReference:
    """The decoders of all ranks of a tensor-parallel target, in threads of this process."""

    capturable = False

    def __init__(self, executors: Sequence[Executor], errors: list[BaseException]) -> None:
        self.contract = executors[0].contract
        self.device = _CPU
        self._executors = executors
        self._errors = errors

    @classmethod
    def open(cls, bundle: Bundle, threads: int | None, call: Mapping[str, int]) -> "RankedReference":
        """Open every rank's decoder in float32. Raises BadBundle if one cannot run."""
        entries = [bundle.engine("target"), *bundle.manifest.ranks]
        size = max(_part_bytes(entry, call) for entry in entries)
        memory = bytearray(shared_bytes(len(entries), size))
        arrived = [[threading.Semaphore(0) for _ in entries] for _ in entries]
        errors: list[BaseException] = []
        executors = []
        for rank, entry in enumerate(entries):
            assert entry.decoder is not None
            ranks = SharedRanks(rank, memory, arrived, partial(_require_no_error, errors))
            executors.append(open_float32_steps(bundle.folder, entry.decoder, entry.contract, threads, call, ranks))
        return cls(executors, errors)

    def bind(self, tensors: Mapping[str, Tensor], *, needs_probs: bool = True) -> Call:
        """See Engine.bind. The caches of the other ranks begin with zeros."""
        cache_names = {source for _, source in self.contract.aliases}
        shared = {name: tensor for name, tensor in tensors.items() if name not in cache_names and name != "features"}
        blocks = {"blocks": tensors[min(cache_names)].shape[0]}
        calls = [self._executors[0].bind(tensors, needs_probs=needs_probs)]
        for executor in self._executors[1:]:
            own = {name: torch.zeros(executor.contract[name].resolve(blocks)) for name in sorted(cache_names)}
            calls.append(executor.bind({**shared, **own, "logits": torch.empty(*tensors["logits"].shape)}))
        return _InThreads(calls, self._errors)


@dataclass(frozen=True)
class _InThreads:
    """Calls that wait for each other while ``errors`` is empty."""

    calls: Sequence[Call]
    errors: list[BaseException]

    def run(self) -> None:
        """Raises the first error of a call, or InternalError if the operating system refuses a thread."""
        with ThreadPoolExecutor(len(self.calls)) as pool:
            try:
                for call in self.calls:
                    pool.submit(self._run, call)
            except RuntimeError as error:
                self.errors.append(
                    InternalError(f"ranks: a thread could not start: {error}; raise the limit (ulimit -u)")
                )
        _require_no_error(self.errors)

    def _run(self, call: Call) -> None:
        try:
            call.run()
        except BaseException as error:  # raised by ``run``
            self.errors.append(error)


def _require_no_error(errors: Sequence[BaseException], *_: object) -> None:
    """Raise the first of ``errors``; also the check of SharedRanks, because a rank that failed sends no part."""
    if errors:
        raise errors[0]


def _part_bytes(entry: EngineEntry, call: Mapping[str, int]) -> int:
    """Bytes of the largest part that ranks exchange, in float32."""
    assert entry.decoder is not None
    bindings = entry.decoder.bindings(entry.contract)
    parts = [bindings[str(step.inputs[0])] for step in entry.decoder.operators if step.name in COLLECTIVES]
    return max(prod(part.resolve(call)) for part in parts) * BYTES["float32"]


def quantizes_activations(bundle: Bundle, name: EngineName) -> bool:
    """Whether engine ``name`` rounds inputs of matmuls, or keys and values, to 8 bits or float8."""
    entry = bundle.engine(name)
    if entry.decoder is not None:
        rounding = ("quantize_tokens", "float8_window_attention")
        return any(step.name in rounding for step in entry.decoder.operators)
    if not (path := bundle.path(name).with_suffix(".onnx")).is_file():
        return False
    nodes = ir.traversal.RecursiveGraphIterator(ir.load(path).graph)
    return any(
        node.op_type in ("MatMulNBits", "low_bit_int8_matmul", "QuantizeLinear")
        or (node.op_type == "Cast" and node.attributes["to"].value == ir.DataType.FLOAT8E4M3FN.value)
        for node in nodes
    )


def float32_contract(contract: Contract) -> Contract:
    """Return the bindings with float32 in place of half precision."""
    return Contract(_float32_bindings(contract.inputs), _float32_bindings(contract.outputs), contract.aliases)


def float32_graph(path: Path, *, rounded: bool = False) -> bytes:
    """Return the graph at ``path`` with float32 for every half precision. Weights stay in their files and are cast.

    ``rounded``: values that the graph casts to half precision are rounded to it.
    """
    model = ir.load(path)
    casts = [(node, _cast_to(node)) for node in model.graph if rounded and _cast_to(node) in _HALF_TYPES]
    for value in _values(model.graph):
        _set_float32(value)
    for name, value in list(model.graph.initializers.items()):
        if value.const_value is None or value.const_value.dtype not in _HALF_TYPES:
            continue
        value.type = ir.TensorType(value.const_value.dtype)
        cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT.value}, name=f"{name}/cast")
        output = cast.outputs[0]
        output.name, output.type, output.shape = f"{name}/float32", ir.TensorType(ir.DataType.FLOAT), value.shape
        for use in list(value.uses()):
            if use.node is not cast:
                use.node.replace_input_with(use.idx, output)
        model.graph.insert_before(model.graph[0], cast)
    for graph in (model.graph, *model.functions.values()):
        for node in ir.traversal.RecursiveGraphIterator(graph):
            _set_float32_attributes(node)
    for cast, kind in casts:
        wide = ir.node("Cast", cast.outputs, {"to": ir.DataType.FLOAT.value}, name=f"{cast.name}/float32")
        ir.convenience.replace_all_uses_with(cast.outputs[0], wide.outputs[0])
        wide.replace_input_with(0, cast.outputs[0])
        cast.attributes["to"], cast.outputs[0].type = ir.AttrInt64("to", kind), ir.TensorType(ir.DataType(kind))
        wide.outputs[0].name, wide.outputs[0].type = f"{wide.name}.0", ir.TensorType(ir.DataType.FLOAT)
        model.graph.insert_after(cast, wide)
    return bytes(ir.to_proto(model).SerializeToString())


_HALF_TYPES = tuple(ir.DataType(ONNX[name]) for name in HALF)


def _cast_to(node: ir.Node) -> int:
    return node.attributes.get_int("to", 0) if node.op_type == "Cast" else 0


def _session(path: Path, threads: int | None, *, rounded: bool = False) -> "onnxruntime.InferenceSession":
    options = session_options(threads=threads, entries={_FOLDER: str(path.parent)})
    try:
        # Constant folding would keep a float32 copy of all weights in memory.
        return onnxruntime.InferenceSession(
            float32_graph(path, rounded=rounded),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=["ConstantFolding"],
        )
    except Exception as error:  # onnxruntime's exceptions have no common public base
        raise BadBundle(f"{path}: onnxruntime cannot load this graph on the CPU: {error}; build it again") from error


def _float32_bindings(bindings: tuple[Binding, ...]) -> tuple[Binding, ...]:
    return tuple(replace(b, dtype="float32") if b.dtype in HALF else b for b in bindings)


def _values(graph: ir.Graph) -> list[ir.Value]:
    computed = [output for node in ir.traversal.RecursiveGraphIterator(graph) for output in node.outputs]
    return [*graph.inputs, *computed]


def _set_float32(value: ir.Value) -> None:
    if value.dtype in _HALF_TYPES:
        value.type = ir.TensorType(ir.DataType.FLOAT)


def _set_float32_attributes(node: ir.Node) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.is_ref():
            continue
        if name == "to" and attribute.value in [kind.value for kind in _HALF_TYPES]:
            node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT.value)
        if attribute.type is ir.AttributeType.TENSOR and attribute.value.dtype in _HALF_TYPES:
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(attribute.value.numpy().astype("float32")))
