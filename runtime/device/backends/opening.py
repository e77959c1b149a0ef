"""Opens the engines of a bundle, each on the backend that its manifest names."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import RUNNABLE, EngineName
from tandemrt.engines.contract.gpus import OLDEST_WITH_KERNELS
from tandemrt.engines.contract.operators import WEIGHTLESS_ENGINES
from tandemrt.engines.parallel import map_in_threads
from tandemrt.engines.tensorrt.library import LIBRARIES
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.device.backends.base import Engine

if TYPE_CHECKING:
    from tandemrt.runtime.device.backends.shared_weights import SharedWeights

_ON_FIRST_USE = ("adjust", "verify", "verify_probs")  # graphs for requests with biases, penalties or a temperature
_CONCURRENT_SESSIONS = 4  # sessions that open concurrently; each uses one thread to read and optimize its graph


def engines_in_use(bundle: Bundle) -> list[EngineName]:
    """Return the engines that requests use. Drafts without a model have no probabilities to verify."""
    unused = () if bundle.draft.engines else ("verify_probs",)
    return [name for name in bundle.manifest.engines if name not in unused]


def open_engines(
    bundle: Bundle,
    device: torch.device,
    threads: int | None,
    names: Sequence[EngineName] | None = None,
    *,
    cuda_graphs: bool = True,
) -> dict[str, Engine]:
    """Open the engines ``names`` of ``bundle``, or all, on ``device``.

    ``cuda_graphs``: whether a target over several ranks may use CUDA graphs; other engines leave that to their caller.
    Raises BackendUnavailable for engines that cannot run here.
    """
    for name, entry in bundle.manifest.engines.items():
        if entry.backend not in RUNNABLE:
            raise BackendUnavailable(
                f"engine {name!r}: built for {entry.backend} ({entry.built_for}), which this version can build but not "
                f"run; it runs {', '.join(RUNNABLE)}: build the bundle with one of those in the recipe's [backend] name"
            )
    if device.type == "cuda" and any(entry.backend in LIBRARIES for entry in bundle.manifest.engines.values()):
        from tandemrt.runtime.device.backends.tensorrt.plan import memory_needed, require_memory

        require_memory(memory_needed(bundle), torch.cuda.mem_get_info(device)[0])
    names = list(bundle.manifest.engines) if names is None else names
    shares = any(entry.decoder is not None or entry.shared for entry in map(bundle.engine, names))
    weights = _shared_weights(bundle, device) if shares else None
    open_one = partial(_open, bundle, device, threads, weights, cuda_graphs)
    if device.type == "cuda":  # one by one, because engines use the current stream of this thread
        return {name: open_one(name) for name in names}
    return dict(zip(names, map_in_threads(open_one, names, _CONCURRENT_SESSIONS), strict=True))


def _shared_weights(bundle: Bundle, device: torch.device) -> "SharedWeights":
    from tandemrt.runtime.device.backends.shared_weights import SharedWeights

    return SharedWeights(bundle.folder, device)


def _open(
    bundle: Bundle,
    device: torch.device,
    threads: int | None,
    weights: "SharedWeights | None",
    cuda_graphs: bool,
    name: EngineName,
) -> Engine:
    # Backends are imported on demand: a bundle needs only its own backend installed.
    if bundle.engine(name).backend in LIBRARIES:
        from tandemrt.runtime.device.backends.tensorrt.engine import TensorRtEngine

        return TensorRtEngine.open(bundle, name, device)
    if bundle.engine(name).decoder is not None:
        from tandemrt.runtime.device.backends.executor import Executor

        assert weights is not None
        entry = bundle.engine(name)
        if name == "target" and bundle.manifest.ranks:
            from tandemrt.runtime.device.backends.ranks import RankedEngine

            return RankedEngine.open(bundle, device, threads, partial(weights.of, entry), cuda_graphs=cuda_graphs)
        return Executor.open(bundle, entry, device, threads, partial(weights.of, entry))
    if name in WEIGHTLESS_ENGINES and _runs_kernels(bundle, device):
        from tandemrt.runtime.device.backends.kernels import KernelEngine

        return KernelEngine.open(bundle, name, device)
    from tandemrt.runtime.device.backends.onnxruntime import OnnxRuntimeEngine

    contract = bundle.contract(name)
    open_graph = partial(
        OnnxRuntimeEngine.open,
        bundle.path(name),
        contract,
        device=device,
        threads=threads,
        optimized=not bundle.engine(name).optimized,
        initializers={} if weights is None else weights.of(bundle.engine(name)),
    )
    if device.type != "cpu" or name not in _ON_FIRST_USE:
        return open_graph(spinning=name not in WEIGHTLESS_ENGINES)
    # Read now: another build may replace the folder of the bundle later.
    open_graph = partial(open_graph, content=bundle.path(name).read_bytes())
    if name != "adjust" and contract["logits"].dtype == "float32":
        from tandemrt.runtime.device.backends.greedy_verification import GreedyVerification

        return GreedyVerification(contract, device, open_graph)
    from tandemrt.runtime.device.backends.deferred import DeferredEngine

    return DeferredEngine(contract, device, open_graph)


def _runs_kernels(bundle: Bundle, device: torch.device) -> bool:
    """Whether kernels run the engines without weights. Older GPUs have no kernels and run ONNX graphs."""
    if device.type != "cuda" or not bundle.manifest.kernels:
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST_WITH_KERNELS
