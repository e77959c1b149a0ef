"""The reference of linear_attention gives the outputs of transformers after any prompts, drafts and rollbacks."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn, torch_recurrent_gated_delta_rule

from tandemrt.plugins.operators.constants import OutputNorm
from tandemrt.plugins.reference.linear_attention import linear_attention

ROOT = Path(__file__).parents[2]
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, KERNEL, WINDOW = 2, 4, 6, 5, 4, 5
KEYS, CHANNELS = KEY_HEADS * KEY_DIM, 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
HISTORY = WINDOW + KERNEL - 1
SLOTS = 3


def weights(generator: np.random.Generator, *, per_channel: bool) -> dict[str, Any]:
    decays = VALUE_HEADS * (KEY_DIM if per_channel else 1)
    return {
        "conv_weight": generator.standard_normal((CHANNELS, KERNEL)).astype(np.float32),
        "decay_scale": -np.exp(generator.standard_normal(VALUE_HEADS)).astype(np.float32),
        "dt_bias": generator.standard_normal(decays).astype(np.float32),
        "conv_bias": np.zeros(CHANNELS, np.float32),
        "skip": np.zeros(VALUE_HEADS, np.float32),
        "norm_weight": np.zeros(1, np.float32),
    }


def expected(tokens: np.ndarray, weights: dict[str, Any]) -> np.ndarray:
    """Return the outputs of transformers for a whole text; for a decay per head only."""
    rows, conv = torch.from_numpy(tokens)[None], torch.from_numpy(weights["conv_weight"])
    x = causal_conv1d_fn(rows[..., :CHANNELS].transpose(1, 2), conv, None, activation="silu").transpose(1, 2)
    q, k, v = torch.split(x[:, : len(tokens)], [KEYS, KEYS, VALUE_HEADS * VALUE_DIM], dim=-1)
    decay, update = rows[..., CHANNELS:].split([len(weights["dt_bias"]), VALUE_HEADS], dim=-1)
    g = torch.from_numpy(weights["decay_scale"]) * torch.nn.functional.softplus(
        decay + torch.from_numpy(weights["dt_bias"])
    )
    headed = [
        part.reshape(1, len(tokens), heads, -1) for part, heads in ((q, KEY_HEADS), (k, KEY_HEADS), (v, VALUE_HEADS))
    ]
    out, _ = torch_recurrent_gated_delta_rule(*headed, g=g, beta=update.sigmoid(), use_qk_l2norm_in_kernel=True)
    return out.reshape(len(tokens), -1).numpy()


class Texts:
    """Texts in slots, with the state that the operator keeps for them."""

    def __init__(self, weights: dict[str, Any], width: int) -> None:
        self.weights = weights
        self.state = np.full((SLOTS, VALUE_HEADS, KEY_DIM, VALUE_DIM), 9, np.float32)
        self.recent = np.full((SLOTS, HISTORY, width), 9, np.float32)
        self.covered = np.zeros(SLOTS, np.int64)

    def clear(self, slot: int) -> None:
        self.state[slot], self.covered[slot] = 0, 0

    def window(self, tokens: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Process ``tokens`` [slots, query, width] at ``index`` [slots]; return the outputs."""
        indices = {"state_index": self.covered, "write_index": index, "commit_index": index}
        out = self._call(tokens.reshape(-1, tokens.shape[2]), indices)
        self.covered = index.copy()
        return out.reshape(*tokens.shape[:2], -1)

    def prompt(self, slot: int, tokens: np.ndarray, index: int) -> np.ndarray:
        """Process ``tokens`` of a prompt, and one token of padding, in a call without windows."""
        count = len(tokens)
        out = self._call(
            np.concatenate([tokens, tokens[:1]]),
            {name: np.zeros(1, np.int64) for name in ("state_index", "write_index", "commit_index")},
            prompt_rows=[*[0] * count, -1],
            prompt_starts=[0, count],
            prompt_index=[index],
            prompt_slots=[slot],
            prompt_state_index=[self.covered[slot]],
        )
        assert not out[count:].any()
        self.covered[slot] = index + count - 1
        return out[:count]

    def _call(self, mixed: np.ndarray, indices: dict[str, Any], **prompts: Any) -> np.ndarray:
        width, decays = mixed.shape[1], len(self.weights["dt_bias"])
        gate = np.full((len(mixed), VALUE_HEADS * VALUE_DIM), 40, mixed.dtype)  # its sigmoid is 1
        attributes = {
            "key_heads": KEY_HEADS,
            "value_heads": VALUE_HEADS,
            "sigmoid_gate": 1,
            "norm": OutputNorm.NONE,
            "norm_groups": 1,
            "query_at": 0,
            "key_at": KEYS,
            "value_at": 2 * KEYS,
            "decay_at": CHANNELS,
            "update_at": CHANNELS + decays,
            "gate_at": width,
        }
        projected = np.concatenate([mixed, gate], axis=1)
        out, self.state, self.recent = linear_attention(
            projected, self.state, self.recent, **self.weights, **indices, **prompts, **attributes
        )
        return out


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    prompts=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=SLOTS, max_size=SLOTS),
    rounds=st.lists(
        st.tuples(st.integers(1, WINDOW), st.lists(st.integers(0, WINDOW), min_size=SLOTS, max_size=SLOTS)), max_size=6
    ),
)
def test_outputs_are_those_of_transformers_after_any_prompts_and_rejected_drafts(
    seed: int, prompts: list[list[int]], rounds: list[tuple[int, list[int]]]
) -> None:
    generator = np.random.default_rng(seed)
    of = weights(generator, per_channel=False)
    width = CHANNELS + 2 * VALUE_HEADS
    tokens = generator.standard_normal((SLOTS, 80, width)).astype(np.float32)
    texts = Texts(of, width)
    wanted = [expected(text, of) for text in tokens]
    index = np.zeros(SLOTS, np.int64)
    for slot, chunks in enumerate(prompts):
        texts.clear(slot)
        for count in chunks:
            part = slice(index[slot], index[slot] + count)
            outputs = texts.prompt(slot, tokens[slot, part], index[slot])
            np.testing.assert_allclose(outputs, wanted[slot][part], rtol=1e-4, atol=1e-5)
            index[slot] += count
    for query, accepted in rounds:
        kept = np.minimum(accepted, query)
        window = generator.standard_normal((SLOTS, query, width)).astype(np.float32)
        for slot in range(SLOTS):
            window[slot, : kept[slot]] = tokens[slot, index[slot] : index[slot] + kept[slot]]
        outputs = texts.window(window, index)
        for slot in range(SLOTS):
            part = slice(index[slot], index[slot] + kept[slot])
            np.testing.assert_allclose(outputs[slot, : kept[slot]], wanted[slot][part], rtol=1e-4, atol=1e-5)
        index = index + kept


