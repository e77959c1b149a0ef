"""``token_bitmask``: apply a row of allowed-token bits."""

import numpy as np
import numpy.typing as npt

from tandemrt.engines.contract.masks import mask_words


def token_bitmask(logits: npt.ArrayLike, bitmask: npt.ArrayLike) -> np.ndarray:
    """Return ``logits`` with −inf for every token whose bit is 0.

    ``logits`` floating [..., vocab]; ``bitmask`` int32 [..., ceil(vocab / 32)], in which bit ``token % 32`` of word
    ``token // 32`` allows the token. Bits past the vocabulary are ignored. The result has the dtype of the logits.
    """
    values = np.asarray(logits)
    words = np.ascontiguousarray(bitmask, dtype=np.int32)
    vocab = values.shape[-1]
    needed = (*values.shape[:-1], mask_words(vocab))
    if words.shape != needed:
        raise ValueError(f"bitmask: int32 {needed} is needed for logits {values.shape}, got {words.shape}")
    allowed = np.unpackbits(words.view(np.uint8), axis=-1, count=vocab, bitorder="little").astype(bool)
    return np.where(allowed, values, np.array(-np.inf, dtype=values.dtype))
