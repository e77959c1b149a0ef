"""The operators as ONNX functions in standard operators (opset 24). Models contain the functions that they use.

A backend that knows an operator of the ``tandemrt`` domain replaces the body; other backends inline it.
"""

import onnx_ir as ir

from tandemrt.plugins.functions.adjust import adjust_logits
from tandemrt.plugins.functions.attention import window_attention
from tandemrt.plugins.functions.bitmask import token_bitmask
from tandemrt.plugins.functions.body import OPSET
from tandemrt.plugins.functions.draft import sample_draft
from tandemrt.plugins.functions.experts import experts
from tandemrt.plugins.functions.filters import filter_logits
from tandemrt.plugins.functions.noise import accept_coin, position_noise, token_noise
from tandemrt.plugins.functions.swiglu import swiglu
from tandemrt.plugins.functions.verify import verify_draft

__all__ = [
    "OPSET",
    "accept_coin",
    "adjust_logits",
    "experts",
    "filter_logits",
    "library",
    "position_noise",
    "sample_draft",
    "swiglu",
    "token_bitmask",
    "token_noise",
    "verify_draft",
    "window_attention",
]


def library(*, draft_probs: bool, target_ids: bool = False) -> tuple[ir.Function, ...]:
    """Return the functions of drafting and verification, to be added to a model.

    ``draft_probs`` adds the draft's probabilities as the last input of ``verify_draft`` and as an output of
    ``sample_draft``. ``target_ids`` adds the target's ids of the draft's tokens as the last input of ``sample_draft``.
    """
    return (
        token_bitmask(),
        position_noise(),
        token_noise(),
        accept_coin(),
        filter_logits(),
        verify_draft(draft_probs),
        sample_draft(draft_probs, target_ids),
    )
