"""GPU time of a round per kernel, and idle time, from records of torch's profiler."""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def traced(work: Callable[[], int], kernels: int = 15) -> dict[str, Any]:
    """Run ``work``, which returns its number of rounds, under the profiler.

    Returns the share of time without work on the GPU between the first and the last kernel, milliseconds per round, the
    ``kernels`` with the largest total time, and as many pairs of kernels with the longest gaps between them in total.
    A kernel's time begins when all earlier ones have ended, because a kernel that is launched early waits for them.
    Recording costs time, so the idle shares are upper bounds.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        rounds = work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return summary([event for event in events if event.get("cat") in _WORK], rounds, kernels)


def summary(events: list[dict[str, Any]], rounds: int, kernels: int) -> dict[str, Any]:
    """Summarize ``events`` of a trace: ``ts`` and ``dur`` in microseconds, in any order, overlapping or not."""
    busy, end = 0.0, float("-inf")
    by_name: dict[str, list[float]] = defaultdict(list)
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    before = None  # the kernel that ended last
    ordered = sorted(events, key=lambda event: event["ts"])
    for event in ordered:
        name, start, stop = _short(event["name"]), max(event["ts"], end), event["ts"] + event["dur"]
        by_name[name].append(max(0.0, stop - start))
        if before is not None and start > end:
            gaps[before, name].append(start - end)
        busy += max(0.0, stop - start)
        if stop > end:
            before, end = name, stop
    span = end - ordered[0]["ts"] if ordered else 0.0
    largest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:kernels]
    longest = sorted(gaps.items(), key=lambda item: -sum(item[1]))[:kernels]
    return {
        "rounds": rounds,
        "ms_per_round": span / 1e3 / max(1, rounds),
        "idle_share": 1 - busy / span if span else 0.0,
        "launches_per_round": len(events) / max(1, rounds),
        "kernels": [
            {"name": name, "ms_per_round": sum(times) / 1e3 / max(1, rounds), "us_each": sum(times) / len(times)}
            for name, times in largest
        ],
        "gaps": [
            {
                "before": before,
                "after": after,
                "ms_per_round": sum(times) / 1e3 / max(1, rounds),
                "us_each": sum(times) / len(times),
            }
            for (before, after), times in longest
        ],
    }


def _short(name: str) -> str:
    return re.sub(r"<.*", "", re.sub(r"^void ", "", name))[:80]
