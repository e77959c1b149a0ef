"""Resources that drafters with a model share."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from tandemrt.engines.contract.calls import NO_PROMPTS, Packed
from tandemrt.engines.contract.contract import logits_width
from tandemrt.engines.contract.draft_kinds import DRAFT_LAYERS
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.caches.call_layout import CallLayout
from tandemrt.runtime.caches.kv_cache import Cache
from tandemrt.runtime.device.backends.base import Call, Engine
from tandemrt.runtime.device.buffers import Buffer, RoundBuffers
from tandemrt.runtime.device.graphs import Graphs
from tandemrt.runtime.device.slot_state import SlotState
from tandemrt.runtime.drafters.target_ids import TargetIds

# Engines that run in `propose`, if a bundle has them.
_PROPOSING = ("markov", "propose", "propose_probs", *DRAFT_LAYERS)


@dataclass(frozen=True)
class DraftResources:
    """The engines, buffers and sizes of a drafter with a model.

    Attributes:
        engines: by their names in the manifest; a drafter runs some of them.
        buffers: tensors shared with the target and verification.
        state: position and sampling parameters of each slot.
        cache: KV cache of the draft.
        graphs: runs the enqueued work.
        layout: how calls of the draft take draft windows and prompts.
        slots: maximum rows of a round.
        window: maximum drafted tokens per row.
        target_ids: target token of each draft logit, see read_target_ids; None if the vocabularies are equal.
    """

    engines: dict[str, Engine]
    buffers: RoundBuffers
    state: SlotState
    cache: Cache
    graphs: Graphs
    layout: CallLayout
    slots: int
    window: int
    target_ids: TargetIds | None

    @cached_property
    def engine(self) -> Engine:
        """The engine of the draft model or head."""
        return self.engines["draft"]

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of logits and states."""
        dtype: torch.dtype = getattr(torch, self.engine.contract["logits"].dtype)
        return dtype

    @cached_property
    def width(self) -> int:
        """The width of the draft's logits: the target's vocabulary, or a part of it."""
        return logits_width(self.engine.contract)

    @cached_property
    def vocab(self) -> int:
        """The width of the target's logits."""
        return logits_width(self.engines["target"].contract)

    @cached_property
    def capturable(self) -> bool:
        """Whether CUDA graphs can capture all engines that run in ``propose``."""
        return all(self.engines[name].capturable for name in _PROPOSING if name in self.engines)

    def run_prompts(self, key: Hashable, call: Call) -> None:
        """Run ``call`` of the draft over ``prompts``; ``key`` names the call and its shape for the CUDA graphs."""
        self.graphs.run_with_prompts(key, call.run, call, capturable=self.capturable)

    def bind(
        self,
        tokens: torch.Tensor,
        score_rows: torch.Tensor,
        write_index: torch.Tensor,
        logits: Buffer,
        others: Mapping[str, torch.Tensor] = MappingProxyType({}),
        *,
        prompts: Packed = NO_PROMPTS,
        final: torch.Tensor | None = None,
    ) -> Call:
        """Bind a call of the draft over ``tokens`` [batch, query], and over ``prompts`` packed with them.

        ``score_rows`` [batch, rows]: the tokens whose logits go to ``logits``, counted from ``layout.row_starts``.
        ``write_index`` [batch]: the position of the first token of each row. ``others``: further bindings. ``final``:
        see Cache.bind.
        """
        batch, rows = score_rows.shape
        return self.cache.bind(
            self.engine,
            0,
            {
                "token_ids": self.layout.token_ids(tokens, prompts),
                "score_rows": score_rows,
                "write_index": write_index,
                "logits": logits.view(batch, rows, self.width),
                **self.layout.bindings(prompts),
                **others,
            },
            final=final,
            prompt_slots=self.layout.slots(prompts),
        )
