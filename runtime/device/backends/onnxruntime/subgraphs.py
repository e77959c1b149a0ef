"""Subgraphs of a decoder as onnxruntime sessions that only enqueue work: no waits, no nodes on the host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.parallel.threads import map_in_threads
from tandemrt.engines.validation.errors import BadBundle
from tandemrt.plugins.onnxruntime.sessions import place
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.runtime.device.backends.onnxruntime.equal_graphs import RenamedGraph, renamed_graph
from tandemrt.runtime.device.backends.onnxruntime.sessions import (
    CPU,
    Provider,
    bindings,
    cuda_provider,
    onnxruntime,
    open_session,
)

_CAPTURABLE = {
    "use_ep_level_unified_stream": "1",  # all nodes use the given stream, none a second one
    "arena_extend_strategy": "kSameAsRequested",  # doubling arenas would add up over many sessions
}
_ENTRIES = {
    "session.disable_cpu_ep_fallback": "1",  # a node on the host would read before the device has written its input
    "session.use_device_allocator_for_initializers": "1",  # keeps weights out of the arena, which grows with the calls
}


_CONCURRENT_LOADS = 4  # subgraphs that load at a time: each holds its weights in host memory meanwhile


@dataclass(frozen=True)
class OpenSubgraph:
    """A session for a subgraph, the names of its bindings, and the initializers that it needs to stay alive.

    ``renamed``: the subgraph as its session has it, where equal subgraphs share the session.
    """

    session: "onnxruntime.InferenceSession"
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    initializers: "Mapping[str, onnxruntime.OrtValue]" = field(default_factory=dict)
    renamed: RenamedGraph | None = None

    @classmethod
    def of(
        cls,
        session: "onnxruntime.InferenceSession",
        expected: Contract,
        path: Path,
        initializers: "Mapping[str, onnxruntime.OrtValue] | None" = None,
        renamed: RenamedGraph | None = None,
    ) -> "OpenSubgraph":
        """Wrap ``session``. Raises BadBundle, which names ``path``, if its bindings are not ``expected``."""
        inputs, outputs = bindings(session.get_inputs()), bindings(session.get_outputs())
        if renamed is not None:
            old = {new: name for name, new in renamed.names.items()}
            inputs = tuple(replace(b, name=old[b.name]) for b in inputs if b.name in old)
            outputs = tuple(replace(b, name=old[b.name]) for b in outputs)
        if differences := expected.differences(Contract(inputs, outputs)):
            raise BadBundle(f"{path}: bindings differ from the manifest's: {'; '.join(differences)}; build it again")
        names = tuple(b.name for b in inputs), tuple(b.name for b in outputs)
        return cls(session, *names, initializers or {}, renamed)

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> "SubgraphCall":
        """Bind every input and output, contiguous and on the session's device."""
        binding = self.session.io_binding()
        names, vectors = (self.renamed.names, self.renamed.vectors) if self.renamed else ({}, {})
        for name in self.inputs:
            binding.bind_input(names.get(name, name), *place(tensors[name]))
        for name, vector in vectors.items():
            binding.bind_input(name, *place(vector))
        for name in self.outputs:
            binding.bind_output(names.get(name, name), *place(tensors[name]))
        return SubgraphCall(self.session, binding, (*tensors.values(), *vectors.values()))


class SubgraphCall:
    """A subgraph with its tensors bound."""

    def __init__(
        self,
        session: "onnxruntime.InferenceSession",
        binding: "onnxruntime.IOBinding",
        keep: tuple[torch.Tensor, ...],
    ) -> None:
        self._session = session
        self._binding = binding
        self._keep = keep  # the binding holds bare addresses
        self._options = onnxruntime.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._options.add_run_config_entry("gpu_graph_id", "-1")  # none; without it each run raises inside

    def run(self) -> None:
        """Enqueue one run on the stream the session was opened for."""
        self._session.run_with_iobinding(self._binding, self._options)


def open_subgraphs(
    wanted: Sequence[tuple[Path, Contract]],
    device: torch.device,
    stream: int,
    threads: int | None,
    initializers: "Mapping[str, onnxruntime.OrtValue] | None" = None,
) -> list[OpenSubgraph]:
    """Open each path of ``wanted`` as open_subgraph does. Subgraphs that are equal_graphs share a session."""
    renamed = [renamed_graph(path, device) for path, _ in wanted]
    # by content: the first subgraph that has it, whose session the others share
    first = {each.content: at for at, each in reversed(list(enumerate(renamed))) if each is not None}
    source = [at if each is None else first[each.content] for at, each in enumerate(renamed)]

    def load(at: int) -> OpenSubgraph:
        return open_subgraph(*wanted[at], device, stream, threads, initializers, renamed[at])

    alone = sorted(set(source))
    opened = dict(zip(alone, map_in_threads(load, alone, _CONCURRENT_LOADS), strict=True))
    return [
        OpenSubgraph.of(opened[at].session, expected, path, initializers, each)
        for at, (path, expected), each in zip(source, wanted, renamed, strict=True)
    ]


def open_subgraph(
    path: Path,
    expected: Contract,
    device: torch.device,
    stream: int,
    threads: int | None = None,
    initializers: "Mapping[str, onnxruntime.OrtValue] | None" = None,
    renamed: RenamedGraph | None = None,
) -> OpenSubgraph:
    """Open ``path`` to enqueue on ``stream`` of a CUDA ``device``, or on a CPU with at most ``threads`` threads.

    ``initializers``: see open_session. ``renamed``: open this form of the graph instead.

    Raises as open_session does, and BadBundle if the bindings of the file are not ``expected``.
    """
    provider: Provider = CPU
    if not device_of(device).on_host:
        name, options = cuda_provider(device, stream)
        provider, threads = (name, options | _CAPTURABLE), 1
    entries = {} if device_of(device).on_host else _ENTRIES
    content = renamed.content if renamed else None
    session = open_session(
        path, [provider], entries=entries, threads=threads, content=content, initializers=initializers
    )
    return OpenSubgraph.of(session, expected, path, initializers, renamed)
