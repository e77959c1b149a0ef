"""The reasoning delimiters of published models, chosen by the tokens of a tokenizer and its chat templates."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

_TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z]+\]")


@dataclass(frozen=True)
class _Delimiters:
    start: str
    ends: tuple[str, ...]  # the first one ends reasoning when a budget is spent
    implicit_ends: tuple[str, ...] = ()


_HARMONY_TURN = "<|end|><|start|>assistant"
_DELIMITERS = (
    _Delimiters("<think>", ("</think>",)),
    _Delimiters("<seed:think>", ("</seed:think>",)),
    _Delimiters("[THINK]", ("[/THINK]",)),  # Magistral, Ministral 3
    _Delimiters("<|channel>thought\n", ("<channel|>",)),  # Gemma 4
    _Delimiters(  # gpt-oss: the answer, a text before calls, or a call
        "<|channel|>analysis<|message|>",
        (
            f"{_HARMONY_TURN}<|channel|>final<|message|>",
            f"{_HARMONY_TURN}<|channel|>commentary<|message|>",
            "<|channel|>final<|message|>",
        ),
        (f"{_HARMONY_TURN}<|channel|>commentary to=", f"{_HARMONY_TURN} to="),
    ),
)
_CALLS = (  # beginnings of calls: a model may call a function before it closes its reasoning
    "<tool_call>",
    "<seed:tool_call>",
    "<minimax:tool_call>",
    "<|tool_call>",
    "<|tool_calls_section_begin|>",
    "<｜tool▁calls▁begin｜>",
    "<|tool_call_start|>",
    "[TOOL_CALLS]",
)


def reasoning_lines(has_token: Callable[[str], bool], templates: str) -> list[str]:
    """Return a [reasoning] section if ``templates`` write delimiters whose tags are tokens, else nothing."""
    for delimiters in _DELIMITERS:
        tags = {tag for text in (delimiters.start, *delimiters.ends) for tag in _TAG.findall(text)}
        written = _TAG.findall(delimiters.ends[-1])[0] in templates and _TAG.findall(delimiters.start)[0] in templates
        if written and all(map(has_token, tags)):
            implicit_ends = delimiters.implicit_ends or tuple(filter(has_token, _CALLS))
            return [
                "",
                "[reasoning]",
                f"think_start = {_text(delimiters.start)}",
                f"think_ends = {_text(delimiters.ends)}",
                f"forced_end = {_text(delimiters.ends[0])}",
                *([f"implicit_ends = {_text(implicit_ends)}"] if implicit_ends else []),
            ]
    return []


def _text(value: str | tuple[str, ...]) -> str:
    return json.dumps(value, ensure_ascii=False)
