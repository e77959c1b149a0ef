"""``adjust_logits``: apply logit biases and presence, frequency and repetition penalties."""

import ml_dtypes
import numpy as np
import numpy.typing as npt


def adjust_logits(
    logits: npt.NDArray,
    draft_tokens: npt.ArrayLike,
    entry_tokens: npt.ArrayLike,
    entry_counts: npt.ArrayLike,
    entry_in_prompt: npt.ArrayLike,
    entry_bias: npt.ArrayLike,
    entry_len: npt.ArrayLike,
    presence: npt.ArrayLike,
    frequency: npt.ArrayLike,
    repetition: npt.ArrayLike,
) -> npt.NDArray:
    """Return ``logits`` [batch, rows, vocab] with the listed tokens of every request adjusted; a copy, of their dtype.

    ``draft_tokens`` int64 [batch, rows - 1]: row i decides the token after draft[:i]. Request b lists its first
    ``entry_len[b]`` columns (0: none) of ``entry_tokens`` int32 [batch, entries], distinct ids of the vocabulary. Per
    entry, ``entry_counts`` int32 is its number in the output so far, ``entry_in_prompt`` int32 (0 or 1) whether the
    prompt has it, and ``entry_bias`` float32 its bias. ``presence``, ``frequency`` and ``repetition`` float32 [batch]
    are the penalties.

    The count c of a listed token before row i is entry_counts plus its number in draft[:i]. These steps follow, in
    float32: its bias is added; if c > 0 or the prompt has it, a positive value is divided by ``repetition`` and any
    other value multiplied by it (Keskar et al., "CTRL", 2019); c * frequency + (c > 0) * presence is subtracted. The
    result is clamped to the finite numbers of the logits' dtype and rounded to it, so that all later steps see the same
    value on every device. Logits that are not finite stay unchanged.
    """
    largest = np.float32(ml_dtypes.finfo(logits.dtype).max)  # type: ignore[no-untyped-call]
    columns = np.arange(np.shape(entry_tokens)[1])
    item, column = np.nonzero(columns < np.asarray(entry_len)[:, None])  # one element per entry
    token, bias = np.asarray(entry_tokens)[item, column], np.asarray(entry_bias, np.float32)[item, column]
    in_prompt = np.asarray(entry_in_prompt)[item, column, None] > 0
    presence, frequency, repetition = (
        np.asarray(penalty, np.float32)[item, None] for penalty in (presence, frequency, repetition)
    )
    drafted = np.asarray(draft_tokens)[item] == token[:, None]
    before = np.pad(np.cumsum(drafted, axis=1), ((0, 0), (1, 0)))
    count = (np.asarray(entry_counts)[item, column, None] + before).astype(np.float32)  # [entries, rows]

    old = logits[item, :, token]
    with np.errstate(invalid="ignore", over="ignore"):
        values = old.astype(np.float32) + bias[:, None]
        repeated = np.where(values > 0, values / repetition, values * repetition)
        values = np.where((count > 0) | in_prompt, repeated, values)
        values = values - (frequency * count + presence * (count > 0))
        kept = np.clip(values, -largest, largest).astype(logits.dtype)
    adjusted = logits.copy()
    adjusted[item, :, token] = np.where(np.isfinite(old), kept, old)
    return adjusted
