"""A preempted request continues later with the same text, or ends like any other request."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandemrt import LLM, SamplingParams, StreamOutput
from tandemrt.engines.validation.errors import QueueFull
from tandemrt.runtime.caches.kv_cache import BlockTable
from tandemrt.runtime.requests.request import Request
from tests.engine.test_prefix_caching import bundle, bundles, llm_without_caching
from tests.waiting import Clock

__all__ = ["bundle", "bundles", "llm_without_caching"]

PROMPTS = [[at, *range(100, 199)] for at in range(3)]  # two blocks each, of five; their texts need three


class ManualRuntime:
    """A runtime with little memory, stepped manually, with three requests that do not all fit."""

    def __init__(self, llm: LLM, **params: Any) -> None:
        self.llm = llm
        self.heard: list[list[StreamOutput]] = []
        self.requests: list[Request] = []
        for prompt in PROMPTS:
            self.send(prompt, **params)

    def send(self, prompt: list[int], **params: Any) -> None:
        heard: list[StreamOutput] = []
        asked = SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 90, "ignore_eos": True, **params})
        [waiting] = self.llm._admission.admit(prompt, asked, heard.append)
        self.llm._scheduler.submit(waiting, block=False)
        self.heard.append(heard)
        self.requests.append(waiting.request)

    def step(self) -> None:
        with self.llm.loop.streams.active():
            self.llm.loop.step()

    def until_one_is_preempted_with_text(self) -> int:
        """Return its number. It has emitted some text."""
        while self.llm.waiting or self.llm.running:
            self.step()
            for waiting in self.llm._scheduler._preempted:
                at = self.requests.index(waiting.request)
                if self.output_of(at):
                    return at
        raise AssertionError("no request was preempted")

    def finish(self) -> None:
        while self.llm.waiting or self.llm.running:
            self.step()

    def output_of(self, at: int) -> list[int]:
        return [token for item in self.heard[at] for token in item.token_ids]

    def output(self, at: int) -> Any:
        return self.heard[at][-1].output


@pytest.fixture(params=[True, False], ids=["overlap", "lockstep"])
def llm(bundle: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(bundle, device="cpu", threads=1, cache_tokens=320, overlap=request.param, queue_limit=1) as opened:
        yield opened


@pytest.fixture
def alone(llm_without_caching: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=90, ignore_eos=True)
    return [llm_without_caching.generate(prompt, params).token_ids for prompt in PROMPTS]


def test_a_preempted_request_continues_with_the_same_text(llm: LLM, alone: list[list[int]]) -> None:
    driven = ManualRuntime(llm)
    victim = driven.until_one_is_preempted_with_text()
    before = driven.output_of(victim)
    driven.finish()
    assert [driven.output_of(at) for at in range(3)] == alone
    assert 0 < len(before) < 90
    assert llm.metrics.preemptions > 0
    assert [driven.output(at).finish_reason for at in range(3)] == ["length"] * 3
    assert llm.metrics.cached > 0, "it finds its own blocks"
    assert [driven.output(at).num_cached_tokens for at in range(3)] == [0] * 3, "of the prompt, when it first joined"
    steps = [driven.output(at).speculation for at in range(3)]
    assert sum(each.num_spec_steps for each in steps) == llm.metrics.steps == llm.metrics.accepted_per_step.count
    assert llm.metrics.queue_seconds.count == llm.metrics.time_to_first_token_seconds.count == 3
    assert llm.metrics.inter_token_seconds.count == 3 * 89


def test_the_youngest_request_is_preempted_and_resumed_first(llm: LLM) -> None:
    driven = ManualRuntime(llm)
    gone: list[list[int]] = []
    while llm.waiting or llm.running:
        driven.step()
        inside = [driven.requests.index(running.request) for running in llm.loop.slots]
        gone.append([driven.requests.index(waiting.request) for waiting in llm._scheduler._preempted])
        assert inside + gone[-1] == sorted(inside + gone[-1]), "in the order in which they came"
    assert any(gone)


@pytest.mark.parametrize("reason", ["cancelled", "timeout", "closed"])
def test_a_preempted_request_may_end_while_it_waits_and_keeps_its_text(
    llm: LLM, alone: list[list[int]], clock: Clock, reason: str
) -> None:
    driven = ManualRuntime(llm, timeout_s=3600.0)
    victim = driven.until_one_is_preempted_with_text()
    if reason == "cancelled":
        llm.cancel(driven.requests[victim])
    elif reason == "timeout":
        clock.ahead = 7200.0
    else:
        llm._scheduler.close()
    driven.step()
    output = driven.output(victim)
    assert output.finish_reason == ("timeout" if reason == "timeout" else "cancelled")
    assert output.token_ids == driven.output_of(victim) == alone[victim][: len(output.token_ids)]
    assert len(output.token_ids) > 0
    assert output.speculation.num_spec_steps > 0
    driven.finish()
    assert sum(llm.metrics.finished.values()) == 3
    cache_manager = llm.loop.cache_manager
    assert isinstance(cache_manager, BlockTable)
    assert cache_manager.allocator.available == 5


def test_a_preempted_request_gets_the_error_of_a_dead_loop(llm: LLM, alone: list[list[int]]) -> None:
    driven = ManualRuntime(llm)
    victim = driven.until_one_is_preempted_with_text()
    llm.loop.die(RuntimeError("the loop's"))
    output = driven.output(victim)
    assert (output.finish_reason, output.error) == ("error", "RuntimeError: the loop's")
    assert output.token_ids == alone[victim][: len(output.token_ids)] != []
    assert llm.metrics.finished == {"error": 3}


def test_a_failed_round_does_not_end_a_preempted_request(llm: LLM, alone: list[list[int]]) -> None:
    driven = ManualRuntime(llm)
    victim = driven.until_one_is_preempted_with_text()
    llm.loop.fail(RuntimeError("the engine failed"))
    driven.finish()
    assert driven.output_of(victim) == alone[victim]
    assert llm.metrics.finished["length"] >= 1


def test_a_preempted_request_does_not_count_against_the_queue_limit(llm: LLM) -> None:
    driven = ManualRuntime(llm)
    assert driven.until_one_is_preempted_with_text() == 1
    with pytest.raises(QueueFull):  # the queue holds one request, and the third one is in it
        driven.send(PROMPTS[0])
    driven.requests[2].cancel()
    driven.step()
    assert driven.output(2).finish_reason == "cancelled"
    driven.send(PROMPTS[0])
    driven.finish()
    assert [driven.output(at).finish_reason for at in (0, 1, 3)] == ["length"] * 3


def test_a_request_whose_slot_cannot_be_cleared_still_continues(
    llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, broken = llm.loop.drafter.leave, [True]

    def leave(slot: int) -> None:
        real(slot)
        if broken and broken.pop():
            raise RuntimeError("the drafter is gone")

    monkeypatch.setattr(llm.loop.drafter, "leave", leave)
    driven = ManualRuntime(llm)
    with caplog.at_level(logging.ERROR):
        driven.finish()
    assert "preemption: freeing slot" in caplog.text
    assert [driven.output_of(at) for at in range(3)] == alone


ADJUSTED = {"presence_penalty": 0.9, "frequency_penalty": 0.4, "logprobs": 1, "bad_words": ["the"]}


@pytest.mark.parametrize(
    ("llm", "params"),
    [(True, {}), (True, {"num_draft_tokens": 0}), (False, ADJUSTED)],
    ids=["overlap", "overlap-no drafts", "lockstep-adjusted"],
    indirect=["llm"],
)
def test_rounds_process_the_output_of_a_preempted_request_again_where_prompts_may_round_otherwise(
    llm: LLM, llm_without_caching: LLM, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    """A batch-invariant target writes each position by one kernel: a prompt's, or that of rounds."""
    llm.loop.cache_manager.caches_outputs = False
    asked = SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 90, "ignore_eos": True, **params})
    alone = [llm_without_caching.generate(prompt, asked) for prompt in PROMPTS]
    layout, ends = llm.loop.target.layout, list[int]()
    write = layout.write
    monkeypatch.setattr(
        layout, "write", lambda chunks, *rest: (ends.extend(chunk.end for chunk in chunks), write(chunks, *rest))
    )
    driven = ManualRuntime(llm, **params)
    driven.finish()
    assert llm.metrics.preemptions > 0
    assert max(ends) == len(PROMPTS[0]) - 1
    for at, wanted in enumerate(alone):
        assert (driven.output_of(at), driven.output(at).text) == (wanted.token_ids, wanted.text)
        assert driven.output(at).logprobs is None or len(driven.output(at).logprobs) == 90


@pytest.mark.parametrize("llm", [True], ids=["overlap"], indirect=True)
@pytest.mark.parametrize("again", [False, True])
def test_a_request_that_ends_or_is_preempted_while_it_processes_its_output_again_keeps_its_text(
    llm: LLM, alone: list[list[int]], again: bool
) -> None:
    llm.loop.cache_manager.caches_outputs = False
    driven = ManualRuntime(llm)
    before = len(driven.output_of(driven.until_one_is_preempted_with_text()))
    while not any(running.replay.rereading and running.output_length for running in llm.loop.slots):
        driven.step()
    [running] = [running for running in llm.loop.slots if running.replay.rereading]
    at = driven.requests.index(running.request)
    if again:
        llm.loop._preemption._preempt(running)
        llm.loop._last = None
        driven.finish()
        assert driven.output_of(at) == alone[at]
    else:
        llm.cancel(running.request)
        driven.step()
        output = driven.output(at)
        assert output.token_ids == driven.output_of(at) == alone[at][: len(output.token_ids)]
        assert len(output.token_ids) >= before > 0
