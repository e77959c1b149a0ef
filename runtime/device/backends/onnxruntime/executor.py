"""Runs a decoder that is split into steps: subgraphs run in onnxruntime, operators by their launchers.

On a CUDA device a run neither waits nor computes on the host, so one CUDA graph can capture all steps. Only grouped
matmuls of experts allocate memory, from torch's allocator, which gives each graph its own.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any
from weakref import WeakValueDictionary

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import EngineEntry
from tandemrt.engines.contract.calls import Sizes, largest_calls
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.contract.decoder import Decoder, Operator, Step, Subgraph
from tandemrt.engines.contract.operators import COLLECTIVES
from tandemrt.engines.parallel.threads import map_in_threads
from tandemrt.engines.validation.errors import InternalError
from tandemrt.plugins.implementations import launcher
from tandemrt.plugins.operators.launch import Call, Context, Ranks
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.plugins.tensors.dtypes import viewed
from tandemrt.runtime.device.backends.base import check_tensors
from tandemrt.runtime.device.backends.onnxruntime.buffer_plan import bytes_of, plan_buffers
from tandemrt.runtime.device.backends.onnxruntime.constants import read_constants
from tandemrt.runtime.device.backends.onnxruntime.shared_weights import Initializers
from tandemrt.runtime.device.backends.onnxruntime.subgraphs import OpenSubgraph, open_subgraphs


class Executor:
    """An engine that runs a decoder in steps. All calls share the intermediate buffers, so runs must not overlap."""

    def __init__(
        self,
        decoder: Decoder,
        contract: Contract,
        subgraphs: Mapping[str, OpenSubgraph],
        constants: Mapping[str, torch.Tensor],
        context: Context,
        largest: Sequence[Sizes],
    ) -> None:
        """``subgraphs`` by file, ``constants`` by name; ``largest`` are the largest calls, as sizes by symbol.

        Raises BackendUnavailable if an operator has no kernels for the device.
        """
        if (context.ranks is not None) != any(step.name in COLLECTIVES for step in decoder.operators):
            raise InternalError("a decoder with operators that ranks run together needs ranks, and only such a one")
        self.contract = contract
        self.device = context.device
        self.capturable = not device_of(self.device).on_host
        self._decoder = decoder
        self._subgraphs = subgraphs
        self._constants = constants
        self.context = context
        self._launchers = {name: launcher(name, context) for name in {step.name for step in decoder.operators}}
        self._largest = largest
        self._values = {value.name: value for value in decoder.values}
        self._buffers = plan_buffers(decoder, contract, largest)
        # Bound steps, by the addresses and shapes of their tensors.
        self._bound: WeakValueDictionary[Hashable, Call] = WeakValueDictionary()
        self._memory = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in self._buffers.sizes]

    @classmethod
    def open(
        cls,
        bundle: Bundle,
        entry: EngineEntry,
        device: torch.device,
        threads: int | None,
        shared: Callable[[], Initializers],
        ranks: Ranks | None = None,
    ) -> "Executor":
        """Open the decoder of engine ``entry`` of ``bundle``; ``shared`` returns its shared weights.

        ``ranks``: the processes that run the decoder together. Raises as OnnxRuntimeEngine.open does.
        """
        decoder, contract = entry.decoder, entry.contract
        assert decoder is not None
        # The current stream of this thread; the loading threads have another one.
        stream = device_of(device).current_stream()
        steps = [subgraph for subgraph in decoder.subgraphs if subgraph is not decoder.constants]
        wanted = [(bundle.folder / step.file, decoder.contract_of(step, contract)) for step in steps]
        opening: list[Callable[[], Any]] = [lambda: open_subgraphs(wanted, device, stream, threads, shared())]
        if decoder.constants is not None:
            opening.append(partial(read_constants, bundle.folder / decoder.constants.file, device))
        # A GPU's weights are read while its sessions open. On a CPU that would only add their memory.
        opened, *read = map_in_threads(_call, opening, 1 if device_of(device).on_host else len(opening))
        constants = read[0] if read else {}
        subgraphs = dict(zip((subgraph.file for subgraph in steps), opened, strict=True))
        limits = bundle.limits
        sizes = {"query": limits.prefill_chunk, "batch": limits.batch, "window+1": limits.num_draft_tokens + 1}
        context = Context(device, bundle.kernels_dir, threads, sizes, entry.batch_invariant, ranks)
        return cls(decoder, contract, subgraphs, constants, context, calls_of(bundle))

    def bind(self, tensors: Mapping[str, torch.Tensor], *, needs_probs: bool = True) -> "DecoderCall":  # noqa: ARG002
        """See Engine.bind. Raises InternalError for a call that is too large for the intermediate buffers."""
        sizes = check_tensors(self.contract, tensors, self.device)
        named = {**tensors, **self._constants, **self._between(sizes)}
        for output, source in self._buffers.in_place_of.items():
            named[output] = named[source]
        return DecoderCall([partial(self._bind_step, step, named) for step in self._decoder.steps])

    def _bind_step(self, step: Step, named: Mapping[str, torch.Tensor]) -> Call:
        """Bind a step, or reuse a bound one: most steps depend only on the number of tokens of a call."""
        bound = _given(step, named)
        key = (step.outputs, *((tensor.data_ptr(), *tensor.shape) for tensor in bound.values()))
        call = self._bound.get(key)
        if call is None:
            if isinstance(step, Operator):
                call = self._launchers[step.name](bound, step.attributes, self.context)
            else:
                call = self._subgraphs[step.file].bind(bound)
            self._bound[key] = call
        return call

    def _between(self, sizes: Sizes) -> dict[str, torch.Tensor]:
        """The intermediate tensors, in the shapes of this call."""
        tensors = {}
        for name, buffer in self._buffers.buffer_of.items():
            value, memory = self._values[name], self._memory[buffer]
            shape = value.resolve(sizes)
            if bytes_of(value.dtype, [shape]) > len(memory):
                raise InternalError(f"bind: a call of {dict(sizes)} is larger than {list(map(dict, self._largest))}")
            dtype = getattr(torch, value.dtype)
            tensors[name] = viewed(memory, dtype)[: prod(shape)].view(shape)
        return tensors


def calls_of(bundle: Bundle) -> tuple[Sizes, ...]:
    """The largest calls of a decoder of ``bundle``, as sizes by symbol."""
    limits = bundle.limits
    return largest_calls(bundle.draft.kind, limits.batch, limits.num_draft_tokens, limits.prefill_chunk)


def _call(function: Callable[[], Any]) -> Any:
    return function()


class DecoderCall:
    """A call of a decoder. Each step is bound when it first runs, while the device computes the previous step."""

    def __init__(self, binders: Sequence[Callable[[], Call]]) -> None:
        self._binders = binders
        self._calls: list[Call] = []  # they keep their tensors alive

    def run(self) -> None:
        """Enqueue the decoder on the device's current stream (on a CPU: run it)."""
        for call in self._calls:
            call.run()
        for bind in self._binders[len(self._calls) :]:
            self._calls.append(bind())
            self._calls[-1].run()
        self._binders = ()


def _given(step: Step, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs and outputs of a step, by its own names."""
    if isinstance(step, Subgraph):
        return {name: named[name] for name in (*step.inputs, *step.outputs)}
    in_place = step.definition.in_place
    arguments = {name: named[value] for name, value in step.named_inputs().items()}
    return arguments | {name: named[value] for name, value in step.named_outputs().items() if name not in in_place}
