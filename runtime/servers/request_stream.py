"""Carry the outputs of one request from the engine loop's thread to the thread that sends the response."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tandemrt.engines.validation.errors import InternalError, TandemError, named
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tandemrt.runtime.requests.request import Request, RequestOutput, StreamOutput
from tandemrt.runtime.servers.request import ServerRequest


class RequestTimeout(TandemError):
    """The time limit of a request passed before its first token."""


class RequestCancelled(TandemError):
    """A request was cancelled before it finished."""


@dataclass(frozen=True)
class OutputDelta:
    """New text and tokens of one output.

    Attributes:
        index: position of the output among the prompt's outputs.
        logprobs: one entry per token, empty unless the request asks for them.
        output: the finished output, in its last delta only.
        sources: one entry per token if the request asks for them (TokenSources).
    """

    index: int
    text: str
    reasoning: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    output: RequestOutput | None
    sources: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def merge(cls, items: Sequence[StreamOutput]) -> "OutputDelta":
        """Join consecutive ``items`` of one output."""
        if len(items) == 1:
            [item] = items
            return cls(item.index, item.text, item.reasoning, item.token_ids, item.logprobs or (), item.output)
        return cls(
            index=items[0].index,
            text="".join(item.text for item in items),
            reasoning="".join(item.reasoning for item in items),
            token_ids=[token for item in items for token in item.token_ids],
            logprobs=[each for item in items for each in item.logprobs or ()],
            output=items[-1].output,
        )


class RequestStream(ABC):
    """Buffer between the engine loop and the sender of one request's response.

    The engine loop calls ``on_output``. The sender calls ``take`` after ``_notify``. A slow sender delays no other
    request: its next ``take`` returns everything that arrived in between, merged.

    Args:
        parsed: the request. Without ``stream``, only finished outputs are buffered.
        every_round: let the engine loop call ``on_output`` each round, also without ``stream``.
    """

    CANCELLED: ClassVar[str]  # error messages
    TIMED_OUT: ClassVar[str]

    def __init__(self, llm: LLM, parsed: ServerRequest, *, every_round: bool = False) -> None:
        self._llm = llm
        self._parsed = parsed
        self._every_round = every_round or parsed.stream
        self._submitted: Future[Request] = Future()  # the loop may call `on_output` before `LLM.submit` returns
        self._cancelled = False
        self._items: list[StreamOutput] = []
        self._lock = threading.Lock()  # of _items

    def submit(self) -> None:
        """Queue the request. Raises BadRequest or QueueFull."""
        parsed = self._parsed
        request = self._llm.submit(
            parsed.prompt,
            parsed.params,
            self.on_output,
            client=parsed.client,
            traced=parsed.traced,
            streams=self._every_round,
        )
        self._parsed = replace(parsed, prompt=())  # may be large, and the request has its tokens
        self._submitted.set_result(request)
        if self._cancelled:
            self.cancel()

    @property
    def request(self) -> Request:
        """The queued request; waits for a `submit` that is under way."""
        return self._submitted.result()

    def cancel(self) -> None:
        """End the request within a round, also while ``submit`` runs. Does nothing after its end."""
        self._cancelled = True
        if self._submitted.done():
            self._llm.cancel(self.request)

    def on_output(self, item: StreamOutput) -> None:
        """Buffer ``item``. The engine loop's thread calls this."""
        if not self._parsed.stream and item.output is None:
            return
        with self._lock:
            self._items.append(item)
            if len(self._items) > 1:
                return
        self._notify()

    def take(self) -> list[OutputDelta]:
        """Empty the buffer: one delta per output that has new items."""
        with self._lock:
            items, self._items = self._items, []
        by_index: dict[int, list[StreamOutput]] = {}
        for item in items:
            by_index.setdefault(item.index, []).append(item)
        return [OutputDelta.merge(items) for items in by_index.values()]

    def error_of(self, output: RequestOutput) -> TandemError | None:
        """The error that replaces ``output`` in the response, if the output failed."""
        failure = (self.request, *self.request.others)[output.index].failure
        if failure is not None:
            return failure if isinstance(failure, TandemError) else InternalError(named(failure))
        if output.finish_reason == "cancelled":
            return RequestCancelled(self.CANCELLED)
        if output.finish_reason == "timeout" and not output.token_ids:
            return RequestTimeout(self.TIMED_OUT)
        return None

    @abstractmethod
    def _notify(self) -> None:
        """Wake the sender. The engine loop's thread calls this when the buffer stops being empty."""
