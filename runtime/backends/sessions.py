"""onnxruntime sessions: opened on a provider that is really there, their bindings in the contract's words."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tandemrt.engines.binding import Binding
from tandemrt.engines.dtypes import from_onnxruntime
from tandemrt.engines.errors import BackendUnavailable, BadBundle
from tandemrt.plugins.sessions import session_options
from tandemrt.plugins.tensors import torch

try:
    import onnxruntime as onnxruntime  # exported
except ImportError as error:
    raise BackendUnavailable(
        "onnxruntime is not installed; it is needed to run this bundle: "
        "pip install 'tandemrt[cpu]' (or 'tandemrt[cuda]' for an NVIDIA GPU)"
    ) from error

Provider = tuple[str, dict[str, str]]

# For the many small nodes of a decoder: its threads stay awake between them, no longer than that, and not behind the
# run's end, where they would take the cores from verification.
SPINNING = {
    "session.intra_op.allow_spinning": "1",
    "session.intra_op.spin_duration_us": "1000",
    "session.force_spinning_stop": "1",
}

onnxruntime.set_default_logger_severity(3)  # errors: opening a CUDA session warns of devices that nobody asked for


def open_session(
    path: Path | str,
    providers: Sequence[Provider],
    *,
    entries: Mapping[str, str] | None = None,
    threads: int | None = None,
    optimized: bool = True,
    initializers: "Mapping[str, onnxruntime.OrtValue] | None" = None,
) -> "onnxruntime.InferenceSession":
    """Open ``path`` on the first of ``providers``, with the session config ``entries`` and at most ``threads`` threads.

    ``optimized``: onnxruntime may change the graph first; what runs once is not worth it. ``initializers`` take the
    place of the graph's own, of those names that it has; who opens the session keeps them as long as that.
    Raises BadBundle if onnxruntime cannot load the file, BackendUnavailable if it would run it elsewhere.
    """
    options = session_options(threads=threads, entries=entries)
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    for name, value in (initializers or {}).items():
        options.add_initializer(name, value)
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=list(providers))
    except Exception as error:  # onnxruntime raises a family of its own without a common public base
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
    """The CUDA provider on ``device``, enqueuing on ``stream`` (a cudaStream_t). Raises BackendUnavailable."""
    if device.type != "cuda" or "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise BackendUnavailable(
            f"device: onnxruntime {onnxruntime.__version__} offers {onnxruntime.get_available_providers()}, "
            f"received {str(device)!r}; use device='cpu' or install 'tandemrt[cuda]' in place of 'tandemrt[cpu]'"
        )
    onnxruntime.preload_dlls()  # CUDA and cuDNN from their Python packages, where those are installed
    options = {"device_id": str(device.index or 0), "user_compute_stream": str(stream), "use_tf32": "0"}
    return "CUDAExecutionProvider", options


def bindings(arguments: Sequence["onnxruntime.NodeArg"]) -> tuple[Binding, ...]:
    """The inputs or outputs of a session."""
    return tuple(Binding(a.name, from_onnxruntime(a.type), tuple(a.shape)) for a in arguments)


CPU: Provider = ("CPUExecutionProvider", {})
