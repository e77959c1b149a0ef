"""Drafts from an independent, smaller model with the target's vocabulary and a cache of its own."""

from collections.abc import Mapping
from functools import cache

import torch

from tandemrt.plugins.operators import Rule
from tandemrt.runtime.backends.base import Call, Engine
from tandemrt.runtime.buffers import Buffer, RoundBuffers
from tandemrt.runtime.cache import LinearCache
from tandemrt.runtime.request import Request
from tandemrt.runtime.slots import SlotState
from tandemrt.runtime.tandem import logits_width, prefill_call


class ModelDrafter:
    """Runs the draft model ``window`` times per round and draws each token as the request would.

    The first run of a round takes the two newest tokens: after a fully accepted window the last drafted token is in
    no cache yet, and writing the other one again changes nothing.

    ``engines`` holds "draft", "propose" and "propose_probs".
    """

    ahead = True

    def __init__(
        self, engines: dict[str, Engine], buffers: RoundBuffers, state: SlotState, *, slots: int, window: int
    ) -> None:
        self.window = window
        self._engines = engines
        self._buffers = buffers
        self._state = state
        self._vocab = logits_width(engines["draft"].contract)
        device = engines["draft"].device
        dtype = getattr(torch, engines["draft"].contract["logits"].dtype)
        self.cache = LinearCache(engines["draft"].contract, slots, device)
        self._token_ids = Buffer((slots, 2), torch.int64, device)
        self._write_index = Buffer((slots,), torch.int64, device)
        self._score_rows = Buffer((slots,), torch.int64, device)
        self._position = Buffer((slots,), torch.int64, device)
        self._logits = Buffer((slots, 1, self._vocab), dtype, device)
        self._token = Buffer((slots,), torch.int64, device)
        self._law = Buffer((slots, self._vocab), torch.float32, device)
        self._laws = Buffer((slots, window, self._vocab), torch.float32, device)
        self._run_call = cache(self._bind_run)
        self._draw_call = cache(self._bind_draw)

    def prefill(self, slot: int, start: int, count: int) -> None:
        """See Drafter.prefill."""
        self._score_rows.view(1).zero_()
        engine, end = self._engines["draft"], self._score_rows.view(1, 1)
        prompt, length = self._buffers.prompts[slot, start : start + count], self._state.view("length", slot + 1)[slot:]
        prefill_call(engine, self.cache, slot, prompt, length, end, self._logits).run()

    def propose(self, rows: Mapping[int, Request], batch: int, window: int) -> Buffer | None:
        """See Drafter.propose. One run of the draft model and one draw per drafted token."""
        keep_laws = any(request.rule is Rule.REJECTION for request in rows.values())
        length, write_index = self._state.view("length", batch), self._write_index.view(batch)
        torch.add(length, 1, out=self._position.view(batch))
        self._start(batch, length, write_index)
        for step in range(window):
            self._run_call(batch, 2 if step == 0 else 1).run()
            self._draw_call(batch, keep_laws).run()
            self._buffers.draft_tokens.view(batch, window)[:, step].copy_(self._token.view(batch))
            if keep_laws:
                self._laws.view(batch, window, self._vocab)[:, step].copy_(self._law.view(batch, self._vocab))
            self._token_ids.view(batch, 1)[:, 0].copy_(self._token.view(batch))
            self._score_rows.view(batch).zero_()
            torch.add(length, step + 1, out=write_index)
            self._position.view(batch).add_(1)
        return self._laws if keep_laws else None

    def _start(self, batch: int, length: torch.Tensor, write_index: torch.Tensor) -> None:
        ids = self._token_ids.view(batch, 2)
        ids[:, 0].copy_(self._state.view("previous", batch))
        ids[:, 1].copy_(self._state.view("last", batch))
        # A text of one token has no previous one: `previous` repeats it, and its first copy is the one to score.
        torch.sub(length, 1, out=write_index).clamp_(min=0)
        torch.clamp(length, max=1, out=self._score_rows.view(batch))

    def _bind_run(self, batch: int, query: int) -> Call:
        return self._engines["draft"].bind(
            {
                "token_ids": self._token_ids.view(batch, query),
                "write_index": self._write_index.view(batch),
                "score_rows": self._score_rows.view(batch, 1),
                "logits": self._logits.view(batch, 1, self._vocab),
                **self.cache.rows(0, batch),
            }
        )

    def _bind_draw(self, batch: int, keep_laws: bool) -> Call:
        tensors = self._state.sampling(batch) | {
            "logits": self._logits.view(batch, 1, self._vocab),
            "position": self._position.view(batch),
            "token": self._token.view(batch),
        }
        if keep_laws:
            tensors["draft_probs"] = self._law.view(batch, self._vocab)
        return self._engines["propose_probs" if keep_laws else "propose"].bind(tensors)
