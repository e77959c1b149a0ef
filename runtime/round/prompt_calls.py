"""Calls of prompts alone, of a target or of a draft: nobody reads their logits."""

from collections.abc import Mapping
from types import MappingProxyType

from tandemrt.engines.calls import Packed
from tandemrt.engines.contract import logits_width
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.backends.base import Call, Engine, prompt_rows
from tandemrt.runtime.caches.kv_cache import Cache
from tandemrt.runtime.round.buffers import Buffer
from tandemrt.runtime.round.runs import PromptRuns

MOST_PACKED = 128  # calls with prompts that are kept bound per engine; those that were not used lately are bound again


def prefill_call(
    engine: Engine,
    kv: Cache,
    slot: int,
    tokens: torch.Tensor,
    length: torch.Tensor,
    logits: Buffer,
    others: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Call:
    """Bind a call over a linear cache: ``tokens`` [slots, tokens] of prompts go behind ``length`` [slots] others.

    Its logits, if any, are not read, so they go where those of a round go. ``others`` are bindings that only some
    engines have.
    """
    slots, rows = len(tokens), prompt_rows(engine)
    return engine.bind(
        {
            "token_ids": tokens,
            "write_index": length,
            "score_rows": torch.zeros(slots, rows, dtype=torch.int64, device=engine.device),
            "logits": logits.view(slots, rows, logits_width(engine.contract)),
            **others,
            **kv.rows(slot, slots),
        }
    )


def prompts_call(
    engine: Engine,
    kv: Cache,
    runs: PromptRuns,
    prompts: Packed,
    logits: Buffer,
    others: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Call:
    """Bind a packed call of prompts alone: its one window has no tokens. Its logits are not read, either.

    ``others`` are bindings that only some engines have.
    """
    nothing = torch.zeros(1, 1, dtype=torch.int64, device=engine.device)
    return engine.bind(
        {
            "token_ids": runs.token_ids(0, prompts),
            "write_index": nothing[0],
            "score_rows": nothing,
            "logits": logits.view(1, 1, logits_width(engine.contract)),
            **others,
            **kv.rows(0, 1),
            **runs.bindings(prompts),
        }
    )
