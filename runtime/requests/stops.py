"""Stop strings, found while the text grows, whatever their number.

An Aho-Corasick automaton over characters, with failure links: each step back on them was paid for by a step forward, so
a character costs a step or two on average. Markers (runtime/constraints/markers.py) are over tokens, and completed.
"""

from collections import deque
from collections.abc import Iterable

ROOT = 0


class StopMatcher:
    """Finds the first of ``stops`` that is completed; of several completed at once, the longest.

    Immutable once built. A node is the longest end of the text that begins a stop string.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [ROOT]  # where to go on from if a character does not follow
        self.depth = [0]  # characters of the node
        self.found: list[str | None] = [None]  # the longest stop string that ends here
        for stop in stops:
            self._insert(stop)
        self._link()

    @property
    def any(self) -> bool:
        """Whether there is any stop string."""
        return len(self.found) > 1

    def step(self, node: int, character: str) -> int:
        """Return the node behind ``character``."""
        while character not in self._next[node]:
            if node == ROOT:
                return ROOT
            node = self._shorter[node]
        return self._next[node][character]

    def _insert(self, stop: str) -> None:
        node = ROOT
        for character in stop:
            if character not in self._next[node]:
                self._next[node][character] = len(self._next)
                self._next.append({})
                self._shorter.append(ROOT)
                self.depth.append(self.depth[node] + 1)
                self.found.append(None)
            node = self._next[node][character]
        self.found[node] = stop

    def _link(self) -> None:
        """Nearest nodes first: what is shorter is linked by then."""
        waiting = deque(self._next[ROOT].values())
        while waiting:
            node = waiting.popleft()
            for character, child in self._next[node].items():
                self._shorter[child] = self.step(self._shorter[node], character)
                self.found[child] = self.found[child] or self.found[self._shorter[child]]
                waiting.append(child)
