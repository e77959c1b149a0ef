"""After any exception anywhere, the request that caused it ends with an error, and no caller waits forever."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tandemrt import LLM, RequestOutput, SamplingParams, StreamOutput
from tandemrt.engines.validation.errors import BadRequest, InternalError
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.round import VerifiedRound
from tandemrt.runtime.requests.running import RunningRequest
from tandemrt.runtime.requests.text import Detokenizer, TextStream
from tests.waiting import PATIENCE_S, eventually


class Panic(BaseException):
    """A BaseException that is no Exception, as a panic in a Rust extension raises."""


KINDS = [RuntimeError, MemoryError, SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit, Panic]


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, threads=1) as opened:
        yield opened


def endless(**params: Any) -> SamplingParams:
    """A request that runs to the maximum length."""
    return SamplingParams(**({"temperature": 1.0, "seed": 1, "ignore_eos": True} | params))


def sent(llm: LLM, prompt: str, params: SamplingParams) -> "Future[RequestOutput]":
    """A future of the request's end. A second end would raise."""
    done: Future[RequestOutput] = Future()

    def listen(item: StreamOutput) -> None:
        if item.output is not None:
            done.set_result(item.output)

    llm.submit(prompt, params, listen)
    return done


def in_order(llm: LLM) -> bool:
    return (llm.running, llm.waiting, len(llm.loop.slots)) == (0, 0, 0)


def fail_when(
    patched: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[..., bool], error: BaseException
) -> None:
    """Make ``owner.name`` raise ``error`` when ``when`` is true."""
    real = getattr(owner, name)

    def raising(*args: Any, **options: Any) -> Any:
        if when(*args):
            raise error
        return real(*args, **options)

    patched.setattr(owner, name, raising)


