"""Prompts on their way into the caches, a number of tokens a round."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tandemrt.engines import calls
from tandemrt.engines.drafts import DRAFT_LAYERS
from tandemrt.runtime.backends.base import prompt_rows
from tandemrt.runtime.device import upload
from tandemrt.runtime.drafters.base import Drafter
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.requests.slots import Slots
from tandemrt.runtime.round.planner import Chunk, plan, rectangles, total
from tandemrt.runtime.round.round import Round
from tandemrt.runtime.round.state import Place
from tandemrt.runtime.round.tandem import Tandem
from tandemrt.runtime.round.windows import Windows


class Prompts:
    """Hears who joins (SlotListener), makes rounds, and sees to it that what requests come with gets into the caches.

    A round takes at most ``chunk`` prompt tokens in all, and at most ``chunk_beside`` where requests decode, which
    bounds how long they wait for their next token. Over a paged cache they ride along with the windows of the round's
    own calls; over a linear one they have calls in front of it.

    A slot in prefill may be a row of rounds. It stands at its next prompt token, or behind those that are in the same
    call: what a round writes there is written again by its next chunk, and an empty mask keeps it from emitting. A
    prompt that ends in a round takes part in that very round.
    """

    def __init__(self, tandem: Tandem, drafter: Drafter, metrics: Metrics, *, chunk: int, chunk_beside: int) -> None:
        self.chunk = chunk
        self.chunk_beside = chunk_beside
        self._tandem = tandem
        self._drafter = drafter
        self._metrics = metrics
        self._joined: dict[int, Place] = {}  # of slots that the device has not heard of

    def join(self, running: Running) -> None:
        """See SlotListener.join."""
        self._joined[running.slot] = Place.of(running.slot, running.tokens, running.prefilled)

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""
        self._joined.pop(slot, None)

    def settle(self) -> None:
        """Tell the device of all who joined since it was last told."""
        self._tandem.state.settle()
        if self._joined:
            self._tandem.state.place(list(self._joined.values()))
            self._joined = {}

    def begin(self, slots: Slots, windows: Windows) -> Round:
        """Make the next round, and enqueue what it needs to know of the prompts that go into the caches with it."""
        self.settle()
        missing = [Chunk(each.slot, each.prefilled, each.prefill_end) for each in slots if each.prefilling]
        if not missing:
            return Round.of(slots, windows, slots.count)
        budget = self.chunk if len(missing) == len(slots) else min(self.chunk, self.chunk_beside)
        chunks = plan(missing, budget)
        this = Round.of(slots, windows, slots.count, chunks)
        runs = self._tandem.runs
        if runs is not None:
            if total(chunks) < total(missing):
                chunks = plan(missing, calls.unpadded(this.windows, budget))
                this = Round.of(slots, windows, slots.count, chunks)
            this = replace(this, prompts=calls.packed(this.windows, total(chunks), len(chunks)))
        inside = {running.slot: running for running in slots}
        if self._drafter.late:
            ended = (chunk.slot for chunk in chunks if chunk.end == inside[chunk.slot].prefill_end)
            this = replace(this, late=frozenset(ended))
        texts = {chunk.slot: inside[chunk.slot].tokens for chunk in chunks}
        if runs is not None:
            runs.write(chunks, texts, this.prompts)
            self._drafter.reads(chunks, texts, this.prompts)
        else:
            self._prefill(chunks, texts)
        self._tandem.state.place([Place.of(chunk.slot, texts[chunk.slot], chunk.end) for chunk in chunks])
        for chunk in chunks:
            inside[chunk.slot].prefilled = chunk.end
        self._metrics.prefilled += total(chunks)
        return this

    def _prefill(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]]) -> None:
        """Run the calls over linear caches; slots stand where their chunks begin."""
        # A prompt that asks for no row's logits is one row's (see prompt_rows).
        target = self._tandem.engines["target"]
        for rectangle in rectangles(chunks) if prompt_rows(target) else [(chunk,) for chunk in chunks]:
            slot, count = rectangle[0].slot, rectangle[0].tokens
            tokens = self._tandem.buffers.chunk.view(len(rectangle), count)
            upload([texts[each.slot][each.start : each.end] for each in rectangle], tokens)
            self._tandem.prefill(slot, tokens)
            following = [texts[each.slot][each.end : each.end + len(DRAFT_LAYERS)] for each in rectangle]
            self._drafter.prefill(slot, tokens, following)
