"""A round: one draft and verify step of the engine loop for all requests in slots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tandemrt.engines.contract.calls import NO_PROMPTS, Packed
from tandemrt.plugins.operators.constants import Rule
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.device.prompt_plan import Chunk
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
        filters: whether any request uses top-k, top-p or min-p, see Engine.bind.
        rules: the verification rules of its requests. Rejection reads draft probabilities.
        num_proposed: tokens per row that the drafter proposes; fast-forward tokens may be more.
        prompts: prompt tokens in the packed calls of target and draft; none over a linear cache.
        mask_drafts: whether grammars mask the drafts, after the host has committed the last round.
        may_fast_forward: whether a constraint may allow a single continuation in any row. Its tokens are drafted
            without a model, after the host has committed the last round.
        fast_forward: those tokens by slot, as soon as they are computed.
        undrafted: slots whose prefill ends in this round, too late for the drafter. Their drafts depend on stale cache
            contents and are not verified; under the rejection rule the text would depend on them.
        only_fast_forward: whether fast-forward tokens fill the window of every row, so that the drafter is skipped.
        adaptive: whether the acceptance in this round adapts the length of later draft windows.
    """

    rows: Mapping[int, RunningRequest]
    batch: int
    window: int
    filters: bool
    rules: frozenset[Rule]
    num_proposed: int = 0
    prompts: Packed = NO_PROMPTS
    mask_drafts: bool = False
    may_fast_forward: bool = False
    fast_forward: Mapping[int, Sequence[int]] = field(default_factory=dict)
    undrafted: frozenset[int] = frozenset()
    only_fast_forward: bool = False
    adaptive: bool = False

    @cached_property
    def shape(self) -> RoundShape:
        """The shape of the round's calls, for a drafter that samples from probabilities."""
        return RoundShape(self.batch, self.window, self.filters, Rule.REJECTION in self.rules, self.prompts)

    @property
    def has_work(self) -> bool:
        """Whether the target has anything to compute."""
        return bool(self.rows) or self.prompts != NO_PROMPTS

    @property
    def drafts_after_commit(self) -> bool:
        """Whether the drafts need the commit of the last round."""
        return self.may_fast_forward or (self.mask_drafts and self.window > 0)

    @property
    def window_tokens(self) -> int:
        """Tokens of all rows that the target scores: the newest and the drafted ones."""
        return self.batch * (self.window + 1)

    def max_drafted(self, running: RunningRequest) -> int:
        """Drafted tokens that may be verified for ``running``."""
        return min(self.window, running.request.num_draft_tokens, running.remaining - 1)

    def num_proposed_for(self, running: RunningRequest) -> int:
        """Valid tokens that the drafter proposes for ``running``."""
        if self.only_fast_forward or running.slot in self.undrafted:
            return 0
        return min(self.num_proposed, self.max_drafted(running))

    def with_fast_forward(self) -> "Round":
        """Return the round with its fast-forward tokens.

        The drafter is skipped where they fill what it would draft. The window shrinks to what is needed, unless the
        round has prompts, whose positions in the packed calls follow from it.
        """
        tokens = {slot: running.fast_forward_tokens(self.max_drafted(running)) for slot, running in self.rows.items()}
        only = all(
            len(tokens[slot]) >= min(self.num_proposed, self.max_drafted(each)) for slot, each in self.rows.items()
        )
        needed = max([0 if only else self.num_proposed, *map(len, tokens.values())])
        window = needed if self.prompts == NO_PROMPTS else self.window
        return replace(self, fast_forward=tokens, only_fast_forward=only, window=window)

    def unfinished(self) -> "Round":
        """Return the round with the same calls, without requests that finished after it was planned."""
        return replace(self, rows={slot: running for slot, running in self.rows.items() if not running.finished})


@dataclass(frozen=True)
class VerifiedRound:
    """A round whose verification is enqueued; the host has not committed it.

    Attributes:
        round: its plan.
        num_verified: drafted tokens that are verified, by slot.
        num_from_drafter: verified tokens that the drafter proposed, by slot; the others are fast-forward tokens.
        logits: [window + 1, vocab] by slot, of requests that ask for logprobs.
    """

    round: Round
    num_verified: Mapping[int, int]
    num_from_drafter: Mapping[int, int]
    logits: Mapping[int, HostCopy] = field(default_factory=dict)

    def without(self, slot: int) -> "VerifiedRound":
        """Return the round with nothing to commit for ``slot``."""
        rows = {other: running for other, running in self.round.rows.items() if other != slot}
        return replace(self, round=replace(self.round, rows=rows))


class NullHooks:
    """The hooks of a round that a drafter has (see engine_loop/drafter.py), which do nothing.

    A drafter overrides those that it needs.
    """

    reads_prompts_late = False

    def join(self, running: RunningRequest) -> None:
        """See SlotListener.join."""

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[Sequence[int]]) -> None:
        """See Drafter.prefill."""

    def write_prompts(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]], sizes: Packed) -> None:
        """See Drafter.write_prompts."""

    def skip(self, this: Round) -> None:
        """See Drafter.skip."""

    def after_target(self, this: Round) -> None:
        """See Drafter.after_target."""

    def replaced(self, running: RunningRequest, kept: int) -> None:
        """See Drafter.replaced."""

    def after_verify(self, this: Round) -> None:
        """See Drafter.after_verify."""

    def window_needed(self, this: Round) -> int:
        """See Drafter.window_needed."""
        return this.window
