"""A request in the engine: in a slot with its tokens and text so far, and in the queue before that."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

from tandemrt.runtime.caches.hashes import BlockHashes
from tandemrt.runtime.constraints.constraint import Constraint, FilledRows, SteadyText
from tandemrt.runtime.constraints.roles import RoleSpan
from tandemrt.runtime.constraints.rows import MaskRows
from tandemrt.runtime.device.slot_state import SlotParams
from tandemrt.runtime.grammars.time_limit import GrammarTimeLimit
from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tandemrt.runtime.requests.penalties import Penalties
from tandemrt.runtime.requests.replay import Replay
from tandemrt.runtime.requests.request import Finish, Request, StreamOutput
from tandemrt.runtime.requests.text import TextStream


class RunningRequest:
    """State of a request from its first slot to its end, used by the engine loop's thread only.

    A preempted request keeps this object while it waits for another slot.

    Constraint, text and counts may be behind ``tokens`` (``lengthen``). Methods that need them call ``catch_up``, or
    ``write_text``, which may raise: a tokenizer may fail.

    Attributes:
        tokens: prompt and output, without those that ``replay`` has not processed again.
        prefilled: number of tokens in the caches.
        cached: number of tokens that the caches held when the request joined its slot.
        prefill_end: number of tokens to prefill: all but the last one. The first round processes the last one, so that
            the same code samples the first output token and all others.
        preemptions: number of preemptions.
        replay: the rounds that it runs again after a preemption.
        registered_blocks: number of blocks that other requests can reuse, see Slots.register_prefix.
        unchanged_until: length of the text up to which its memory and these blocks stay as they are.
        reasoning_ends_mid_round: number of rounds whose tokens contain both the end of reasoning and answer text.
        counted_tokens: number of output tokens in the metrics.
        last_token_time: arrival of the newest token, in seconds of ``time.monotonic``; None before the first one.

    Raises the exception of ``queued.constraints``, which must be done.
    """

    def __init__(self, queued: "QueuedRequest", slot: int, cached: int = 0) -> None:
        self.request: Request = queued.request
        self.constraint, self._validate, self.grammar_time = queued.constraints.result()
        self.penalties = queued.penalties
        self.hashes = queued.hashes
        self.tokens = list(self.request.prompt)
        self.preemptions = 0
        self.replay = Replay()
        self._queued = queued
        self._cached_prompt = cached
        self.assign_slot(slot, cached)
        self.speculation = self.request.new_speculation()
        self._logprobs: list[TokenLogprobs] = []  # of the output, if the request asks for them
        self.reasoning_ends_mid_round = 0
        self.counted_tokens = 0
        self.last_token_time: float | None = None
        self._text = queued.text_stream
        self._verified: deque[_VerifiedDraft] = deque()  # drafts with tokens that are not final yet
        self._behind: list[tuple[int, int]] = []  # drafted and emitted tokens of rounds that ``lengthen`` has appended
        self._unwritten = 0  # tokens of the constraint that the text lacks, all of its default role
        self._accepted: list[int] = []  # see take_accepted
        self._notified = 0  # output tokens passed to the listener
        self._validation: Future[str | None] | None = None
        self._stop_reason: str | int | None = None

    def preempt(self) -> "QueuedRequest":
        """Return the request for the queue. Its text continues unchanged in the next slot."""
        self.write_text()
        self.preemptions += 1
        self.tokens += self.replay.stop()
        return replace(self._queued, preempted=self)

    def assign_slot(self, slot: int, cached: int, *, rereads: bool = False) -> None:
        """Start over in ``slot`` with all tokens so far; the caches hold the first ``cached`` of them.

        ``rereads``: rounds process the output again, as they did before. Otherwise it is prefilled like the prompt,
        which may round keys and values differently.
        """
        if rereads:
            count = len(self.request.prompt)
            self.replay.start(self.tokens[count:])
            del self.tokens[count:]
        self.slot = slot
        self.cached = cached
        self.prefilled = cached
        self.prefill_end = len(self.tokens) - 1
        self.registered_blocks = 0
        self.unchanged_until = 0

    def slot_params(self) -> SlotParams:
        """See SlotOccupant."""
        return self.request.slot_params()

    @property
    def prefilling(self) -> bool:
        """Whether the caches lack prompt tokens, so that rounds emit no tokens yet."""
        return self.prefilled < self.prefill_end

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def output_length(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def final_length(self) -> int:
        """Number of output tokens that stay. A stop string may still remove tokens whose role is undecided.

        Only after ``write_text``.
        """
        return self.output_length if self.finished else self._text.tokens

    @property
    def remaining(self) -> int:
        """Largest number of output tokens that may follow."""
        return self.request.max_length - len(self.tokens)

    @property
    def finished(self) -> bool:
        """Whether the text is complete: the request has finished, or its text is being validated."""
        return self.request.finished or self._validation is not None

    @property
    def validation(self) -> "Future[str | None] | None":
        """The pending validation of the finished text: the problem found, or None. See ``finish_validated``."""
        return None if self.request.finished else self._validation

    @property
    def forced_ends(self) -> int:
        """Number of times that a thinking budget ended the reasoning. Not before ``catch_up``."""
        return self.constraint.forced_ends_within(self.output_length)

    def reread(self, emitted: Sequence[int]) -> None:
        """Append the output that a round processed again."""
        self.replay.advance(emitted)
        self.tokens += emitted

    def may_fast_forward(self, tokens: int) -> bool:
        """See Constraint.may_fast_forward and Replay.fast_forward."""
        repeated = self.replay.fast_forward
        self.catch_up()
        return self.constraint.may_fast_forward(tokens) if repeated is None else repeated

    def fill_rows(self, draft: Sequence[int], masks: MaskRows, first: int, *, limit: int, override: bool) -> FilledRows:
        """See Constraint.fill_rows and Replay.fill_rows."""
        if self.replay.rereading:
            return self.replay.fill_rows(masks, first, limit)
        self.catch_up()
        return self.constraint.fill_rows(draft, masks, first, limit=limit, override=override)

    def fast_forward_tokens(self, most: int) -> list[int]:
        """See Constraint.fast_forward_tokens."""
        if self.replay.rereading:
            return self.replay.next_drafts(most)
        self.catch_up()
        with nullcontext() if self.grammar_time is None else self.grammar_time.shared_work():
            return self.constraint.fast_forward_tokens(most)

    def commit(self, emitted: Sequence[int], drafted: int, logprobs: Sequence[TokenLogprobs] = ()) -> list[int]:
        """Append the tokens that verification emitted; this may finish the request.

        Args:
            drafted: number of drafted tokens that were verified.
            logprobs: those of ``emitted``, if the request asks for them.

        Returns:
            For each verified draft whose tokens became final, the number of drafted tokens accepted.
        """
        self.write_text()
        commit = self.constraint.commit(emitted)
        if self.request.trace is not None:
            self.request.trace.record_commit(emitted, self.constraint.forced_end_spans)
        if drafted:
            begin = self.output_length
            self._verified.append(_VerifiedDraft(begin, begin + len(commit.kept), drafted, len(emitted)))
        self.tokens += commit.kept
        self._logprobs += logprobs[: len(commit.kept)]
        finish = commit.finish
        stop_reason: str | int | None = commit.stop_token
        roles = []  # without spans that a stop string removes
        for span in commit.spans:
            roles.append(span.role)
            if self._add(span):
                finish, stop_reason = "stop", self._text.stopped_by
                del self.tokens[len(self.request.prompt) + self._text.tokens :]
                break
        self.reasoning_ends_mid_round += "answer" in roles[1:] and roles[0] != "answer"
        if finish is not None:
            return self.take_accepted() + self._conclude(finish, stop_reason)
        return self.take_accepted() + self._record(self._text.tokens)

    def steady_text(self) -> SteadyText | None:
        """See Constraint.steady_text. None as well if each of the next tokens needs more than to be appended."""
        each_matters = self.request.trace is not None or self.request.params.logprobs is not None or self._text.stops
        if (
            each_matters
            or self.last_token_time is None
            or self.finished
            or self.constraint.has_grammar
            or self.replay.rereading
        ):
            return None
        self.catch_up()
        return self.constraint.steady_text()

    def lengthen(self, emitted: Sequence[int], drafted: int) -> None:
        """Append tokens that lengthen a SteadyText; ``catch_up`` and ``write_text`` do the rest of ``commit``."""
        self.tokens += emitted
        self._behind.append((drafted, len(emitted)))

    def catch_up(self) -> None:
        """Commit the tokens that ``lengthen`` has appended, and leave their text to ``write_text``."""
        if not self._behind:
            return
        rounds, self._behind, count = self._behind, [], 0
        for drafted, emitted in rounds:
            count += emitted
            if drafted:
                self._accepted.append(self.speculation.record(drafted=drafted, kept=emitted, emitted=emitted))
        self.constraint.lengthen(count)
        self._unwritten += count

    def write_text(self) -> None:
        """Catch up, and add the tokens that ``lengthen`` has appended to the text. Raises what the tokenizer raises."""
        self.catch_up()
        count, self._unwritten = self._unwritten, 0
        if count:
            self._text.add(self.constraint.default_role, self.tokens[-count:])

    def take_accepted(self) -> list[int]:
        """Write the text, and return the number of drafted tokens accepted in each round that was caught up with."""
        self.write_text()
        accepted, self._accepted = self._accepted, []
        return accepted

    def finish(self, finish: Finish) -> list[int]:
        """End the request and keep its text so far. Does nothing if it has finished. Raises nothing.

        If detokenizing fails, the request ends with "error" and the text up to there. Returns the same as ``commit``.
        """
        if self.request.finished:
            return []
        accepted: list[int] = []
        try:
            accepted = self.take_accepted()
            self.tokens += self.replay.stop()
            undecided = self.constraint.undecided_span
            if undecided.tokens and not self.finished and finish.failure is None:  # an incomplete delimiter is text
                self._add(undecided)
            self._text.finish()
        except BaseException as raised:
            finish = replace(finish, reason="error", failure=finish.failure or raised)
        try:
            return accepted + self._end(finish)
        except BaseException as raised:  # a request must end, whatever fails
            finish = Finish("error", finish.failure or raised)
            output = replace(
                self.request.empty_output(finish),
                text=self._text.text,
                reasoning=self._text.reasoning,
                token_ids=self.output_ids,
                logprobs=self.logprobs(0, self.output_length),
            )
            self.request.finish(finish, output)
            return []

    def count_tokens(self, now: float) -> tuple[float | None, int]:
        """Return the time of the last token before, and how many became final since then, at ``now``."""
        since, count = self.last_token_time, self.final_length - self.counted_tokens
        if count:
            self.counted_tokens += count
            self.last_token_time = now
        return since, count

    def finish_validated(self) -> None:
        """End the request with the result of its validation, which must be done. Raises nothing."""
        assert self._validation is not None
        try:
            problem = self._validation.result()
        except BaseException as failure:  # the text may be valid or not
            self.finish(Finish("error", failure))
            return
        if problem is None:
            self.finish(Finish("stop", stop_reason=self._stop_reason))
        else:
            self.finish(Finish("constraint", error=f"structured_outputs: the finished text is not valid: {problem}"))

    def notify(self) -> None:
        """Pass new final tokens and text to the listener, and the output once the request has finished."""
        request = self.request
        if not request.streams and not request.finished:
            return
        self.write_text()
        begin = len(request.prompt)
        tokens = self.tokens[begin + self._notified : begin + self.final_length]
        self._notified += len(tokens)
        if tokens or request.finished:
            logprobs = self.logprobs(self._notified - len(tokens), self._notified)
            request.notify(StreamOutput(self._text.take(), tokens, request.output, logprobs, request.index))

    def logprobs(self, begin: int, end: int) -> list[TokenLogprobs] | None:
        """Return the logprobs of output tokens [begin, end); None if the request asks for none."""
        return None if self.request.params.logprobs is None else self._logprobs[begin:end]

    def _add(self, span: RoleSpan) -> bool:
        """Add tokens whose role was decided to the text; return whether a stop string ended it."""
        if self.request.trace is not None:
            self.request.trace.add_roles(span)
        return self._text.add(span.role, span.tokens, span.inner)

    def _conclude(self, reason: str, stop_reason: str | int | None) -> list[int]:
        """End the request at the end of its text, or start to validate the text first."""
        self._text.finish()
        if reason != "stop" or self._validate is None:
            return self._end(Finish(reason, stop_reason=stop_reason))
        self._stop_reason = stop_reason
        self._validation = self._validate(self._text.text)
        return self._record(self.output_length, last=True)

    def _end(self, finish: Finish) -> list[int]:
        accepted = self._record(self.output_length, last=True)
        output = replace(
            self.request.empty_output(finish),
            text=self._text.text,
            reasoning=self._text.reasoning,
            reasoning_tokens=self._text.reasoning_tokens,
            token_ids=self.output_ids,
            speculation=self.speculation,
            forced_ends=self.forced_ends,
            num_cached_tokens=self._cached_prompt,
            logprobs=self.logprobs(0, self.output_length),
        )
        self.request.finish(finish, output)
        return accepted

    def _record(self, final: int, *, last: bool = False) -> list[int]:
        """Record the drafts that end within the first ``final`` output tokens; with ``last``, all of them."""
        accepted = []
        while self._verified and (last or self._verified[0].end <= final):
            draft = self._verified.popleft()
            kept = min(draft.end, final) - draft.begin
            if kept > 0 or draft.end == draft.begin:
                accepted.append(self.speculation.record(drafted=draft.drafted, kept=kept, emitted=draft.emitted))
        return accepted


class _VerifiedDraft(NamedTuple):
    """A verified draft window: its output tokens [begin, end) and its counts."""

    begin: int
    end: int
    drafted: int
    emitted: int


class RequestConstraints(NamedTuple):
    """The constraints on a request's output.

    Attributes:
        constraint: decides the allowed tokens of every step.
        validate: starts to validate a finished text off the loop; None: no validation. The future's result is the
            problem found, or None.
        grammar_time: the time limit of the grammar; None without a grammar.
    """

    constraint: Constraint
    validate: "Callable[[str], Future[str | None]] | None" = None
    grammar_time: GrammarTimeLimit | None = None


def _nothing() -> None:
    pass


@dataclass(frozen=True, eq=False)
class QueuedRequest:
    """A request that waits for its constraints, for a slot and for cache memory.

    Admission creates the empty ``text_stream``, ``penalties`` and ``hashes``, which saves the engine loop that work.

    Attributes:
        constraints: not done while a grammar compiles.
        hashes: names of the prompt's blocks; None if prefix caching is off.
        preempted: the running state of a preempted request; None for a request that never had a slot.
        prepare: starts the work that creates ``constraints`` for all outputs of the prompt. The scheduler calls it on
            the first output, once the queue has a place for them, so that refused requests cause no work.
        leader: the first output of the same prompt. The others wait until its prompt is in the caches, and reuse it.
    """

    request: Request
    constraints: "Future[RequestConstraints]"
    text_stream: TextStream
    penalties: Penalties | None
    hashes: BlockHashes | None = None
    preempted: RunningRequest | None = None
    leader: Request | None = None
    prepare: Callable[[], None] = _nothing

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens of the request when it joins a slot. The first round processes the last, prefill the others."""
        return self.request.prompt if self.preempted is None else self.preempted.tokens

    @property
    def ready(self) -> bool:
        """Whether the request waits only for a slot and cache memory."""
        return self.constraints_ready and not self.waits_for_leader

    @property
    def constraints_ready(self) -> bool:
        return self.constraints.done() and self.constraints.exception() is None

    @property
    def waits_for_leader(self) -> bool:
        """Whether the leader's prompt is not in the caches yet."""
        return self.leader is not None and not (self.leader.prompt_cached or self.leader.finished)

    def dropped(self, now: float) -> "DroppedRequest | None":
        """Return why the request must leave the queue at ``now`` (seconds of ``time.monotonic``), or None."""
        finish = self.request.interrupted(now)
        failure = self.constraints.exception() if self.constraints.done() else None
        if finish is None and failure is None:
            return None
        return DroppedRequest(self, Finish("error" if finish is None else finish.reason, failure))


class DroppedRequest(NamedTuple):
    """A request that leaves the queue without a slot."""

    queued: QueuedRequest
    finish: Finish
