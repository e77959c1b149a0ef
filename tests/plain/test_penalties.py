"""Penalty entries of requests, per round, and their layout on the device as a batch."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandemrt import SamplingParams
from tandemrt.plugins.reference import adjust_logits
from tandemrt.runtime.device.adjust_buffers import AdjustBuffers, AdjustEntries
from tandemrt.runtime.requests.penalties import Penalties

VOCAB = 12
TOKENS = st.integers(0, VOCAB - 1)
BIASES = st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=4)


def dense(logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> np.ndarray:
    """Reference: return the adjusted logits of one position from the full text, token by token; float32 [vocab]."""
    counts, result = Counter(output), logits.copy()
    presence, frequency = np.float32(params.presence_penalty), np.float32(params.frequency_penalty)
    repetition = np.float32(params.repetition_penalty)
    for token in range(len(logits)):
        value = logits[token] + np.float32((params.logit_bias or {}).get(token, 0))
        if token in counts or token in prompt:
            value = value / repetition if value > 0 else value * repetition
        if token in counts:
            value = value - (frequency * np.float32(counts[token]) + presence)
        result[token] = value
    return result


def run(logits: np.ndarray, rows: dict[int, AdjustEntries], drafts: np.ndarray) -> np.ndarray:
    """Return ``logits`` adjusted with the entries that ``AdjustBuffers`` holds for ``rows``."""
    entries = AdjustBuffers(len(logits), 64, torch.device("cpu"))
    entries.begin(len(logits))
    for slot, listed in rows.items():
        entries.add(slot, listed)
    entries.write()
    entries.copy_in()
    views = {name: tensor.numpy() for name, tensor in entries.view(len(logits), entries.columns).items()}
    return adjust_logits(logits, drafts, **views)


@given(
    prompt=st.lists(TOKENS, min_size=1, max_size=6),
    rounds=st.lists(st.tuples(st.lists(TOKENS, max_size=4), st.integers(0, 4), TOKENS), max_size=6),
    penalties=st.tuples(st.sampled_from([0, 0.5, -1]), st.sampled_from([0, 0.25, 2]), st.sampled_from([1, 1.25, 0.5])),
    bias=BIASES,
)
def test_every_row_of_a_draft_window_counts_the_tokens_before_it(
    prompt: list[int],
    rounds: list[tuple[list[int], int, int]],
    penalties: tuple[float, float, float],
    bias: dict[int, float],
) -> None:
    """Some or all drafts are accepted, then another token follows. Each row equals a replay of the full text."""
    presence, frequency, repetition = penalties
    params = SamplingParams(
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition, logit_bias=bias
    )
    request, text = Penalties(prompt, params), list(prompt)
    if not params.adjusts_logits:
        assert penalties == (0, 0, 1)
        assert not bias
        return
    draw = np.random.default_rng(len(rounds))
    for draft, accepted, following in rounds:
        logits = draw.normal(size=(1, len(draft) + 1, VOCAB)).astype(np.float32)
        adjusted = run(logits, {0: request.entries(text, draft)}, np.array([draft], np.int64))
        for row in range(len(draft) + 1):
            output = text[len(prompt) :] + draft[:row]
            np.testing.assert_array_equal(adjusted[0, row], dense(logits[0, row], prompt, output, params))
        text += [*draft[:accepted], following]


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 70), st.booleans()), max_size=6), st.integers(0, 999))
def test_every_entry_is_needed_and_unique(runs: list[tuple[int, int, bool]], biased: int) -> None:
    """Texts of many different tokens, drafted or not, that exceed the initial capacity."""
    outputs = [([*range(first, first + count), first], drafted) for first, count, drafted in runs]
    request = Penalties([1, 2, 2], SamplingParams(frequency_penalty=1, logit_bias={biased: 1}))
    text = [1, 2, 2]
    for output, drafted in [*outputs, ([], False)]:
        draft = output if drafted else []
        (tokens, counts, in_prompt), bias, *_ = request.entries(text, draft)
        counted = Counter(text[3:])
        assert sorted(tokens.tolist()) == sorted({*counted, *draft, biased})
        assert [counted[token] for token in tokens.tolist()] == counts.tolist()
        assert not in_prompt.any()  # no penalty reads the prompt
        assert bias.tolist() == [float(token == biased) for token in tokens.tolist()]
        text += output


def test_a_request_with_only_biases_has_no_other_entries() -> None:
    request = Penalties([1, 2], SamplingParams(logit_bias={7: -100}))
    columns, bias, *_ = request.entries([1, 2, 7, 7, 9], [4, 4])
    assert (columns.tolist(), bias.tolist()) == ([[7], [0], [0]], [-100.0])


@pytest.mark.parametrize("params", [{}, {"logit_bias": {}}, {"repetition_penalty": 1.0}, {"presence_penalty": 0}])
def test_a_request_without_options_has_no_penalties(params: dict[str, Any]) -> None:
    assert not SamplingParams(**params).adjusts_logits


def test_a_batch_mixes_requests_with_many_few_and_no_entries() -> None:
    entries = AdjustBuffers(5, 300, torch.device("cpu"))
    wide = Penalties(range(200), SamplingParams(repetition_penalty=2.0))
    few = Penalties([0], SamplingParams(logit_bias={3: 1.5}, presence_penalty=0.5, frequency_penalty=-0.25))
    for rows, columns in (({1: wide, 3: few}, 256), ({0: few}, 64)):
        listed = {slot: request.entries([0], []) for slot, request in rows.items()}
        entries.begin(4)
        for slot, request_entries in listed.items():
            entries.add(slot, request_entries)
        entries.write()
        entries.copy_in()
        view = entries.view(4, columns)
        assert entries.columns == columns
        assert view["entry_len"].tolist() == [len(listed[i].bias) if i in listed else 0 for i in range(4)]
        at = next(slot for slot, request in rows.items() if request is few)
        assert (view["entry_tokens"][at, 0].item(), view["entry_bias"][at, 0].item()) == (3, 1.5)
        assert [float(view[n][at]) for n in ("presence", "frequency", "repetition")] == [0.5, -0.25, 1.0]
    entries.begin(4)
    entries.write()
    assert entries.columns == 0
