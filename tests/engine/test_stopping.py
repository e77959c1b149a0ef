"""What ends a request that chose its own ends: with a grammar, without the bundle's stop tokens, not too early."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandemrt import LLM, RequestOutput, SamplingParams, StructuredOutputs


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, threads=1) as llm:
        yield llm


def answers(llm: LLM, **params: Any) -> list[RequestOutput]:
    """The answers with and without speculation, of a model that would end at once if it could."""
    params = {"logit_bias": {llm.bundle.stop_ids[0]: 100}, "seed": 3, "ignore_eos": True} | params
    return [llm.generate("text", SamplingParams(num_draft_tokens=window, **params)) for window in (0, 8)]


def test_a_stop_token_that_a_request_ignores_never_stands_inside_its_grammar(llm: LLM) -> None:
    own = llm.tokenizer.token_to_id("<|endoftext|>")
    anything = StructuredOutputs(json={"type": "string", "minLength": 3, "maxLength": 6})
    for output in answers(llm, stop_token_ids=[own], structured_outputs=anything):
        assert (output.finish_reason, output.stop_reason) == ("stop", own)
        assert not set(llm.bundle.stop_ids) & set(output.token_ids)
        assert output.text[0] == output.text[-1] == '"'


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_a_grammar_that_is_complete_too_early_ends_with_constraint(llm: LLM, ignore_eos: bool) -> None:
    for output in answers(llm, ignore_eos=ignore_eos, min_tokens=5, structured_outputs=StructuredOutputs(regex="no")):
        assert (output.finish_reason, output.text) == ("constraint", "no")


def test_a_grammar_ends_with_the_stop_token_that_a_request_ignores(llm: LLM) -> None:
    for output in answers(llm, min_tokens=3, structured_outputs=StructuredOutputs(regex="no{1,9}")):
        assert (output.finish_reason, output.stop_reason) == ("stop", llm.bundle.stop_ids[0])
        assert output.text == "noo"
