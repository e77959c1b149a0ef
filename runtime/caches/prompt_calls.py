"""Calls of a target or draft that only process prompts. Their logits are never read."""

from collections.abc import Mapping
from types import MappingProxyType

from tandemrt.engines.contract.calls import Packed
from tandemrt.engines.contract.contract import logits_width
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.caches.call_layout import CallLayout
from tandemrt.runtime.caches.kv_cache import Cache
from tandemrt.runtime.device.backends.base import Call, Engine, prompt_rows
from tandemrt.runtime.device.buffers import Buffer


def linear_prefill_call(
    engine: Engine,
    kv: Cache,
    slot: int,
    tokens: torch.Tensor,
    length: torch.Tensor,
    logits: Buffer,
    others: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Call:
    """Bind a call over a linear cache that appends prompt ``tokens`` [slots, tokens] to ``length`` [slots] cached ones.

    ``logits``: a buffer for the logits, if the engine computes any. ``others``: bindings that only some engines have.
    """
    slots, rows = len(tokens), prompt_rows(engine)
    # The first call of a draft model's round processes the last token again, see ModelDrafter.
    return kv.bind(
        engine,
        slot,
        {
            "token_ids": tokens,
            "write_index": length,
            "score_rows": torch.zeros(slots, rows, dtype=torch.int64, device=engine.device),
            "logits": logits.view(slots, rows, logits_width(engine.contract)),
            **others,
        },
        certain=tokens.shape[1] - 1,
    )


def packed_prefill_call(
    engine: Engine,
    kv: Cache,
    layout: CallLayout,
    prompts: Packed,
    logits: Buffer,
    others: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Call:
    """Bind a call over a paged cache that has only ``prompts``; its one draft window is empty.

    ``logits``, ``others``: see linear_prefill_call.
    """
    nothing = torch.zeros(1, 1, dtype=torch.int64, device=engine.device)
    return kv.bind(
        engine,
        0,
        {
            "token_ids": layout.token_ids(nothing[:0], prompts),
            "write_index": nothing[0],
            "score_rows": nothing,
            "logits": logits.view(1, 1, logits_width(engine.contract)),
            **others,
            **layout.bindings(prompts),
        },
        prompt_slots=layout.slots(prompts),
    )
