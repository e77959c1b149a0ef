"""The numpy definition of the operators, which every other implementation must reproduce.

It favors clarity over speed. Rows are vectorized, so tests can measure distributions over many requests at once.
"""

from tandemrt.plugins.reference.adjust import adjust_logits
from tandemrt.plugins.reference.attention import window_attention
from tandemrt.plugins.reference.bitmask import token_bitmask
from tandemrt.plugins.reference.draft import sample_draft
from tandemrt.plugins.reference.filters import filter_logits, probabilities
from tandemrt.plugins.reference.noise import accept_coin, philox4x32, position_bits, position_noise
from tandemrt.plugins.reference.verify import verify_draft

__all__ = [
    "accept_coin",
    "adjust_logits",
    "filter_logits",
    "philox4x32",
    "position_bits",
    "position_noise",
    "probabilities",
    "sample_draft",
    "token_bitmask",
    "verify_draft",
    "window_attention",
]
