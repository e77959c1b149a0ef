"""Several outputs of one prompt: each is that of a request of its own, whatever is drafted, whole and streamed."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemrt import LLM, SamplingParams, StructuredOutputs
from tandemrt.engines.validation.errors import BadRequest, QueueFull
from tests.waiting import eventually

PARAMS: list[dict[str, Any]] = [
    {"temperature": 1.0, "presence_penalty": 1.0, "logprobs": 1},
    {"temperature": 0.7, "top_k": 20, "stop": ["e"], "rule": "coupled"},
    {"temperature": 1.0, "structured_outputs": {"choice": ["left", "right", "let it be"]}},
    {"temperature": 1.0, "thinking_token_budget": 3},
]


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, threads=1, num_draft_tokens=4, queue_limit=4) as opened:
        yield opened


@settings(max_examples=8, deadline=None)
@given(
    n=st.integers(1, 4),
    seed=st.sampled_from([0, 7, -2, 2**64 - 2]),
    window=st.integers(0, 4),
    params=st.sampled_from(PARAMS),
)
def test_each_is_that_of_its_own_seed_without_speculation(
    llm: LLM, n: int, seed: int, window: int, params: dict[str, Any]
) -> None:
    several = llm.generate(
        "why <think>", SamplingParams(**params, n=n, seed=seed, num_draft_tokens=window, max_tokens=12)
    )
    assert [output.index for output in several.outputs] == list(range(n))
    for output in several.outputs:
        own = (seed + output.index) % 2**64
        alone = llm.generate("why <think>", SamplingParams(**params, seed=own, num_draft_tokens=0, max_tokens=12))
        assert output.seed == alone.seed == own
        assert (output.token_ids, output.text, output.reasoning) == (alone.token_ids, alone.text, alone.reasoning)
        assert (output.finish_reason, output.logprobs) == (alone.finish_reason, alone.logprobs)


def test_each_event_of_a_stream_names_its_output(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=9)

    async def read() -> tuple[list[str], list[str]]:
        texts, ends = ["", "", ""], ["", "", ""]
        async for item in llm.stream("hello", params):
            texts[item.index] += item.text
            if item.output is not None:
                ends[item.index] = item.output.text
        return texts, ends

    texts, ends = asyncio.run(read())
    assert texts == ends == [output.text for output in llm.generate("hello", params).outputs]


def test_a_list_of_prompts_has_all_outputs_of_each(llm: LLM) -> None:
    asked = [SamplingParams(n=n, seed=1, max_tokens=3) for n in (2, 1, 3)]
    answers = llm.generate(["a", "b", "c"], asked)
    assert [len(answer.outputs) for answer in answers] == [2, 1, 3]
    assert [answer.outputs[0] is answer for answer in answers] == [True] * 3


def test_cancelling_ends_all_of_them(llm: LLM) -> None:
    ended: list[str] = []

    def listen(item: Any) -> None:
        if item.output is None:
            llm.cancel(request)
        else:
            ended.append(item.output.finish_reason)

    request = llm.submit("x", SamplingParams(n=4, max_tokens=80, ignore_eos=True, num_draft_tokens=0), listen)
    llm.generate("y", SamplingParams(max_tokens=20, ignore_eos=True, num_draft_tokens=0, n=2))
    assert ended == ["cancelled"] * 4


def test_outputs_get_their_grammar_after_others_were_cancelled(llm: LLM) -> None:
    """A compilation is abandoned only if all of them are cancelled."""
    structured = StructuredOutputs(choice=["left", "right"])
    params = SamplingParams(n=3, structured_outputs=structured)
    library = llm._admission._grammar_library()
    compiled = library.compile(library.read(structured)).result()
    for num_cancelled in (1, 2, 3):
        pending: Future[Any] = Future()
        queued = llm._admission.admit("x", params, lambda _: None)
        with patch.object(library, "compile", return_value=pending), patch.object(library, "abandon") as abandon:
            queued[0].prepare()
            for each in queued[:num_cancelled]:
                each.constraints.cancel()
            pending.set_result(compiled)
        assert abandon.called == (num_cancelled == 3)
        assert all(each.constraints.result(0).constraint.has_grammar for each in queued[num_cancelled:])


def test_a_full_queue_takes_all_of_them_or_none(llm: LLM) -> None:
    answers: list[str] = []

    def listen(item: Any) -> None:
        if item.output is None and not answers:
            answers.append("asked")
            llm.submit("y", SamplingParams(max_tokens=80, ignore_eos=True, n=4), lambda _: None)  # three slots are free
            with pytest.raises(QueueFull, match="or would with 4 more"):
                llm.submit("z", SamplingParams(max_tokens=2, n=4), lambda _: None)
            answers.append(str(llm.waiting + llm.running))
            llm.submit("z", SamplingParams(max_tokens=2, n=3), lambda _: None)

    llm.submit("x", SamplingParams(max_tokens=80, ignore_eos=True), listen)
    assert eventually(lambda: len(answers) > 1)
    assert answers == ["asked", "5"]
    assert eventually(lambda: llm.waiting + llm.running == 0)


def test_more_than_can_ever_wait_are_refused(llm: LLM) -> None:
    with pytest.raises(BadRequest, match=r"n: slots \(4\) and queue must hold all outputs .* 8 in all, received 9"):
        llm.generate("x", SamplingParams(n=9))
    with pytest.raises(BadRequest, match="n: must be at most 128"):
        SamplingParams(n=129)
