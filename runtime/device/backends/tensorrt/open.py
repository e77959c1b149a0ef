"""Deserializes an engine file, or raises an error that names the cause."""

import ctypes
import mmap
from pathlib import Path
from typing import Any

import torch

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import EngineEntry as EngineEntry
from tandemrt.engines.bundle.manifest import EngineName
from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.contract.gpus import Capability, covers, name_of
from tandemrt.engines.recipe.backends import CPU
from tandemrt.engines.validation.errors import BackendUnavailable, BadBundle
from tandemrt.plugins.tensorrt.bindings import dtype_of, narrow_inputs, widened
from tandemrt.plugins.tensorrt.modules import load, logger, opens
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.runtime.device.backends.tensorrt.plan import Profile, Shape


def open_file(bundle: Bundle, name: EngineName, device: torch.device) -> tuple[Any, Any]:
    """Return the module of the engine's backend and the open engine.

    Raises BackendUnavailable when the module, the GPU or its memory do not fit, BadBundle when the file does not.
    """
    entry = bundle.engine(name)
    trt = load(entry.backend)
    if device_of(device).on_host:
        raise BackendUnavailable(
            f"engine {name!r}: built for {entry.backend}, which runs on a GPU; received device {str(device)!r}. "
            f"Use device='cuda', or build the bundle for {CPU}"
        )
    require_gpu(name, entry, device_of(device).capability)
    return trt, deserialize(trt, name, entry, bundle.path(name))


def require_gpu(name: EngineName, entry: EngineEntry, capability: Capability) -> None:
    """Raise BackendUnavailable unless the recipe named this kind of GPU."""
    if not covers(entry.built_for, capability):
        fix = "add it to backend.compute_capabilities" if entry.backend == "tensorrt-rtx" else "build on this GPU"
        raise BackendUnavailable(
            f"engine {name!r}: built for {entry.built_for}; the GPU here is {name_of(capability)}. Run it on a GPU "
            f"that the recipe names, or {fix} and build the bundle again"
        )


def deserialize(trt: Any, name: EngineName, entry: EngineEntry, file: Path) -> Any:
    """Deserialize ``file``. Raises BackendUnavailable with TensorRT's own message if it fails."""
    log = logger(trt)
    log.clear()
    runtime = trt.Runtime(log)
    if log.errors:
        # TensorRT still returns an empty object, which crashes the process when it is used or freed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(runtime))
        raise BackendUnavailable(f"engine {name!r}: {entry.backend} {trt.__version__} cannot start: {log.summary()}")
    # A version-compatible engine contains the runtime of its own release, as code to load and run.
    runtime.engine_host_code_allowed = entry.backend == "tensorrt"
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        engine = runtime.deserialize_cuda_engine(data)
        if engine is not None:
            return engine
        why = "; ".join((*_diagnoses(trt, runtime, data), log.summary()))
    raise BackendUnavailable(
        f"engine {name!r}: {entry.backend} {trt.__version__} cannot open {file.name}, built for {entry.built_for}: "
        f"{why}. This release opens its own engines and {opens(entry.backend, trt.__version__)}, on a GPU that they "
        "were built for; install the release that built it (export inspect names it) or build the bundle again"
    )


def contract_of(engine: Any, *, reports_aliases: bool = True) -> Contract:
    """The bindings of an open engine; dynamic sizes are -1. An engine may be too old to be asked for aliases."""
    kinds: dict[str, list[Binding]] = {"INPUT": [], "OUTPUT": []}
    aliases = []
    for i in range(engine.num_io_tensors):
        name = engine.get_tensor_name(i)
        dtype = engine.get_tensor_dtype(name).name
        kind = engine.get_tensor_mode(name).name
        kinds[kind].append(Binding(name, dtype_of(dtype), tuple(engine.get_tensor_shape(name))))
        if reports_aliases and kind == "OUTPUT" and (source := engine.get_aliased_input_tensor(name)):
            aliases.append((name, source))
    return Contract(tuple(kinds["INPUT"]), tuple(kinds["OUTPUT"]), tuple(aliases))


def require_bindings(
    name: EngineName, engine: Any, contract: Contract, *, reports_aliases: bool = True
) -> tuple[str, ...]:
    """Raise BadBundle unless the bindings fit the contract: caches in place, nothing in host memory.

    Returns the int64 inputs that the engine reads as int32. ``reports_aliases``: see manifest.EngineEntry.
    """
    actual = contract_of(engine, reports_aliases=reports_aliases)
    lines = contract.differences(widened(actual, contract))
    copied = [alias for alias in contract.aliases if reports_aliases and alias not in actual.aliases]
    lines += [f"{output} does not update {source} in place" for output, source in copied]
    on_host = [b.name for b in actual.inputs if engine.get_tensor_location(b.name).name == "HOST"]
    lines += [f"{name} is read in host memory" for name in on_host]
    if lines:
        raise BadBundle(f"engine {name!r}: bindings differ from the contract: {'; '.join(lines)}. Build it again")
    return narrow_inputs(actual, contract)


def profiles_of(engine: Any, contract: Contract) -> list[Profile]:
    """The shapes that each profile of an open engine takes, without the last dimension of pairs (bindings.paired)."""

    def shapes(name: str, rank: int, profile: int) -> tuple[Shape, Shape, Shape]:
        least, best, most = (tuple(shape)[:rank] for shape in engine.get_tensor_profile_shape(name, profile))
        return least, best, most

    return [
        {b.name: shapes(b.name, len(b.shape), i) for b in contract.inputs}
        for i in range(engine.num_optimization_profiles)
    ]


def _diagnoses(trt: Any, runtime: Any, data: mmap.mmap) -> list[str]:
    # Only TensorRT-RTX has this call; TensorRT logs its causes.
    if not hasattr(runtime, "get_engine_validity"):
        return []
    _, bits = runtime.get_engine_validity(data)
    return [_DIAGNOSES.get(n, n) for n, bit in trt.EngineInvalidityDiagnostics.__members__.items() if bits & int(bit)]


_DIAGNOSES = {
    "VERSION_MISMATCH": "built by another release of TensorRT-RTX",
    "UNSUPPORTED_CC": "the compute capability of this GPU is not supported by TensorRT-RTX, or not by this engine",
    "OLD_CUDA_DRIVER": "the NVIDIA driver is too old",
    "OLD_CUDA_RUNTIME": "the CUDA runtime is too old",
    "INSUFFICIENT_GPU_MEMORY": "the GPU has too little memory",
    "MALFORMED_ENGINE": "the file is damaged or is not an engine",
    "CUDA_ERROR": "CUDA or its driver is not installed correctly",
}