def test_a_decay_per_channel_that_is_equal_in_all_channels_is_a_decay_per_head() -> None:
    generator = np.random.default_rng(0)
    tokens = generator.standard_normal((20, CHANNELS + 2 * VALUE_HEADS)).astype(np.float32)
    of = weights(generator, per_channel=False)
    logits, update = tokens[:, CHANNELS:-VALUE_HEADS], tokens[:, -VALUE_HEADS:]
    wide = np.concatenate([tokens[:, :CHANNELS], logits.repeat(KEY_DIM, axis=1), update], axis=1)
    texts = Texts(of | {"dt_bias": of["dt_bias"].repeat(KEY_DIM)}, wide.shape[1])
    texts.clear(1)
    np.testing.assert_allclose(texts.prompt(1, wide, 0), expected(tokens, of), rtol=1e-4, atol=1e-5)


def test_a_prompt_and_a_window_of_one_text_may_share_a_call() -> None:
    generator = np.random.default_rng(0)
    of, width = weights(generator, per_channel=False), CHANNELS + 2 * VALUE_HEADS
    tokens = generator.standard_normal((12, width)).astype(np.float32)
    texts = Texts(of, width)
    texts.clear(0)
    out = texts._call(
        np.concatenate([tokens[9:], tokens[:9]]),
        {"state_index": [8], "write_index": [9], "commit_index": [9]},
        prompt_rows=[0] * 9,
        prompt_starts=[0, 9],
        prompt_index=[0],
        prompt_slots=[0],
        prompt_state_index=[0],
    )
    np.testing.assert_allclose(np.concatenate([out[3:], out[:3]]), expected(tokens, of), rtol=1e-4, atol=1e-5)


def test_norms_have_the_numbers_of_the_kernel() -> None:
    [names] = re.findall(r"enum \{ (NO_NORM.*) \}", (ROOT / "plugins/kernels/linear_attention.cu").read_text())
    numbers = {name: number for number, name in enumerate(names.split(", "))}
    assert numbers == {
        "NO_NORM": OutputNorm.NONE,
        "NORM_BEFORE_GATE": OutputNorm.BEFORE_GATE,
        "NORM_AFTER_GATE": OutputNorm.AFTER_GATE,
    }
