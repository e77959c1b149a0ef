"""Open onnxruntime sessions on a provider, and read their bindings as contract types."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.dtypes import ONNX
from tandemrt.engines.validation.errors import BackendUnavailable, BadBundle, clipped
from tandemrt.engines.validation.extras import pip_install
from tandemrt.engines.validation.system_errors import system_advice
from tandemrt.plugins.onnxruntime.custom_operators import load_into
from tandemrt.plugins.onnxruntime.sessions import session_options
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of

try:
    import onnxruntime as onnxruntime  # exported
except ImportError as error:
    raise BackendUnavailable(
        f"onnxruntime is not installed; it is needed to run this bundle: {pip_install('cpu')} "
        "(the extra cuda for an NVIDIA GPU)"
    ) from error

Provider = tuple[str, dict[str, str]]
_NAMES = {"float32": "float", "float8_e4m3fn": "float8e4m3fn"}  # of onnxruntime, where they differ
_DTYPES = {f"tensor({_NAMES.get(dtype, dtype)})": dtype for dtype in ONNX}

# Threads spin between the many small nodes of a decoder, but not after the run, when verification needs the cores.
SPINNING = {
    "session.intra_op.allow_spinning": "1",
    "session.intra_op.spin_duration_us": "1000",
    "session.force_spinning_stop": "1",
}


def open_session(
    path: Path | str,
    providers: Sequence[Provider],
    *,
    entries: Mapping[str, str] | None = None,
    threads: int | None = None,
    optimized: bool = True,
    content: bytes | None = None,
    initializers: "Mapping[str, onnxruntime.OrtValue] | None" = None,
) -> "onnxruntime.InferenceSession":
    """Open ``path`` on the first of ``providers``, with the session config ``entries`` and at most ``threads`` threads.

    ``optimized``: let onnxruntime optimize the graph first; not worth the time for a graph that runs once, or that a
    build has optimized.
    ``content``: the bytes of the file, which is not read then.
    ``initializers`` replace the graph's own by name; the caller keeps them alive as long as the session.
    Raises BadBundle if onnxruntime cannot load the file, BackendUnavailable if it would use another provider or the
    operating system refuses its threads.
    """
    options = session_options(threads=threads, entries=entries)
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    for name, value in (initializers or {}).items():
        options.add_initializer(name, value)
    try:
        if providers[0] == CPU:
            load_into(options, Path(path) if content is None else content)
        session = onnxruntime.InferenceSession(content or str(path), options, providers=list(providers))
    except Exception as error:  # onnxruntime's exceptions share no public base class
        if "pthread_create failed" in str(error):
            raise BackendUnavailable(
                f"{path}: onnxruntime could not start its threads: {clipped(error)}; use fewer (threads) or raise the "
                "limit (ulimit -u)"
            ) from error
        if (advice := system_advice(error)) is not None:
            raise BackendUnavailable(f"{path}: onnxruntime cannot load this engine: {advice}") from error
        raise BadBundle(f"{path}: onnxruntime cannot load this engine: {error}; build the bundle again") from error
    require_provider(session, providers[0][0])
    return session


def require_provider(session: "onnxruntime.InferenceSession", provider: str) -> None:
    """Raise BackendUnavailable unless ``session`` runs on ``provider``: onnxruntime falls back without an error."""
    if provider not in session.get_providers():
        raise BackendUnavailable(
            f"device: onnxruntime {onnxruntime.__version__} cannot use {provider} here, it would run on "
            f"{', '.join(session.get_providers())} instead; check that the CUDA and cuDNN libraries it was built for "
            "are installed, or use device='cpu'"
        )


def cuda_provider(device: torch.device, stream: int) -> Provider:
    """The CUDA provider on ``device`` and ``stream`` (a cudaStream_t). Raises BackendUnavailable if there is none."""
    if device_of(device).on_host or "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise BackendUnavailable(
            f"device: onnxruntime {onnxruntime.__version__} offers {onnxruntime.get_available_providers()}, "
            f"received {str(device)!r}; use device='cpu', or pip uninstall onnxruntime, then {pip_install('cuda')}"
        )
    onnxruntime.preload_dlls()  # CUDA and cuDNN from their Python packages, where those are installed
    options = {"device_id": str(device.index or 0), "user_compute_stream": str(stream), "use_tf32": "0"}
    return "CUDAExecutionProvider", options


def bindings(arguments: Sequence["onnxruntime.NodeArg"]) -> tuple[Binding, ...]:
    """The inputs or outputs of a session."""
    return tuple(Binding(a.name, _DTYPES.get(a.type, a.type), tuple(a.shape)) for a in arguments)


CPU: Provider = ("CPUExecutionProvider", {})
