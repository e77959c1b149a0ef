"""What a caller asked for and holds on to: it may be cancelled, and it ends once."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandemrt.engines.errors import named
from tandemrt.engines.params import SamplingParams
from tandemrt.plugins.operators import Rule
from tandemrt.runtime.grammars.engine import engine_of
from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tandemrt.runtime.requests.outputs import RequestOutput, Speculation, StreamOutput

if TYPE_CHECKING:
    from tandemrt.runtime.trace.trace import Trace

log = logging.getLogger(__name__)

Listener = Callable[[StreamOutput], None]


@dataclass(frozen=True)
class SlotParams:
    """How one request samples, as the operators take it (engines/contract.py)."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int  # bits of an unsigned 64-bit integer, as a signed one
    rule: int
    draft_temperature: float  # what the draft model draws with; 0 where it drafts greedily


class Request:
    """The same object from admission to the end, through the queue (Waiting) and a slot (Running).

    ``cancel`` may be called from any thread. ``end`` and ``tell`` are called by the loop's alone: the first sets the
    output, the second lets the listener know. What the loop counts and holds is in order in between, so a listener
    may look at it or send the next request.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        max_tokens: int,
        window: int,
        draft_temperature: float | None = None,
        client: str = "",
        listener: Listener,
        called: float | None = None,
        index: int = 0,
        scores: bool = False,
    ) -> None:
        self.prompt = list(prompt)
        self.params = params
        self.seed = seed
        self.max_tokens = max_tokens
        self.window = window
        self.draft_temperature = params.temperature if draft_temperature is None else draft_temperature
        self.client = client  # whose it is, for fair turns; "": nobody said
        self.trace: Trace | None = None  # what its rounds did, where somebody follows it
        self.index = index  # of the prompt's outputs
        self.scores = scores  # whether its output is what another one's prompt was, to be scored
        self.others: Sequence[Request] = ()  # of the first: what else was queued for its prompt
        self.prompt_known = False  # whether others find of its prompt in the caches what they ever will
        self.synthetic = params.synthetic_acceptance_length  # what verification is told is no rule of its own
        self.rule = Rule.REJECTION if params.rule == "rejection" else Rule.COUPLED
        filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0 or self.rule is Rule.REJECTION
        self.filters = params.temperature > 0 and filters  # what Engine.bind calls so
        asked = params.structured_outputs
        self.grammar_engine = None if asked is None else engine_of(asked)
        self.submitted = time.monotonic()
        called = self.submitted if called is None else called  # the time that a prompt takes to read counts as well
        self.deadline = called + params.timeout_s if params.timeout_s is not None else None
        self.output: RequestOutput | None = None  # None until the request has finished, and so is `failure`
        self.failure: BaseException | None = None
        self._listener = listener
        self._told = False  # of its end
        self._cancelled = False

    @property
    def length(self) -> int:
        """Tokens that the text may have in all, the prompt included."""
        return len(self.prompt) + self.max_tokens

    @property
    def finished(self) -> bool:
        return self.output is not None

    @property
    def finish_reason(self) -> str | None:
        return self.output.finish_reason if self.output else None

    def slot_params(self) -> SlotParams:
        p = self.params
        seed = self.seed - 2**64 if self.seed >= 2**63 else self.seed
        own = self.draft_temperature
        return SlotParams(p.temperature, max(0, p.top_k), p.top_p, p.min_p, seed, int(self.rule), own)

    def new_speculation(self) -> Speculation:
        """A record in which nothing is counted yet."""
        return Speculation(self.window, synthetic=self.synthetic is not None)

    def cancel(self) -> None:
        """Ask the loop to end this request; noticed within a round. Safe from any thread."""
        self._cancelled = True

    def interrupted(self, now: float) -> str | None:
        """The finish reason of a request that must not go on at ``now`` (seconds of ``time.monotonic``), or None."""
        if self._cancelled:
            return "cancelled"
        return "timeout" if self.deadline is not None and now >= self.deadline else None

    def end(
        self,
        reason: str,
        *,
        text: str = "",
        reasoning: str = "",
        reasoning_tokens: int = 0,
        token_ids: Sequence[int] = (),
        stop_reason: str | int | None = None,
        speculation: Speculation | None = None,
        forced_ends: int = 0,
        num_cached_tokens: int = 0,
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
        failure: BaseException | None = None,
    ) -> None:
        """The request has finished, as RequestOutput says; without a text if it never had a slot.

        ``failure`` is what ``error`` says, its kind first, unless that is given. The first end is the one that counts.
        """
        if self.finished:
            return
        self.failure = failure
        self.output = RequestOutput(
            text=text,
            reasoning=reasoning,
            reasoning_tokens=reasoning_tokens,
            token_ids=list(token_ids),
            prompt_token_ids=self.prompt,
            finish_reason=reason,
            stop_reason=stop_reason,
            seed=self.seed,
            speculation=self.new_speculation() if speculation is None else speculation,
            forced_ends=forced_ends,
            num_cached_tokens=num_cached_tokens,
            error=named(failure) if error is None and failure is not None else error,
            grammar_engine=self.grammar_engine,
            logprobs=logprobs,
            index=self.index,
        )

    def tell(self, item: StreamOutput) -> None:
        """Hand ``item`` to the listener, the end of the request once and nothing behind it.

        A listener that raises, be it SystemExit, harms nobody else: its request is cancelled.
        """
        if self._told:
            return
        self._told = item.output is not None
        try:
            self._listener(item)
        except BaseException:
            log.exception("the listener of a request failed; the request is cancelled")
            self.cancel()
