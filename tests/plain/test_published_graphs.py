"""The graphs of the published configs: their contracts, and that nothing in them changes unnoticed.

published_graphs.txt has the number of nodes and a digest of each graph. After an intended change,
`python -m tests.plain.test_published_graphs` writes the file again: its difference names the models that changed.
`... NAME` prints the graphs of one, to compare with those of the commit before.
"""

import dataclasses
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest.mock import patch
from zlib import crc32

import numpy as np
import onnx_ir as ir
import pytest

from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.contract.dtypes import COMPUTE
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.graph.builder import DTYPES
from tandemrt.export.graph.lowering import Lowering, supported_lowering
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.decoder import build_decoder
from tandemrt.export.read.assistant import TOKEN_ORDERING
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor
from tandemrt.export.read.recurrent_layers import ShortConvolution
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.onnxruntime.custom_operators import has_kernels
from tests.plain.test_families import PUBLISHED

FILE = Path(__file__).parent / "published_graphs.txt"
EXPERTS, CAPACITY = 4, 64
DTYPE_OF: dict[Lowering, str] = {"grouped": "float32", "paged": "bfloat16"}
_Record = TypeVar("_Record")
STATES = ("state_index", "commit_index", "prompt_state_index")  # a short convolution keeps its latest inputs alone
_SHOWN = 8  # values of a constant


def few_layers(spec: ModelSpec) -> ModelSpec:
    """The spec with the first layer of each kind, and few experts: a graph has a part for each."""
    sharing = spec.variants.sharing
    kinds = list(zip(*_by_layer(spec, spec.layers), strict=True))
    own, shared = kinds[: spec.layers - sharing], kinds[spec.layers - sharing :]
    picked = sorted(own.index(kind) for kind in {*own}) + [
        len(own) + shared.index(kind) for kind in dict.fromkeys(shared)
    ]
    cut = dataclasses.replace(_picked(spec, picked, spec.layers), layers=len(picked), skips=())
    if sharing:
        cut = dataclasses.replace(cut, variants=dataclasses.replace(cut.variants, sharing=len({*shared})))
    if cut.experts is None:
        return cut
    count = min(cut.experts.count, EXPERTS * max(1, cut.experts.router.groups))
    few = dataclasses.replace(cut.experts, count=count, per_token=min(cut.experts.per_token, count))
    return dataclasses.replace(cut, experts=few)


def _by_layer(record: Any, layers: int) -> Iterator[tuple[Any, ...]]:
    """The tuples with an item for each layer in a record, and in those that it has."""
    for value in vars(record).values():
        if dataclasses.is_dataclass(value):
            yield from _by_layer(value, layers)
        elif _is_by_layer(value, layers):
            yield value


def _is_by_layer(value: Any, layers: int) -> bool:
    return isinstance(value, tuple) and len(value) == layers and not isinstance(value[0], float)


def _picked(record: _Record, picked: list[int], layers: int) -> _Record:
    values = {
        name: _picked(value, picked, layers) if dataclasses.is_dataclass(value) else tuple(value[at] for at in picked)
        for name, value in vars(record).items()
        if dataclasses.is_dataclass(value) or _is_by_layer(value, layers)
    }
    return cast("_Record", dataclasses.replace(cast("Any", record), **values)) if values else record


def graphs(config: dict[str, Any]) -> Iterator[tuple[Lowering, ModelSpec, ir.Model]]:
    """The decoder of a config on a CPU and on a GPU, where the model has it: the lowering, the spec and the graph."""
    config.pop("quantization_config", None)
    spec = few_layers(ModelSpec.from_hf(config))
    for wanted, dtype in DTYPE_OF.items():
        lowering = supported_lowering(wanted, spec)
        sizes: dict[str, Any] = {"dtype": dtype, "capacity": CAPACITY, "lowering": lowering}
        try:
            yield lowering, spec, build_decoder(spec, Checkpoint(Path("published"), config, {}, ()), **sizes)
        except BadCheckpoint as error:
            if "config.json: " not in str(error):  # else the lowering does not support the model
                raise


def described(model: ir.Model) -> Iterator[str]:
    """A line for each node of a graph, which names weights by their name and other values by their number."""
    yield from _nodes(model.graph, {})
    yield from (f"function {name}" for name in sorted(map(str, model.functions)))


def _nodes(graph: ir.Graph, names: dict[ir.Value, str]) -> Iterator[str]:
    for value in (*graph.inputs, *graph.initializers.values()):
        names[value] = _typed(value, value.name or "") + _content(value.const_value)
    yield from (f"input {names[value]}" for value in graph.inputs)
    for node in graph:
        inputs = ", ".join("" if value is None else names[value] for value in node.inputs)
        attributes = [f"{name}={_attribute(each.value, names)}" for name, each in sorted(node.attributes.items())]
        names |= {value: _typed(value, f"%{len(names) + at}") for at, value in enumerate(node.outputs)}
        outputs = ", ".join(names[value] for value in node.outputs)
        yield f"{outputs} = {node.domain}.{node.op_type}({inputs}) {' '.join(attributes)}"
    yield from (f"output {value.name}: {names[value]}" for value in graph.outputs)


