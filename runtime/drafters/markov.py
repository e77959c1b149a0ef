"""Drafts from a block whose logits a Markov head changes by the token in front: DSpark.

"DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation" (arXiv 2607.05147).
"""

from functools import cache

from tandemrt.plugins.tensors import torch
from tandemrt.runtime.backends.base import Call
from tandemrt.runtime.drafters.block import BlockDrafter
from tandemrt.runtime.drafters.drawing import StepwiseDrafter
from tandemrt.runtime.drafters.resources import DraftResources
from tandemrt.runtime.round.buffers import Buffer


class MarkovDrafter(BlockDrafter, StepwiseDrafter):
    """Runs the block once a round, and behind it, for one token after the other, the engine "markov", and draws.

    A head that remembers tokens begins each block with zeros.
    """

    def __init__(self, resources: DraftResources, *, mask_token: int, block: int, sample_from_anchor: bool) -> None:
        super().__init__(resources, mask_token=mask_token, block=block, sample_from_anchor=sample_from_anchor)
        markov, slots, device = self._engines["markov"], resources.slots, self._device
        self._capturable = self._capturable and markov.capturable
        self._sizes = {b.name: int(b.shape[-1]) for b in markov.contract.inputs if b.name != "token_ids"}
        memory = self._sizes.pop("memory", 0)
        self._memories = [
            torch.zeros(slots, memory, dtype=self._dtype, device=device) for _ in range(2 if memory else 0)
        ]
        # What the block gives of the whole window, and of the row that is drawn from, by the names of "markov".
        sizes = self._sizes.items()
        self._given = {name: Buffer((slots, resources.window, size), self._dtype, device) for name, size in sizes}
        self._row = {name: Buffer((slots, 1, size), self._dtype, device) for name, size in sizes}
        self._newest = torch.zeros(slots, dtype=torch.int64, device=device)
        self._block_call = cache(self._bind_whole)
        self._step_call = cache(self._bind_step)

    def _draft(self, batch: int, window: int, *, keep_probs: bool, filters: bool) -> None:
        """See BlockDrafter._draft. One run of the Markov head and one draw per token."""
        self._block_call(batch, window).run()
        self._newest[:batch].copy_(self._state.newest[:batch, 1])
        for memory in self._memories:
            memory.zero_()
        torch.add(self._state.view("length", batch), self._steps, out=self._index[:, :batch])

        def run(step: int) -> None:
            for name, size in self._sizes.items():
                self._row[name].view(batch, size).copy_(self._given[name].view(batch, window, size)[:, step])
            self._step_call(batch, step).run()

        self._draw(batch, window, run, keep_probs=keep_probs, filters=filters)

    def _bind_whole(self, batch: int, window: int) -> Call:
        others = {
            name: self._given[name].view(batch, window, size)
            for name, size in self._sizes.items()
            if name != "row_logits"
        }
        return self._bind_block(batch, window, others, logits=self._given["row_logits"])

    def _bind_step(self, batch: int, step: int) -> Call:
        before = self._tokens[step - 1] if step else self._newest
        given = {name: self._row[name].view(batch, 1, size) for name, size in self._sizes.items()}
        if self._memories:
            even, odd = (memory[:batch] for memory in self._memories)
            given |= {"memory": odd, "next_memory": even} if step % 2 else {"memory": even, "next_memory": odd}
        logits = self._logits.view(batch, 1, self._width)
        return self._engines["markov"].bind({"token_ids": before[:batch], "logits": logits, **given})
