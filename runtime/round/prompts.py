"""Prompts on their way into the caches, a few tokens a round."""

from tandemrt.plugins.tensors import torch
from tandemrt.runtime.device import upload
from tandemrt.runtime.drafters.base import Drafter
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.requests.slots import Slots
from tandemrt.runtime.round.state import SlotState
from tandemrt.runtime.round.tandem import Tandem


class Prompts:
    """Hears who joins (SlotListener) and prefills what they come with, ``chunk`` tokens a round in all.

    A slot in prefill is a row of every round as well. It stands at its next prompt token, so what a round writes
    behind that is written again by the next chunk, and an empty mask keeps it from emitting.
    """

    def __init__(self, tandem: Tandem, drafter: Drafter, metrics: Metrics, *, chunk: int) -> None:
        self.chunk = chunk
        self._tandem = tandem
        self._drafter = drafter
        self._metrics = metrics
        self._state: SlotState = tandem.state
        self._tokens: torch.Tensor = tandem.buffers.prompts

    def join(self, running: Running) -> None:
        """See SlotListener.join."""
        upload(running.tokens, self._tokens[running.slot, : len(running.tokens)])
        self._place(running)

    def leave(self, slot: int) -> None:
        """See SlotListener.leave. Tokens that nobody reads may stay."""

    def prefill(self, slots: Slots) -> None:
        """Enqueue the next chunks, those who joined first before the others."""
        budget = self.chunk
        for running in slots:
            count = min(budget, running.prefill_end - running.prefilled)
            if count > 0:
                self._tandem.prefill(running.slot, running.prefilled, count)
                self._drafter.prefill(running.slot, running.prefilled, count)
                running.prefilled += count
                budget -= count
                self._metrics.prefilled += count
                self._place(running)

    def _place(self, running: Running) -> None:
        at, tokens = running.prefilled, running.tokens
        self._state.place(running.slot, length=at, last=tokens[at], previous=tokens[max(0, at - 1)])
