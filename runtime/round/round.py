"""One round: what is fixed before any of its work is enqueued, and what is known of it once it is verified."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tandemrt.engines.calls import NO_PROMPTS, Packed, bucket
from tandemrt.plugins.operators import Rule
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.round.planner import Chunk
from tandemrt.runtime.round.windows import Windows


@dataclass(frozen=True)
class Round:
    """What propose, score, fill, verify and commit take.

    Attributes:
        rows: the requests that it serves, by slot.
        batch: slots [0, batch) are rows of its calls; those that no request has emit nothing.
        window: drafted tokens per row.
        asked: how many of them the drafter is asked for; forced tokens may be more.
        filters: whether any request has what Engine.bind calls filters.
        rules: the verification rules of its requests. Rejection reads draft probabilities.
        prompts: what its calls of target and draft have of prompts, beside the windows; over a linear cache nothing.
        masked: whether drafts are masked by the constraints of its requests, once the host has committed the round
            before.
        forces: whether a constraint may leave a request no choice in it. What follows then is drafted without a model,
            once the host has committed the round before.
        forced: the tokens that follow in each row before anything is drafted, once they are known.
        late: slots whose prompts end in its own calls, too late for the drafter: what that drafts for them, from
            whatever its cache holds, is not verified. Under the rejection rule a text would depend on it.
        covered: whether they are the whole window of every row, so that nobody else is asked for drafts.
        adapts: whether windows follow what is accepted of this one.
    """

    rows: Mapping[int, Running]
    batch: int
    window: int
    filters: bool
    rules: frozenset[Rule]
    asked: int = 0
    prompts: Packed = NO_PROMPTS
    masked: bool = False
    forces: bool = False
    forced: Mapping[int, Sequence[int]] = field(default_factory=dict)
    late: frozenset[int] = frozenset()
    covered: bool = False
    adapts: bool = False

    @classmethod
    def of(cls, requests: Iterable[Running], windows: Windows, slots: int, chunks: Iterable[Chunk] = ()) -> "Round":
        """The round of those among ``requests`` whose prompts are in the caches, of ``slots`` slots.

        ``chunks`` count as if they were in the caches already.
        """
        ends = {chunk.slot: chunk.end for chunk in chunks}
        rows = {
            running.slot: running
            for running in requests
            if ends.get(running.slot, running.prefilled) >= running.prefill_end
        }
        asked = [running.request for running in rows.values()]
        # Until the host has committed the round before, it knows the texts but for one window.
        forces = any(
            running.request.window
            and (windows.forced or running.request.scores)
            and running.constraint.may_force(windows.largest + 1)
            for running in rows.values()
        )
        if not rows:
            return cls(rows, 0, 0, filters=False, rules=frozenset())
        batch = bucket(max(rows) + 1, slots)
        rules = frozenset(request.rule for request in asked)
        # Under the rejection rule a text depends on its windows, and those on the clock where they adapt.
        acceptances = [running.acceptance for running in rows.values()]
        wanted = max(request.window for request in asked)
        drafted = windows.drafted(acceptances, batch, wanted=wanted, fixed=Rule.REJECTION in rules)
        return cls(
            rows,
            batch=batch,
            window=min(windows.of(len(rows)) if forces else drafted, wanted),
            filters=any(request.filters for request in asked),
            rules=rules,
            asked=drafted,
            masked=windows.masked and any(running.constraint.has_grammar for running in rows.values()),
            forces=forces,
            adapts=windows.adaptive,
        )

    @property
    def works(self) -> bool:
        """Whether there is anything to do for the target."""
        return bool(self.rows) or self.prompts != NO_PROMPTS

    @property
    def waits(self) -> bool:
        """Whether its drafts wait for the commit of the round before."""
        return self.forces or (self.masked and self.window > 0)

    @property
    def windows(self) -> int:
        """Tokens of all windows that the target is given."""
        return self.batch * (self.window + 1)

    def most(self, running: Running) -> int:
        """Tokens that may be drafted for ``running``."""
        return min(self.window, running.request.window, running.remaining - 1)

    def drafts_for(self, running: Running) -> int:
        """Tokens that the drafter was to draft for ``running`` and that mean something."""
        return 0 if self.covered or running.slot in self.late else min(self.asked, self.most(running))

    def foreseen(self) -> "Round":
        """The same round, knowing what follows in each row.

        The drafter is not asked where that is as much as it would draft. The window becomes what is needed, unless the
        places of prompts in the calls are fixed behind it.
        """
        forced = {slot: running.forced(self.most(running)) for slot, running in self.rows.items()}
        covered = all(len(forced[slot]) >= min(self.asked, self.most(each)) for slot, each in self.rows.items())
        needed = max([0 if covered else self.asked, *map(len, forced.values())])
        return replace(
            self, forced=forced, covered=covered, window=needed if self.prompts == NO_PROMPTS else self.window
        )

    def remaining(self) -> "Round":
        """The same calls for those who have not finished since the round was made."""
        return replace(self, rows={slot: running for slot, running in self.rows.items() if not running.finished})


@dataclass(frozen=True)
class Verified:
    """A round that the device has decided or is about to; the host has not committed it.

    ``usable``: how many drafted tokens are verified, by slot; ``kept``: how many of those the drafter made.
    ``logits``: [window + 1, vocab] by slot, of those who ask for logprobs, on the device.
    """

    round: Round
    usable: Mapping[int, int]
    kept: Mapping[int, int]
    logits: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def without(self, slot: int) -> "Verified":
        """The same round, of which nothing is committed for ``slot``."""
        rows = {other: running for other, running in self.round.rows.items() if other != slot}
        return replace(self, round=replace(self.round, rows=rows))
