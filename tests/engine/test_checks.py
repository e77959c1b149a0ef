"""``validate_output``: a finished text is checked off the loop, and whatever happens there is its request's alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandemrt import LLM, SamplingParams, StreamOutput
from tandemrt.engines.validation.errors import BadRequest, Closed, ProcessLost, QueueFull
from tandemrt.runtime.workers.sandbox.pool import ProcessPool
from tests.waiting import eventually

STUCK = {"enum": ["a" * 40 + "!"], "not": {"pattern": "^(a+)+$"}}  # for longer than anybody lives
CHECKED = {"enum": ["ab"], "not": {"type": "integer"}}


@pytest.fixture
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, threads=1) as llm:
        yield llm


def asked(schema: Any, **params: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "thinking_token_budget": 0} | params,
        structured_outputs={"json": schema, "validate_output": True},
    )


def submit(llm: LLM, params: SamplingParams) -> tuple[Any, list[StreamOutput]]:
    heard: list[StreamOutput] = []
    return llm.submit("x", params, heard.append), heard


def being_checked(llm: LLM) -> int:
    return len(llm.loop.scheduler.validations)


def texts(outputs: Any) -> list[str]:
    return [output.text for output in outputs]


def test_a_pattern_that_never_ends_delays_no_request_and_is_refused_in_time(tiny_bundle: Path) -> None:
    free = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)
    with LLM(tiny_bundle, threads=1, grammar_timeout_s=8.0) as llm:
        alone = llm.generate("the", free).text
        stuck = [submit(llm, asked(STUCK)) for _ in range(llm.bundle.limits.batch + 1)]
        assert eventually(lambda: being_checked(llm) == len(stuck))
        assert eventually(lambda: (llm.running, llm.waiting) == (0, 0))  # their slots are others'
        assert texts(llm.generate(["the"] * 6, free)) == [alone] * 6
        assert being_checked(llm) == len(stuck)  # the others did not wait for them
        errors: list[str] = []
        for request, heard in stuck:
            assert eventually(lambda request=request: request.finished)
            assert request.finish_reason == "error"
            assert isinstance(request.failure, BadRequest | QueueFull)
            errors.append(str(request.failure).partition(": ")[2])
            assert request.output.text == '"' + STUCK["enum"][0] + '"'
            assert [item.output is None for item in heard].count(False) == 1
        slow = "checking the finished text took longer than 8 s; simplify it"
        late = "checking the finished text had to wait too long for other requests; try later"
        assert errors.count(slow) >= 2
        assert set(errors) <= {slow, late}
        assert llm.metrics.finished == {"length": 7, "error": len(stuck)}
        assert llm.generate("x", asked(CHECKED)).finish_reason == "stop"


def test_the_text_streams_before_its_verdict_and_the_end_comes_with_it(llm: LLM) -> None:
    request, heard = submit(llm, asked(CHECKED))
    assert eventually(lambda: request.finished)
    assert eventually(lambda: heard[-1].output is not None)
    assert "".join(item.text for item in heard) == '"ab"' == request.output.text
    assert [token for item in heard for token in item.token_ids] == request.output.token_ids
    assert (request.finish_reason, request.output.error) == ("stop", None)
    assert llm.metrics.kept == len(request.output.token_ids)


def test_time_goes_on_while_a_text_is_checked(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle, threads=1, grammar_timeout_s=1e6) as llm:
        request, _ = submit(llm, asked(STUCK, timeout_s=3.0))
        assert eventually(lambda: request.finished)
        assert request.finish_reason == "timeout"


def test_a_text_that_is_being_checked_can_be_cancelled(llm: LLM) -> None:
    request, heard = submit(llm, asked(STUCK))
    assert eventually(lambda: being_checked(llm) == 1)
    llm.cancel(request)
    assert eventually(lambda: request.finished)
    assert eventually(lambda: [item.finish_reason for item in heard if item.output] == ["cancelled"])
    assert being_checked(llm) == 0


def test_closing_ends_requests_that_are_being_checked(llm: LLM) -> None:
    request, heard = submit(llm, asked(STUCK))
    assert eventually(lambda: being_checked(llm) == 1)
    llm.close()
    assert request.finish_reason == "cancelled"
    assert [item.finish_reason for item in heard if item.output] == ["cancelled"]
    with pytest.raises(Closed):
        llm.generate("x", asked(CHECKED))


def test_a_process_that_is_killed_ends_its_request_with_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = ProcessPool.submit

    def die(pool: ProcessPool, client: str, what: str, limit_s: float, *_: Any, **__: Any) -> Any:
        return submitted(pool, client, what, limit_s, exec, "import os; os.kill(os.getpid(), 9)")

    monkeypatch.setattr(ProcessPool, "submit", die)
    with pytest.raises(ProcessLost, match=r"ended \(signal SIGKILL\)"):
        llm.generate("x", asked(CHECKED))
    monkeypatch.undo()
    assert llm.generate("x", asked(CHECKED)).finish_reason == "stop"


def test_a_check_that_cannot_begin_is_an_error_of_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise SystemExit("no more")

    monkeypatch.setattr(ProcessPool, "submit", full)
    [output, other] = llm.generate(["x", "x"], [asked(CHECKED), SamplingParams(max_tokens=2, ignore_eos=True)])
    assert (output.finish_reason, output.error, other.finish_reason) == ("error", "SystemExit: no more", "length")
    assert len(llm.loop.slots) == 0


def test_a_loop_that_dies_ends_requests_that_are_being_checked(llm: LLM) -> None:
    request, heard = submit(llm, asked(STUCK))
    assert eventually(lambda: being_checked(llm) == 1)

    def die() -> None:
        raise SystemExit("the loop dies")

    llm.loop.step = die  # type: ignore[method-assign]
    submit(llm, SamplingParams())
    assert eventually(lambda: request.finished)
    assert request.output.error == "SystemExit: the loop dies"
    assert eventually(lambda: [item.finish_reason for item in heard if item.output] == ["error"])


def test_who_asks_for_no_check_pays_for_none(llm: LLM) -> None:
    schema = {"json": {"enum": ["ab"]}}
    llm.generate("x", SamplingParams(structured_outputs=schema, thinking_token_budget=0))
    processes = llm._admission._grammar_library()._processes
    assert processes is not None
    assert not processes._quick._threads
