"""onnxruntime, on a CPU or a CUDA device: sessions with IO binding and caches updated in place."""

from collections.abc import Mapping
from pathlib import Path

import torch

from tandemrt.engines.contract import Binding, Contract
from tandemrt.engines.errors import BackendUnavailable, BadBundle
from tandemrt.runtime.backends.base import check_tensors

try:
    import onnxruntime
except ImportError as error:
    raise BackendUnavailable(
        "onnxruntime is not installed; it is needed to run this bundle: "
        "pip install 'tandemrt[cpu]' (or 'tandemrt[cuda]' for an NVIDIA GPU)"
    ) from error


onnxruntime.set_default_logger_severity(3)  # errors: opening a CUDA session warns of devices that nobody asked for


class OnnxRuntimeEngine:
    """One graph in one session. Runs are ordered by the device's current stream; nothing is allocated between runs."""

    def __init__(self, session: "onnxruntime.InferenceSession", contract: Contract, device: torch.device) -> None:
        self.session = session
        self.contract = contract
        self.device = device
        self.capturable = False  # a run waits for its own work, and parts of a graph may be computed on the host
        self._host_inputs = _host_inputs(session) if device.type == "cuda" else ()

    @classmethod
    def open(
        cls, path: Path | str, contract: Contract, *, device: str | torch.device = "cpu", threads: int | None = None
    ) -> "OnnxRuntimeEngine":
        """Open ``path`` on ``device`` and check its bindings. ``threads`` limits CPU threads (None: one per core).

        Raises BackendUnavailable if onnxruntime has no provider for the device or cannot load it, and BadBundle if
        the file cannot be loaded or its bindings differ from ``contract``.
        """
        device = torch.device(device)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors: the rest is advice on graphs that we do not write by hand
        # Several sessions share the cores: threads that spin while they wait would take them from one another.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if threads is not None:
            options.intra_op_num_threads = threads
        providers = _providers(device)
        try:
            session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        except Exception as error:  # onnxruntime raises a family of its own without a common public base
            raise BadBundle(f"{path}: onnxruntime cannot load this engine: {error}; build the bundle again") from error
        require_provider(session, providers[0][0])
        differences = contract.differences(_contract_of(session, contract))
        if differences:
            raise BadBundle(f"{path}: bindings differ from the contract: {'; '.join(differences)}; build it again")
        return cls(session, contract, device)

    def bind(self, tensors: Mapping[str, torch.Tensor], *, filters: bool = True) -> "OnnxRuntimeCall":  # noqa: ARG002
        """See Engine.bind. A graph looks for filters itself. Aliased outputs are bound to the memory of their input."""
        check_tensors(self.contract, tensors, self.device)
        binding = self.session.io_binding()
        mirrors = {name: tensors[name].cpu() for name in self._host_inputs}
        for b in self.contract.inputs:
            tensor = mirrors.get(b.name, tensors[b.name])
            binding.bind_input(b.name, *_place(tensor))
        source = dict(self.contract.aliases)
        for b in self.contract.outputs:
            binding.bind_output(b.name, *_place(tensors[source.get(b.name, b.name)]))
        copies = tuple((tensors[name], mirror) for name, mirror in mirrors.items())
        return OnnxRuntimeCall(self.session, binding, copies, tuple(tensors.values()))


class OnnxRuntimeCall:
    """A session with all of its tensors bound.

    A run waits for its own work on a CUDA device: what a graph computes on the host on its way there is overwritten
    by the next run. Inputs that a graph reads on the host (operators without a CUDA kernel) are copied there first;
    bound directly, onnxruntime would copy them once, when they are bound, and read the same values ever after.
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


def require_provider(session: "onnxruntime.InferenceSession", provider: str) -> None:
    """Raise BackendUnavailable unless ``session`` runs on ``provider``: onnxruntime falls back without an error."""
    if provider not in session.get_providers():
        raise BackendUnavailable(
            f"device: onnxruntime {onnxruntime.__version__} cannot use {provider} here, it would run on "
            f"{', '.join(session.get_providers())} instead; check that the CUDA and cuDNN libraries it was built for "
            "are installed, or use device='cpu'"
        )


def _providers(device: torch.device) -> list[tuple[str, dict[str, str]]]:
    cpu: tuple[str, dict[str, str]] = ("CPUExecutionProvider", {})
    if device.type == "cpu":
        return [cpu]
    if device.type != "cuda" or "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise BackendUnavailable(
            f"device: onnxruntime {onnxruntime.__version__} offers {onnxruntime.get_available_providers()}, "
            f"received {str(device)!r}; use device='cpu' or install 'tandemrt[cuda]' in place of 'tandemrt[cpu]'"
        )
    onnxruntime.preload_dlls()  # CUDA and cuDNN from their Python packages, where those are installed
    stream = torch.cuda.current_stream(device).cuda_stream
    cuda = {"device_id": str(device.index or 0), "user_compute_stream": str(stream), "use_tf32": "0"}
    return [("CUDAExecutionProvider", cuda), cpu]


def _host_inputs(session: "onnxruntime.InferenceSession") -> tuple[str, ...]:
    """Inputs that the session wants in host memory, though it runs on a CUDA device."""
    where = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    return tuple(argument.name for argument, memory in where if memory.name == "Cpu")


def _place(tensor: torch.Tensor) -> tuple[str, int, object, list[int], int]:
    device = tensor.device
    return device.type, device.index or 0, _ELEMENT_TYPES[tensor.dtype], list(tensor.shape), tensor.data_ptr()


def _contract_of(session: "onnxruntime.InferenceSession", expected: Contract) -> Contract:
    def bindings(args: list["onnxruntime.NodeArg"]) -> tuple[Binding, ...]:
        return tuple(Binding(a.name, _DTYPES.get(a.type, a.type), tuple(a.shape)) for a in args)

    return Contract(bindings(session.get_inputs()), bindings(session.get_outputs()), expected.aliases)


# onnxruntime takes ONNX's own element types, which numpy lacks for bfloat16 (TensorProto.DataType).
_ELEMENT_TYPES = {torch.float32: 1, torch.int32: 6, torch.int64: 7, torch.float16: 10, torch.bfloat16: 16}
_DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
}
