"""One round: what is fixed before any of its work is enqueued, and what is known of it once it is verified."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tandemrt.engines.calls import NO_PROMPTS, Packed, bucket
from tandemrt.plugins.operators import Rule
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
        filters: whether any request has what Engine.bind calls filters.
        rules: the verification rules of its requests. Rejection reads draft probabilities.
        prompts: what its calls of target and draft have of prompts, beside the windows; over a linear cache nothing.
        forces: whether a constraint may leave a request no choice in it. What follows then is drafted without a model,
            once the host has committed the round before.
        forced: the tokens that follow in each row before anything is drafted, once they are known.
        covered: whether they are the whole window of every row, so that nobody else is asked for drafts.
    """

    rows: Mapping[int, Running]
    batch: int
    window: int
    filters: bool
    rules: frozenset[Rule]
    prompts: Packed = NO_PROMPTS
    forces: bool = False
    forced: Mapping[int, Sequence[int]] = field(default_factory=dict)
    covered: bool = False

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
        forces = windows.forced and any(
            running.request.window and running.constraint.may_force(windows.largest + 1) for running in rows.values()
        )
        return cls(
            rows,
            batch=bucket(max(rows) + 1, slots) if rows else 0,
            window=min(windows.of(len(rows), forces=forces), max(each.window for each in asked)) if rows else 0,
            filters=any(request.filters for request in asked),
            rules=frozenset(request.rule for request in asked),
            forces=forces,
        )

    @property
    def works(self) -> bool:
        """Whether there is anything to do for the target."""
        return bool(self.rows) or self.prompts != NO_PROMPTS

    @property
    def windows(self) -> int:
        """Tokens of all windows that the target is given."""
        return self.batch * (self.window + 1)

    def most(self, running: Running) -> int:
        """Tokens that may be drafted for ``running``."""
        return min(self.window, running.request.window, running.remaining - 1)

    def foreseen(self, *, drafts: bool) -> "Round":
        """The same round, knowing what follows in each row; ``drafts``: whether anybody else drafts.

        Nobody is asked where that fills the windows. They become as short as it is then, unless the places of prompts
        in the calls are fixed behind them.
        """
        forced = {slot: running.constraint.forced(self.most(running)) for slot, running in self.rows.items()}
        covered = not drafts or all(len(forced[slot]) >= self.most(each) for slot, each in self.rows.items())
        longest = max(map(len, forced.values()), default=0)
        window = longest if covered and self.prompts == NO_PROMPTS else self.window
        return replace(self, forced=forced, covered=covered, window=window)

    def remaining(self) -> "Round":
        """The same calls for those who have not finished since the round was made."""
        return replace(self, rows={slot: running for slot, running in self.rows.items() if not running.finished})


@dataclass(frozen=True)
class Verified:
    """A round that the device has decided or is about to; the host has not committed it.

    ``usable``: how many drafted tokens are verified, by slot.
    """

    round: Round
    usable: Mapping[int, int]

    def without(self, slot: int) -> "Verified":
        """The same round, of which nothing is committed for ``slot``."""
        rows = {other: running for other, running in self.round.rows.items() if other != slot}
        return replace(self, round=replace(self.round, rows=rows))
