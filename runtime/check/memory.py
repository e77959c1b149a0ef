"""Measure the device memory of an opened bundle."""

from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of, gpus
from tandemrt.runtime.check.result import CheckResult
from tandemrt.runtime.llm.llm import LLM


def memory_in_use() -> dict[str, int]:
    """Return bytes in use by device type: all processes on the first GPU ("cuda"), this process on the host ("cpu").

    Types whose use cannot be measured are absent.
    """
    devices = (device_of(torch.device("cpu")), *gpus()[:1])
    used = {device.handle.type: device.used_memory() for device in devices}
    return {kind: nbytes for kind, nbytes in used.items() if nbytes is not None}


def measure_memory(llm: LLM, before: dict[str, int], after: dict[str, int]) -> CheckResult:
    """Report the memory that opening took, from ``memory_in_use`` before and after, and the share of the caches."""
    loop = llm.loop
    tensors = [tensor for cache in (loop.target.cache, *loop.drafter.caches) for tensor in cache.tensors.values()]
    numbers = {"caches": sum(tensor.nbytes for tensor in tensors)}
    result = f"caches {_megabytes(numbers['caches'])}"
    kind = loop.streams.device.type
    if kind in before:
        numbers["opened"] = after[kind] - before[kind]
        result = f"{_megabytes(numbers['opened'])} taken by opening, including {result}"
    return CheckResult("memory", "", result, "measured", numbers)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
