"""Time GPU work by replay of a CUDA graph."""

from collections.abc import Callable, Sequence

import torch

from tandemrt.plugins.operators.launch import Call

COLD = 400e6  # bytes that a graph reads: far more than the 50 MB second-level cache of an H200
_READ_RATES = {"H200": 4.3e12, "H100": 3.35e12}  # bytes per second: the highest measured; that of the data sheet


def bandwidth() -> float:
    """Return the highest rate at which a GPU of this kind reads memory; of other kinds that of an H200."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((rate for kind, rate in _READ_RATES.items() if kind in name), _READ_RATES["H200"])


def run_all(calls: Sequence[Call]) -> Callable[[], None]:
    """Return what enqueues ``calls`` in their order, for best_us."""

    def run() -> None:
        for call in calls:
            call.run()

    return run


def best_us(run: Callable[[], object], calls: int, stream: torch.cuda.Stream | None = None) -> float:
    """Return microseconds per call: the best of ten series of five replays. ``run`` makes ``calls`` calls."""
    return min(_series(run, calls, stream, series=10, replays=5))


def median_us(run: Callable[[], object]) -> float:
    """Return microseconds of one ``run``: the median of five series of 20 replays. The graph holds ten runs."""

    def ten() -> None:
        for _ in range(10):
            run()

    return sorted(_series(ten, 10, None, series=5, replays=20))[2]


def _series(
    run: Callable[[], object], calls: int, stream: torch.cuda.Stream | None, *, series: int, replays: int
) -> list[float]:
    stream = stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())  # the inputs are written there
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
            run()
        graph.replay()
        times: list[float] = []
        for _ in range(series):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / replays / calls)
    return times
