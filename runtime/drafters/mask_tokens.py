"""Mask-token inputs of drafts that predict a whole window in one run (PARD, P-EAGLE)."""

from tandemrt.plugins.tensors import torch
from tandemrt.runtime.device.buffers import Buffer
from tandemrt.runtime.drafters.resources import DraftResources


class MaskTokens:
    """Rows of new tokens followed by mask tokens: the last new token and each mask predict one drafted token."""

    def __init__(self, draft: DraftResources, mask_token: int) -> None:
        self._mask_token = mask_token
        self._row_starts = draft.layout.row_starts
        self._steps = torch.arange(draft.window, device=draft.device)
        self.score_rows = Buffer((draft.slots, draft.window), torch.int64, draft.device)

    def write(self, ids: torch.Tensor, new: torch.Tensor) -> None:
        """Write ``new`` into ``ids``, both int64 [batch, query], with the mask token where ``new`` is -1."""
        torch.clamp(new, max=0, out=ids)  # 0 for a token, -1 for a mask
        torch.sub(new, ids * (self._mask_token + 1), out=ids)

    def score_from_last(self, counts: torch.Tensor, scored: int, query: int) -> None:
        """Score ``scored`` tokens of each row from its last new one on; ``counts`` [batch]: new tokens per row."""
        rows = self.score_rows.view(len(counts), scored)
        torch.add(counts[:, None], self._steps[:scored], out=rows)
        torch.sub(rows, 1, out=rows).clamp_(min=0)
        torch.add(rows, self._row_starts(len(counts), query), out=rows)
