"""What onnxruntime can do on this machine."""

from tandemrt.engines.recipe import backend_status as installed
from tandemrt.engines.recipe.backend_status import NO_GPU, BackendStatus
from tandemrt.engines.recipe.backends import BACKENDS
from tandemrt.engines.validation.extras import pip_install
from tandemrt.plugins.tensors.devices.lookup import gpus


def backend_status(name: str) -> BackendStatus:
    """Return the status of the backend ``name``. A GPU needs another package of onnxruntime; it runs on a CPU too."""
    gpu_version = installed.package_version("onnxruntime-gpu")
    version = installed.package_version("onnxruntime") or gpu_version
    works = "yes" if version else f"needs: {pip_install('cpu')}"
    builds = works if not version or installed.package_version("torch") else f"needs torch: {pip_install('build')}"
    if BACKENDS[name].device == "cpu":
        return BackendStatus(name, version or "-", builds, works)
    return BackendStatus(name, gpu_version or "-", builds, _runs_on_gpu(gpu_version))


def _runs_on_gpu(version: str | None) -> str:
    if not version:
        return f"needs: pip uninstall onnxruntime, then {pip_install('cuda')}"
    if not gpus():
        return NO_GPU
    from tandemrt.plugins.kernels import cudnn_attention

    slower = cudnn_attention.unavailable()
    return "yes" if slower is None else f"yes; prefill by our own kernel, up to twice as slow: {slower}"
