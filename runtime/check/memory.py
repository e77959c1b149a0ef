"""What an opened bundle takes of the device's memory."""

import mmap
from pathlib import Path

import torch

from tandemrt.runtime.check.finding import Finding
from tandemrt.runtime.round.loop import Loop

_STATM = Path("/proc/self/statm")


def used() -> dict[str, int]:
    """Bytes in use by kind of device: of the current GPU by everybody, of the host by this process; where known."""
    found = {}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found["cuda"] = total - free
    if _STATM.is_file():
        found["cpu"] = int(_STATM.read_text().split()[1]) * mmap.PAGESIZE
    return found


def measure_memory(loop: Loop, before: dict[str, int], after: dict[str, int]) -> Finding:
    """Report what opening took (``before`` and ``after`` as ``used`` gave them) and what of it the caches are."""
    tensors = [tensor for cache in (loop.tandem.cache, *loop.drafter.caches) for tensor in cache.tensors.values()]
    numbers = {"caches": sum(tensor.nbytes for tensor in tensors)}
    result = f"caches {_megabytes(numbers['caches'])}"
    kind = loop.clock.device.type
    if kind in before:
        numbers["opened"] = after[kind] - before[kind]
        result = f"{_megabytes(numbers['opened'])} taken by opening, of which {result}"
    return Finding("memory", "", result, "measured", numbers)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
