"""Logprobs of a prompt, computed by a request of their own.

A prefill computes no logits. A scoring request therefore starts from the prompt's first token and replays the rest as
its output: a grammar allows only the prompt's next token, drafts are fast-forward tokens, and verification returns
their logprobs. The scoring request reuses no cached blocks, because cached blocks come without logits.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
from tokenizers import Tokenizer

from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.engines.validation.errors import named
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.grammars import bitmask
from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tandemrt.runtime.requests.request import OutputListener, Request, RequestOutput, StreamOutput
from tandemrt.runtime.requests.running import QueuedRequest, RequestConstraints
from tandemrt.runtime.requests.text import TextStream

_MOST = 32  # fast-forward tokens per call: more than any draft window


class ReplayGrammar:
    """A Grammar (runtime/grammars/grammar.py) that allows one sequence of ``tokens`` and never terminates."""

    stop_ids: frozenset[int] = frozenset()

    def __init__(self, tokens: Sequence[int], at: int = 0) -> None:
        self._tokens = tokens
        self._at = at

    def fill_row(self, row: np.ndarray) -> None:
        bitmask.allow_only(row, self._tokens[self._at])

    def precompute_rows(self, tokens: Sequence[int]) -> None:
        """Does nothing: rows are cheap."""

    def accept(self, token: int) -> bool:
        follows = self.fast_forward_tokens()[:1] == [token]
        self._at += follows
        return follows

    def rollback(self, count: int) -> None:
        self._at -= count

    def fork(self) -> "ReplayGrammar":
        return ReplayGrammar(self._tokens, self._at)

    def is_terminated(self) -> bool:
        return False

    def fast_forward_tokens(self) -> list[int]:
        return list(self._tokens[self._at : self._at + _MOST])


class PromptLogprobsCollector:
    """Add the prompt's logprobs to its outputs, and hold their ends back until the logprobs are known.

    Both callbacks run in the engine loop's thread. ``requests`` are those of the outputs. ``pending``: whether there is
    a scoring request; a prompt of one token has no logprobs and needs none.
    """

    def __init__(self, listener: OutputListener, *, pending: bool) -> None:
        self.requests: Sequence[Request] = ()
        self._listener = listener
        self._held: list[StreamOutput] = []  # last parts of outputs
        self._logprobs: list[TokenLogprobs] | None = None if pending else []
        self._failure: BaseException | None = None
        self._interrupted = ""  # the finish reason of an interrupted scoring request

    def on_output(self, item: StreamOutput) -> None:
        """The listener of the outputs' requests."""
        if item.output is None:
            self._listener(item)
        elif self._logprobs is None:
            self._held.append(item)
        else:
            self._pass_on(item, item.output, self._logprobs)

    def on_scored(self, scoring: Request, item: StreamOutput) -> None:
        """The listener of the scoring request."""
        if item.output is None:
            return
        self._logprobs, self._failure = item.output.logprobs or [], scoring.failure
        self._interrupted = item.output.finish_reason if item.output.finish_reason in ("timeout", "cancelled") else ""
        if self._failure is not None:
            for request in self.requests:
                request.cancel()
        waiting, self._held = self._held, []
        with ExitStack() as stack:  # callbacks run in reverse order, each even if another one raises
            for each in reversed(waiting):
                stack.callback(self.on_output, each)

    def _pass_on(self, item: StreamOutput, output: RequestOutput, logprobs: list[TokenLogprobs]) -> None:
        output = replace(output, prompt_logprobs=logprobs)
        request = self.requests[item.index]
        if self._failure is not None and request.failure is None:
            request.failure = self._failure
            output = replace(output, finish_reason="error", error=named(self._failure))
        elif self._interrupted and output.finish_reason in ("stop", "length"):
            output = replace(output, finish_reason=self._interrupted)
        self._listener(replace(item, output=output))


def scoring_request(
    first: Request,
    collector: PromptLogprobsCollector,
    *,
    vocab: int,
    valid_tokens: int,
    tokenizer: Tokenizer,
    arrival_time: float,
) -> QueuedRequest:
    """Return the request that scores the prompt of ``first``, which has at least two tokens, for ``collector``."""
    first_params, prompt = first.params, first.prompt
    params = SamplingParams(
        temperature=first_params.temperature,
        **first_params.filter_values(),
        logprobs=first_params.prompt_logprobs,
        logprobs_mode=first_params.logprobs_mode,
        priority=first_params.priority,
        timeout_s=first_params.timeout_s,
    )
    request = Request(
        prompt[:1],
        params,
        seed=first.seed,
        max_tokens=len(prompt) - 1,
        num_draft_tokens=first.num_draft_tokens,
        draft_temperature=0.0,
        client=first.client,
        listener=lambda item: collector.on_scored(request, item),
        arrival_time=arrival_time,
        scores_prompt=True,
    )
    replay = Constraint(
        vocab,
        (),
        prompt=prompt[:1],
        grammar=ReplayGrammar(prompt[1:]),
        max_tokens=len(prompt) - 1,
        valid_tokens=valid_tokens,
    )
    constraints: Future[RequestConstraints] = Future()
    constraints.set_result(RequestConstraints(replay))
    return QueuedRequest(request, constraints, TextStream(tokenizer), None)
