"""What one request may cost the others: its grammar has a share, and what takes long is not done in the loop."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandemrt import LLM, SamplingParams, StructuredOutputs
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.engine_loop.verify_inputs import SLOW_S
from tandemrt.runtime.grammars.llguidance_matcher import LLGuidanceMatcher

FREE = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)
WORD = SamplingParams(structured_outputs=StructuredOutputs(regex="[a-z]{30}"), thinking_token_budget=0, seed=2)
AMBIGUOUS = "root ::= a0" + "".join(f"\na{i} ::= a{i + 1} a{i + 1}" for i in range(60)) + "\na60 ::= [a-z]?"


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, threads=1) as llm:
        yield llm


def slow(monkeypatch: pytest.MonkeyPatch, method: str, at: int) -> list[int]:
    """Let a method of every grammar take 0.4 s of the processor at the call number ``at``; gives the calls so far."""
    real, calls = getattr(LLGuidanceMatcher, method), [0]

    def slowly(grammar: LLGuidanceMatcher, *arguments: Any) -> Any:
        calls[0] += 1
        end = time.thread_time() + (0.4 if calls[0] == at else 0.0)
        while time.thread_time() < end:
            pass
        return real(grammar, *arguments)

    monkeypatch.setattr(LLGuidanceMatcher, method, slowly)
    return calls


@pytest.mark.parametrize("method", ["fill_row", "accept"])
def test_a_grammar_that_is_slow_once_ends_its_request_and_no_other(llm: LLM, monkeypatch, method: str) -> None:
    alone = llm.generate("the", FREE).text
    calls = slow(monkeypatch, method, 12)
    word, *others = llm.generate(["x", "the", "the"], [WORD, FREE, FREE])
    assert [other.text for other in others] == [alone] * 2
    assert word.finish_reason == "error"
    assert "BadRequest: structured_outputs: the grammar took 0.4" in (word.error or "")
    assert "fill_timeout_s" in (word.error or "")
    assert word.text.isalpha()  # what it had
    assert 12 <= calls[0] < 12 + 2 * 9  # no round more
    monkeypatch.undo()
    assert len(llm.generate("x", WORD).text) == 30


def test_masks_that_take_long_are_worked_out_side_by_side(llm: LLM, monkeypatch) -> None:
    shape = StructuredOutputs(regex="[a-z]{8}")
    asked = [SamplingParams(structured_outputs=shape, thinking_token_budget=0, seed=seed) for seed in (3, 4)]
    alone = [llm.generate("x", each).text for each in asked]
    real, threads = LLGuidanceMatcher.precompute_rows, set()

    def slowly(grammar: LLGuidanceMatcher, tokens: Any) -> None:
        threads.add(threading.current_thread().name)
        end = time.thread_time() + 2 * SLOW_S
        while time.thread_time() < end:
            pass
        real(grammar, tokens)

    monkeypatch.setattr(LLGuidanceMatcher, "precompute_rows", slowly)
    assert [each.text for each in llm.generate(["x"] * 2, asked)] == alone
    assert {name.rstrip("_0123456789") for name in threads} == {"tandemrt-loop", "tandemrt-parallel"}


def test_how_long_masks_take_is_counted_for_grammars(llm: LLM) -> None:
    before = llm.metrics.fill_seconds.count
    llm.generate("the", FREE)
    assert llm.metrics.fill_seconds.count == before
    llm.generate("x", WORD)
    assert llm.metrics.fill_seconds.count > before


def test_a_grammar_without_an_end_of_work_is_refused_and_others_go_on(llm: LLM) -> None:
    alone = llm.generate("the", FREE).text
    ambiguous = SamplingParams(structured_outputs=StructuredOutputs(grammar=AMBIGUOUS))
    bad, other = llm.generate(["x", "the"], [ambiguous, FREE])
    assert other.text == alone
    assert "structured_outputs.grammar: computing its mask rows takes more than 0.1 s" in (bad.error or "")


def test_prompts_and_grammars_have_sizes_that_are_options(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle, threads=1, max_prompt_bytes=10, max_grammar_bytes=20) as llm:
        with pytest.raises(BadRequest, match=r"at most 10 bytes of text .* \(max_prompt_bytes\)"):
            llm.generate("hello world")
        with pytest.raises(BadRequest, match=r"choice: must be at most 20 bytes \(max_grammar_bytes\)"):
            llm.generate("x", SamplingParams(structured_outputs=StructuredOutputs(choice=["a" * 30])))
