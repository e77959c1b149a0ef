"""A server's first rounds: whatever shape a round has later, one of the same shape came before."""

from pathlib import Path
from typing import Any

import pytest

from tandemrt import LLM
from tandemrt.engines.errors import InternalError
from tandemrt.runtime.round.round import Round
from tandemrt.runtime.triton.warmup import run_every_batch, warm_up


def test_every_batch_size_runs_with_and_without_filters(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny_bundle, threads=1) as llm:
        verify, shapes = llm.loop.tandem.verify, set()

        def note(this: Round, draft_probs: Any) -> None:
            shapes.add((this.batch, this.window, this.filters))
            verify(this, draft_probs)

        monkeypatch.setattr(llm.loop.tandem, "verify", note)
        run_every_batch(llm)
    assert shapes == {(batch, 8, filters) for batch in (1, 2, 4) for filters in (False, True)}


def test_on_a_cpu_where_nothing_is_captured_one_full_batch_and_one_grammar_are_enough(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle, threads=1) as llm:
        warm_up(llm)
        assert sum(llm.metrics.finished.values()) == llm.bundle.limits.batch + 2


def test_a_bundle_whose_rounds_fail_does_not_become_ready(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(this: Round) -> None:
        raise RuntimeError(f"no memory for {this.batch} rows of {this.window}")

    with LLM(tiny_bundle, threads=1) as llm:
        monkeypatch.setattr(llm.loop.tandem, "score", fail)
        with pytest.raises(InternalError, match="opens but cannot generate: no memory"):
            warm_up(llm)
