"""A request stream of a server: when a request is cancelled, and which ends are errors."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandemrt import LLM, SamplingParams, StreamOutput
from tandemrt.engines.validation.errors import BadRequest, InternalError, TandemError
from tandemrt.runtime.requests.request import Finish, Request, RequestOutput
from tandemrt.runtime.servers.request import ServerRequest
from tandemrt.runtime.servers.request_stream import OutputDelta, RequestCancelled, RequestStream, RequestTimeout
from tests.waiting import PATIENCE_S, Clock, eventually


class Collected(RequestStream):
    """Takes every delta as soon as it arrives."""

    CANCELLED, TIMED_OUT = "cancelled", "timed out"

    def __init__(self, llm: LLM, parsed: ServerRequest) -> None:
        super().__init__(llm, parsed)
        self.deltas: list[OutputDelta] = []

    def _notify(self) -> None:
        self.deltas += self.take()

    @property
    def outputs(self) -> dict[int, RequestOutput]:
        return {each.index: each.output for each in self.deltas if each.output is not None}


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, threads=1) as opened:
        yield opened


@contextmanager
def standing_still(llm: LLM) -> Iterator[None]:
    """Hold the engine loop between two rounds: it is in a listener until the block ends."""
    seen, release = threading.Event(), threading.Event()

    def hold(_: StreamOutput) -> None:
        seen.set()
        release.wait(PATIENCE_S)

    llm.submit("x", SamplingParams(max_tokens=1), hold)
    assert seen.wait(PATIENCE_S)
    try:
        yield
    finally:
        release.set()


def endless(n: int = 1, *, stream: bool = False, **params: Any) -> ServerRequest:
    sampling = SamplingParams(n=n, ignore_eos=True, seed=1, num_draft_tokens=0, **params)
    return ServerRequest(prompt=[5, 9, 17], params=sampling, stream=stream)


@pytest.mark.parametrize("moment", ["before", "while", "after"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_request_is_cancelled_whenever_its_client_leaves(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, moment: str, n: int
) -> None:
    """Also while its prompt is still being read, when there is no request to cancel yet."""
    stream, submit = Collected(llm, endless(n)), llm.submit

    def read_the_prompt(*arguments: Any, **options: Any) -> Request:
        if moment == "while":
            stream.cancel()
        return submit(*arguments, **options)

    with standing_still(llm):
        monkeypatch.setattr(llm, "submit", read_the_prompt)
        if moment == "before":
            stream.cancel()
        stream.submit()
        if moment == "after":
            stream.cancel()
    assert eventually(lambda: len(stream.outputs) == n)
    for output in stream.outputs.values():
        assert output.finish_reason == "cancelled"
        assert isinstance(stream.error_of(output), RequestCancelled)
    assert eventually(lambda: llm.running == llm.waiting == 0)


FAILURES: list[tuple[BaseException | None, type[TandemError], str]] = [
    (BadRequest("top_p: no"), BadRequest, "top_p: no"),
    (ValueError("odd"), InternalError, "ValueError: odd"),
]


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize(("failure", "kind", "message"), FAILURES)
def test_the_failure_of_an_output_is_its_own(
    llm: LLM, index: int, failure: BaseException, kind: type[TandemError], message: str
) -> None:
    stream = Collected(llm, endless(3, max_tokens=1))
    stream.submit()
    assert eventually(lambda: len(stream.outputs) == 3)
    (stream.request, *stream.request.others)[index].failure = failure
    errors = [stream.error_of(stream.outputs[at]) for at in range(3)]
    assert [type(error) for error in errors] == [kind if at == index else type(None) for at in range(3)]
    assert str(errors[index]) == message


@pytest.mark.parametrize(
    ("reason", "tokens", "kind"),
    [
        ("timeout", [], RequestTimeout),
        ("timeout", [1], type(None)),
        ("cancelled", [], RequestCancelled),
        ("cancelled", [1], RequestCancelled),
        ("stop", [], type(None)),
        ("length", [1], type(None)),
        ("constraint", [], type(None)),
    ],
)
def test_a_timeout_is_an_error_only_before_the_first_token(
    llm: LLM, reason: str, tokens: list[int], kind: type
) -> None:
    stream = Collected(llm, endless(max_tokens=1))
    stream.submit()
    output = stream.request.empty_output(Finish(reason))
    output.token_ids.extend(tokens)
    assert type(stream.error_of(output)) is kind
    assert eventually(lambda: len(stream.outputs) == 1)


def test_a_stream_keeps_no_prompt_after_it_was_submitted(llm: LLM) -> None:
    stream = Collected(llm, endless(max_tokens=1))
    stream.submit()
    assert stream._parsed.prompt == ()
    assert eventually(lambda: len(stream.outputs) == 1)


@pytest.mark.parametrize("stream", [True, False])
def test_a_text_that_time_cuts_off_is_kept(llm: LLM, clock: Clock, stream: bool) -> None:
    collected = Collected(llm, endless(stream=stream, timeout_s=1000.0))

    def wait_for_tokens(_: StreamOutput) -> None:
        if collected.request.first_token_time is not None:
            clock.ahead = 2000.0

    with standing_still(llm):  # so that both begin in one round
        llm.submit("x", SamplingParams(ignore_eos=True), wait_for_tokens)
        collected.submit()
    assert eventually(lambda: 0 in collected.outputs)
    output = collected.outputs[0]
    assert (output.finish_reason, collected.error_of(output)) == ("timeout", None)
    assert 0 < len(output.token_ids) < 90
    if stream:
        assert "".join(each.text for each in collected.deltas) == output.text


@pytest.mark.parametrize("stream", [True, False])
def test_deltas_that_were_not_taken_are_merged_by_output(llm: LLM, stream: bool) -> None:
    class Slow(Collected):
        def _notify(self) -> None:
            pass

    slow = Slow(llm, endless(2, stream=stream, max_tokens=9, logprobs=0))
    slow.submit()
    assert eventually(lambda: llm.running == llm.waiting == 0)
    deltas = slow.take()
    assert [each.index for each in deltas] == [0, 1]
    for delta in deltas:
        assert delta.output is not None
        assert (delta.index, len(delta.output.token_ids)) == (delta.output.index, 9)
        if stream:
            assert (delta.text, delta.token_ids) == (delta.output.text, delta.output.token_ids)
            assert delta.logprobs == delta.output.logprobs
    assert slow.take() == []
