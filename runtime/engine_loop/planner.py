"""Planning of rounds: which requests decode, which prompt tokens are processed, whether the cache memory suffices, and
how many tokens are drafted.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

from tandemrt.engines.contract.calls import NO_PROMPTS, bucket
from tandemrt.engines.contract.draft_kinds import DRAFT_LAYERS
from tandemrt.engines.options.options import draft_tokens_problem
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.plugins.operators.constants import Rule
from tandemrt.runtime.device.backends.base import ProfiledEngine, prompt_rows
from tandemrt.runtime.device.prompt_plan import Chunk, group_equal_chunks, num_tokens, plan
from tandemrt.runtime.device.slot_state import SlotPosition
from tandemrt.runtime.device.streams import upload
from tandemrt.runtime.engine_loop.costs import RoundCosts
from tandemrt.runtime.engine_loop.models import Drafter, TargetRunner
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.acceptance import Acceptance, best_window
from tandemrt.runtime.requests.request import Finish
from tandemrt.runtime.requests.running import RunningRequest
from tandemrt.runtime.requests.scheduler import Scheduler
from tandemrt.runtime.requests.slots import Round, Slots, VerifiedRound

log = logging.getLogger(__name__)


class RoundPlanner:
    """Plans rounds and prefills the prompts of requests in slots (chunked prefill).

    A round processes at most ``chunk`` prompt tokens, and at most ``chunk_while_decoding`` if any request decodes,
    which bounds the latency of the next token. Over a paged cache, prompts and draft windows share the calls of the
    round; over a linear cache, prompts have their own calls before the round.

    A slot in prefill may also be a row of the round's calls. Its position is its next prompt token, after those in
    the same call: the next chunk overwrites what the round writes there, and an empty mask keeps the row from emitting
    tokens. A request decodes from the round on in which its prompt ends.
    """

    def __init__(
        self,
        target: TargetRunner,
        drafter: Drafter,
        metrics: Metrics,
        *,
        chunk: int,
        chunk_while_decoding: int,
        copies: bool = False,
    ) -> None:
        """``copies``: whether drafts may also be copied from the text."""
        self.chunk = chunk
        self.chunk_while_decoding = chunk_while_decoding
        self._target = target
        self._drafter = drafter
        self._metrics = metrics
        self._copies = copies

    def plan(self, slots: Slots, draft_windows: "DraftWindowPlanner", last: VerifiedRound | None = None) -> Round:
        """Return the next round, and enqueue the uploads or prefill calls of its prompt tokens.

        ``last``: the round in flight. Requests that it completes take part in no further round.
        """
        state = self._target.state
        requests = [request for request in slots if last is None or not last.round.completes(request)]
        missing = [
            Chunk(request.slot, request.prefilled, request.prefill_end) for request in requests if request.prefilling
        ]
        if not missing:
            state.flush()
            return plan_round(requests, draft_windows, slots.count)
        budget = self.chunk if len(missing) == len(requests) else min(self.chunk, self.chunk_while_decoding)
        running = {request.slot: request for request in requests}
        in_prompts = partial(plan, missing, at_block_ends=slots.reuses_whole_chunks, whole=_whole_spans(requests))
        plan_decoding = partial(self._plan_decoding, requests, draft_windows, slots.count)
        chunks = in_prompts(budget)
        round_ = plan_decoding(chunks)
        layout = self._target.layout
        if num_tokens(chunks) < num_tokens(missing) and layout.budget(round_.window_tokens, budget) < budget:
            budget = layout.budget(round_.window_tokens, budget)
            chunks = in_prompts(budget)
            round_ = plan_decoding(chunks)
        round_ = replace(round_, prompts=layout.prompts_of(round_.window_tokens, chunks))
        texts = {chunk.slot: running[chunk.slot].tokens for chunk in chunks}
        if round_.prompts != NO_PROMPTS:
            self._target.write_prompts(chunks, texts, round_.shape)
            self._drafter.write_prompts(chunks, texts, round_.prompts)
        else:
            state.flush()
            self._prefill(chunks, texts)
        for chunk in chunks:
            running[chunk.slot].prefilled = chunk.end
            state.place(SlotPosition.of(chunk.slot, texts[chunk.slot], chunk.end))
        state.flush()
        self._metrics.prefilled += num_tokens(chunks)
        return round_

    def _plan_decoding(
        self,
        requests: Sequence[RunningRequest],
        draft_windows: "DraftWindowPlanner",
        slots: int,
        chunks: Collection[Chunk],
    ) -> Round:
        """Plan the rows of a round with ``chunks``, without drafts if no request can use them.

        Only packed calls leave them out: other rounds keep the window of their captured graphs.
        """
        round_ = plan_round(requests, draft_windows, slots, chunks)
        if self._drafter.reads_prompts_late:
            ends = {running.slot: running.prefill_end for running in requests}
            undrafted = frozenset(chunk.slot for chunk in chunks if chunk.end == ends[chunk.slot])
            round_ = replace(round_, undrafted=undrafted)
        if not self._target.layout.packed or round_.can_use_drafts(copies=self._copies):
            return round_
        return replace(round_, window=0, num_proposed=0)

    def _prefill(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]]) -> None:
        """Run the prefill calls over linear caches. The position of each slot is the start of its chunk."""
        # An engine that computes no logits for prompts, or was compiled for ranges of sizes, takes one slot per call.
        target = self._target.engines["target"]
        together = prompt_rows(target) and not isinstance(target, ProfiledEngine)
        for rectangle in group_equal_chunks(chunks) if together else [(chunk,) for chunk in chunks]:
            slot, count = rectangle[0].slot, rectangle[0].tokens
            tokens = self._target.buffers.chunk.view(len(rectangle), count)
            upload([texts[each.slot][each.start : each.end] for each in rectangle], tokens)
            self._target.prefill(rectangle, tokens)
            following = [texts[each.slot][each.end : each.end + len(DRAFT_LAYERS)] for each in rectangle]
            self._drafter.prefill(slot, tokens, following)


def _whole_spans(requests: Iterable[RunningRequest]) -> dict[int, Sequence[tuple[int, int]]]:
    """Return, by slot, the images that prompt chunks must not cut."""
    images = {request.slot: request.request.images for request in requests}
    return {slot: of_slot.whole for slot, of_slot in images.items() if of_slot is not None}


def plan_round(
    requests: Iterable[RunningRequest], draft_windows: "DraftWindowPlanner", slots: int, chunks: Iterable[Chunk] = ()
) -> Round:
    """Plan a round of those ``requests`` that decode, on ``slots`` slots; the caller adds the prompts.

    A request decodes if its prompt is cached; tokens of ``chunks`` count as cached.
    """
    ends = {chunk.slot: chunk.end for chunk in chunks}
    rows = {
        running.slot: running
        for running in requests
        if ends.get(running.slot, running.prefilled) >= running.prefill_end
        and not (running.slot in ends and running.replay.waits_for_drafts)
    }
    if not rows:
        return Round(rows, 0, 0, filters=False, rules=frozenset())
    requested = [running.request for running in rows.values()]
    # The last round may not be committed, so a text may be one window longer than the host knows.
    may_fast_forward = frozenset(
        slot
        for slot, running in rows.items()
        if running.request.num_draft_tokens
        and (draft_windows.fast_forward or running.request.scores_prompt or running.replay.rereading)
        and running.may_fast_forward(draft_windows.largest + 1)
    )
    batch = bucket(max(rows) + 1, slots)
    rules = frozenset(request.rule for request in requested)
    # Under the rejection rule a text depends on its windows; adaptive windows depend on the clock.
    wanted = max(request.num_draft_tokens for request in requested)
    num_proposed = draft_windows.choose(
        rows.values(), batch, wanted=wanted, fixed=Rule.REJECTION in rules, prompts=bool(ends)
    )
    return Round(
        rows,
        batch=batch,
        window=min(draft_windows.limit(len(rows)) if may_fast_forward else num_proposed, wanted),
        filters=any(request.filters for request in requested),
        rules=rules,
        num_proposed=num_proposed,
        mask_drafts=draft_windows.mask_drafts and any(running.constraint.has_grammar for running in rows.values()),
        may_fast_forward=may_fast_forward,
        adaptive=draft_windows.adapts(batch),
    )


class Preemption:
    """Reserves cache memory for the next round, preempts requests if memory is short, and registers prefixes.

    Memory goes to the oldest request first; the youngest one is preempted. ``end`` ends a request with an error.

    A preempted request leaves its slot and returns to the queue. Later it is prefilled again, except for blocks that
    are still cached. Tokens that the round in flight decides for it are dropped; Replay says what rounds do again.
    """

    def __init__(
        self,
        slots: Slots,
        scheduler: Scheduler,
        drafter: Drafter,
        end: Callable[[RunningRequest, Finish], None],
        metrics: Metrics,
    ) -> None:
        self._slots = slots
        self._scheduler = scheduler
        self._drafter = drafter
        self._end = end
        self._metrics = metrics

    def reserve_memory(self, last: VerifiedRound | None) -> VerifiedRound | None:
        """Reserve the memory of the next round; return ``last``, the round in flight, without preempted requests."""
        queue = deque(self._slots)  # the oldest first
        while queue:
            running = queue.popleft()
            try:
                self._register_prefix(running)
                while not self._slots.grow(running):
                    youngest = queue.pop() if queue else running
                    if last is not None:
                        last = last.drop(youngest, reads_prompts_late=self._drafter.reads_prompts_late)
                    self._preempt(youngest)
                    if youngest is running:
                        break
            except BaseException as error:  # ends only this request
                self._end(running, Finish("error", error))
        return last

    def _register_prefix(self, running: RunningRequest) -> None:
        """Register the tokens that are in the caches of both models.

        Earlier steps have enqueued all calls that write them. ``running.tokens`` has no drafted token that was not
        accepted.
        """
        in_target = running.prefilled if running.prefilling else len(running.tokens) - 1
        self._slots.register_prefix(running, min(in_target, self._drafter.cached_tokens(running)))

    def _preempt(self, running: RunningRequest) -> None:
        self._metrics.preemptions += 1
        self._scheduler.preempt(running.preempt())
        try:
            self._slots.leave(running.slot)
        except BaseException:
            log.exception("preemption: freeing slot %s failed; its request continues later", running.slot)


_REQUESTS_PER_ROUND = 8  # estimates that a round compares on average: those of many requests take the host long


class DraftWindowPlanner:
    """Chooses how many tokens a round drafts: a number, a table by running requests, or an adaptive choice up to these.

    It follows the acceptance of requests in slots (SlotListener).

    Under the coupled rule the window changes no text. Under the rejection rule it does not change the distribution of
    texts, but a table makes a text depend on how many other requests run.

    Attributes:
        largest: the most tokens that any round drafts.
        fast_forward: whether tokens that a constraint forces are drafted.
        mask_drafts: whether grammars mask the drafts.
        adaptive: whether any window follows acceptance and cost (acceptance.py, costs.py).
        uncaptured: rows of rounds whose shorter windows have no CUDA graphs yet; these rounds do not adapt.
        costs: seconds of rounds, by rows and window.
        calibrates: whether ``costs`` are measured before there are texts, else in their first rounds.
    """

    def __init__(
        self,
        windows: int | Mapping[int, int] | None,
        limit: int,
        *,
        fast_forward: bool = True,
        drafts: bool = True,
        mask_drafts: bool = False,
        adapts_from: int | None = None,
        calibrates: bool = True,
    ) -> None:
        """
        Args:
            windows: a number, or {requests: window}: an entry holds from its number of running requests up to the next
                entry. None: ``limit``.
            limit: the bundle's largest window.
            drafts: whether the bundle has a drafter.
            adapts_from: adapt rounds whose calls have at least so many tokens with the largest window; None: no rounds.
            calibrates: whether rounds without texts cost what others do, in proportion.

        Raises BadRequest for a window outside 0..limit, or a table without an entry for one request.
        """
        table = dict(windows) if isinstance(windows, Mapping) else {1: limit if windows is None else windows}
        if problem := draft_tokens_problem(table, limit):
            raise BadRequest(f"num_draft_tokens: {problem}")
        self._table = sorted(table.items(), reverse=True)
        self.largest = max(table.values())
        self.fast_forward = fast_forward
        self.mask_drafts = mask_drafts
        self.costs = RoundCosts()
        self.calibrates = calibrates
        self.uncaptured: set[int] = set()
        self._acceptance: WeakKeyDictionary[RunningRequest, Acceptance] = WeakKeyDictionary()  # survives preemption
        self._running: dict[int, RunningRequest] = {}  # by slot
        self._ended = Acceptance()
        self._drafts = drafts
        self.adaptive = adapts_from is not None and drafts
        self._adapts_from = adapts_from or 0
        self._chosen: dict[int, tuple[int, int]] = {}  # by rows: the last choice, and for how many rounds it holds

    def join(self, running: RunningRequest) -> None:
        """See SlotListener.join. A new request starts from the acceptance of ended requests."""
        if self.adaptive:
            self._running[running.slot] = running
            self._acceptance.setdefault(running, self._ended.start())

    def leave(self, slot: int) -> None:
        """See SlotListener.leave. A preempted request has not finished; it is counted once, when it ends."""
        running = self._running.pop(slot, None)
        if running is not None and running.finished:
            self._ended.merge(self._acceptance[running])

    def observe(self, running: RunningRequest, accepted: int, proposed: int) -> None:
        """Count a round that accepted the first ``accepted`` of ``proposed`` drafted tokens of a request."""
        if self.adaptive:
            self._acceptance[running].observe(accepted, proposed)

    def limit(self, requests: int) -> int:
        """Return the largest window of a round with ``requests`` requests, at least one."""
        return next(window for least, window in self._table if requests >= least)

    def choose(
        self,
        requests: Collection[RunningRequest],
        batch: int,
        *,
        wanted: int | None = None,
        fixed: bool = False,
        prompts: bool = False,
    ) -> int:
        """Return how many tokens the drafter proposes in a round of ``requests``, all of which have joined.

        ``batch``: rows of the round. ``wanted``: the largest window that any request allows. ``fixed``: do not adapt.
        ``prompts``: whether the round has prompts: it drafts nothing or the largest window, so that its calls have few
        shapes. A drafted token costs as much there as it saves in another round.
        """
        if not self._drafts:
            return 0
        limit = self.limit(len(requests))
        most = limit if wanted is None else min(wanted, limit)
        if fixed or not most or batch in self.uncaptured or not self.adapts(batch):
            return most
        steps = self._steps(most)
        due = None if prompts else self.costs.due(batch, steps)
        if due is not None:
            return due
        chosen, rounds = self._chosen.get(batch, (0, 0))
        if not rounds or chosen not in steps:
            costs = {step: self.costs.estimate(batch, step) for step in steps}
            chosen = best_window([self._acceptance[each] for each in requests], costs)
            rounds = len(requests) // _REQUESTS_PER_ROUND
        self._chosen[batch] = chosen, max(0, rounds - 1)
        return most if prompts and chosen else chosen

    def adapts(self, batch: int) -> bool:
        """Whether the windows of rounds with ``batch`` rows adapt."""
        return self.adaptive and batch * (self.limit(batch) + 1) >= self._adapts_from

    def usual(self, requests: int) -> list[int]:
        """Return the windows that ``choose`` may return where requests set none, without fast-forward tokens."""
        most = self.limit(requests)
        if not self._drafts:
            return [0]
        return self._steps(most) if most and self.adapts(requests) else [most]

    def _steps(self, most: int) -> list[int]:
        """0, 1, 2, 3, 4, 6, 8, 12, ...: few windows, because each is one more graph per number of rows."""
        powers = [1 << power for power in range(most.bit_length())]
        return sorted({0, most, *(window for power in powers for window in (power, 3 * power) if window < most)})
