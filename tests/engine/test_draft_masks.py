"""Drafts masked by grammars: no grammar rejects them, and no text changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandemrt import LLM, SamplingParams
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.grammars.time_limit import GrammarTimeLimit
from tests.engine.test_invisible import REQUESTS, open_llm, output_of
from tests.plain.constraints import TOO_COMPLEX_AFTER_A_BRACE

BRACE = 90  # the token of the tiny bundle


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    options: Any = {"overlap": True, "adaptive_draft_tokens": False, "fast_forward_drafts": False}
    with open_llm(tiny_bundle, draft_masks=True, **options) as opened:
        yield opened


def run(llm: LLM, requests: list[tuple[str, dict[str, Any]]], *, masked: bool, **params: Any) -> tuple[list[Any], Any]:
    llm.loop.draft_windows.mask_drafts = masked
    before = llm.metrics.copy()
    outputs = llm.generate([p for p, _ in requests], [SamplingParams(**asked | params) for _, asked in requests])
    return [output_of(output) for output in outputs], llm.metrics.since(before)


def test_masked_drafts_change_no_text_and_none_is_cut(llm: LLM) -> None:
    """Together with requests without a grammar, and after reasoning."""
    mixed = REQUESTS[4:10]
    plain, unmasked = run(llm, mixed, masked=False)
    masked, counted = run(llm, mixed, masked=True)
    assert masked == plain == run(llm, mixed, masked=True, num_draft_tokens=0)[0]
    assert unmasked.constraint_rejected_drafts > counted.constraint_rejected_drafts
    assert sum(counted.accepted) > sum(unmasked.accepted)


def test_the_rejection_rule_reads_masked_probabilities(llm: LLM) -> None:
    grammars = REQUESTS[7:10]
    once, counted = run(llm, grammars, masked=True, rule="rejection")
    assert run(llm, grammars, masked=True, rule="rejection")[0] == once
    assert sum(counted.accepted) > 0


def test_a_draft_that_makes_the_grammar_too_complex_ends_no_request(llm: LLM) -> None:
    """Texts that go there end with an error, with what they have; all others go on."""
    asked = {"max_tokens": 6, "logit_bias": {BRACE: 1}, "structured_outputs": {"json": TOO_COMPLEX_AFTER_A_BRACE}}
    seeds = [("a", asked | {"seed": seed, "temperature": 2.0}) for seed in range(12)]
    plain = run(llm, seeds, masked=False, num_draft_tokens=0)[0]
    errors = {end for *_, end in plain} - {"stop", "length"}
    assert len(errors) == 1, f"as for {errors}"
    assert {text for _, _, text, end in plain if end in errors} == {"{"}
    assert {end for *_, end in plain} > errors
    for masked in (False, True):
        assert run(llm, seeds, masked=masked)[0] == plain
    for text in run(llm, seeds, masked=True, rule="rejection")[0]:
        assert (text[2] == "{") == (text[3] in errors)


def test_constraints_are_forked_only_while_verified_drafts_are_sampled(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU time of masks and forks counts for the request."""
    forked: list[int] = []
    left: list[int] = []
    steps: list[GrammarTimeLimit] = []
    fork, step = Constraint.fork, GrammarTimeLimit.step
    drafter: Any = llm.loop.drafter

    def counted_fork(self: Constraint) -> Constraint:
        left.append(len(drafter._sampler._masks._forks))  # of the round before
        forked.append(len(steps))
        return fork(self)

    @contextmanager
    def counted_step(self: GrammarTimeLimit) -> Iterator[None]:
        steps.append(self)
        with step(self):
            yield
        steps.append(self)

    monkeypatch.setattr(Constraint, "fork", counted_fork)
    monkeypatch.setattr(GrammarTimeLimit, "step", counted_step)
    run(llm, REQUESTS[7:9], masked=True, num_draft_tokens=0)
    assert forked == []
    drafted, plain = REQUESTS[8], (REQUESTS[9][0], REQUESTS[9][1] | {"num_draft_tokens": 0})
    run(llm, [drafted, plain], masked=True)
    assert forked
    assert all(at % 2 == 1 for at in forked)  # inside of a step
    assert {id(steps[at]) for at in forked} == {id(steps[forked[0]])}  # of one request
    assert not any(left)


def test_drafts_without_a_model_cannot_be_masked(ngram_bundle: Path) -> None:
    with pytest.raises(BadRequest, match="draft_masks: needs a draft with a model of its own, received True"):
        LLM(ngram_bundle, threads=1, draft_masks=True)
