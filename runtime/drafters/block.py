"""DFlash and DSpark: drafts from a block of mask tokens that attends to cached features of the target.

"DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv 2602.06036), "DSpark: Confidence-Scheduled Speculative
Decoding with Semi-Autoregressive Generation" (arXiv 2607.05147).
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Protocol

from tandemrt.engines.contract.calls import NO_PROMPTS
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.caches.call_layout import cache_calls
from tandemrt.runtime.device.backends.base import Call
from tandemrt.runtime.device.buffers import Buffer
from tandemrt.runtime.device.round_shape import RoundShape
from tandemrt.runtime.drafters.none import NullHooks
from tandemrt.runtime.drafters.resources import DraftResources
from tandemrt.runtime.drafters.sampling import Sampler, StepSampler, WindowSampler
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.requests.running import RunningRequest


class BlockHead(Protocol):
    """Computes logits from the block of a round."""

    def run(self, shape: RoundShape, step: int) -> None:
        """Write the logits of ``step``. Step 0 runs the block."""


class BlockDrafter(NullHooks):
    """Runs a block once per round, and keeps the target's features of all tokens in the draft's cache.

    The engine "context" writes the keys and values of features into the cache, after the target's call of a round, for
    the whole window and for prompts. Verification decides how many of them belong to the text; the next block and the
    next features overwrite the others. So there is no backlog. Drafts for a request start in the round after the end of
    its prompt.
    """

    max_length: int | None = None

    def __init__(self, draft: DraftResources, head: BlockHead, sampler: Sampler) -> None:
        """``draft``: must have the target's layout, because features are in the order of the target's tokens."""
        self.window = draft.window
        self.reads_prompts_late = draft.layout.packed
        self.caches = (draft.cache,)
        self._draft = draft
        self._head = head
        self._sampler = sampler
        self._context = draft.engines["context"]
        self._feature_width = int(self._context.contract["features"].shape[-1])
        self._context_call = cache_calls(self._bind_context)

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[Sequence[int]]) -> None:  # noqa: ARG002
        """See Drafter.prefill."""
        slots, count = tokens.shape
        features = self._draft.buffers.prompt_features
        assert features is not None
        self._context.bind(
            {
                "features": features.view(slots, count, self._feature_width),
                "write_index": self._draft.state.view("length", slot + slots)[slot:],
                **self._draft.cache.rows(slot, slots),
            }
        ).run()

    def propose(self, round_: Round) -> Buffer | None:
        """See Drafter.propose. One run of the block."""
        shape = round_.shape.without_prompts
        return self._sampler.propose(round_, shape, lambda: self._sampler.sample(shape, partial(self._head.run, shape)))

    def after_target(self, round_: Round) -> None:
        """See Drafter.after_target. Write the features of the window and of prompts into the cache."""
        shape, graphs = round_.shape.size, self._draft.graphs
        call = self._context_call(shape)
        if shape.prompts != NO_PROMPTS:
            graphs.run_eagerly(call.run, "prompts")
        else:
            graphs.run(("context", shape), call.run, outputs=[], capturable=self._context.capturable)

    def cached_tokens(self, running: RunningRequest) -> int:
        """See Drafter.cached_tokens."""
        return len(running.tokens) - 1

    def _bind_context(self, shape: RoundShape) -> Call:
        draft, batch = self._draft, shape.batch
        features = draft.buffers.features
        assert features is not None
        tokens = draft.layout.token_shape(batch, shape.query, shape.prompts)
        index = draft.state.view("length", batch)
        return self._context.bind(
            {
                "features": features.view(*tokens, self._feature_width),
                # A packed call has at least one row, here one without tokens.
                "write_index": index if batch else torch.zeros(1, dtype=torch.int64, device=draft.device),
                **draft.cache.rows(0, max(1, batch)),
                **draft.layout.bindings(shape.prompts),
            }
        )


class MaskBlock:
    """The newest token (the anchor) and mask tokens, ``size`` in total, as in training. The window may be shorter.

    Each mask token predicts the token at its own position. With ``sample_from_anchor``, every token, including the
    newest one, predicts the token after it.
    """

    def __init__(self, draft: DraftResources, *, mask_token: int, size: int, sample_from_anchor: bool) -> None:
        self._draft = draft
        self._size, self._first_row = size, 0 if sample_from_anchor else 1
        self._ids = torch.zeros(draft.slots, size, dtype=torch.int64, device=draft.device).fill_(mask_token)

    def write_newest(self, batch: int) -> None:
        """Write the newest token of each row."""
        self._ids[:batch, 0].copy_(self._draft.state.newest[:batch, 1])

    def bind(
        self,
        batch: int,
        window: int,
        logits: Buffer,
        others: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> Call:
        """Bind the block's call, which writes the ``logits`` of the rows that predict the window."""
        draft, first = self._draft, self._first_row
        steps = torch.arange(first, first + window, device=draft.device)
        rows = draft.layout.row_starts(batch, self._size) + steps
        return draft.bind(self._ids[:batch], rows, draft.state.view("length", batch), logits, others)


