"""Collect the output of a request that was submitted to an LLM."""

import threading

from tandemrt.runtime.requests.request import RequestOutput, StreamOutput


class Listener:
    """The listener of one request. ``items`` holds its stream so far."""

    def __init__(self) -> None:
        self.items: list[StreamOutput] = []
        self._ended = threading.Event()

    def __call__(self, item: StreamOutput) -> None:
        self.items.append(item)
        if item.output is not None:
            self._ended.set()

    @property
    def num_tokens(self) -> int:
        """Tokens received so far."""
        return sum(len(item.token_ids) for item in self.items)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the request has ended; return False after ``timeout_s``."""
        return self._ended.wait(timeout_s)

    @property
    def output(self) -> RequestOutput | None:
        """The output of the request, None while it runs."""
        return self.items[-1].output if self.items else None
