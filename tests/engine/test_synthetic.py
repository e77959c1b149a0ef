"""Synthetic acceptance: the requested mean is accepted and reported, and no other request's text changes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandemrt import LLM, SamplingParams
from tandemrt.engines.validation.errors import BadRequest


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, threads=1, num_draft_tokens=4, synthetic_rule=True) as opened:
        yield opened


def synthetic(mean: float, **params: object) -> SamplingParams:
    asked = {"temperature": 1.0, "seed": 3, "max_tokens": 80, "ignore_eos": True, **params}
    return SamplingParams(rule="synthetic", synthetic_acceptance_length=mean, **asked)


@pytest.mark.parametrize(("mean", "temperature"), [(1.0, 1.0), (2.5, 0.0), (3.0, 1.0), (5.0, 1.0)])
def test_a_round_has_as_many_tokens_as_were_asked_for(llm: LLM, mean: float, temperature: float) -> None:
    outputs = llm.generate(["a", "b"], synthetic(mean, temperature=temperature))
    histogram = [sum(counts) for counts in zip(*(o.speculation.acceptance_histogram for o in outputs), strict=True)]
    average = 1 + sum(count * steps for count, steps in enumerate(histogram)) / sum(histogram)
    # Fewer at the end of a text, and where the draft proposes what is no token: every sixth of this vocabulary is none.
    assert 0.6 * mean < average < 1.2 * mean
    assert (mean == 1.0) == (average == 1.0)


def test_synthetic_acceptance_is_reported_repeatable_and_leaves_other_requests_alone(llm: LLM) -> None:
    plain = SamplingParams(seed=1, max_tokens=40)
    alone = llm.generate("other", plain)
    before = llm.metrics.synthetic_drafts
    outputs = [llm.generate(["first", "other"], [synthetic(3.5), plain]) for _ in range(2)]
    assert [other.token_ids for _, other in outputs] == [alone.token_ids] * 2
    assert outputs[0][0].token_ids == outputs[1][0].token_ids
    assert outputs[0][0].speculation.to_json()["synthetic"] is True
    assert "synthetic" not in alone.speculation.to_json()
    assert llm.metrics.synthetic_drafts - before == sum(o.speculation.num_accepted_draft_tokens for o, _ in outputs)


def test_constraints_hold_all_the_same(llm: LLM) -> None:
    output = llm.generate("x</think>", synthetic(4.0, structured_outputs={"regex": "[ab]{20}c"}))
    assert (output.text[-1], set(output.text[:-1]) <= {"a", "b"}, len(output.text)) == ("c", True, 21)


def test_it_is_refused_where_it_is_not_allowed_and_where_it_makes_no_sense(llm: LLM, tiny_bundle: Path) -> None:
    with LLM(tiny_bundle, threads=1) as strict, pytest.raises(BadRequest, match="open the bundle with synthetic_rule"):
        strict.generate("x", synthetic(2.0))
    with pytest.raises(BadRequest, match=r"with 2 drafted tokens a round emits at most 3 tokens, received 3\.5"):
        llm.generate("x", synthetic(3.5, num_draft_tokens=2))
    for params in ({"rule": "synthetic"}, {"synthetic_acceptance_length": 2.0}):
        with pytest.raises(BadRequest, match="must come with the rule synthetic"):
            SamplingParams(**params)
    with pytest.raises(BadRequest, match="logprobs must not be set"):
        synthetic(2.0, logprobs=1)
