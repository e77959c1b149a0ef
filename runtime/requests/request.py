"""One request on its way through the rounds: its text so far, its constraint and how it ends."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from tandemrt.engines.params import SamplingParams
from tandemrt.plugins.operators import Rule
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.phases import Phase
from tandemrt.runtime.requests.outputs import RequestOutput, Speculation, StreamOutput
from tandemrt.runtime.requests.penalties import Penalties
from tandemrt.runtime.requests.text import Transcript
from tandemrt.runtime.round.slots import SlotParams

log = logging.getLogger(__name__)

Listener = Callable[[StreamOutput], None]


class Rules(NamedTuple):
    """What a request must obey while it runs, and what its finished text is checked with (None: nothing)."""

    constraint: Constraint
    check: Callable[[str], str | None] | None = None


class Request:
    """State of one request. Everything but ``cancel`` is called by the loop's thread alone.

    ``commit`` and ``finish`` change the state, ``tell`` then lets the listener know; the loop's books are in order by
    then, so a listener may look at them or send the next request.

    ``tokens`` holds prompt and output; ``prefilled`` counts the prompt tokens in the caches. All but the last prompt
    token are prefilled: the last one is the first token a round feeds, so the first output token is decided by the
    same code as every other.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        max_tokens: int,
        window: int,
        rules: "Future[Rules]",
        transcript: Transcript,
        listener: Listener,
    ) -> None:
        self.prompt = list(prompt)
        self.params = params
        self.seed = seed
        self.max_tokens = max_tokens
        self.window = window
        self.rule = Rule[params.rule.upper()]
        filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0 or self.rule is Rule.REJECTION
        self.filters = params.temperature > 0 and filters  # what Engine.bind calls so
        self.penalties = Penalties.of(self.prompt, params)
        self.pending_rules = rules  # a grammar is compiled off the loop
        self.constraint: Constraint  # set when the request gets its slot
        self.tokens = list(prompt)
        self.prefilled = 0
        self.speculation = Speculation(window)
        self.failure: Exception | None = None
        self.output: RequestOutput | None = None  # set when the request has finished
        self.boundaries_inside = 0  # reasoning that ended in the middle of what one round emitted
        self.submitted = time.monotonic()
        self.newest: float | None = None  # when the newest token came, in the same seconds
        self._transcript = transcript
        self._listener = listener
        self._windows: deque[_Window] = deque()  # those with tokens that are not certain
        self._told = 0  # output tokens the listener knows
        self._check: Callable[[str], str | None] | None = None
        self._deadline = time.monotonic() + params.timeout_s if params.timeout_s is not None else None
        self._cancelled = False

    def start(self) -> None:
        """Take the rules that were made off the loop; called when the request gets its slot."""
        self.constraint, self._check = self.pending_rules.result()

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def output_length(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def finish_reason(self) -> str | None:
        return self.output.finish_reason if self.output else None

    @property
    def finished(self) -> bool:
        return self.output is not None

    @property
    def prefill_end(self) -> int:
        return len(self.prompt) - 1

    @property
    def remaining(self) -> int:
        """Output tokens that may still come."""
        return self.max_tokens - self.output_length

    @property
    def forced_ends(self) -> int:
        """How often a thinking budget closed the reasoning."""
        return self.constraint.forced_ends_within(self.output_length) if hasattr(self, "constraint") else 0

    @property
    def certain(self) -> int:
        """Output tokens that nothing takes back any more; a stop string may yet cut off those whose role is open."""
        return self.output_length if self.finished else self._transcript.tokens

    @property
    def deadline(self) -> float | None:
        """When the request times out, in seconds of ``time.monotonic``."""
        return self._deadline

    def slot_params(self) -> SlotParams:
        p = self.params
        seed = self.seed - 2**64 if self.seed >= 2**63 else self.seed
        return SlotParams(p.temperature, max(0, p.top_k), p.top_p, p.min_p, seed, int(self.rule))

    def cancel(self) -> None:
        """Ask the loop to end this request; noticed within a round. Safe from any thread."""
        self._cancelled = True

    def interrupted(self, now: float) -> str | None:
        """The finish reason of a request that must not go on, or None."""
        if self._cancelled:
            return "cancelled"
        return "timeout" if self._deadline is not None and now >= self._deadline else None

    def commit(self, emitted: Sequence[int], drafted: int) -> list[int]:
        """Take in what verification emitted for this request, ``drafted`` drafted tokens verified. May finish it.

        Returns, for each window whose tokens are certain now, how many drafted tokens were accepted and kept.
        """
        commit = self.constraint.commit(emitted)
        if drafted:
            begin = self.output_length
            self._windows.append(_Window(begin, begin + len(commit.kept), drafted, len(emitted)))
        self.tokens += commit.kept
        finish = commit.finish
        stop_reason: str | int | None = commit.stop_token
        kinds = []  # what a stop string cuts off was never there
        for piece in commit.pieces:
            kinds.append(piece.kind)
            if self._transcript.add(piece.kind, piece.tokens):
                finish, stop_reason = "stop", self._transcript.stopped_by
                del self.tokens[len(self.prompt) + self._transcript.tokens :]
                break
        self.boundaries_inside += "answer" in kinds[1:] and kinds[0] != "answer"
        if finish is not None:
            return self._conclude(finish, stop_reason)
        return self._record(self._transcript.tokens)

    def finish(self, reason: str, failure: Exception | None = None) -> list[int]:
        """End the request from outside of its text, which is kept so far. Nothing happens if it has finished.

        Returns what ``commit`` does.
        """
        if self.finished:
            return []
        held = self.output_ids[self._transcript.tokens :]
        if held and failure is None:  # what might have become a marker never will
            self._transcript.add("reasoning" if self.constraint.phase is Phase.THINKING else "answer", held)
        return self._conclude(reason, failure=failure)

    def tell(self) -> None:
        """Tell the listener what is new: tokens and text that are certain, and the output of a finished request.

        A listener that raises harms nobody else: its error is logged and its request cancelled.
        """
        begin = len(self.prompt)
        tokens = self.tokens[begin + self._told : begin + self.certain]
        self._told += len(tokens)
        if not tokens and not self.finished:
            return
        try:
            self._listener(StreamOutput(self._transcript.take(), tokens, self.output))
        except Exception:
            log.exception("the listener of a request failed; the request is cancelled")
            self.cancel()

    def _record(self, certain: int, *, last: bool = False) -> list[int]:
        """Record the windows that end within the first ``certain`` output tokens; the ``last`` time, all there are."""
        accepted = []
        while self._windows and (last or self._windows[0].end <= certain):
            window = self._windows.popleft()
            kept = min(window.end, certain) - window.begin
            if kept > 0 or window.end == window.begin:
                accepted.append(self.speculation.record(drafted=window.drafted, kept=kept, emitted=window.emitted))
        return accepted

    def _conclude(
        self, reason: str, stop_reason: str | int | None = None, *, failure: Exception | None = None
    ) -> list[int]:
        self._transcript.finish()
        accepted = self._record(self.output_length, last=True)
        error = f"{type(failure).__name__}: {failure}" if failure is not None else None
        if reason == "stop" and self._check is not None and (problem := self._check(self._transcript.text)):
            reason, error = "constraint", f"structured_outputs: the finished text is not valid: {problem}"
        self.failure = failure
        self.output = RequestOutput(
            text=self._transcript.text,
            reasoning=self._transcript.reasoning,
            token_ids=self.output_ids,
            prompt_token_ids=self.prompt,
            finish_reason=reason,
            stop_reason=stop_reason,
            seed=self.seed,
            speculation=self.speculation,
            forced_ends=self.forced_ends,
            error=error,
        )
        return accepted


class _Window(NamedTuple):
    """A verified window: where its tokens stand in the output, [begin, end), and its counts."""

    begin: int
    end: int
    drafted: int
    emitted: int
