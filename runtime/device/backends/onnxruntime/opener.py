"""The opener of onnxruntime: a graph, a decoder in steps, or the kernels that replace a graph; and its status."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import EngineName
from tandemrt.engines.contract.gpus import OLDEST_WITH_KERNELS
from tandemrt.engines.contract.operators import WEIGHTLESS_ENGINES
from tandemrt.engines.recipe import backend_status as installed
from tandemrt.engines.recipe.backend_status import NO_GPU, BackendStatus
from tandemrt.engines.recipe.backends import BACKENDS
from tandemrt.engines.validation.extras import pip_install
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of, gpus
from tandemrt.runtime.device.backends.base import Engine
from tandemrt.runtime.device.backends.opening import Opening

if TYPE_CHECKING:
    from tandemrt.runtime.device.backends.onnxruntime.shared_weights import SharedWeights

_HOST_DECIDES = ("verify", "verify_probs", "propose")  # by numpy, where it can
_ON_FIRST_USE = ("adjust", *_HOST_DECIDES)  # graphs for requests with biases, penalties or the rejection rule


def engine_opener(opening: Opening) -> Callable[[EngineName], Engine]:
    """Return the function that opens an engine by its name, see Opener. Engines share the weights of the bundle."""
    bundle, weights = opening.bundle, None
    if any(entry.decoder is not None or entry.shared for entry in bundle.manifest.engines.values()):
        from tandemrt.runtime.device.backends.onnxruntime.shared_weights import SharedWeights

        weights = SharedWeights(bundle.folder, opening.device)
    return partial(_open_engine, opening, weights)


def require_memory(bundle: Bundle, device: torch.device) -> None:
    """Require nothing: a graph does not tell its memory. runtime/llm/memory.py checks weights and caches."""


def backend_status(name: str) -> BackendStatus:
    """Return the status of the backend ``name``. A GPU needs another package of onnxruntime; it runs on a CPU too."""
    gpu_version = installed.package_version("onnxruntime-gpu")
    version = installed.package_version("onnxruntime") or gpu_version
    works = "yes" if version else f"needs: {pip_install('cpu')}"
    builds = works if not version or installed.package_version("torch") else f"needs torch: {pip_install('build')}"
    if BACKENDS[name].device == "cpu":
        return BackendStatus(name, version or "-", builds, works)
    return BackendStatus(name, gpu_version or "-", builds, _runs_on_gpu(gpu_version))


def _open_engine(opening: Opening, weights: "SharedWeights | None", name: EngineName) -> Engine:
    """Open engine ``name``. Modules are imported on demand: kernels and steps need more of them than a graph."""
    bundle, device, threads = opening.bundle, opening.device, opening.threads
    entry = bundle.engine(name)
    if entry.decoder is not None:
        from tandemrt.runtime.device.backends.onnxruntime.executor import Executor

        assert weights is not None
        shared = partial(weights.of, entry)
        if name == "target" and bundle.manifest.ranks:
            from tandemrt.runtime.device.backends.onnxruntime.ranks import RankedEngine

            return RankedEngine.open(bundle, device, threads, shared, cuda_graphs=opening.cuda_graphs)
        return Executor.open(bundle, entry, device, threads, shared)
    if name in WEIGHTLESS_ENGINES and _runs_kernels(bundle, device):
        from tandemrt.runtime.device.backends.onnxruntime.kernels import KernelEngine

        return KernelEngine.open(bundle, name, device)
    from tandemrt.runtime.device.backends.onnxruntime.engine import OnnxRuntimeEngine

    contract = bundle.contract(name)
    open_graph = partial(
        OnnxRuntimeEngine.open,
        bundle.path(name),
        contract,
        device=device,
        threads=threads,
        optimized=not entry.optimized,
        initializers={} if weights is None else weights.of(entry),
    )
    if not device_of(device).on_host or name not in _ON_FIRST_USE:
        return open_graph(spinning=name not in WEIGHTLESS_ENGINES)
    # Read now: another build may replace the folder of the bundle later.
    open_graph = partial(open_graph, content=bundle.path(name).read_bytes())
    if name in _HOST_DECIDES and contract["logits"].dtype == "float32":
        from tandemrt.runtime.device.backends.onnxruntime.host_decisions import HostDrafting, HostVerification

        return (HostDrafting if name == "propose" else HostVerification)(contract, device, open_graph)
    from tandemrt.runtime.device.backends.onnxruntime.deferred import DeferredEngine

    return DeferredEngine(contract, device, open_graph)


def _runs_kernels(bundle: Bundle, device: torch.device) -> bool:
    """Whether kernels run the engines without weights. Older GPUs have no kernels and run ONNX graphs."""
    return bool(bundle.manifest.kernels) and device_of(device).capability >= OLDEST_WITH_KERNELS


def _runs_on_gpu(version: str | None) -> str:
    if not version:
        return f"needs: pip uninstall onnxruntime, then {pip_install('cuda')}"
    if not gpus():
        return NO_GPU
    from tandemrt.plugins.kernels import cudnn_attention

    slower = cudnn_attention.unavailable()
    return "yes" if slower is None else f"yes; prefill by our own kernel, up to twice as slow: {slower}"
