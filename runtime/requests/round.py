"""The plan of a round, fixed before any of its work is enqueued, and the round whose verification is enqueued."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tandemrt.engines.contract.calls import NO_PROMPTS, Packed
from tandemrt.plugins.operators.constants import Rule
from tandemrt.runtime.device.round_shape import RoundShape
from tandemrt.runtime.device.streams import HostCopy
from tandemrt.runtime.requests.running import RunningRequest


@dataclass(frozen=True)
class Round:
    """The plan of a round: one step of drafting and verification, fixed before any of its work is enqueued.

    Attributes:
        rows: the requests that the round serves, by slot.
        batch: slots [0, batch) are rows of its calls; rows without a request emit nothing.
        window: drafted tokens per row.
        needs_probs: whether any request uses a filter or the rejection rule, see Engine.bind.
        rules: the verification rules of its requests. Rejection reads draft probabilities.
        num_proposed: tokens per row that the drafter proposes; fast-forward tokens may be more.
        prompts: prompt tokens in the packed calls of target and draft; none over a linear cache.
        mask_drafts: whether grammars mask the drafts, after the host has committed the last round.
        may_fast_forward: slots whose constraint may allow a single continuation, as far as the host knew when the round
            was planned. Its tokens are drafted without a model, after the host has committed the last round.
        fast_forward: those tokens by slot, as soon as they are computed.
        may_copy: whether drafts may be copied from the text, after the host has committed the last round. Then the
            target waits for that commit.
        copied: drafts by slot that replace the drafter's: fast-forward tokens, continued from the text (TextLookup).
        undrafted: slots whose prefill ends in this round, too late for the drafter. Their drafts depend on stale cache
            contents and are not verified; under the rejection rule the text would depend on them.
        only_fast_forward: whether fast-forward tokens fill the window of every row, so that the drafter is skipped.
        missed: tokens of its rows that the drafter has not processed and processes before it drafts, where these take
            it long.
        adaptive: whether the acceptance in this round adapts the length of later draft windows.
        least_gain: the drafter may stop before the end of the window, where a further token promises fewer accepted
            ones per request, by its own probabilities.
    """

    rows: Mapping[int, RunningRequest]
    batch: int
    window: int
    needs_probs: bool
    rules: frozenset[Rule]
    num_proposed: int = 0
    prompts: Packed = NO_PROMPTS
    mask_drafts: bool = False
    may_fast_forward: frozenset[int] = frozenset()
    fast_forward: Mapping[int, Sequence[int]] = field(default_factory=dict)
    may_copy: bool = False
    copied: Mapping[int, Sequence[int]] = field(default_factory=dict)
    undrafted: frozenset[int] = frozenset()
    only_fast_forward: bool = False
    missed: int = 0
    adaptive: bool = False
    least_gain: float = 0.0

    @cached_property
    def shape(self) -> RoundShape:
        """The shape of the round's calls, for a drafter that samples from probabilities."""
        return RoundShape(self.batch, self.window, self.needs_probs, Rule.REJECTION in self.rules, self.prompts)

    @property
    def has_work(self) -> bool:
        """Whether the target has anything to compute."""
        return bool(self.rows) or self.prompts != NO_PROMPTS

    @property
    def drafts_after_commit(self) -> bool:
        """Whether the drafts need the commit of the last round."""
        return bool(self.may_fast_forward) or (self.mask_drafts and self.window > 0)

    @property
    def drafted_from_text(self) -> Mapping[int, Sequence[int]]:
        """The drafts by slot that need no drafter."""
        return {**self.fast_forward, **self.copied}

    @cached_property
    def needs_drafter(self) -> bool:
        """Whether the drafter has to propose.

        It has not, if all rows copy, have fast-forward tokens for the whole window, or are undrafted. The answer must
        not change while the round is committed, which lengthens its texts.
        """
        if not self.window or not self.num_proposed or self.only_fast_forward:
            return False
        if not self.copied and not self.undrafted:
            return True
        without = self.copied.keys() | self.undrafted
        return any(
            slot not in without and len(self.fast_forward.get(slot, ())) < self.max_drafted(running)
            for slot, running in self.rows.items()
        )

    @property
    def window_tokens(self) -> int:
        """Tokens of all rows that the target scores: the newest and the drafted ones."""
        return self.batch * (self.window + 1)

    def max_drafted(self, running: RunningRequest) -> int:
        """Drafted tokens that may be verified for ``running``."""
        return min(self.window, running.request.num_draft_tokens, running.remaining - 1)

    def can_use_drafts(self) -> bool:
        """Whether any drafted token may be verified."""
        return any(
            self.max_drafted(running) > 0
            and (self.may_copy or slot not in self.undrafted or slot in self.may_fast_forward)
            for slot, running in self.rows.items()
        )

    def completes(self, running: RunningRequest) -> bool:
        """Whether the round surely emits the last token of ``running``. It emits at least one for each of its rows."""
        return self.rows.get(running.slot) is running and running.remaining <= 1 and not running.replay.rereading

    def num_proposed_for(self, running: RunningRequest) -> int:
        """Valid tokens that the drafter proposes for ``running``.

        Under the rejection rule none of them is verified where fast-forward tokens fill the window, also in a round in
        which the drafter runs for others.
        """
        most = min(self.num_proposed, self.max_drafted(running))
        fast_forward = len(self.fast_forward.get(running.slot, ()))
        replaced = running.request.rule is Rule.REJECTION and fast_forward >= most
        return 0 if not self.needs_drafter or running.slot in self.undrafted or replaced else most

    def max_fast_forward(self, running: RunningRequest) -> int:
        """Return the length of the draft window up to which mask rows may add fast-forward tokens for ``running``.

        Under the rejection rule they fill what it drafts itself, not a window that others widen: its text depends on
        its drafts.
        """
        slot, most = running.slot, self.max_drafted(running)
        if slot not in self.may_fast_forward:
            return 0
        if running.request.rule is not Rule.REJECTION or running.replay.rereading:
            return most
        drafts_itself = slot not in self.copied and self.num_proposed_for(running) > 0
        return most if drafts_itself else min(most, len(self.drafted_from_text.get(slot, ())))

    def with_fast_forward(self) -> "Round":
        """Return the round with its fast-forward tokens, for ``may_fast_forward`` alone.

        Other slots get none, so that drafts, and a text under the rejection rule, do not depend on neighbours.

        A request that had output to process again when the round was planned may have processed it by now. It gets some
        only if the round that this one repeats did.

        The drafter is skipped where they fill what it would draft. The window shrinks to what is needed, unless the
        round has prompts, whose positions in the packed calls follow from it.
        """
        may = frozenset(
            slot
            for slot, running in self.rows.items()
            if slot in self.may_fast_forward and running.replay.fast_forward is not False
        )
        tokens = {
            slot: running.fast_forward_tokens(self.max_drafted(running)) if slot in may else []
            for slot, running in self.rows.items()
        }
        only = all(
            len(tokens[slot]) >= min(self.num_proposed, self.max_drafted(each)) for slot, each in self.rows.items()
        )
        needed = max([0 if only else self.num_proposed, *map(len, tokens.values())])
        window = needed if self.prompts == NO_PROMPTS else self.window
        least_gain = 0.0 if any(tokens.values()) else self.least_gain  # the drafter must not cut them
        round_ = replace(self, may_fast_forward=may, fast_forward=tokens, only_fast_forward=only)
        return replace(round_, window=window, least_gain=least_gain)

    def with_copies(self, copied: Mapping[int, Sequence[int]], *, drafter: bool) -> "Round":
        """Return the round with drafts ``copied`` from the text, and the window that its drafts need.

        ``drafter``: whether there is one. Copies may be longer than what it proposes only where it does not run.
        """
        round_ = replace(self, copied=copied, only_fast_forward=self.only_fast_forward and not copied)
        if self.prompts != NO_PROMPTS:  # their positions in the packed calls follow from the window
            return round_
        if not (drafter and round_.needs_drafter):
            return replace(round_, window=max(map(len, round_.drafted_from_text.values()), default=0))
        window = max([self.num_proposed, *map(len, self.fast_forward.values())])
        least_gain = 0.0 if copied else self.least_gain
        cut = {slot: tokens[:window] for slot, tokens in copied.items()}
        return replace(round_, window=window, copied=cut, least_gain=least_gain)

    def drafted(self, tokens: int) -> "Round":
        """Return the round after the drafter has proposed so many tokens per row."""
        return replace(self, window=tokens, num_proposed=min(tokens, self.num_proposed))

    def unfinished(self) -> "Round":
        """Return the round with the same calls, without requests that finished after it was planned."""
        left = {slot: running for slot, running in self.rows.items() if not running.finished}
        return self if len(left) == len(self.rows) else replace(self, rows=left)


