"""``gated_delta_net``: a short causal convolution and the gated delta rule, over a state that drafts can be rolled back
from.
"""

import numpy as np
import numpy.typing as npt

NO_PROMPTS = np.zeros(0, np.int64)


def gated_delta_net(
    mixed: npt.NDArray,
    state: npt.NDArray[np.float32],
    recent: npt.NDArray,
    conv_weight: npt.NDArray,
    decay_scale: npt.NDArray[np.float32],
    dt_bias: npt.NDArray[np.float32],
    state_index: npt.ArrayLike,
    write_index: npt.ArrayLike,
    commit_index: npt.ArrayLike,
    prompt_rows: npt.ArrayLike = NO_PROMPTS,
    prompt_starts: npt.ArrayLike = NO_PROMPTS,
    prompt_index: npt.ArrayLike = NO_PROMPTS,
    prompt_slots: npt.ArrayLike = NO_PROMPTS,
    prompt_state_index: npt.ArrayLike = NO_PROMPTS,
    *,
    key_heads: int,
    value_heads: int,
    update_scale: float = 1.0,
) -> tuple[npt.NDArray, npt.NDArray[np.float32], npt.NDArray]:
    """Return (out [tokens, value_heads * value_dim], state, recent); the last two are updated copies.

    ``mixed`` [tokens, width] holds for each token its queries and keys [key_heads * key_dim each] and values
    [value_heads * value_dim] before the convolution, then the decay logits, [value_heads] or [value_heads * key_dim],
    and the update logits [value_heads]. These are the tokens of a packed call (engines/contract/contract.py: packed):
    windows of the first ``batch`` slots, then runs of prompts. ``prompt_slots`` [prompts] are the slots of the runs.

    ``state`` float32 [slots, value_heads, key_dim, value_dim] covers the first ``state_index`` tokens of a text.
    ``recent`` [slots, history, width] has the ``mixed`` row of position p at p % history. A call at ``write_index``
    first replays the tokens from ``state_index`` on from ``recent``, then processes its own tokens. It writes back the
    state after ``commit_index`` tokens, and all its tokens into ``recent``. Rejected drafts are thereby rolled back by
    a ``write_index`` that does not advance over them. A run makes all tokens but its last final; ``prompt_index`` and
    ``prompt_state_index`` are its other two indices. Runs are complete before windows are processed.

    ``history`` must hold the positions from ``state_index`` - (kernel - 1) to the last one that a call writes. At
    state_index 0, where a text begins, the state is 0 whatever ``state`` holds. A slot without a text may have any
    indices; a call replays at most ``history`` - (kernel - 1) tokens.

    For one token, with S the state of a value head and q, k those of its key head (value_heads / key_heads
    consecutive value heads share one)::

        x = silu(causal convolution of queries, keys and values by conv_weight [channels, kernel], per channel)
        q, k = q / sqrt(|q|² + 1e-6) / sqrt(key_dim), k / sqrt(|k|² + 1e-6)
        S = exp(decay_scale * softplus(decay + dt_bias)) * S
        S = S + k ⊗ update_scale * sigmoid(update) * (v - Sᵀ k)
        out = Sᵀ q

    ``decay_scale`` is float32 [value_heads]; ``dt_bias`` has the width of the decay logits, one per key channel in Kimi
    delta attention. Computed in float64, and rounded once: the state to float32, ``out`` to the dtype of ``mixed``.
    (Yang et al., Gated Delta Networks, 2024.)
    """
    state, recent = state.copy(), recent.copy()
    batch, starts = len(np.asarray(write_index)), np.asarray(prompt_starts)
    windows = len(mixed) - len(np.asarray(prompt_rows))
    out = np.zeros((len(mixed), value_heads * state.shape[3]))
    runs = [
        (
            slot,
            windows + starts[run],
            windows + starts[run + 1],
            covered,
            index,
            index + starts[run + 1] - starts[run] - 1,
        )
        for run, (slot, covered, index) in enumerate(
            zip(*map(np.asarray, (prompt_slots, prompt_state_index, prompt_index)), strict=True)
        )
    ]
    query = windows // batch if batch else 0
    rows = zip(*map(np.asarray, (state_index, write_index, commit_index)), strict=True)
    runs += [(row, row * query, (row + 1) * query, *indices) for row, indices in enumerate(rows)]
    for slot, first, last, covered, index, commit in runs:
        if first == last:
            continue
        history, kernel = recent.shape[1], conv_weight.shape[1]
        covered = max(min(covered, index), index - (history - kernel + 1))
        before = np.arange(covered - (kernel - 1), index)
        replayed = np.where(before[:, None] >= 0, recent[slot, before % history], 0)
        tokens = np.concatenate([replayed, mixed[first:last]]).astype(np.float64)
        q, k, v, decay, update = _inputs(tokens, conv_weight, decay_scale, dt_bias, key_heads, state.shape[1:])
        update = update_scale * update
        current, final = state[slot] if covered else np.zeros_like(state[slot]), state[slot]
        for at, position in enumerate(range(covered, index + last - first)):
            decayed = np.exp(decay[at])[..., None] * current.astype(np.float64)
            delta = update[at][:, None] * (v[at] - np.einsum("hkv,hk->hv", decayed, k[at]))
            exact = decayed + k[at][:, :, None] * delta[:, None, :]
            if position >= index:
                out[first + position - index] = np.einsum("hkv,hk->hv", exact, q[at]).reshape(-1)
            current = exact.astype(np.float32)
            if position == commit - 1:
                final = current
        state[slot] = final
        recent[slot, np.arange(index, index + last - first) % history] = mixed[first:last]
    return out.astype(mixed.dtype), state, recent


def _inputs(
    tokens: npt.NDArray,
    conv_weight: npt.NDArray,
    decay_scale: npt.NDArray,
    dt_bias: npt.NDArray,
    key_heads: int,
    state: tuple[int, ...],
) -> tuple[npt.NDArray, ...]:
    """Return queries, keys, values, decay and update of every token after the first kernel - 1, by value head."""
    value_heads, key_dim, value_dim = state
    channels, kernel = conv_weight.shape
    count = len(tokens) - (kernel - 1)
    weight = conv_weight.astype(np.float64)
    x = sum(tokens[tap : tap + count, :channels] * weight[:, tap] for tap in range(kernel))
    x = x / (1 + np.exp(-x))
    q, k, v = np.split(x, [key_heads * key_dim, 2 * key_heads * key_dim], axis=1)
    shared = value_heads // key_heads
    q, k = (_unit(part.reshape(count, key_heads, key_dim)).repeat(shared, axis=1) for part in (q, k))
    logits, update = np.split(tokens[kernel - 1 :, channels:], [len(dt_bias)], axis=1)
    decay = decay_scale.astype(np.float64)[:, None] * np.logaddexp(0, logits + dt_bias).reshape(count, value_heads, -1)
    return q * key_dim**-0.5, k, v.reshape(count, value_heads, value_dim), decay, 1 / (1 + np.exp(-update))


def _unit(x: npt.NDArray) -> npt.NDArray:
    unit: npt.NDArray = x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
    return unit
