"""Runs a decoder step by step, on any device: pieces by onnxruntime, operators by their launchers.

It knows nothing about what the steps compute. On a CUDA device nothing waits and nothing is computed on the host in a
run, and nothing is allocated but by grouped products of experts, from torch's allocator, which gives a graph memory of
its own: so all steps can be captured into one CUDA graph.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from weakref import WeakValueDictionary

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.calls import Sizes, largest_calls
from tandemrt.engines.contract import Contract
from tandemrt.engines.decoder import Decoder, Operator, Piece, Step
from tandemrt.engines.errors import InternalError
from tandemrt.engines.manifest import EngineName
from tandemrt.plugins.faces import launcher
from tandemrt.plugins.launch import Call, Context
from tandemrt.plugins.tensors import torch, viewed
from tandemrt.runtime.backends.base import check_tensors
from tandemrt.runtime.backends.buffers import bytes_of, plan_buffers
from tandemrt.runtime.backends.constants import read_constants
from tandemrt.runtime.backends.pieces import OpenPiece, open_piece
from tandemrt.runtime.backends.shared_weights import SharedWeights

_LOADING = 4  # pieces that load at a time: each holds its weights in host memory meanwhile


class Executor:
    """An engine in steps. Buffers between them are shared by all calls, so runs must follow one another."""

    def __init__(
        self,
        decoder: Decoder,
        contract: Contract,
        pieces: Mapping[str, OpenPiece],
        constants: Mapping[str, torch.Tensor],
        context: Context,
        largest: Sequence[Sizes],
    ) -> None:
        """``pieces`` by file, ``constants`` by name; ``largest`` are the largest calls, as sizes by symbol.

        Raises BackendUnavailable if an operator has no kernels for the device.
        """
        self.contract = contract
        self.device = context.device
        self.capturable = self.device.type == "cuda"
        self._decoder = decoder
        self._pieces = pieces
        self._constants = constants
        self._context = context
        self._launchers = {name: launcher(name, context) for name in {step.name for step in decoder.operators}}
        self._largest = largest
        self._values = {value.name: value for value in decoder.values}
        self._buffers = plan_buffers(decoder, contract, largest)
        self._bound: WeakValueDictionary[Hashable, Call] = WeakValueDictionary()  # by what a step reads and makes
        self._memory = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in self._buffers.sizes]

    @classmethod
    def open(
        cls, bundle: Bundle, name: EngineName, device: torch.device, threads: int | None, weights: SharedWeights
    ) -> "Executor":
        """Open the decoder of engine ``name``. Raises as OnnxRuntimeEngine.open does."""
        entry = bundle.engine(name)
        shared = weights.of(entry)
        decoder, contract = entry.decoder, entry.contract
        assert decoder is not None
        # Of this thread, not of those that load.
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0

        def load(piece: Piece) -> OpenPiece:
            expected = decoder.contract_of(piece, contract)
            return open_piece(bundle.folder / piece.file, expected, device, stream, threads, shared)

        steps = [piece for piece in decoder.pieces if piece is not decoder.constants]
        with ThreadPoolExecutor(_LOADING) as pool:
            pieces = dict(zip((piece.file for piece in steps), pool.map(load, steps), strict=True))
        constants = read_constants(bundle.folder / decoder.constants.file, device) if decoder.constants else {}
        limits = bundle.limits
        sizes = {"query": limits.prefill_chunk, "batch": limits.batch, "window+1": limits.window + 1}
        context = Context(device, bundle.kernels_dir, threads, sizes, entry.batch_invariant)
        largest = largest_calls(bundle.draft.kind, limits.batch, limits.window, limits.prefill_chunk)
        return cls(decoder, contract, pieces, constants, context, largest)

    def bind(self, tensors: Mapping[str, torch.Tensor], *, filters: bool = True) -> "Steps":  # noqa: ARG002
        """See Engine.bind. Raises InternalError for a call that the buffers between steps have no room for."""
        sizes = check_tensors(self.contract, tensors, self.device)
        named = {**tensors, **self._constants, **self._between(sizes)}
        for output, source in self._buffers.home.items():
            named[output] = named[source]
        return Steps([partial(self._bind_step, step, named) for step in self._decoder.steps])

    def _bind_step(self, step: Step, named: Mapping[str, torch.Tensor]) -> Call:
        """Most steps of a call see nothing but how many tokens it has, so calls of as many share them."""
        given = _given(step, named)
        key = (step.outputs, *((tensor.data_ptr(), *tensor.shape) for tensor in given.values()))
        call = self._bound.get(key)
        if call is None:
            if isinstance(step, Operator):
                call = self._launchers[step.name](given, step.attributes, self._context)
            else:
                call = self._pieces[step.file].bind(given)
            self._bound[key] = call
        return call

    def _between(self, sizes: Sizes) -> dict[str, torch.Tensor]:
        """The values between steps, where this call has them."""
        found = {}
        for name, buffer in self._buffers.place.items():
            value, memory = self._values[name], self._memory[buffer]
            shape = value.resolve(sizes)
            if bytes_of(value.dtype, [shape]) > len(memory):
                raise InternalError(f"bind: a call of {dict(sizes)} is larger than {list(map(dict, self._largest))}")
            dtype = getattr(torch, value.dtype)
            found[name] = viewed(memory, dtype)[: prod(shape)].view(shape)
        return found


class Steps:
    """All steps of a decoder, each bound when it first runs: the device computes one while the next is bound."""

    def __init__(self, binders: Sequence[Callable[[], Call]]) -> None:
        self._binders = binders
        self._calls: list[Call] = []  # they hold what they were bound to

    def run(self) -> None:
        """Enqueue the decoder on the device's current stream (on a CPU: run it)."""
        for call in self._calls:
            call.run()
        for bind in self._binders[len(self._calls) :]:
            self._calls.append(bind())
            self._calls[-1].run()
        self._binders = ()


def _given(step: Step, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that a step reads and makes, under the names that it knows them by."""
    if isinstance(step, Piece):
        return {name: named[name] for name in (*step.inputs, *step.outputs)}
    in_place = step.definition.in_place
    given = {name: named[value] for name, value in step.named_inputs().items()}
    return given | {name: named[value] for name, value in step.named_outputs().items() if name not in in_place}