@dataclass(frozen=True)
class VerifiedRound:
    """A round whose verification is enqueued; the host has not committed it.

    Attributes:
        round: its plan.
        num_verified: drafted tokens that are verified, by slot.
        num_from_drafter: verified tokens that the drafter proposed, by slot; the others are fast-forward tokens. Slots
            whose drafts were replaced by copies are missing.
        logits: [window + 1, vocab] by slot, of requests that ask for logprobs.
        arrived: an event that follows the copies of its tokens and logits to the host; None on a CPU.
    """

    round: Round
    num_verified: Mapping[int, int]
    num_from_drafter: Mapping[int, int]
    logits: Mapping[int, HostCopy] = field(default_factory=dict)
    arrived: Any = None

    def drop(self, running: RunningRequest, *, reads_prompts_late: bool) -> "VerifiedRound":
        """Return the round with nothing to commit for ``running``, which repeats it in its next slot.

        ``reads_prompts_late``: see Drafter.
        """
        plan, slot = self.round, running.slot
        if slot in plan.rows:
            depends_on_drafts = running.request.rule is Rule.REJECTION and slot not in plan.undrafted
            running.replay.drop_round(
                fast_forward=slot in plan.may_fast_forward,
                waits_for_drafts=reads_prompts_late and depends_on_drafts,
            )
        rows = {other: row for other, row in plan.rows.items() if other != slot}
        return replace(self, round=replace(plan, rows=rows))