def _typed(value: ir.Value, name: str) -> str:
    dims = None if value.shape is None else [str(dim) for dim in value.shape.dims]
    return f"{name}:{value.dtype}{dims}"


def _attribute(value: Any, names: dict[ir.Value, str]) -> str:
    if isinstance(value, ir.Graph):
        return f"[{'; '.join(_nodes(value, names))}]"
    if isinstance(value, ir.TensorProtocol):
        return _content(value)
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _content(tensor: ir.TensorProtocol | None) -> str:
    """The values of a small constant, and the ends of another one; nothing of a weight in a file."""
    if tensor is None or isinstance(tensor, ir.ExternalTensor):
        return ""
    values = tensor.numpy().astype(np.float64).ravel()
    shown = values if values.size <= _SHOWN else np.array([values[0], values[-1], values.mean()])
    return " ".join(f"{value:.3g}" for value in shown)


def any_weights() -> AbstractContextManager[Any]:
    """While it is open, a checkpoint has every weight, in whatever shape a graph asks for; what it reads is zeros."""
    stack = ExitStack()
    stack.enter_context(patch.multiple(Weights, _find=_found, _claim=_claimed, finish=lambda _: None))
    stack.enter_context(patch.object(Checkpoint, "read", _zeros))
    return stack


def checked(name: str) -> Iterator[tuple[Lowering, str]]:
    """The text of each graph of a published config, whose contract it keeps."""
    with any_weights():
        for lowering, spec, model in graphs(json.loads(PUBLISHED[name][0])):
            sizes = {"dtype": DTYPE_OF.get(lowering, "float32"), "cache": "paged" if lowering == "paged" else "linear"}
            unread = STATES if isinstance(spec.recurrent, ShortConvolution) else ()
            require_bound(model, spec.contract(capacity=CAPACITY, **cast("Any", sizes)), unread)
            yield lowering, "\n".join(described(model))


def _found(weights: Weights, name: str) -> StoredTensor:
    return StoredTensor(name, weights.dtype, (), Path(f"{name}.safetensors"), 0, 0)


def _claimed(weights: Weights, name: str, shape: Sequence[int], dtypes: Sequence[str] = COMPUTE) -> StoredTensor:
    dtype = weights.dtype if weights.dtype in dtypes else dtypes[0]
    return dataclasses.replace(_found(weights, name), dtype=dtype, shape=tuple(shape))


def _zeros(_: Checkpoint, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Any:  # noqa: ARG001
    return np.arange(shape[0]) if name == TOKEN_ORDERING else np.zeros(shape, np.float32)


def require_bound(model: ir.Model, contract: Contract, unread: Collection[str] = ()) -> None:
    """A graph binds what the runtime binds: the inputs and outputs of its contract, in name, dtype and shape.

    It reads all of its inputs except ``unread``.
    """
    for bound, values in ((contract.inputs, model.graph.inputs), (contract.outputs, model.graph.outputs)):
        expected = [(binding.name, DTYPES[binding.dtype], [str(dim) for dim in binding.shape]) for binding in bound]
        assert [_bound(value) for value in values] == expected
    read = {value for node in model.graph.all_nodes() for value in node.inputs}
    left = {value.name for value in model.graph.inputs if value not in read}
    assert left <= {*unread}, f"inputs that nothing reads: {left}"


def _bound(value: ir.Value) -> tuple[str | None, ir.DataType | None, list[str]]:
    return value.name, value.dtype, [] if value.shape is None else [str(dim) for dim in value.shape.dims]


def line(name: str) -> str:
    return f"{name}: {'; '.join(digest(lowering, text) for lowering, text in checked(name))}"


def digest(kind: str, text: str) -> str:
    return f"{kind} {len(text.splitlines())} {crc32(text.encode()):08x}"


@pytest.mark.skipif(not has_kernels(), reason="graphs differ without a C compiler")
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_graph_keeps_its_contract_and_its_nodes(name: str) -> None:
    assert line(name) in FILE.read_text().splitlines(), "the graph has changed; if it should, see the top of this file"


if __name__ == "__main__" and sys.argv[1:]:
    for name in sys.argv[1:]:
        print(*(text for _, text in checked(name)), sep="\n")
elif __name__ == "__main__":
    FILE.write_text("".join(f"{line(name)}\n" for name in PUBLISHED))
