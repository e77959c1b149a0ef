"""Keeps what a trace shows: the newest requests, and when the host did what."""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.trace.trace import Trace

MOST_REQUESTS = 100
MOST_SPANS = 100_000  # about 15,000 rounds


@dataclass(frozen=True)
class Span:
    """The host worked on a verb of a round, in seconds of ``time.perf_counter``."""

    verb: str
    start: float
    end: float


@dataclass(frozen=True)
class Step:
    """What the loop did for one round, the commit of the round before included. ``number`` counts from 0."""

    number: int
    spans: Sequence[Span]

    @property
    def start(self) -> float:
        return self.spans[0].start

    @property
    def end(self) -> float:
        return self.spans[-1].end


class Recorder:
    """Follows the requests of one LLM: the newest ``MOST_REQUESTS`` of them and ``MOST_SPANS`` spans are kept.

    Requests may be followed from any thread; the rest is for when no round runs.
    """

    def __init__(self) -> None:
        self._requests: deque[Request] = deque(maxlen=MOST_REQUESTS)
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)

    def follow(self, request: Request) -> None:
        """Keep a trace of ``request``, which has not been queued yet."""
        request.trace = Trace()
        self._requests.append(request)

    def span(self, verb: str, start: float, end: float) -> None:
        """See Metrics.listener. Called by the loop's thread."""
        self._spans.append(Span(verb, start, end))

    def forget(self) -> None:
        """Begin anew."""
        self._requests.clear()
        self._spans.clear()

    @property
    def finished(self) -> list[Request]:
        """The requests that have finished, in the order in which they came."""
        return [request for request in self._requests if request.finished]

    def steps(self) -> list[Step]:
        """The spans by step. Each begins with its prompts; what is left of one whose beginning is lost is left out."""
        spans = list(self._spans)
        begins = [at for at, span in enumerate(spans) if span.verb == "prefill"]
        ends = pairwise([*begins, len(spans)])
        return [Step(number, spans[begin:end]) for number, (begin, end) in enumerate(ends)]


def step_at(steps: Sequence[Step], seconds: float) -> Step | None:
    """The step in which something happened; None if it is no longer known."""
    at = bisect_right(steps, seconds, key=lambda step: step.start) - 1
    return steps[at] if at >= 0 else None
