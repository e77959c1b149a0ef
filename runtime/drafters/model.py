"""Drafts from an independent, smaller model with the target's vocabulary and a cache of its own."""

from functools import cache

import torch

from tandemrt.plugins.operators import Rule
from tandemrt.runtime.backends.base import Call, Engine
from tandemrt.runtime.caches.kv_cache import Cache, is_paged, windows
from tandemrt.runtime.device import upload
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.round.buffers import Buffer, RoundBuffers
from tandemrt.runtime.round.graphs import Graphs
from tandemrt.runtime.round.round import Round
from tandemrt.runtime.round.state import SlotState
from tandemrt.runtime.round.tandem import logits_width, prefill_call


class ModelDrafter:
    """Runs the draft model ``window`` times per round and draws each token as the request would.

    The first run of a round takes the two newest tokens: after a fully accepted window the last drafted token is in
    no cache yet, and writing the other one again changes nothing.

    ``engines`` holds "draft", "propose" and "propose_probs". ``chunk`` bounds the tokens of one prefill.
    """

    ahead = True

    def __init__(
        self,
        engines: dict[str, Engine],
        buffers: RoundBuffers,
        state: SlotState,
        kv: Cache,
        graphs: Graphs,
        *,
        slots: int,
        window: int,
        chunk: int,
    ) -> None:
        self.window = window
        self._engines = engines
        self._buffers = buffers
        self._state = state
        self._graphs = graphs
        self._slots, self._chunk = slots, chunk
        self._vocab = logits_width(engines["draft"].contract)
        device = engines["draft"].device
        dtype = getattr(torch, engines["draft"].contract["logits"].dtype)
        self.caches = (kv,)
        self._cache = kv
        # Row r holds length + r - 1: where step r - 1 writes its token, and what step r - 2 decides.
        self._index = torch.zeros(window + 2, slots, dtype=torch.int64, device=device)
        self._steps = torch.arange(-1, window + 1, device=device)[:, None]
        self._score_rows = Buffer((slots,), torch.int64, device)
        self._only_row = torch.zeros(slots, 1, dtype=torch.int64, device=device)
        # Over a paged cache rows that get logits are counted from the first token of the call.
        self._first = torch.arange(slots, device=device) * is_paged(engines["draft"].contract)
        self._logits = Buffer((slots, 1, self._vocab), dtype, device)
        self._tokens = torch.zeros(window, slots, dtype=torch.int64, device=device)
        self._step_probs = Buffer((slots, self._vocab), torch.float32, device)
        self._draft_probs = Buffer((slots, window, self._vocab), torch.float32, device)
        self._seen: dict[int, int] = {}  # of slots that it was not asked for lately: tokens that are in its cache
        self._run_call = cache(self._bind_run)
        self._draw_call = cache(self._bind_draw)

    def join(self, running: Running) -> None:
        """See SlotListener.join."""

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""
        self._seen.pop(slot, None)

    def prefill(self, slot: int, start: int, count: int) -> None:
        """See Drafter.prefill."""
        self._prefill(slot, start, count, self._state.view("length", slot + 1)[slot:])

    def skip(self, this: Round) -> None:
        """See Drafter.skip. What these rows emit meanwhile is fed to the draft before it is asked again."""
        for slot, running in this.rows.items():
            self._seen.setdefault(slot, len(running.tokens) - 1)

    def propose(self, this: Round) -> Buffer | None:
        """See Drafter.propose. One run of the draft model and one draw per drafted token."""
        for slot, running in this.rows.items():
            self._catch_up(slot, running)
        batch, window, filters = this.batch, this.window, this.filters
        draft_probs = self._draft_probs if Rule.REJECTION in this.rules else None
        outputs = [self._buffers.draft_tokens.view(batch, window)]
        if draft_probs is not None:
            outputs.append(draft_probs.view(batch, window, self._vocab))
        self._graphs.run(
            ("propose", batch, window, draft_probs is None, filters),
            lambda: self._chain(batch, window, keep_probs=draft_probs is not None, filters=filters),
            outputs=outputs,
            capturable=all(self._engines[name].capturable for name in ("draft", "propose", "propose_probs")),
        )
        return draft_probs

    def _chain(self, batch: int, window: int, *, keep_probs: bool, filters: bool) -> None:
        length = self._state.view("length", batch)
        # A text of one token has no previous one: `newest` repeats it, and its first copy is the one to score.
        torch.add(length, self._steps, out=self._index[:, :batch]).clamp_(min=0)
        torch.clamp(length, max=1, out=self._score_rows.view(batch)).add_(2 * self._first[:batch])
        for step in range(window):
            self._run_call(batch, step).run()
            self._draw_call(batch, step, keep_probs, filters).run()
            if keep_probs:
                self._draft_probs.view(batch, window, self._vocab)[:, step].copy_(
                    self._step_probs.view(batch, self._vocab)
                )
        self._buffers.draft_tokens.view(batch, window).copy_(self._tokens[:window, :batch].T)

    def _catch_up(self, slot: int, running: Running) -> None:
        start, end = self._seen.pop(slot, None), len(running.tokens) - 1  # the round itself feeds the newest two
        if start is None:
            return
        upload(running.tokens[start:end], self._buffers.prompts[slot, start:end])
        for at in range(start, end, self._chunk):
            self._index[0, :1].fill_(at)
            self._prefill(slot, at, min(self._chunk, end - at), self._index[0, :1])

    def _prefill(self, slot: int, start: int, count: int, length: torch.Tensor) -> None:
        prompt, end = self._buffers.prompts[slot, start : start + count], self._only_row[:1]
        prefill_call(self._engines["draft"], self._cache, slot, prompt, length, end, self._logits).run()

    def _bind_run(self, batch: int, step: int) -> Call:
        first = step == 0
        engine = self._engines["draft"]
        tokens = self._state.newest[:batch] if first else self._tokens[step - 1, :batch, None]
        return engine.bind(
            {
                **windows(engine.contract, tokens, self._only_row[:batch]),
                **({"score_rows": self._score_rows.view(batch, 1)} if first else {}),
                "write_index": self._index[0 if first else step + 1, :batch],
                "logits": self._logits.view(batch, 1, self._vocab),
                **self._cache.rows(0, batch),
            }
        )

    def _bind_draw(self, batch: int, step: int, keep_probs: bool, filters: bool) -> Call:
        tensors = self._state.sampling(batch) | {
            "logits": self._logits.view(batch, 1, self._vocab),
            "position": self._index[step + 2, :batch],
            "token": self._tokens[step, :batch],
        }
        if keep_probs:
            tensors["draft_probs"] = self._step_probs.view(batch, self._vocab)
        return self._engines["propose_probs" if keep_probs else "propose"].bind(tensors, filters=filters)
