"""How likely a prompt was, by a pass over it in windows: with speculation as without, and no text changes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemrt import LLM, SamplingParams, StreamOutput
from tandemrt.engines.errors import BadRequest
from tandemrt.runtime.requests.outputs import Delta
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.scoring import PromptScores
from tests.waiting import eventually

PROMPT = [(7 * i) % 256 for i in range(37)]


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, threads=1, window=8, queue_limit=4) as opened:
        yield opened


def asked(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 4, "prompt_logprobs": 2, **params})


@settings(max_examples=5, deadline=None)
@given(
    length=st.integers(1, 37),
    window=st.integers(1, 8),
    law=st.sampled_from(["raw", "sampled"]),
    filters=st.sampled_from([{}, {"top_k": 5, "temperature": 0.7}, {"temperature": 0.0}]),
)
def test_they_are_the_same_with_speculation_as_without(
    llm: LLM, length: int, window: int, law: str, filters: dict[str, Any]
) -> None:
    params = {"logprobs_law": law, **filters}
    drafted = llm.generate(PROMPT[:length], asked(window=window, **params))
    plain = llm.generate(PROMPT[:length], asked(window=0, **params))
    bare = llm.generate(PROMPT[:length], asked(prompt_logprobs=None, **params))
    assert drafted.prompt_logprobs == plain.prompt_logprobs
    assert drafted.prompt_logprobs is not None
    assert [each.token for each in drafted.prompt_logprobs] == PROMPT[1:length]
    assert all(len(each.top) <= 2 for each in drafted.prompt_logprobs)
    assert drafted.token_ids == plain.token_ids == bare.token_ids
    assert bare.prompt_logprobs is None


def test_they_are_those_of_tokens_that_follow(llm: LLM) -> None:
    """What a continuation says of its tokens is what a prompt that holds them says."""
    written = llm.generate(PROMPT, asked(logprobs=2, logprobs_law="raw", max_tokens=20, ignore_eos=True))
    assert written.logprobs is not None
    again = llm.generate(PROMPT + written.token_ids, asked(logprobs_law="raw", max_tokens=1))
    assert again.prompt_logprobs is not None
    behind = again.prompt_logprobs[len(PROMPT) - 1 :]
    assert [each.token for each in behind] == written.token_ids
    found, expected = ([each.logprob for each in logprobs] for logprobs in (behind, written.logprobs))
    np.testing.assert_allclose(found, expected, atol=1e-4)  # the prompt was prefilled there


def test_the_law_at_temperature_1_without_filters_is_that_of_raw_logits(llm: LLM) -> None:
    sampled, raw = (llm.generate(PROMPT[:9], asked(logprobs_law=law)).prompt_logprobs for law in ("sampled", "raw"))
    found, expected = ([each.logprob for each in logprobs or ()] for logprobs in (sampled, raw))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert max(expected) < 0


def test_all_outputs_and_both_ends_of_a_stream_have_them(llm: LLM) -> None:
    outputs = llm.generate([PROMPT, PROMPT[:5]], [asked(n=2), asked(prompt_logprobs=0)])
    first, second = outputs[0].outputs
    assert first.prompt_logprobs == second.prompt_logprobs
    assert [each.top for each in outputs[1].prompt_logprobs or ()] == [()] * 4
    heard: list[Any] = []
    llm.submit(PROMPT, asked(), heard.append)
    assert llm.generate("later", SamplingParams(max_tokens=60, ignore_eos=True)).prompt_logprobs is None
    assert [item.output.prompt_logprobs for item in heard if item.output] == [first.prompt_logprobs]


@pytest.mark.parametrize("failure", [ValueError, SystemExit])
def test_a_listener_that_fails_at_one_output_hears_of_all_others(llm: LLM, failure: type[BaseException]) -> None:
    """Their ends have waited for the prompt's logprobs, and come together."""
    heard: list[int] = []

    def listen(item: StreamOutput) -> None:
        if item.output is not None:
            heard.append(item.index)
            raise failure

    llm.submit(PROMPT, asked(n=3, max_tokens=1, window=1), listen)  # so the pass takes many rounds
    assert eventually(lambda: len(heard) == 3)
    assert llm.generate("later", SamplingParams(max_tokens=1)).finish_reason == "length"


def test_the_pass_is_cancelled_with_its_request_and_takes_a_place_in_the_queue(llm: LLM) -> None:
    heard: list[Any] = []
    request = llm.submit(PROMPT, asked(max_tokens=50, window=0), heard.append)
    llm.cancel(request)
    llm.generate("later", SamplingParams(max_tokens=60, ignore_eos=True))
    assert [item.output.finish_reason for item in heard if item.output] == ["cancelled"]
    with pytest.raises(BadRequest, match=r"7 in all beside the pass for prompt_logprobs, received 8"):
        llm.generate(PROMPT, asked(n=8))


def test_what_several_outputs_multiply_is_bounded_before_anything_is_made(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandemrt.runtime.requests.admission.MOST_PROMPT_LOGPROBS", 37 * 3 * 2)
    assert llm.generate(PROMPT, asked(n=2)).prompt_logprobs is not None
    with pytest.raises(BadRequest, match="prompt_logprobs: outputs times prompt tokens times logprobs must be at most"):
        llm.generate(PROMPT, asked(n=3))
    with pytest.raises(BadRequest, match="n: outputs times banned_token_ids and allowed_token_ids must be at most"):
        llm.generate(PROMPT, SamplingParams(n=3, banned_token_ids=[1] * 100_000, max_tokens=1))


def test_a_pass_that_ran_out_of_time_ends_its_outputs_so(llm: LLM) -> None:
    output = llm.generate(PROMPT, SamplingParams(max_tokens=1, ignore_eos=True))
    told: list[StreamOutput] = []
    scores = PromptScores(told.append, pending=True)
    request = Request(PROMPT, SamplingParams(), seed=1, max_tokens=1, window=0, listener=scores.listen)
    scores.requests = [request]
    scores.listen(StreamOutput(Delta("", ""), [5], output))
    assert told == []
    scores.hear(request, StreamOutput(Delta("", ""), [], replace(output, finish_reason="timeout")))
    assert [item.output.finish_reason for item in told if item.output] == ["timeout"]
