"""The operators as ONNX functions in standard operators (opset 24). Models contain the functions that they use.

A backend that knows an operator of the ``tandemrt`` domain replaces the body; other backends inline it.
"""

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
    "position_noise",
    "sample_draft",
    "swiglu",
    "token_bitmask",
    "token_noise",
    "verify_draft",
    "window_attention",
]
