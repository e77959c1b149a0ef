"""``adjust_logits``: bias and penalties of a few tokens, by what the text holds before each row."""

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

    ``draft_tokens`` int64 [batch, rows - 1]: row i decides the token behind draft[:i]. Request b lists its first
    ``entry_len[b]`` columns (0: it is left alone) of ``entry_tokens`` int32 [batch, entries], ids of the vocabulary,
    none of them twice; ``entry_counts`` int32 says how often each is in the output already, ``entry_in_prompt``
    int32 (0 or 1) whether it is in the prompt, ``entry_bias`` float32 what is added to it. ``presence``, ``frequency``
    and ``repetition`` float32 [batch] are the penalties.

    A listed token stands c times before row i: entry_counts, and each time among draft[:i]. In float32, in this order:
    its bias is added; if c > 0 or it is in the prompt, a positive value is divided by ``repetition`` and another one
    multiplied by it (Keskar et al., "CTRL", 2019); c * frequency + (c > 0) * presence is taken off. The result is held
    within the finite numbers of the dtype of the logits and rounded to it, so that all that comes after, on whatever
    device, sees the same value. Logits that are not finite stay as they are.
    """
    largest = np.float32(ml_dtypes.finfo(logits.dtype).max)  # type: ignore[no-untyped-call]
    columns = np.arange(np.shape(entry_tokens)[1])
    item, column = np.nonzero(columns < np.asarray(entry_len)[:, None])  # one each for every entry
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
