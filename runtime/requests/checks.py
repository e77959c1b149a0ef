"""Requests that have a text, whole, and no slot any more: it is being checked, off the loop."""

from collections.abc import Callable, Iterator

from tandemrt.runtime.requests.running import Running


class Checks:
    """Who waits for the verdict on a finished text. ``changed`` is called, in any thread, when one has come.

    Only the loop's thread adds and takes; any thread may look who is there.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._pending: list[Running] = []

    def add(self, running: Running) -> None:
        assert running.verdict is not None
        self._pending = [*self._pending, running]
        running.verdict.add_done_callback(lambda _: self._changed())

    def over(self, now: float) -> list[Running]:
        """Those whose verdict has come, and those who must not wait for it any longer."""
        return [running for running in self._pending if _over(running, now)]

    def take(self, now: float) -> list[Running]:
        """Take those out who are ``over``; what nobody waits for is not begun."""
        taken = self.over(now)
        self._pending = [running for running in self._pending if running not in taken]
        for running in taken:
            if running.verdict is not None:
                running.verdict.cancel()
        return taken

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[Running]:
        return iter(self._pending)


def _over(running: Running, now: float) -> bool:
    return running.verdict is None or running.verdict.done() or running.request.interrupted(now) is not None
