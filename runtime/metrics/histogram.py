"""A histogram that passes each observed value to an optional listener."""

from bisect import bisect_left
from collections.abc import Callable, Sequence


class Histogram:
    """Counts values by bucket.

    Attributes:
        buckets: ascending upper bounds, inclusive as in Prometheus.
        counts: values per bucket (not cumulative); one more entry counts values above the last bound.
        sum: of all values.
        listener: called with every value, in the thread that observes it; must be fast and must not raise.
    """

    def __init__(self, buckets: Sequence[float]) -> None:
        self.buckets = tuple(buckets)
        self.counts = [0] * (len(self.buckets) + 1)
        self.sum = 0.0
        self.listener: Callable[[float], None] | None = None

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value`` ``times`` times."""
        self.counts[bisect_left(self.buckets, value)] += times
        self.sum += times * value
        if self.listener is not None:
            for _ in range(times):
                self.listener(value)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def copy(self) -> "Histogram":
        """A snapshot, without the listener."""
        same = Histogram(self.buckets)
        same.counts, same.sum = list(self.counts), self.sum
        return same

    def since(self, earlier: "Histogram") -> "Histogram":
        """A histogram of the values observed since ``earlier``, an earlier copy."""
        newer = Histogram(self.buckets)
        newer.counts = [now - then for now, then in zip(self.counts, earlier.counts, strict=True)]
        newer.sum = self.sum - earlier.sum
        return newer
