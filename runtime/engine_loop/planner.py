"""Plan rounds: which requests decode, and which prompt tokens are processed."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from tandemrt.engines.contract.calls import NO_PROMPTS, bucket
from tandemrt.engines.contract.draft_kinds import DRAFT_LAYERS
from tandemrt.plugins.operators.constants import Rule
from tandemrt.runtime.device.backends.base import ProfiledEngine, prompt_rows
from tandemrt.runtime.device.prompt_plan import Chunk, group_equal_chunks, num_tokens, plan
from tandemrt.runtime.device.slot_state import SlotPosition
from tandemrt.runtime.device.streams import upload
from tandemrt.runtime.engine_loop.draft_windows import DraftWindowPlanner
from tandemrt.runtime.engine_loop.drafter import Drafter, Lookup
from tandemrt.runtime.engine_loop.target import TargetRunner
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.round import Round, VerifiedRound
from tandemrt.runtime.requests.running import RunningRequest
from tandemrt.runtime.requests.slots import Slots


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
        lookup: Lookup | None = None,
    ) -> None:
        self.chunk = chunk
        self.chunk_while_decoding = chunk_while_decoding
        self._target = target
        self._drafter = drafter
        self._metrics = metrics
        self._lookup = lookup

    def plan(
        self,
        slots: Slots,
        draft_windows: DraftWindowPlanner,
        last: VerifiedRound | None = None,
        *,
        wait: float | None = None,
    ) -> Round:
        """Return the next round, and enqueue the uploads or prefill calls of its prompt tokens.

        ``last``: the round in flight. Requests that it completes take part in no further round. ``wait``: see
        Lookup.promises; None if the target waits for the last commit anyway.
        """
        state = self._target.state
        requests = [request for request in slots if _remains(request, last)]
        missing = [
            Chunk(request.slot, request.prefilled, request.prefill_end) for request in requests if request.prefilling
        ]
        if not missing:
            state.flush()
            return self._plan_rows(requests, draft_windows, slots.count, wait)
        budget = self._budget(decoding=len(missing) < len(requests))
        running = {request.slot: request for request in requests}
        in_prompts = partial(plan, missing, at_block_ends=slots.reuses_whole_chunks, whole=_whole_spans(requests))
        plan_decoding = partial(self._plan_decoding, requests, draft_windows, slots.count, wait)
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

    def most_tokens(self, slots: Slots, last: VerifiedRound | None) -> int:
        """Return how many prompt tokens the next round processes if they are there; ``last``: see ``plan``."""
        return self._budget(decoding=any(not request.prefilling and _remains(request, last) for request in slots))

    def _budget(self, *, decoding: bool) -> int:
        return min(self.chunk, self.chunk_while_decoding) if decoding else self.chunk

    def _plan_decoding(
        self,
        requests: Sequence[RunningRequest],
        draft_windows: DraftWindowPlanner,
        slots: int,
        wait: float | None,
        chunks: Collection[Chunk],
    ) -> Round:
        """Plan the rows of a round with ``chunks``, without drafts if no request can use them.

        Only packed calls leave them out: other rounds keep the window of their captured graphs.
        """
        round_ = self._plan_rows(requests, draft_windows, slots, wait, chunks)
        if self._drafter.reads_prompts_late:
            ends = {running.slot: running.prefill_end for running in requests}
            undrafted = frozenset(chunk.slot for chunk in chunks if chunk.end == ends[chunk.slot])
            round_ = replace(round_, undrafted=undrafted)
        if not self._target.layout.packed or round_.can_use_drafts():
            return round_
        return replace(round_, window=0, num_proposed=0)

    def _plan_rows(
        self,
        requests: Sequence[RunningRequest],
        draft_windows: DraftWindowPlanner,
        slots: int,
        wait: float | None,
        chunks: Collection[Chunk] = (),
    ) -> Round:
        """Plan the rows of a round, and whether drafts are copied from the text.

        Copies may be longer than what the drafter proposes in rounds in which it does not run.
        """
        round_ = plan_round(requests, draft_windows, slots, chunks, drafter=self._drafter)
        if self._lookup is None or not round_.rows:
            return round_
        waits = wait is None or round_.drafts_after_commit
        copying = replace(round_, may_copy=True)
        if waits or not (self._drafter.window and round_.num_proposed):
            wanted = _most_drafted(round_.rows.values(), draft_windows)
            copying = replace(copying, window=min(draft_windows.limit(len(round_.rows)), wanted))
        if not copying.window:
            return round_
        if wait is None or waits or self._lookup.promises(copying, wait):
            return copying
        return round_ if self._drafter.window else replace(round_, window=0, num_proposed=0)

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


def _remains(request: RunningRequest, last: VerifiedRound | None) -> bool:
    """Return whether the round in flight does not complete ``request``."""
    return last is None or not last.round.completes(request)


def _missed(rows: Iterable[RunningRequest], drafter: Drafter) -> int:
    """Return how many tokens the drafter has not processed. A round processes the newest two of each row anyway."""
    return sum(max(0, len(running.tokens) - drafter.cached_tokens(running) - 2) for running in rows)


def _most_drafted(rows: Collection[RunningRequest], draft_windows: DraftWindowPlanner) -> int:
    """Return the most tokens that any request may draft; with any shape, no more than any may still emit.

    A text under the rejection rule may depend on its windows, so these do not depend on how much others may emit. A
    request that processes a text again drafts what it knows.
    """
    requests = [running.request for running in rows]
    cut = draft_windows.any_shape and not any(request.rule is Rule.REJECTION for request in requests)

    def most(running: RunningRequest) -> int:
        request = running.request
        if not cut or request.scores_prompt or running.replay.rereading:
            return request.num_draft_tokens
        return max(0, min(request.num_draft_tokens, running.remaining - 1))

    return max(map(most, rows))


def _whole_spans(requests: Iterable[RunningRequest]) -> dict[int, Sequence[tuple[int, int]]]:
    """Return, by slot, the images that prompt chunks must not cut."""
    images = {request.slot: request.request.images for request in requests}
    return {slot: of_slot.whole for slot, of_slot in images.items() if of_slot is not None}


def plan_round(
    requests: Iterable[RunningRequest],
    draft_windows: DraftWindowPlanner,
    slots: int,
    chunks: Iterable[Chunk] = (),
    *,
    drafter: Drafter | None = None,
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
        return Round(rows, 0, 0, needs_probs=False, rules=frozenset())
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
    wanted = _most_drafted(rows.values(), draft_windows)
    missed = 0 if drafter is None or not draft_windows.missed_cost else _missed(rows.values(), drafter)
    num_proposed = draft_windows.choose(
        rows.values(), batch, wanted=wanted, fixed=Rule.REJECTION in rules, prompts=bool(ends), missed=missed
    )
    adaptive = draft_windows.adaptive and Rule.REJECTION not in rules
    return Round(
        rows,
        batch=batch,
        window=min(draft_windows.limit(len(rows)) if may_fast_forward else num_proposed, wanted),
        needs_probs=any(request.needs_probs for request in requested),
        rules=rules,
        num_proposed=num_proposed,
        mask_drafts=draft_windows.mask_drafts and any(running.constraint.has_grammar for running in rows.values()),
        may_fast_forward=may_fast_forward,
        missed=missed,
        adaptive=adaptive,
        least_gain=draft_windows.least_gain(batch, num_proposed) if adaptive and not ends else 0.0,
    )
