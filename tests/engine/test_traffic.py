"""Random traffic with cancelled and disconnected requests: every text equals that of its request alone."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemrt import LLM, RequestOutput, SamplingParams, StreamOutput
from tests.waiting import PATIENCE_S


@dataclass(frozen=True)
class Visit:
    """A request, and after how many tokens it is cancelled (None: never)."""

    length: int  # of the prompt
    params: SamplingParams
    leave_after: int | None


CONSTRAINTS: list[dict[str, Any]] = [
    {"ignore_eos": True},
    {"ignore_eos": True, "stop": ["a", "e", "th"]},
    {"thinking_token_budget": 3},
    {"structured_outputs": {"regex": "[a-c]{2,9}"}},
    {"allowed_token_ids": [70, 71, 72], "min_tokens": 2},
]


@st.composite
def visits(draw: st.DrawFn) -> Visit:
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.8, 1.5])),
        seed=draw(st.integers(0, 2)),
        max_tokens=draw(st.sampled_from([2, 3, 9, 30])),
        num_draft_tokens=draw(st.sampled_from([None, 0, 1, 5])),
        rule=draw(st.sampled_from(["coupled", "coupled", "rejection"])),
        **draw(st.sampled_from(CONSTRAINTS)),
    )
    return Visit(draw(st.sampled_from([1, 2, 17, 60])), params, draw(st.none() | st.integers(0, 12)))


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "lockstep"])
def llm(request: pytest.FixtureRequest, tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, threads=1, overlap=request.param) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone(tiny_bundle: Path) -> Iterator[Any]:
    """A visit alone and to its end: without drafts under the coupled rule, in its own windows under rejection."""
    with LLM(tiny_bundle, threads=1) as opened:

        @cache
        def text(length: int, params: str) -> RequestOutput:
            request_params = SamplingParams.model_validate_json(params)
            window = 0 if request_params.rule == "coupled" else request_params.num_draft_tokens
            return opened.generate(list(range(length)), request_params.model_copy(update={"num_draft_tokens": window}))

        yield lambda visit: text(visit.length, visit.params.model_dump_json(by_alias=True))


@settings(max_examples=20, deadline=None)
@given(st.lists(visits(), min_size=1, max_size=9))
def test_every_text_is_that_of_a_request_alone_as_far_as_it_went(llm: LLM, alone: Any, wave: list[Visit]) -> None:
    outputs = visit_all(llm, wave)
    assert list(llm.loop.slots) == []
    assert llm.loop.scheduler.waiting == 0
    for visit, output in zip(wave, outputs, strict=True):
        expected = alone(visit)
        if output.finish_reason == "cancelled":
            assert visit.leave_after is not None
            assert output.token_ids == expected.token_ids[: len(output.token_ids)]
            assert len(output.token_ids) >= visit.leave_after
        else:
            assert (output.token_ids, output.text, output.reasoning) == (
                expected.token_ids,
                expected.text,
                expected.reasoning,
            )
            assert output.finish_reason == expected.finish_reason


def visit_all(llm: LLM, wave: list[Visit]) -> list[RequestOutput]:
    """Send all at once, cancel those who leave, and wait for the last one."""
    ended = threading.Semaphore(0)
    heard: list[list[StreamOutput]] = [[] for _ in wave]
    requests: dict[int, Any] = {}
    sent = threading.Event()

    def listen(i: int, item: StreamOutput) -> None:
        heard[i].append(item)
        if item.output is not None:
            ended.release()
        elif wave[i].leave_after is not None and sum(len(x.token_ids) for x in heard[i]) >= wave[i].leave_after:
            sent.wait(PATIENCE_S)
            llm.cancel(requests[i])

    for i, visit in enumerate(wave):
        requests[i] = llm.submit(list(range(visit.length)), visit.params, lambda item, i=i: listen(i, item))
        if visit.leave_after == 0:
            llm.cancel(requests[i])
    sent.set()
    assert all(ended.acquire(timeout=PATIENCE_S) for _ in wave)
    outputs = []
    for items in heard:
        output = items[-1].output
        assert output is not None
        assert [token for item in items for token in item.token_ids] == output.token_ids
        assert "".join(item.text for item in items) == output.text
        assert "".join(item.reasoning for item in items) == output.reasoning
        outputs.append(output)
    return outputs
