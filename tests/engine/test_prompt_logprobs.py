"""Prompt logprobs, from a pass over the prompt in draft windows: equal with and without speculation."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemrt import LLM, SamplingParams, StreamOutput
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.requests.prompt_logprobs import PromptLogprobsCollector
from tandemrt.runtime.requests.request import Request, TextDelta
from tests.waiting import eventually

PROMPT = [(7 * i) % 256 for i in range(37)]


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, threads=1, num_draft_tokens=8, queue_limit=4) as opened:
        yield opened


def asked(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 4, "prompt_logprobs": 2, **params})


@settings(max_examples=5, deadline=None)
@given(
    length=st.integers(1, 37),
    window=st.integers(1, 8),
    mode=st.sampled_from(["raw", "processed"]),
    filters=st.sampled_from([{}, {"top_k": 5, "temperature": 0.7}, {"temperature": 0.0}]),
)
def test_prompt_logprobs_are_equal_with_and_without_speculation(
    llm: LLM, length: int, window: int, mode: str, filters: dict[str, Any]
) -> None:
    params = {"logprobs_mode": mode, **filters}
    drafted = llm.generate(PROMPT[:length], asked(num_draft_tokens=window, **params))
    plain = llm.generate(PROMPT[:length], asked(num_draft_tokens=0, **params))
    bare = llm.generate(PROMPT[:length], asked(prompt_logprobs=None, **params))
    assert drafted.prompt_logprobs == plain.prompt_logprobs
    assert drafted.prompt_logprobs is not None
    assert [each.token for each in drafted.prompt_logprobs] == PROMPT[1:length]
    assert all(len(each.top) <= 2 for each in drafted.prompt_logprobs)
    assert drafted.token_ids == plain.token_ids == bare.token_ids
    assert bare.prompt_logprobs is None


def test_prompt_logprobs_equal_the_logprobs_of_a_continuation(llm: LLM) -> None:
    """A prompt that contains a continuation has the logprobs of that continuation."""
    written = llm.generate(PROMPT, asked(logprobs=2, logprobs_mode="raw", max_tokens=20, ignore_eos=True))
    assert written.logprobs is not None
    again = llm.generate(PROMPT + written.token_ids, asked(logprobs_mode="raw", max_tokens=1))
    assert again.prompt_logprobs is not None
    output = again.prompt_logprobs[len(PROMPT) - 1 :]
    assert [each.token for each in output] == written.token_ids
    scores, expected = ([each.logprob for each in logprobs] for logprobs in (output, written.logprobs))
    np.testing.assert_allclose(scores, expected, atol=1e-4)  # the prompt was prefilled in this call


def test_the_distribution_at_temperature_1_without_filters_is_that_of_raw_logits(llm: LLM) -> None:
    sampled, raw = (
        llm.generate(PROMPT[:9], asked(logprobs_mode=mode)).prompt_logprobs for mode in ("processed", "raw")
    )
    scores, expected = ([each.logprob for each in logprobs or ()] for logprobs in (sampled, raw))
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert max(expected) < 0


def test_all_outputs_and_stream_ends_have_prompt_logprobs(llm: LLM) -> None:
    outputs = llm.generate([PROMPT, PROMPT[:5]], [asked(n=2), asked(prompt_logprobs=0)])
    first, second = outputs[0].outputs
    assert first.prompt_logprobs == second.prompt_logprobs
    assert [each.top for each in outputs[1].prompt_logprobs or ()] == [()] * 4
    heard: list[Any] = []
    llm.submit(PROMPT, asked(), heard.append)
    assert llm.generate("later", SamplingParams(max_tokens=60, ignore_eos=True)).prompt_logprobs is None
    assert [item.output.prompt_logprobs for item in heard if item.output] == [first.prompt_logprobs]


@pytest.mark.parametrize("failure", [ValueError, SystemExit])
def test_a_listener_that_fails_for_one_output_is_notified_of_the_others(llm: LLM, failure: type[BaseException]) -> None:
    """The ends of all outputs wait for the prompt logprobs and arrive together."""
    heard: list[int] = []

    def listen(item: StreamOutput) -> None:
        if item.output is not None:
            heard.append(item.index)
            raise failure

    llm.submit(PROMPT, asked(n=3, max_tokens=1, num_draft_tokens=1), listen)  # so that the pass takes many rounds
    assert eventually(lambda: len(heard) == 3)
    assert llm.generate("later", SamplingParams(max_tokens=1, ignore_eos=True)).finish_reason == "length"


def test_the_pass_counts_in_the_queue_and_is_cancelled_with_its_request(llm: LLM) -> None:
    heard: list[Any] = []
    request = llm.submit(PROMPT, asked(max_tokens=50, num_draft_tokens=0), heard.append)
    llm.cancel(request)
    llm.generate("later", SamplingParams(max_tokens=60, ignore_eos=True))
    assert [item.output.finish_reason for item in heard if item.output] == ["cancelled"]
    with pytest.raises(BadRequest, match=r"7 in all plus one request for prompt_logprobs, received 8"):
        llm.generate(PROMPT, asked(n=8))


def test_logprobs_of_several_outputs_are_bounded_before_allocation(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandemrt.runtime.requests.request_size.MAX_PROMPT_LOGPROBS", 37 * 3 * 2)
    assert llm.generate(PROMPT, asked(n=2)).prompt_logprobs is not None
    with pytest.raises(BadRequest, match="prompt_logprobs: outputs times prompt tokens times logprobs must be at most"):
        llm.generate(PROMPT, asked(n=3))
    with pytest.raises(BadRequest, match="n: outputs times banned_token_ids and allowed_token_ids must be at most"):
        llm.generate(PROMPT, SamplingParams(n=3, banned_token_ids=[1] * 100_000, max_tokens=1))


def test_logprobs_of_several_outputs_are_bounded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandemrt.runtime.requests.request_size.MAX_LOGPROBS", 2 * 5 * 4)
    fits = SamplingParams(n=2, max_tokens=5, logprobs=3, ignore_eos=True)
    assert len(llm.generate(PROMPT, fits).outputs[1].logprobs or ()) == 5
    with pytest.raises(BadRequest, match=r"n: .* logprobs \+ 1 must be at most 40, received 2 x 5 x 5 = 50; ask for"):
        llm.generate(PROMPT, fits.model_copy(update={"logprobs": 4}))
    assert len(llm.generate(PROMPT, SamplingParams(max_tokens=9, logprobs=4, ignore_eos=True)).logprobs or ()) == 9
    assert len(llm.generate(PROMPT, SamplingParams(n=2, max_tokens=50, ignore_eos=True)).outputs[1].token_ids) == 50


def test_a_pass_that_times_out_ends_its_outputs_with_a_timeout(llm: LLM) -> None:
    output = llm.generate(PROMPT, SamplingParams(max_tokens=1, ignore_eos=True))
    events: list[StreamOutput] = []
    scores = PromptLogprobsCollector(events.append, pending=True)
    request = Request(PROMPT, SamplingParams(), seed=1, max_tokens=1, num_draft_tokens=0, listener=scores.on_output)
    scores.requests = [request]
    scores.on_output(StreamOutput(TextDelta("", ""), [5], output))
    assert events == []
    scores.on_scored(request, StreamOutput(TextDelta("", ""), [], replace(output, finish_reason="timeout")))
    assert [item.output.finish_reason for item in events if item.output] == ["timeout"]
