"""Requests of seven kinds, whose answers copy much or little of their prompts. Their files are those of Python 3.11."""

import bisect
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tandemrt import SamplingParams, StructuredOutputs

ROOT = Path(__file__).resolve().parents[3]


class Workload(NamedTuple):
    """A request: its chat, and the parameters that its answer needs."""

    messages: list[dict[str, Any]]
    params: SamplingParams
    tools: Sequence[dict[str, Any]] = ()


def workloads() -> dict[str, list[Workload]]:
    """The requests by kind."""
    return {
        "edit 300 lines": [_edit(shlex.__file__, 300, "nextchar", "char")],
        "edit 110 lines": [_edit(bisect.__file__, 110, "lo", "low")],
        "code": [_ask(question, 300) for question in CODE],
        "summary": [_ask(f"{_document('design.md', 1200)}\n\nSummarize this text in five sentences.", 200)],
        "quotes": [_ask(f"{_document('drafts.md', 3500)}\n\n{question}", 200) for question in QUOTES],
        "JSON": [_ask(f"{ORDERS}\n\nList all orders as JSON.", 300, structured_outputs=OF_ORDERS)],
        "tools": [_ask(question, 200)._replace(tools=[_tool(*tool) for tool in TOOLS]) for question in CALLS],
        "chat": [_ask(question, 200) for question in CHAT],
    }


def _ask(question: str, max_tokens: int, **params: Any) -> Workload:
    return Workload(
        [{"role": "user", "content": question}], SamplingParams(temperature=0.0, max_tokens=max_tokens, **params)
    )


def _edit(file: str, lines: int, name: str, renamed: str) -> Workload:
    text = "\n".join(Path(file).read_text().splitlines()[:lines])
    question = f"Rename the variable `{name}` to `{renamed}` in this file. Answer with the complete file, nothing else."
    return _ask(f"{question}\n\n```python\n{text}\n```", 16 * lines)


def _document(name: str, characters: int) -> str:
    return (ROOT / "docs" / name).read_text()[:characters]


def _tool(name: str, description: str, fields: str) -> dict[str, Any]:
    properties = {field: {"type": "string"} for field in fields.split()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


CODE = (
    "Write a Python class for an LRU cache with get, put and a capacity, and unit tests for it.",
    "Write a SQL schema for a library with books, authors, members and loans, and three typical queries.",
)
CHAT = (
    "What is the difference between a process and a thread?",
    "Give me three ideas for a rainy Sunday with two children.",
    "Explain why the sky is blue to a curious teenager.",
)
QUOTES = (
    "Which kinds of drafts need no checkpoint? Quote the rows and sentences of the text that say so, word by word.",
    "Quote three sentences of the text about speed, word by word, each followed by a short comment.",
)
CALLS = (
    "Close issue 4127 of acme/rocket-engine with the comment 'Fixed in 8c1f2d9e by adding a retry to the uploader.'",
    "Open an issue in acme/rocket-engine: the telemetry collector drops packets when the buffer of a sensor is full. "
    "Its title is 'telemetry collector drops packets'. Repeat my description as its body.",
    "Read the files src/telemetry/collector.py and src/telemetry/buffer.py of acme/rocket-engine at branch "
    "release/2026-11, and merge pull request 981 there by squash.",
)
TOOLS = (
    ("create_issue", "Open an issue in a repository.", "owner repository title body"),
    ("comment_on_issue", "Add a comment to an issue.", "owner repository issue_number body"),
    ("close_issue", "Close an issue.", "owner repository issue_number reason"),
    ("get_file_contents", "Read a file of a repository.", "owner repository path branch"),
    ("merge_pull_request", "Merge a pull request.", "owner repository pull_number merge_method"),
    ("search_code", "Search the code of a repository.", "owner repository query"),
)
_PEOPLE = ("orders@northgate-lumber.example", "desk@harbour-optics.example", "stock@millbrook-bakery.example")
_GOODS = ("Oak boards 40 x 200 mm, planed", "Aspheric lens, 25 mm, coated", "Rye flour type 1150, 25 kg")
ORDERS = "Orders of this week.\n" + "\n".join(
    f"- Order NL-2026-{7310 + 37 * at}: {3 + 4 * at} of '{_GOODS[at % 3]}' for {_PEOPLE[at % 3]}, "
    f"to be delivered on 2026-12-{10 + at}."
    for at in range(6)
)
_ORDER = {"order": {"type": "string"}, "article": {"type": "string"}, "count": {"type": "integer"}}
_ORDER |= {"customer": {"type": "string"}, "delivery": {"type": "string"}}
_ITEM = {"type": "object", "properties": _ORDER, "required": list(_ORDER), "additionalProperties": False}
OF_ORDERS = StructuredOutputs(json=json.dumps({"type": "array", "items": _ITEM}))
