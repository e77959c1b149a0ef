"""Default reasoning delimiters: those that the chat template writes and the tokenizer has."""

import tomllib

import pytest

from tandemrt.engines.recipe.recipe import Reasoning
from tandemrt.export.bundle.default_reasoning import reasoning_lines

HARMONY = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>"]


def found(tokens: list[str], template: str) -> Reasoning | None:
    lines = reasoning_lines(tokens.__contains__, template)
    return Reasoning.model_validate(tomllib.loads("\n".join(lines))["reasoning"]) if lines else None


@pytest.mark.parametrize(
    ("tokens", "template", "start", "forced_end", "implicit_ends"),
    [
        (["<think>", "</think>"], "<think>\n</think>", "<think>", "</think>", ()),
        (["<think>", "</think>", "<tool_call>"], "<think></think>", "<think>", "</think>", ("<tool_call>",)),
        (["[THINK]", "[/THINK]", "[TOOL_CALLS]"], "[THINK][/THINK]", "[THINK]", "[/THINK]", ("[TOOL_CALLS]",)),
        (["<|channel>", "<channel|>"], "<|channel>thought\n<channel|>", "<|channel>thought\n", "<channel|>", ()),
    ],
)
def test_delimiters_are_those_that_the_template_writes(
    tokens: list[str], template: str, start: str, forced_end: str, implicit_ends: tuple[str, ...]
) -> None:
    reasoning = found(tokens, template)
    assert reasoning is not None
    assert (reasoning.think_start, reasoning.forced_end, reasoning.implicit_ends) == (start, forced_end, implicit_ends)
    assert forced_end in reasoning.think_ends
    assert found(tokens[1:], template) is None
    assert found(tokens, "no delimiters") is None


def test_harmony_ends_its_reasoning_with_an_answer_or_a_call() -> None:
    reasoning = found(HARMONY, "<|start|>assistant<|channel|>analysis<|message|>")
    assert reasoning is not None
    turn = "<|end|><|start|>assistant"
    assert reasoning.forced_end == f"{turn}<|channel|>final<|message|>"
    assert reasoning.implicit_ends == (f"{turn}<|channel|>commentary to=", f"{turn} to=")
