"""How likely a prompt was: a pass of its own over it, beside the request that it belongs to.

Prompts are taken in without logits. So a request of one token goes on with the rest of the prompt, whatever the model
says, in windows like any other text: drafted without a model, verified, and scored on the way. It reuses nothing that
the caches hold, because what lies there has no logits.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from tandemrt.engines.errors import named
from tandemrt.runtime.constraints import bitmask
from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tandemrt.runtime.requests.outputs import RequestOutput, StreamOutput
from tandemrt.runtime.requests.request import Listener, Request

_MOST = 32  # tokens that are foreseen: more than any window


class Replay:
    """A grammar (see constraints/grammar.py) of one text, ``tokens``, which nothing ends but its length."""

    stop_ids: frozenset[int] = frozenset()

    def __init__(self, tokens: Sequence[int], at: int = 0) -> None:
        self._tokens = tokens
        self._at = at

    def fill(self, row: np.ndarray) -> None:
        bitmask.allow_only(row, self._tokens[self._at])

    def look_ahead(self, tokens: Sequence[int]) -> None:
        pass  # rows are cheap

    def accept(self, token: int) -> bool:
        follows = self.forced()[:1] == [token]
        self._at += follows
        return follows

    def rollback(self, count: int) -> None:
        self._at -= count

    def fork(self) -> "Replay":
        return Replay(self._tokens, self._at)

    def is_terminated(self) -> bool:
        return False

    def forced(self) -> list[int]:
        return list(self._tokens[self._at : self._at + _MOST])


class PromptScores:
    """Between the outputs of a prompt and their listener: their ends wait for the logprobs of the prompt.

    Called by the loop's thread. ``requests`` are those of the outputs. A prompt of one token has no logprobs, and
    nobody waits for them (``pending``).
    """

    def __init__(self, listener: Listener, *, pending: bool) -> None:
        self.requests: Sequence[Request] = ()
        self._listener = listener
        self._held: list[StreamOutput] = []
        self._logprobs: list[TokenLogprobs] | None = None if pending else []
        self._failure: BaseException | None = None
        self._cut = ""  # the finish reason of a pass that did not come to its end

    def listen(self, item: StreamOutput) -> None:
        """Hear of an output."""
        if item.output is None:
            self._listener(item)
        elif self._logprobs is None:
            self._held.append(item)
        else:
            self._end(item, item.output, self._logprobs)

    def hear(self, scoring: Request, item: StreamOutput) -> None:
        """Hear of the pass over the prompt."""
        if item.output is None:
            return
        self._logprobs, self._failure = item.output.logprobs or [], scoring.failure
        self._cut = item.output.finish_reason if item.output.finish_reason in ("timeout", "cancelled") else ""
        if self._failure is not None:
            for request in self.requests:
                request.cancel()
        held, self._held = self._held, []
        with ExitStack() as everybody:  # who is added last hears first; each does, whatever the others raise
            for each in reversed(held):
                everybody.callback(self.listen, each)

    def _end(self, item: StreamOutput, output: RequestOutput, logprobs: list[TokenLogprobs]) -> None:
        output = replace(output, prompt_logprobs=logprobs)
        request = self.requests[item.index]
        if self._failure is not None and request.failure is None:
            request.failure = self._failure
            output = replace(output, finish_reason="error", error=named(self._failure))
        elif self._cut and output.finish_reason in ("stop", "length"):
            output = replace(output, finish_reason=self._cut)
        self._listener(replace(item, output=output))