def stop_target(llm: LLM, patched: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Stop the target. The first event is set once it stands still, the second one releases it."""
    score, inside, go_on = llm.loop.target.score, threading.Event(), threading.Event()

    def wait(round_: Any) -> None:
        inside.set()
        go_on.wait(PATIENCE_S)
        score(round_)

    patched.setattr(llm.loop.target, "score", wait)
    return inside, go_on


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["commit", "detokenize", "last words", "joining", "telling"])
def test_an_exception_of_one_request_ends_only_that_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str, kind: type[BaseException]
) -> None:
    limits = (12, 13, 14)
    expected = llm.generate(["a", "b", "c"], [endless(max_tokens=n) for n in limits])
    before = llm.metrics.copy()
    bad: set[int] = set()

    def joined(running: RunningRequest) -> None:
        if running.request.max_tokens == 13:
            bad.update({id(running), id(running._text), *map(id, running._text._detokenizers.values())})
            if place == "joining":
                raise kind("broken")

    real = RunningRequest.__init__

    def begin(self: RunningRequest, *args: Any) -> None:
        real(self, *args)
        joined(self)

    monkeypatch.setattr(RunningRequest, "__init__", begin)
    where = {
        "commit": (RunningRequest, "commit"),
        "detokenize": (Detokenizer, "push"),
        "last words": (Detokenizer, "finish"),
        "telling": (TextStream, "take"),
    }
    if place in where:
        fail_when(monkeypatch, *where[place], lambda self, *_: id(self) in bad, kind("broken"))
    futures = [sent(llm, prompt, endless(max_tokens=n)) for prompt, n in zip("abc", limits, strict=True)]
    outputs = [future.result(PATIENCE_S) for future in futures]
    assert [output.token_ids for output in (outputs[0], outputs[2])] == [expected[i].token_ids for i in (0, 2)], (
        "neighbours keep their texts"
    )
    assert outputs[1].finish_reason == "error"
    assert str(outputs[1].error) == f"{kind.__name__}: broken"
    assert {reason: n for reason, n in llm.metrics.since(before).finished.items() if n} == {"length": 2, "error": 1}
    assert eventually(lambda: in_order(llm))


@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_outlives_a_step_in_which_a_request_and_then_an_engine_fails(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """The request's own error frees the last slot, so the engine's error ends no request."""
    expected = llm.generate("a", endless(max_tokens=9))
    with monkeypatch.context() as patched:
        fail_when(patched, Constraint, "fill_rows", lambda *_: True, kind("the grammar"))
        fail_when(patched, llm.loop.target, "score", lambda *_: True, kind("the engine"))
        assert sent(llm, "a", endless(max_tokens=9)).result(PATIENCE_S).finish_reason == "error"
        eventually(lambda: in_order(llm))
    assert llm.generate("a", endless(max_tokens=9)).token_ids == expected.token_ids


def test_the_loop_outlives_a_round_that_fails_after_its_last_request_was_cancelled(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The round is in flight when its request leaves, so the engine's error ends no request."""
    expected = llm.generate("a", endless(max_tokens=9))
    request, done = Future[Request](), Future[RequestOutput]()
    cancelled = threading.Event()

    def listen(item: StreamOutput) -> None:
        if item.output is not None:
            done.set_result(item.output)
        elif not cancelled.is_set():
            llm.cancel(request.result(PATIENCE_S))
            cancelled.set()

    def is_after_it(last: VerifiedRound | None, *_: Any) -> bool:
        return last is not None and cancelled.is_set()

    with monkeypatch.context() as patched:
        fail_when(patched, llm.loop._stages, "commit", is_after_it, RuntimeError("the engine"))
        request.set_result(llm.submit("a", endless(), listen))
        assert done.result(PATIENCE_S).finish_reason == "cancelled"
        assert eventually(lambda: "a round failed" in caplog.text)
        assert eventually(lambda: in_order(llm))
    assert llm.generate("a", endless(max_tokens=9)).token_ids == expected.token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_error_ends_the_requests_of_its_round_and_later_ones_run(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    expected = llm.generate("c", endless(max_tokens=9))
    calls: list[Any] = []
    with monkeypatch.context() as patched:
        fail_when(
            patched, llm.loop.target, "score", lambda round_: calls.append(round_) or len(calls) == 2, kind("gone")
        )
        futures = [sent(llm, prompt, endless(max_tokens=20)) for prompt in "ab"]
        assert eventually(lambda: any(future.done() for future in futures))
        errors = [future.result(PATIENCE_S).error for future in futures]
    assert f"{kind.__name__}: gone" in errors
    assert eventually(lambda: in_order(llm))
    assert llm.generate("c", endless(max_tokens=9)).token_ids == expected.token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_that_cannot_be_cleared_blocks_no_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    expected = llm.generate(["a", "b"], [endless(max_tokens=n) for n in (5, 20)])
    before = llm.metrics.copy()
    first = []
    with monkeypatch.context() as patched:
        fail_when(patched, llm.loop.drafter, "leave", lambda slot: not first and not first.append(slot), kind("stuck"))
        futures = [sent(llm, prompt, endless(max_tokens=n)) for prompt, n in (("a", 5), ("b", 20))]
        outputs = [future.result(PATIENCE_S) for future in futures]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert {reason: n for reason, n in llm.metrics.since(before).finished.items() if n} == {"length": 2}
    assert "stuck" in caplog.text
    assert eventually(lambda: in_order(llm))


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_of_a_listener_ends_only_its_request(llm: LLM, kind: type[BaseException]) -> None:
    expected = llm.generate("b", endless(max_tokens=30)).token_ids
    heard = []

    def broken(item: StreamOutput) -> None:
        heard.append(item)
        raise kind("not my day")

    llm.submit("a", endless(), broken)
    assert sent(llm, "b", endless(max_tokens=30)).result(PATIENCE_S).token_ids == expected
    assert eventually(lambda: heard[-1].finish_reason == "cancelled")
    assert [item.output is not None for item in heard] == [False] * (len(heard) - 1) + [True]
    assert eventually(lambda: in_order(llm))


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_loop_fails_waiting_and_later_requests(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(tiny_bundle, threads=1, queue_limit=1) as llm:
        inside, go_on = stop_target(llm, monkeypatch)
        seated = [sent(llm, "seated", endless())]
        assert inside.wait(PATIENCE_S)
        seated += [sent(llm, "seated", endless()) for _ in range(3)]
        queued = sent(llm, "queued", endless())
        failed: Future[Exception] = Future()

        def submit_later() -> None:
            with pytest.raises(InternalError) as caught:
                llm.generate("waits for room in the queue", endless())
            failed.set_result(caught.value)

        asking = threading.Thread(target=submit_later)
        asking.start()
        fail_when(monkeypatch, llm.loop.scheduler, "wait_for_work", lambda: True, kind("the end"))
        go_on.set()
        for future in (*seated, queued):
            assert future.result(PATIENCE_S).error == f"{kind.__name__}: the end"
        assert f"{kind.__name__}: the end" in str(failed.result(PATIENCE_S))
        asking.join()
        with pytest.raises(InternalError, match=f"the loop has ended .{kind.__name__}: the end"):
            llm.generate("later", endless())
        assert llm.metrics.finished == {"error": 5}
        assert "the loop has ended" in caplog.text


@pytest.mark.parametrize("served", [False, True])
def test_a_step_that_fails_while_no_slot_is_taken_ends_the_loop(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    """No request can be blamed, also if one ran before: the next step would fail as well."""
    with LLM(tiny_bundle, threads=1) as llm:
        if served:
            llm.generate("before", endless(max_tokens=2))
        failed: list[bool] = []
        fail_when(
            monkeypatch, llm.loop, "_end_requests", lambda: not failed and not failed.append(True), RuntimeError("once")
        )
        assert sent(llm, "queued", endless(max_tokens=2)).result(PATIENCE_S).error == "RuntimeError: once"
        with pytest.raises(InternalError, match="the loop has ended"):
            llm.generate("later", endless(max_tokens=2))


def test_a_listener_may_close_and_submit_but_not_generate(tiny_bundle: Path) -> None:
    llm = LLM(tiny_bundle, threads=1)
    refused: Future[Exception] = Future()

    def listen(item: StreamOutput) -> None:
        if item.output is None:
            return
        try:
            llm.generate("inside", endless(max_tokens=2))
        except BadRequest as error:
            llm.close()
            refused.set_result(error)

    llm.submit("outside", endless(max_tokens=2), listen)
    assert "must not be called by a listener" in str(refused.result(PATIENCE_S))
    llm.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_gets_an_error_that_asks_for_its_own_runtime(llm: LLM) -> None:
    llm.generate("before", endless(max_tokens=2))
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            with llm:
                llm.generate("in the child", endless(max_tokens=2))
        except BaseException as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        assert "open the bundle again in the child" in said.read()
    os.waitpid(child, 0)
    assert len(llm.generate("after", endless(max_tokens=2)).token_ids) == 2


def test_a_deadline_applies_while_a_request_waits_for_a_full_queue(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny_bundle, threads=1, queue_limit=1) as llm:
        inside, go_on = stop_target(llm, monkeypatch)
        others = [sent(llm, "seated", endless())]
        assert inside.wait(PATIENCE_S)
        others += [sent(llm, "seated or queued", endless()) for _ in range(4)]
        queued = threading.Event()
        submit = llm._scheduler.submit

        def note(waiting: Any, *, block: bool) -> None:
            submit(waiting, block=block)
            queued.set()

        monkeypatch.setattr(llm._scheduler, "submit", note)
        asking = threading.Thread(target=lambda: outputs.append(llm.generate("late", endless(timeout_s=0.2))))
        outputs: list[RequestOutput] = []
        asking.start()
        assert queued.wait(PATIENCE_S), "no cache memory was freed"
        assert not any(other.done() for other in others)
        go_on.set()
        asking.join(PATIENCE_S)
        assert [output.finish_reason for output in outputs] == ["timeout"]


def test_a_refused_loop_thread_fails_one_request_and_the_next_one_runs(
    ngram_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first caller gets an error, and no later request waits for a thread that never started."""
    start, refused = threading.Thread.start, [True]

    def refusing(thread: threading.Thread) -> None:
        if thread.name == "tandemrt-loop" and refused:
            refused.clear()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    params = SamplingParams(max_tokens=4, timeout_s=30)
    with LLM(ngram_bundle, threads=1) as llm:
        with pytest.raises(InternalError, match="engine loop: a thread could not start"):
            llm.generate("the text", params)
        assert llm.generate("the text", params).token_ids
        assert not llm.waiting