class PlainBlockHead:
    """DFlash: the whole window is sampled from the logits of the block."""

    def __init__(self, block: MaskBlock, sampler: WindowSampler) -> None:
        self._block = block
        self._call = cache(lambda batch, window: block.bind(batch, window, sampler.logits))

    def run(self, shape: RoundShape, step: int) -> None:  # noqa: ARG002
        """See BlockHead.run."""
        self._block.write_newest(shape.batch)
        self._call(shape.batch, shape.window).run()


class MarkovBlockHead:
    """DSpark, DFlash2: the engine "markov" corrects the logits of each token by the token before it. Experimental.

    A recurrent head starts each block with a state ("memory") of zeros.
    """

    def __init__(self, draft: DraftResources, block: MaskBlock, sampler: StepSampler) -> None:
        self._draft = draft
        self._block = block
        self._sampler = sampler
        self._markov = draft.engines["markov"]
        slots, dtype, device = draft.slots, draft.dtype, draft.device
        self._sizes = {b.name: int(b.shape[-1]) for b in self._markov.contract.inputs if b.name != "token_ids"}
        memory = self._sizes.pop("memory", 0)
        self._memories = [torch.zeros(slots, memory, dtype=dtype, device=device) for _ in range(2 if memory else 0)]
        # Outputs of the block for the whole window, and of one step, by their names in "markov".
        sizes = self._sizes.items()
        self._of_window = {name: Buffer((slots, draft.window, size), dtype, device) for name, size in sizes}
        self._of_step = {name: Buffer((slots, 1, size), dtype, device) for name, size in sizes}
        self._newest = torch.zeros(slots, dtype=torch.int64, device=device)
        self._block_call = cache(self._bind_block)
        self._step_call = cache(self._bind_step)

    def run(self, shape: RoundShape, step: int) -> None:
        """See BlockHead.run."""
        batch, window = shape.batch, shape.window
        if not step:
            self._block.write_newest(batch)
            self._block_call(batch, window).run()
            self._newest[:batch].copy_(self._draft.state.newest[:batch, 1])
            for memory in self._memories:
                memory.zero_()
        for name, size in self._sizes.items():
            of_window = self._of_window[name].view(batch, window, size)
            self._of_step[name].view(batch, size).copy_(of_window[:, step])
        self._step_call(batch, step).run()

    def _bind_block(self, batch: int, window: int) -> Call:
        others = {
            name: self._of_window[name].view(batch, window, size)
            for name, size in self._sizes.items()
            if name != "row_logits"
        }
        return self._block.bind(batch, window, self._of_window["row_logits"], others)

    def _bind_step(self, batch: int, step: int) -> Call:
        before = self._sampler.tokens[step - 1] if step else self._newest
        inputs = {name: self._of_step[name].view(batch, 1, size) for name, size in self._sizes.items()}
        if self._memories:
            even, odd = (memory[:batch] for memory in self._memories)
            inputs |= {"memory": odd, "next_memory": even} if step % 2 else {"memory": even, "next_memory": odd}
        logits = self._sampler.logits.view(batch, 1, self._draft.width)
        return self._markov.bind({"token_ids": before[:batch], "logits": logits, **inputs})
