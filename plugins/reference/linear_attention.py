"""Recurrent layers of packed calls, over states that drafts can be rolled back from: ``linear_attention`` and
``short_convolution``.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.operators.constants import OutputNorm
from tandemrt.plugins.operators.projections import Projections

NO_PROMPTS = np.zeros(0, np.int64)


def linear_attention(
    projected: npt.NDArray,
    state: npt.NDArray[np.float32],
    recent: npt.NDArray,
    conv_weight: npt.NDArray,
    conv_bias: npt.NDArray[np.float32],
    decay_scale: npt.NDArray[np.float32],
    dt_bias: npt.NDArray[np.float32],
    skip: npt.NDArray[np.float32],
    norm_weight: npt.NDArray[np.float32],
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
    sigmoid_gate: int = 0,
    norm: int = OutputNorm.BEFORE_GATE,
    norm_groups: int,
    epsilon: float = 1e-6,
    query_at: int,
    key_at: int,
    value_at: int,
    decay_at: int,
    update_at: int = -1,
    gate_at: int,
    by_key_head: int = 0,
) -> tuple[npt.NDArray, npt.NDArray[np.float32], npt.NDArray]:
    """Return (out [tokens, value_heads * value_dim], state, recent); the last two are updated copies.

    ``projected`` has the queries and keys [key_heads * key_dim each] and values [value_heads * value_dim] of each token
    before the convolution, decay logits, one per value head or one per key channel of each, update logits [value_heads]
    and gates [value_heads * value_dim], where Projections locates them. These are the tokens of a packed call
    (engines/contract/contract.py: packed): windows of the first ``batch`` slots, then runs of prompts. ``prompt_slots``
    [prompts] are the slots of the runs.

    ``state`` float32 [slots, value_heads, key_dim, value_dim] covers the first ``state_index`` tokens of a text.
    ``recent`` [slots, history, width] has the values of position p, without gates, at p % history. A call at
    ``write_index`` first replays the tokens from ``state_index`` on from ``recent``, then processes its own tokens. It
    writes back the state after ``commit_index`` tokens, and all its tokens into ``recent``. Rejected drafts are thereby
    rolled back by a ``write_index`` that does not advance over them. A run makes all tokens but its last final;
    ``prompt_index`` and ``prompt_state_index`` are its other two indices. Runs are complete before windows are
    processed.

    ``history`` must hold the positions from ``state_index`` - (kernel - 1) to the last one that a call writes. At
    state_index 0, where a text begins, the state is 0 whatever ``state`` holds. A slot without a text may have any
    indices; a call replays at most ``history`` - (kernel - 1) tokens.

    For one token, with S the state of a value head and q, k those of its key head (value_heads / key_heads
    consecutive value heads share one)::

        q, k, v = silu(causal convolution by conv_weight [channels, kernel], per channel, + conv_bias)
        step = softplus(decay + dt_bias)
        S = exp(decay_scale * step) * S

    By the delta rule (Yang et al., Gated Delta Networks, 2024), with an update logit for each value head::

        q, k = q / sqrt(|q|² + 1e-6) / sqrt(key_dim), k / sqrt(|k|² + 1e-6)
        S = S + k ⊗ update_scale * sigmoid(update) * (v - Sᵀ k)

    Without it (Mamba-2: Dao and Gu, 2024)::

        S = S + k ⊗ step * v

    The outputs Sᵀ q + skip * v are multiplied by silu(gate), or by sigmoid(gate) with ``sigmoid_gate``. ``norm`` says
    whether and where each of ``norm_groups`` groups of them has a root-mean-square norm, whose weight is repeated over
    the outputs.

    Computed in float64, and rounded once: the state to float32, ``out`` to the dtype of ``projected``.
    """
    state, recent = state.copy(), recent.copy()
    key_dim, value_dim = state.shape[2:]
    places = query_at, key_at, value_at, decay_at, update_at, gate_at, by_key_head
    parts = Projections(key_heads, value_heads, key_dim, value_dim, len(dt_bias), *places)
    out = np.zeros((len(projected), value_heads * value_dim))
    kernel, history = conv_weight.shape[1], recent.shape[1]
    ring = projected[:, parts.ring]
    for run in _runs(projected, write_index, prompt_rows, prompt_starts, prompt_index, prompt_slots):
        covered, commit = (
            (np.asarray(prompt_state_index)[run.number], run.position + run.last - run.first - 1)
            if run.is_prompt
            else (np.asarray(state_index)[run.number], np.asarray(commit_index)[run.number])
        )
        covered = max(min(covered, run.position), run.position - (history - kernel + 1))
        tokens = _with_recent(recent, ring, run, covered - (kernel - 1))
        x, logits = np.split(tokens, [parts.channels], axis=1)
        x = _convolved(x, conv_weight, conv_bias)
        q, k, v, decay, update = _inputs(
            x / (1 + np.exp(-x)), logits[kernel - 1 :], decay_scale, dt_bias, parts, update_scale
        )
        current, final = state[run.slot] if covered else np.zeros_like(state[run.slot]), state[run.slot]
        for at, position in enumerate(range(covered, run.position + run.last - run.first)):
            decayed = np.exp(decay[at])[..., None] * current.astype(np.float64)
            target = v[at] - np.einsum("hkv,hk->hv", decayed, k[at]) if parts.has_update else v[at]
            exact = decayed + k[at][:, :, None] * (update[at][:, None] * target)[:, None, :]
            if position >= run.position:
                mixed = np.einsum("hkv,hk->hv", exact, q[at]) + skip.astype(np.float64)[:, None] * v[at]
                out[run.first + position - run.position] = mixed.reshape(-1)
            current = exact.astype(np.float32)
            if position == commit - 1:
                final = current
        state[run.slot] = final
        _keep(recent, ring, run)
    gate = projected[:, parts.columns[5]].astype(np.float64)
    gate = (1 if sigmoid_gate else gate) / (1 + np.exp(-gate))
    out = _normed(out * (1 if norm == OutputNorm.BEFORE_GATE else gate), norm, norm_groups, norm_weight, epsilon)
    return (out * (gate if norm == OutputNorm.BEFORE_GATE else 1)).astype(projected.dtype), state, recent


def short_convolution(
    projected: npt.NDArray,
    recent: npt.NDArray,
    conv_weight: npt.NDArray,
    conv_bias: npt.NDArray[np.float32],
    write_index: npt.ArrayLike,
    prompt_rows: npt.ArrayLike = NO_PROMPTS,
    prompt_starts: npt.ArrayLike = NO_PROMPTS,
    prompt_index: npt.ArrayLike = NO_PROMPTS,
    prompt_slots: npt.ArrayLike = NO_PROMPTS,
) -> tuple[npt.NDArray, npt.NDArray]:
    """Return (out [tokens, channels], recent); the second is an updated copy.

    ``projected`` [tokens, 3 * channels] has two gates and the values of each token, before, after and values::

        out = after * (causal convolution of before * values by conv_weight [channels, kernel] + conv_bias)

    ``recent`` [slots, history, channels] has before * values of position p, rounded to its dtype, at p % history. The
    calls are those of ``linear_attention``; there is no state, so nothing is replayed or committed. Computed in
    float64, and rounded once.
    """
    recent = recent.copy()
    before, after, values = np.split(projected.astype(np.float64), 3, axis=1)
    ring = (before * values).astype(projected.dtype)
    out = np.zeros_like(after)
    for run in _runs(projected, write_index, prompt_rows, prompt_starts, prompt_index, prompt_slots):
        tokens = _with_recent(recent, ring, run, run.position - (conv_weight.shape[1] - 1))
        out[run.first : run.last] = after[run.first : run.last] * _convolved(tokens, conv_weight, conv_bias)
        _keep(recent, ring, run)
    return out.astype(projected.dtype), recent


class _Run(NamedTuple):
    """Tokens [first, last) of a call, which are the text of ``slot`` from ``position`` on."""

    number: int
    is_prompt: bool
    slot: int
    first: int
    last: int
    position: int


def _runs(
    projected: npt.NDArray,
    write_index: npt.ArrayLike,
    prompt_rows: npt.ArrayLike,
    prompt_starts: npt.ArrayLike,
    prompt_index: npt.ArrayLike,
    prompt_slots: npt.ArrayLike,
) -> Iterator[_Run]:
    """Yield the runs of a packed call that have tokens, prompts first."""
    windows, starts, index = len(projected) - len(np.asarray(prompt_rows)), np.asarray(prompt_starts), np.asarray
    for number, (slot, at) in enumerate(zip(index(prompt_slots), index(prompt_index), strict=True)):
        first, last = windows + starts[number], windows + starts[number + 1]
        if first < last:
            yield _Run(number, True, slot, first, last, at)
    batch = len(index(write_index))
    query = windows // batch if batch else 0
    for row, at in enumerate(index(write_index)):
        if query:
            yield _Run(row, False, row, row * query, (row + 1) * query, at)


def _with_recent(recent: npt.NDArray, ring: npt.NDArray, run: _Run, start: int) -> npt.NDArray:
    """Return the tokens of a text from position ``start`` to the end of ``run``; zeros before the beginning."""
    before = np.arange(start, run.position)
    kept = np.where(before[:, None] >= 0, recent[run.slot, before % recent.shape[1]], 0)
    return np.concatenate([kept, ring[run.first : run.last]]).astype(np.float64)


def _keep(recent: npt.NDArray, ring: npt.NDArray, run: _Run) -> None:
    positions = np.arange(run.position, run.position + run.last - run.first)
    recent[run.slot, positions % recent.shape[1]] = ring[run.first : run.last]


def _convolved(x: npt.NDArray, weight: npt.NDArray, bias: npt.NDArray) -> npt.NDArray:
    """Return the convolution for every token after the first kernel - 1."""
    count, wide = len(x) - (weight.shape[1] - 1), weight.astype(np.float64)
    taps = [x[tap : tap + count] * wide[:, tap] for tap in range(weight.shape[1])]
    convolved: npt.NDArray = np.sum(taps, axis=0) + bias
    return convolved


def _inputs(
    x: npt.NDArray,
    logits: npt.NDArray,
    decay_scale: npt.NDArray,
    dt_bias: npt.NDArray,
    parts: Projections,
    update_scale: float,
) -> tuple[npt.NDArray, ...]:
    """Return queries, keys, values, decays and rates of every token, by value head."""
    count, keys, values = len(x), parts.key_heads * parts.key_dim, parts.value_heads * parts.value_dim
    order = [keys, keys, values] if parts.value_at > parts.key_at else [values, keys, keys]
    pieces = np.split(x, np.cumsum(order)[:2], axis=1)
    q, k, v = pieces if parts.value_at > parts.key_at else pieces[::-1]
    q, k = (part.reshape(count, parts.key_heads, parts.key_dim) for part in (q, k))
    step = np.logaddexp(0, logits[:, : parts.decays] + dt_bias).reshape(count, parts.value_heads, -1)
    rate = step[..., 0]
    if parts.has_update:
        q, k, rate = _unit(q) * parts.key_dim**-0.5, _unit(k), update_scale / (1 + np.exp(-logits[:, parts.decays :]))
    q, k = (part.repeat(parts.value_heads // parts.key_heads, axis=1) for part in (q, k))
    return q, k, v.reshape(count, parts.value_heads, -1), decay_scale.astype(np.float64)[:, None] * step, rate


def _unit(x: npt.NDArray) -> npt.NDArray:
    unit: npt.NDArray = x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
    return unit


def _normed(x: npt.NDArray, norm: int, groups: int, weight: npt.NDArray, epsilon: float) -> npt.NDArray:
    if norm == OutputNorm.NONE:
        return x
    grouped = x.reshape(len(x), groups, -1)
    unit = grouped / np.sqrt((grouped * grouped).mean(-1, keepdims=True) + epsilon)
    normed: npt.NDArray = unit.reshape(x.shape) * np.tile(weight.astype(np.float64), x.shape[1] // len(weight))
    return normed
