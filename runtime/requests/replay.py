"""The rounds that a preempted request runs again in its next slot, so that its text continues unchanged."""

from collections.abc import Sequence

from tandemrt.engines.validation.errors import InternalError, quoted
from tandemrt.runtime.constraints.constraint import FilledRows
from tandemrt.runtime.constraints.rows import MaskRows
from tandemrt.runtime.grammars.bitmask import allow_only


class Replay:
    """The rounds that a preempted request runs again, in two steps. A request that was never preempted has none.

    1. For batch invariance, rounds process the output again (``rereading``). Their masks allow this output alone, all
       their drafted tokens are fast-forward tokens, and they decide nothing.
    2. One round repeats the round that the preemption dropped. The same random numbers decide its tokens. It makes the
       same choice about fast-forward tokens, because under the rejection rule a text depends on its drafts.

    Attributes:
        waits_for_drafts: whether the request decodes only after the round in which its prompt ends, because the dropped
            round had drafts and the drafter reads prompts too late for drafts in that round; see Round.undrafted.
    """

    def __init__(self) -> None:
        self.waits_for_drafts = False
        self._output: list[int] = []  # the part that no round has processed again
        self._dropped_fast_forward: bool | None = None  # None: there is no dropped round

    @property
    def rereading(self) -> bool:
        """Whether the next round processes output again."""
        return bool(self._output)

    @property
    def fast_forward(self) -> bool | None:
        """Whether the next round may draft fast-forward tokens; None if it repeats nothing."""
        return True if self._output else self._dropped_fast_forward

    def drop_round(self, *, fast_forward: bool, waits_for_drafts: bool) -> None:
        """Note that a preemption drops a round, which might draft fast-forward tokens or not."""
        if not self._output:  # otherwise an older round is still to be repeated
            self._dropped_fast_forward = fast_forward
        self.waits_for_drafts = waits_for_drafts

    def mark_planned(self) -> None:
        """Note that a round of the request is planned. Unless it processes output again, it repeats the dropped one."""
        self.waits_for_drafts = False
        if not self._output:
            self._dropped_fast_forward = None

    def start(self, output: Sequence[int]) -> None:
        """Let rounds process ``output`` again."""
        self._output = list(output)

    def stop(self) -> list[int]:
        """Process no more output again; return the part that is left."""
        rest, self._output = self._output, []
        return rest

    def next_drafts(self, most: int) -> list[int]:
        """Return at most ``most`` tokens for the next round to draft; it emits one more."""
        return self._output[: min(most, len(self._output) - 1)]

    def fill_rows(self, masks: MaskRows, first: int, limit: int) -> FilledRows:
        """Write the mask rows of the next round from row ``first`` on; see Constraint.fill_rows."""
        tokens = self.next_drafts(limit)
        for at in range(len(tokens) + 1):
            allow_only(masks.writable(first + at), self._output[at])
        return FilledRows(tokens, list(range(len(tokens))))

    def advance(self, emitted: Sequence[int]) -> None:
        """Continue after a round that processed output again; ``emitted`` must be that output."""
        count = len(emitted)
        if not count or list(emitted) != self._output[:count]:
            raise InternalError(
                f"a round must emit the output that it processes again, {quoted(self._output[: max(1, count)])}; got "
                f"{quoted(list(emitted))}"
            )
        del self._output[:count]
