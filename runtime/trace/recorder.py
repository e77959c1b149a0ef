"""Recorder of traces: the newest requests, and the times of the host's work."""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.trace import RequestTrace

MAX_REQUESTS = 100
MAX_SPANS = 100_000  # about 15,000 rounds


@dataclass(frozen=True)
class Span:
    """Host work on one phase of a step. Times are in seconds of ``time.perf_counter``."""

    phase: str
    start: float
    end: float


@dataclass(frozen=True)
class Step:
    """The host's work on one round, including the commit of the round before. ``number`` counts from 0."""

    number: int
    spans: Sequence[Span]

    @property
    def start(self) -> float:
        return self.spans[0].start

    @property
    def end(self) -> float:
        return self.spans[-1].end


class Recorder:
    """Keeps the newest ``MAX_REQUESTS`` requests and ``MAX_SPANS`` spans of one LLM.

    ``follow`` may be called from any thread. The other methods must not be called while a round runs, except ``span``.
    """

    def __init__(self) -> None:
        self._requests: deque[Request] = deque(maxlen=MAX_REQUESTS)
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)

    def follow(self, request: Request) -> None:
        """Trace ``request``, which must not be queued yet."""
        request.trace = RequestTrace()
        self._requests.append(request)

    def span(self, phase: str, start: float, end: float) -> None:
        """The listener of Metrics, called by the engine loop's thread."""
        self._spans.append(Span(phase, start, end))

    def clear(self) -> None:
        """Drop all requests and spans."""
        self._requests.clear()
        self._spans.clear()

    @property
    def finished(self) -> list[Request]:
        """The finished requests, in order of arrival."""
        return [request for request in self._requests if request.finished]

    def steps(self) -> list[Step]:
        """Return the spans grouped by step. A step starts with a prefill span; earlier spans are left out."""
        spans = list(self._spans)
        begins = [at for at, span in enumerate(spans) if span.phase == "prefill"]
        ends = pairwise([*begins, len(spans)])
        return [Step(number, spans[begin:end]) for number, (begin, end) in enumerate(ends)]


def step_at(steps: Sequence[Step], seconds: float) -> Step | None:
    """Return the step that was running at ``seconds``; None before the first one."""
    at = bisect_right(steps, seconds, key=lambda step: step.start) - 1
    return steps[at] if at >= 0 else None
