"""A server's first rounds: whatever shape a round has later, one of the same shape came before."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandemrt import LLM, SamplingParams
from tandemrt.engines.errors import InternalError
from tandemrt.runtime.round.capture import capture
from tandemrt.runtime.round.round import Round
from tandemrt.runtime.warmup import warm_up


def test_every_batch_size_runs_with_and_without_filters(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny_bundle, threads=1) as llm:
        verify, shapes = llm.loop.tandem.verify, set()

        def note(this: Round, draft_probs: Any) -> None:
            shapes.add((this.batch, this.window, this.filters))
            verify(this, draft_probs)

        monkeypatch.setattr(llm.loop.tandem, "verify", note)
        with llm.loop.clock.active():
            capture(llm.loop)
    assert shapes == {(batch, 8, filters) for batch in (1, 2, 4) for filters in (False, True)}


def test_what_was_run_to_be_captured_leaves_no_trace_in_slots_and_texts(tiny_bundle: Path) -> None:
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=20, ignore_eos=True) for i in range(6)]
    found, steps = [], []
    for captured in (False, True):
        with LLM(tiny_bundle, threads=1, window={1: 8, 3: 2}) as llm:
            if captured:
                llm._worker.prepare(partial(capture, llm.loop, lambda done, total: steps.append((done, total))))
                state, buffers = llm.loop.tandem.state, llm.loop.tandem.buffers
                assert not any(state.view(name, 4).any() for name in (*state.INTEGERS, *state.FLOATS))
                assert not state.newest.any()
                assert not buffers.bitmask.device.any()
                assert llm.metrics.rounds == 0
            found.append([output.token_ids for output in llm.generate(["a", "b c", "d", "e", "f", "g"], params)])
    assert found[0] == found[1]
    assert steps == [
        (done, 8) for done in range(9)
    ]  # batches 1, 2; 4 with windows 2 and 8; each with filters and without


def test_a_capture_that_fails_is_told_to_whoever_opens_the_bundle(tiny_bundle: Path) -> None:
    def fail() -> None:
        raise RuntimeError("no memory for a graph")

    with LLM(tiny_bundle, threads=1) as llm:
        with pytest.raises(RuntimeError, match="no memory for a graph"):
            llm._worker.prepare(fail)
        with pytest.raises(InternalError, match="prepare it before the first request"):
            llm._worker.prepare(fail)


def test_on_a_cpu_nothing_is_captured_when_a_bundle_opens(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle, threads=1) as llm:
        assert llm.metrics.eager_runs == {}


def test_on_a_cpu_where_nothing_is_captured_one_full_batch_and_one_grammar_are_enough(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle, threads=1) as llm:
        warm_up(llm)
        assert sum(llm.metrics.finished.values()) == llm.bundle.limits.batch + 2


def test_a_bundle_whose_rounds_fail_does_not_become_ready(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(this: Round) -> None:
        raise RuntimeError(f"no memory for {this.batch} rows of {this.window}")

    with LLM(tiny_bundle, threads=1) as llm:
        monkeypatch.setattr(llm.loop.tandem, "score", fail)
        with pytest.raises(InternalError, match="opens but cannot generate: RuntimeError: no memory"):
            warm_up(llm)
