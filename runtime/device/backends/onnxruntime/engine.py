"""onnxruntime on a CPU or a CUDA device: sessions with IO binding, caches updated in place."""

from collections.abc import Mapping
from pathlib import Path

from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.validation.errors import BadBundle
from tandemrt.plugins.onnxruntime.sessions import place
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.runtime.device.backends.base import check_tensors
from tandemrt.runtime.device.backends.onnxruntime.sessions import (
    CPU,
    SPINNING,
    Provider,
    bindings,
    cuda_provider,
    onnxruntime,
    open_session,
)


class OnnxRuntimeEngine:
    """One graph in one session. Runs are ordered by the device's current stream; nothing is allocated between runs."""

    capturable = False  # a run waits for its own work, and may compute parts of a graph on the host

    def __init__(
        self,
        session: "onnxruntime.InferenceSession",
        contract: Contract,
        device: torch.device,
        initializers: "Mapping[str, onnxruntime.OrtValue] | None" = None,
    ) -> None:
        self.session = session
        self._initializers = initializers  # the session holds bare addresses
        self.contract = contract
        self.device = device
        self._host_inputs = () if device_of(device).on_host else _host_inputs(session)

    @classmethod
    def open(
        cls,
        path: Path | str,
        contract: Contract,
        *,
        device: "str | torch.device" = "cpu",
        threads: int | None = None,
        spinning: bool = False,
        optimized: bool = True,
        content: bytes | None = None,
        initializers: "Mapping[str, onnxruntime.OrtValue] | None" = None,
    ) -> "OnnxRuntimeEngine":
        """Open ``path`` on ``device`` and check its bindings. ``threads`` limits CPU threads (None: one per core).

        ``spinning``: threads spin between the nodes of a run; see SPINNING. ``optimized``, ``initializers``: see
        open_session. ``content``: the bytes of the file, read before.

        Raises BackendUnavailable if onnxruntime has no provider for the device or cannot load it, and BadBundle if
        the file cannot be loaded or its bindings differ from ``contract``.
        """
        device = torch.device(device)
        entries = SPINNING if spinning and device_of(device).on_host else {}
        session = open_session(
            path,
            _providers(device),
            threads=threads,
            entries=entries,
            optimized=optimized,
            content=content,
            initializers=initializers,
        )
        actual = Contract(bindings(session.get_inputs()), bindings(session.get_outputs()), contract.aliases)
        differences = contract.differences(actual)
        if differences:
            raise BadBundle(f"{path}: bindings differ from the contract: {'; '.join(differences)}; build it again")
        return cls(session, contract, device, initializers)

    def bind(self, tensors: Mapping[str, torch.Tensor], *, needs_probs: bool = True) -> "OnnxRuntimeCall":  # noqa: ARG002
        """See Engine.bind; the graph ignores ``needs_probs``. Aliased outputs share the memory of their input."""
        check_tensors(self.contract, tensors, self.device)
        binding = self.session.io_binding()
        mirrors = {name: tensors[name].cpu() for name in self._host_inputs}
        for b in self.contract.inputs:
            binding.bind_input(b.name, *place(mirrors.get(b.name, tensors[b.name])))
        source = dict(self.contract.aliases)
        for b in self.contract.outputs:
            binding.bind_output(b.name, *place(tensors[source.get(b.name, b.name)]))
        copies = tuple((tensors[name], mirror) for name, mirror in mirrors.items())
        return OnnxRuntimeCall(self.session, binding, copies, tuple(tensors.values()))


class OnnxRuntimeCall:
    """A session with all tensors bound.

    On a CUDA device a run waits for its own work, because the next run overwrites values that the graph computes on the
    host. Inputs that the graph reads on the host (operators without a CUDA kernel) are copied before each run; bound
    directly, onnxruntime would copy them only once, at binding.
    """

    def __init__(
        self,
        session: "onnxruntime.InferenceSession",
        binding: "onnxruntime.IOBinding",
        copies: tuple[tuple[torch.Tensor, torch.Tensor], ...],
        keep: tuple[torch.Tensor, ...],
    ) -> None:
        self._session = session
        self._binding = binding
        self._copies = copies
        self._keep = keep  # the bindings hold bare addresses

    def run(self) -> None:
        """Run once, after all work on the device's current stream."""
        for tensor, mirror in self._copies:
            mirror.copy_(tensor)
        self._session.run_with_iobinding(self._binding)


def _providers(device: torch.device) -> list[Provider]:
    if device_of(device).on_host:
        return [CPU]
    return [cuda_provider(device, device_of(device).current_stream()), CPU]


def _host_inputs(session: "onnxruntime.InferenceSession") -> tuple[str, ...]:
    """Inputs that the session reads in host memory, although it runs on a CUDA device."""
    where = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    return tuple(argument.name for argument, memory in where if memory.name == "Cpu")
