"""Logprobs are of the sampling distribution or of raw logits, and speculation changes none of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt import LLM, RequestOutput, SamplingParams
from tandemrt.runtime.requests.logprobs import TokenLogprobs, token_logprobs
from tests.waiting import eventually

ASKED: list[tuple[str, dict[str, Any]]] = [
    ("hello the world", {"temperature": 0.0, "logprobs": 0}),
    ("hello the world", {"temperature": 0.7, "seed": 5, "top_k": 5, "logprobs": 3, "presence_penalty": 1.0}),
    ("hello the world", {"temperature": 1.0, "seed": 5, "logprobs": 2, "logprobs_mode": "raw", "frequency_penalty": 1}),
    ("x</think>", {"temperature": 1.0, "seed": 2, "logprobs": 4, "structured_outputs": {"regex": "[ab]{9}c"}}),
    ("x</think>", {"temperature": 1.0, "seed": 2, "logprobs": 1, "stop": ["e", "t"]}),
    ("none", {"temperature": 1.0, "seed": 3}),
]


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, threads=1, num_draft_tokens=4) as opened:
        yield opened


def answered(llm: LLM, **params: Any) -> list[RequestOutput]:
    each = [SamplingParams(**{"max_tokens": 20, **options, **params}) for _, options in ASKED]
    return llm.generate([prompt for prompt, _ in ASKED], each)


def test_every_token_has_a_logprob_with_and_without_speculation(llm: LLM, tiny_bundle: Path) -> None:
    drafted, plain = answered(llm), answered(llm, num_draft_tokens=0)
    with LLM(tiny_bundle, threads=1, num_draft_tokens=4, overlap=True) as overlapping:
        overlapped = answered(overlapping)
    for ours, bare, overlap in zip(drafted, plain, overlapped, strict=True):
        assert ours.logprobs == bare.logprobs == overlap.logprobs
    assert drafted[-1].logprobs is None
    assert sum(output.speculation.num_accepted_draft_tokens for output in drafted) > 0
    for output, (_, params) in zip(drafted[:-1], ASKED, strict=False):
        assert output.logprobs is not None
        assert [each.token for each in output.logprobs] == output.token_ids
        assert all(each.logprob <= 0 for each in output.logprobs)
        assert all(len(each.top) <= params["logprobs"] for each in output.logprobs)
        assert all(
            [p for _, p in each.top] == sorted((p for _, p in each.top), reverse=True) for each in output.logprobs
        )


def test_a_stream_has_the_logprobs_of_its_tokens(llm: LLM) -> None:
    heard: list[Any] = []
    request = llm.submit("hello", SamplingParams(seed=1, max_tokens=9, logprobs=1), heard.append)
    eventually(lambda: request.output is not None)
    assert request.output is not None
    assert [each for item in heard for each in item.logprobs or []] == request.output.logprobs


@given(st.integers(1, 700), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_top_logprobs_equal_those_of_a_sorted_vocabulary(vocab: int, count: int, seed: int) -> None:
    logits = np.random.default_rng(seed).integers(0, 40, (1, vocab)).astype(np.float32)  # with many ties
    [logprob] = token_logprobs(logits, None, [0], SamplingParams(temperature=1.0, logprobs=count))
    expected = sorted(range(vocab), key=lambda token: (-logits[0, token], token))[:count]
    assert [token for token, _ in logprob.top] == expected


def test_sampling_logprobs_are_masked_and_filtered_and_raw_ones_are_not() -> None:
    logits = np.log(np.array([[4, 3, 2, 1]], np.float32))
    masks = np.array([[0b1110]], np.int32)
    params = SamplingParams(temperature=1.0, top_k=2, logprobs=3)
    assert token_logprobs(logits, masks, [2], params) == [
        TokenLogprobs(
            2, pytest.approx(np.log(2 / 5)), ((1, pytest.approx(np.log(3 / 5))), (2, pytest.approx(np.log(0.4))))
        )
    ]
    [raw] = token_logprobs(logits, masks, [2], params.model_copy(update={"logprobs_mode": "raw", "logprobs": 1}))
    assert (raw.logprob, raw.top[0][0]) == (pytest.approx(np.log(0.2)), 0)
    [greedy] = token_logprobs(logits, masks, [1], params.model_copy(update={"temperature": 0.0}))
    assert greedy.logprob == pytest.approx(np.log(0.5))
    [gone] = token_logprobs(logits, masks, [0], params)
    assert (gone.logprob, gone.to_json()["logprob"]) == (-np.inf, -9999.0)
