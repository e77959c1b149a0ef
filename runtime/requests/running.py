"""A request in a slot: its text so far, what it is held to, and how it ends."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

from tandemrt.runtime.constraints.roles import Piece
from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tandemrt.runtime.requests.outputs import StreamOutput
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.waiting import Waiting
from tandemrt.runtime.round.adaptive import Acceptance


class Running:
    """State of a request from the moment it joins ``slot``, also while it has none again. Used by the loop's thread.

    ``tokens`` holds prompt and output; ``prefilled`` counts those in the caches, ``cached`` of them found there. All
    but the last token that a request comes with are prefilled: the last one is the first token a round feeds, so the
    first output token is decided by the same code as every other.

    Raises what kept ``waiting.enforcement`` from being made; a request that waits for it must not run.
    """

    def __init__(self, waiting: Waiting, slot: int, cached: int = 0) -> None:
        self.request: Request = waiting.request
        self.constraint, self._check, self.share = waiting.enforcement.result()
        self.penalties = waiting.penalties
        self.hashes = waiting.hashes
        self.tokens = list(self.request.prompt)
        self.preemptions = 0  # how often it had to give its slot back
        self._waiting = waiting
        self._cached_prompt = cached
        self.sit(slot, cached)
        self.speculation = self.request.new_speculation()
        self.acceptance = Acceptance()
        self._logprobs: list[TokenLogprobs] = []  # of the output's tokens, if the request asks for them
        self.boundaries_inside = 0  # reasoning that ended in the middle of what one round emitted
        self.counted = 0  # output tokens that the metrics know
        self.newest: float | None = None  # when the newest token came, in seconds of time.monotonic
        self._transcript = waiting.transcript
        self._windows: deque[_Window] = deque()  # those with tokens that are not certain
        self._told = 0  # output tokens the listener knows
        self._verdict: Future[str | None] | None = None  # on the finished text, while it is checked
        self._stop_reason: str | int | None = None

    def preempt(self) -> Waiting:
        """Return what waits for another slot. The text goes on there as if nothing had happened."""
        self.preemptions += 1
        return replace(self._waiting, preempted=self)

    def sit(self, slot: int, cached: int) -> None:
        """Sit in ``slot`` with all tokens so far, of which the caches hold the first ``cached``."""
        self.slot = slot
        self.cached = cached
        self.prefilled = cached
        self.prefill_end = len(self.tokens) - 1
        self.known = 0  # blocks that others can find in the caches, see Slots.know

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens are missing in the caches, so that no round decides anything yet."""
        return self.prefilled < self.prefill_end

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def output_length(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def certain(self) -> int:
        """Output tokens that nothing takes back any more; a stop string may yet cut off those whose role is open."""
        return self.output_length if self.finished else self._transcript.tokens

    @property
    def remaining(self) -> int:
        """Output tokens that may still come."""
        return self.request.length - len(self.tokens)

    @property
    def finished(self) -> bool:
        """Whether nothing comes any more. The request has ended then, or its text is being checked."""
        return self.request.finished or self._verdict is not None

    @property
    def verdict(self) -> "Future[str | None] | None":
        """What becomes of the request whose finished text is being checked, off the loop; see ``judge``."""
        return None if self.request.finished else self._verdict

    @property
    def forced_ends(self) -> int:
        """How often a thinking budget closed the reasoning."""
        return self.constraint.forced_ends_within(self.output_length)

    def forced(self, most: int) -> list[int]:
        """See Constraint.forced."""
        with nullcontext() if self.share is None else self.share.between():
            return self.constraint.forced(most)

    def commit(self, emitted: Sequence[int], drafted: int, logprobs: Sequence[TokenLogprobs] = ()) -> list[int]:
        """Take in what verification emitted for this request, ``drafted`` drafted tokens verified. May finish it.

        ``logprobs``: those of the emitted tokens, if the request asks for them.

        Returns, for each window whose tokens are certain now, how many drafted tokens were accepted and kept.
        """
        commit = self.constraint.commit(emitted)
        if self.request.trace is not None:
            self.request.trace.commit(emitted, self.constraint.forced_spans)
        if drafted:
            begin = self.output_length
            self._windows.append(_Window(begin, begin + len(commit.kept), drafted, len(emitted)))
        self.tokens += commit.kept
        self._logprobs += logprobs[: len(commit.kept)]
        finish = commit.finish
        stop_reason: str | int | None = commit.stop_token
        kinds = []  # what a stop string cuts off was never there
        for piece in commit.pieces:
            kinds.append(piece.kind)
            if self._add(piece):
                finish, stop_reason = "stop", self._transcript.stopped_by
                del self.tokens[len(self.request.prompt) + self._transcript.tokens :]
                break
        self.boundaries_inside += "answer" in kinds[1:] and kinds[0] != "answer"
        if finish is not None:
            return self._conclude(finish, stop_reason)
        return self._record(self._transcript.tokens)

    def finish(
        self,
        reason: str,
        failure: BaseException | None = None,
        *,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> list[int]:
        """End the request from outside of its text, which is kept so far. Nothing happens if it has finished.

        ``stop_reason`` and ``error`` are those of RequestOutput; ``failure`` stands for an error where there is none.
        Returns what ``commit`` does. A text that cannot be spelled ends where its spelling failed, with "error".
        Raises nothing.
        """
        if self.request.finished:
            return []
        try:
            held = self.constraint.undecided
            if held.tokens and not self.finished and failure is None:  # what might have become a marker never will
                self._add(held)
            self._transcript.finish()
        except BaseException as raised:
            reason, failure = "error", failure or raised
        try:
            return self._end(reason, stop_reason, error=error, failure=failure)
        except BaseException as raised:  # whatever is broken, a request ends
            text, reasoning, failure = self._transcript.text, self._transcript.reasoning, failure or raised
            self.request.end("error", text=text, reasoning=reasoning, token_ids=self.output_ids, failure=failure)
            return []

    def judge(self) -> None:
        """End the request by the verdict on its text, which has come. Raises nothing."""
        assert self._verdict is not None
        try:
            problem = self._verdict.result()
        except BaseException as failure:  # nobody knows whether the text is valid
            self.finish("error", failure)
            return
        if problem is None:
            self.finish("stop", stop_reason=self._stop_reason)
        else:
            self.finish("constraint", error=f"structured_outputs: the finished text is not valid: {problem}")

    def tell(self) -> None:
        """Tell the listener what is new: tokens and text that are certain, and the output of a finished request."""
        request = self.request
        begin = len(request.prompt)
        tokens = self.tokens[begin + self._told : begin + self.certain]
        self._told += len(tokens)
        if tokens or request.finished:
            told = self.logprobs(self._told - len(tokens), self._told)
            request.tell(StreamOutput(self._transcript.take(), tokens, request.output, told, request.index))

    def logprobs(self, begin: int, end: int) -> list[TokenLogprobs] | None:
        """Those of output tokens [begin, end); None if the request asks for none."""
        return None if self.request.params.logprobs is None else self._logprobs[begin:end]

    def _add(self, piece: Piece) -> bool:
        """Add tokens whose role is certain to the text. True when a stop string ended it."""
        if self.request.trace is not None:
            self.request.trace.know(piece)
        return self._transcript.add(piece.kind, piece.tokens, piece.inner)

    def _conclude(self, reason: str, stop_reason: str | int | None) -> list[int]:
        """End the request where its own text ends, or have the text checked first."""
        self._transcript.finish()
        if reason != "stop" or self._check is None:
            return self._end(reason, stop_reason)
        self._stop_reason = stop_reason
        self._verdict = self._check(self._transcript.text)
        return self._record(self.output_length, last=True)

    def _end(
        self,
        reason: str,
        stop_reason: str | int | None = None,
        *,
        error: str | None = None,
        failure: BaseException | None = None,
    ) -> list[int]:
        accepted = self._record(self.output_length, last=True)
        self.request.end(
            reason,
            text=self._transcript.text,
            reasoning=self._transcript.reasoning,
            reasoning_tokens=self._transcript.reasoning_tokens,
            token_ids=self.output_ids,
            stop_reason=stop_reason,
            speculation=self.speculation,
            forced_ends=self.forced_ends,
            num_cached_tokens=self._cached_prompt,
            logprobs=self.logprobs(0, self.output_length),
            error=error,
            failure=failure,
        )
        return accepted

    def _record(self, certain: int, *, last: bool = False) -> list[int]:
        """Record the windows that end within the first ``certain`` output tokens; the ``last`` time, all there are."""
        accepted = []
        while self._windows and (last or self._windows[0].end <= certain):
            window = self._windows.popleft()
            kept = min(window.end, certain) - window.begin
            if kept > 0 or window.end == window.begin:
                accepted.append(self.speculation.record(drafted=window.drafted, kept=kept, emitted=window.emitted))
        return accepted


class _Window(NamedTuple):
    """A verified window: where its tokens stand in the output, [begin, end), and its counts."""

    begin: int
    end: int
    drafted: int
    emitted: int
