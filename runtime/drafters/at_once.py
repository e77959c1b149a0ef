"""What drafters share whose model foresees a whole window in one run: all its tokens are drawn at once."""

from functools import cache

from tandemrt.plugins.tensors import torch
from tandemrt.runtime.backends.base import Call
from tandemrt.runtime.drafters.drawing import DrawingDrafter
from tandemrt.runtime.drafters.resources import DraftResources
from tandemrt.runtime.round.buffers import Buffer
from tandemrt.runtime.round.state import SlotState


class AtOnceDrafter(DrawingDrafter):
    """Draws from ``_logits`` [batch, window, width], whose row j is for the token j + 1 places behind the newest."""

    def __init__(self, resources: DraftResources, *, reach: int | None = None) -> None:
        super().__init__(resources, reach=reach)
        device, slots, window = self._device, resources.slots, resources.window
        self._steps = torch.arange(window, device=device)
        self._score_rows = Buffer((slots, window), torch.int64, device)
        self._logits = Buffer((slots, window, self._width), self._dtype, device)
        narrow = self._width < self._vocab
        self._laws = Buffer((slots, window, self._width), torch.float32, device) if narrow else self._draft_probs
        self._sampling = {
            name: Buffer((slots, window), torch.float32 if name in SlotState.FLOATS else torch.int64, device)
            for name in self._state.sampling(0)
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
            else:
                logits = self._logits.view(batch, window, self._width)
                for step in range(window):
                    masks.apply(logits[:, step])
                    draw.run()
                    masks.follow(self._buffers.draft_tokens.view(batch, window)[:, step].tolist())
        if keep_probs and self._laws is not self._draft_probs:
            rows = batch * window
            self._keep_laws(self._draft_probs.view(rows, self._vocab), self._laws.view(rows, self._width))

    def _score_from(self, counts: torch.Tensor, scored: int, query: int) -> None:
        """Logits are wanted of ``scored`` tokens of each row from the last of its ``counts`` [batch] on."""
        rows = self._score_rows.view(len(counts), scored)
        torch.add(counts[:, None], self._steps[:scored], out=rows)
        torch.add(rows, -1, out=rows).clamp_(min=0)
        torch.add(rows, self._starts(len(counts), query), out=rows)

    def _repeated(self, name: str, batch: int, window: int) -> torch.Tensor:
        return self._sampling[name].view(batch * window)

    def _slots_of_rows(self, batch: int, window: int) -> torch.Tensor:
        """int64 [batch * window]: 0, 0, …, 1, 1, …"""
        slots = [slot for slot in range(batch) for _ in range(window)]
        return torch.tensor(slots, dtype=torch.int64, device=self._device)

    def _bind_draw(self, batch: int, window: int, keep_probs: bool, filters: bool) -> Call:
        rows = batch * window
        tensors = {name: self._repeated(name, batch, window) for name in self._sampling} | {
            "logits": self._logits.view(rows, 1, self._width),
            "token": self._buffers.draft_tokens.view(rows),
        }
        probs = self._laws.view(rows, self._width) if keep_probs else None
        return self._bind_law(tensors, probs, filters=filters)


def write_masked(ids: torch.Tensor, line: torch.Tensor, mask_token: int) -> None:
    """Write ``line`` into ``ids``, both int64 [batch, query], with ``mask_token`` where it holds -1."""
    torch.clamp(line, max=0, out=ids)  # 0 for a token, -1 where a mask stands
    torch.add(line, ids * -(mask_token + 1), out=ids)
