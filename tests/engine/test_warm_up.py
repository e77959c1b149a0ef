"""A server's first rounds: whatever shape a round has later, one of the same shape came before."""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandemrt import LLM, SamplingParams
from tandemrt.engines.validation.errors import InternalError
from tandemrt.runtime.engine_loop.capture import capture
from tandemrt.runtime.engine_loop.costs import RoundCosts
from tandemrt.runtime.llm.warmup import warm_up
from tandemrt.runtime.requests.round import Round
from tests.waiting import PATIENCE_S, eventually


def test_every_batch_size_runs_with_and_without_filters(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny_bundle, threads=1) as llm:
        verify, shapes = llm.loop.target.verify, set()

        def note(round_: Round, draft_probs: Any) -> None:
            shapes.add((round_.batch, round_.window, round_.needs_probs))
            verify(round_, draft_probs)

        monkeypatch.setattr(llm.loop.target, "verify", note)
        with llm.loop.streams.active():
            capture(llm.loop, adaptive=False)
    assert shapes == {(batch, 8, filters) for batch in (1, 2, 4) for filters in (False, True)}


def test_capture_leaves_no_trace_in_slots_and_texts(tiny_bundle: Path) -> None:
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=20, ignore_eos=True) for i in range(6)]
    texts, steps = [], []
    for captured in (False, True):
        with LLM(tiny_bundle, threads=1, num_draft_tokens={1: 8, 3: 2}) as llm:
            if captured:
                llm._loop_thread.prepare(partial(capture, llm.loop, lambda done, total: steps.append((done, total))))
                state, buffers = llm.loop.target.state, llm.loop.target.buffers
                assert not any(state.view(name, 4).any() for name in (*state.INTEGERS, *state.FLOATS))
                assert not state.newest.any()
                assert not buffers.bitmask.device.any()
                assert llm.metrics.rounds == 0
            texts.append([output.token_ids for output in llm.generate(["a", "b c", "d", "e", "f", "g"], params)])
    assert texts[0] == texts[1]
    # Batches 1, 2; 4 with windows 2 and 8; each with filters and without.
    assert steps == [(done, 8) for done in range(9)]


def test_opening_a_bundle_raises_what_capture_raises(tiny_bundle: Path) -> None:
    def fail() -> list[None]:
        raise RuntimeError("no memory for a graph")

    with LLM(tiny_bundle, threads=1) as llm:
        with pytest.raises(RuntimeError, match="no memory for a graph"):
            llm._loop_thread.prepare(fail)
        with pytest.raises(InternalError, match="prepare it before the first request"):
            llm._loop_thread.prepare(fail)


def test_a_request_goes_before_what_is_left_of_the_warm_up(tiny_bundle: Path) -> None:
    queued, finished = threading.Event(), []

    def rest() -> Iterator[None]:
        assert queued.wait(PATIENCE_S)
        yield
        finished.append(sum(llm.metrics.finished.values()))
        yield

    with LLM(tiny_bundle, threads=1) as llm:
        llm._loop_thread.prepare(rest)
        request = llm.submit("a", SamplingParams(max_tokens=3, ignore_eos=True), lambda _: None)
        queued.set()
        assert eventually(lambda: bool(finished))
        assert finished == [1]
        assert request.failure is None
        assert llm.loop.idle, "the loop has finished the warm-up"


def test_a_failure_of_what_is_left_of_the_warm_up_ends_no_request(
    tiny_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def rest() -> Iterator[None]:
        yield
        raise RuntimeError("no memory for a graph")

    with LLM(tiny_bundle, threads=1) as llm:
        llm._loop_thread.prepare(rest)
        assert llm.loop.idle
        assert llm.generate("a", SamplingParams(max_tokens=3, ignore_eos=True)).finish_reason == "length"
    assert "no memory for a graph" in caplog.text


def test_the_warm_up_of_a_linear_cache_leaves_nothing_for_later(tiny_bundle: Path) -> None:
    """Free rows keep texts that later requests reuse."""
    with LLM(tiny_bundle, threads=1) as llm:
        assert not llm.loop.target.layout.packed
        assert list(capture(llm.loop)) == []


@pytest.mark.parametrize("calibrates", [True, False])
def test_rounds_without_texts_are_timed_only_where_they_cost_what_others_do(
    tiny_bundle: Path, calibrates: bool
) -> None:
    """All tokens of such rounds would choose the same experts."""
    with LLM(tiny_bundle, threads=1, adaptive_draft_tokens=True) as llm:
        windows = llm.loop.draft_windows
        windows.calibrates, windows.costs = calibrates, RoundCosts()  # of a GPU
        list(capture(llm.loop))
        assert not windows.uncaptured
        assert windows.costs.due(4, [0, 8]) == (None if calibrates else 0)


def test_nothing_is_captured_on_a_cpu(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle, threads=1) as llm:
        assert llm.metrics.eager_runs == {}


def test_warm_up_on_a_cpu_is_one_full_batch_and_one_grammar(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle, threads=1) as llm:
        warm_up(llm)
        assert sum(llm.metrics.finished.values()) == llm.bundle.limits.batch + 2


def test_a_bundle_whose_rounds_fail_does_not_become_ready(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(round_: Round) -> None:
        raise RuntimeError(f"no memory for {round_.batch} rows of {round_.window}")

    with LLM(tiny_bundle, threads=1) as llm:
        monkeypatch.setattr(llm.loop.target, "score", fail)
        with pytest.raises(InternalError, match="opens but cannot generate: RuntimeError: no memory"):
            warm_up(llm)
