"""What drafters share whose model foresees a whole window in one run: all its tokens are drawn at once."""

from functools import cache

from tandemrt.plugins.tensors import torch
from tandemrt.runtime.backends.base import Call, Engine
from tandemrt.runtime.caches.kv_cache import Cache
from tandemrt.runtime.drafters.drawing import DrawingDrafter
from tandemrt.runtime.round.buffers import Buffer, RoundBuffers
from tandemrt.runtime.round.graphs import Graphs
from tandemrt.runtime.round.state import SlotState


class AtOnceDrafter(DrawingDrafter):
    """Draws from ``_logits`` [batch, window, vocab], whose row j is for the token j + 1 places behind the newest."""

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
        reach: int | None,
    ) -> None:
        super().__init__(engines, buffers, state, kv, graphs, slots=slots, window=window, reach=reach)
        device = self._device
        self._steps = torch.arange(window, device=device)
        self._logits = Buffer((slots, window, self._vocab), self._dtype, device)
        self._sampling = {
            name: Buffer((slots, window), torch.float32 if name in SlotState.FLOATS else torch.int64, device)
            for name in state.sampling(0)
        }
        self._draw_call = cache(self._bind_draw)
        self._rows_of = cache(self._slots_of_rows)

    def _draw(self, batch: int, window: int, *, keep_probs: bool, filters: bool) -> None:
        """One draw for all rows of all slots; where they are masked, one for each row."""
        for name, values in self._state.drafting(batch).items():
            torch.index_select(values, 0, self._rows_of(batch, window), out=self._repeated(name, batch, window))
        position = self._sampling["position"].view(batch, window)
        torch.add(position, self._steps[:window], out=position)
        draw = self._draw_call(batch, window, keep_probs, filters)
        with self._masking() as masks:
            if masks is None:
                draw.run()
                return
            logits = self._logits.view(batch, window, self._vocab)
            for step in range(window):
                masks.apply(logits[:, step])
                draw.run()
                masks.follow(self._buffers.draft_tokens.view(batch, window)[:, step].tolist())

    def _repeated(self, name: str, batch: int, window: int) -> torch.Tensor:
        return self._sampling[name].view(batch * window)

    def _slots_of_rows(self, batch: int, window: int) -> torch.Tensor:
        """int64 [batch * window]: 0, 0, …, 1, 1, …"""
        slots = [slot for slot in range(batch) for _ in range(window)]
        return torch.tensor(slots, dtype=torch.int64, device=self._device)

    def _bind_draw(self, batch: int, window: int, keep_probs: bool, filters: bool) -> Call:
        rows = batch * window
        tensors = {name: self._repeated(name, batch, window) for name in self._sampling} | {
            "logits": self._logits.view(rows, 1, self._vocab),
            "token": self._buffers.draft_tokens.view(rows),
        }
        probs = self._draft_probs.view(rows, self._vocab) if keep_probs else None
        return self._bind_law(tensors, probs, filters=filters)
