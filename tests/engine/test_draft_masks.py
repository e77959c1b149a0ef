"""Drafts that are masked by grammars: none is refused by one, and no text changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandemrt import LLM, SamplingParams
from tandemrt.engines.errors import BadRequest
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.requests.share import GrammarShare
from tests.engine.test_invisible import REQUESTS, told
from tests.plain.constraints import TOO_COMPLEX_BEHIND_A_BRACE

BRACE = 90  # the token of the tiny bundle


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, threads=1, overlap=True, draft_masks=True, forced_drafts=False) as opened:
        yield opened


def run(llm: LLM, requests: list[tuple[str, dict[str, Any]]], *, masked: bool, **params: Any) -> tuple[list[Any], Any]:
    llm.loop.windows.masked = masked
    before = llm.metrics.copy()
    found = llm.generate([p for p, _ in requests], [SamplingParams(**asked | params) for _, asked in requests])
    return [told(output) for output in found], llm.metrics.since(before)


def test_masked_drafts_change_no_text_and_none_is_cut(llm: LLM) -> None:
    """Beside requests without a grammar, and behind reasoning."""
    mixed = REQUESTS[4:10]
    plain, unmasked = run(llm, mixed, masked=False)
    masked, counted = run(llm, mixed, masked=True)
    assert masked == plain == run(llm, mixed, masked=True, window=0)[0]
    assert unmasked.cut_drafts > counted.cut_drafts
    assert sum(counted.accepted) > sum(unmasked.accepted)


def test_a_law_that_is_masked_is_the_one_that_the_rejection_rule_reads(llm: LLM) -> None:
    grammars = REQUESTS[7:10]
    once, counted = run(llm, grammars, masked=True, rule="rejection")
    assert run(llm, grammars, masked=True, rule="rejection")[0] == once
    assert sum(counted.accepted) > 0


def test_a_draft_behind_which_its_grammar_is_too_complex_ends_no_request(llm: LLM) -> None:
    """Texts that go there end with an error, with what they have; all others go on."""
    asked = {"max_tokens": 6, "logit_bias": {BRACE: 1}, "structured_outputs": {"json": TOO_COMPLEX_BEHIND_A_BRACE}}
    seeds = [("a", asked | {"seed": seed, "temperature": 2.0}) for seed in range(12)]
    plain = run(llm, seeds, masked=False, window=0)[0]
    assert {text for _, _, text, finish in plain if finish == "error"} == {"{"}
    assert {finish for *_, finish in plain} > {"error"}
    for masked in (False, True):
        assert run(llm, seeds, masked=masked)[0] == plain
    for text in run(llm, seeds, masked=True, rule="rejection")[0]:
        assert (text[2] == "{") == (text[3] == "error")


def test_only_texts_that_drafts_are_verified_for_are_followed_and_only_while_they_are_drawn(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that takes of the processor, making the fork included, is the request's."""
    forked: list[int] = []
    left: list[int] = []
    steps: list[GrammarShare] = []
    fork, step = Constraint.fork, GrammarShare.step
    drafter: Any = llm.loop.drafter

    def counted_fork(self: Constraint) -> Constraint:
        left.append(len(drafter._masks._forks))  # of the round before
        forked.append(len(steps))
        return fork(self)

    @contextmanager
    def counted_step(self: GrammarShare) -> Iterator[None]:
        steps.append(self)
        with step(self):
            yield
        steps.append(self)

    monkeypatch.setattr(Constraint, "fork", counted_fork)
    monkeypatch.setattr(GrammarShare, "step", counted_step)
    run(llm, REQUESTS[7:9], masked=True, window=0)
    assert forked == []
    drafted, plain = REQUESTS[8], (REQUESTS[9][0], REQUESTS[9][1] | {"window": 0})
    run(llm, [drafted, plain], masked=True)
    assert forked
    assert all(at % 2 == 1 for at in forked)  # inside of a step
    assert {id(steps[at]) for at in forked} == {id(steps[forked[0]])}  # of one request
    assert not any(left)


def test_what_draws_nothing_cannot_be_masked(ngram_bundle: Path) -> None:
    with pytest.raises(BadRequest, match="draft_masks: needs a draft with a model of its own, received True"):
        LLM(ngram_bundle, threads=1, draft_masks=True)
