"""The requests of a load: from a file that other benchmarks use, from the included questions, or random text."""

import json
import random
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tandemrt.engines.validation.errors import BadRequest, clipped, quoted
from tandemrt.runtime.cli.commands import BENCH_PROMPTS

Fields = dict[str, Any]
"""The part of a request's body that holds its prompt: ``messages`` for a chat, ``prompt`` for a completion."""


def prompts(source: str | None, count: int, seed: int) -> list[Fields]:
    """Return ``count`` prompts, from the beginning again if ``source`` has fewer.

    ``source`` is a file, ``random:LENGTH`` (that many random letters and digits each), or None: the included questions.
    A file is JSON or JSON lines. A row has ``prompt``, ``messages``, ``conversations`` (ShareGPT) or ``turns``
    (SPEED-Bench, MT-Bench). Of a conversation the first turn is the prompt. Conversations without a question are left
    out; ShareGPT has some. Raises BadRequest.
    """
    if source is not None and source.startswith("random:"):
        return _random(source.removeprefix("random:"), count, seed)
    rows = list(_read(BENCH_PROMPTS if source is None else Path(source)))
    return [rows[at % len(rows)] for at in range(count)]


def _random(length: str, count: int, seed: int) -> list[Fields]:
    if not length.isdecimal() or not int(length):
        raise BadRequest(f"--prompts: random: must be followed by a number of characters, received {quoted(length)}")
    drawn = random.Random(seed)
    return [
        {"prompt": "".join(drawn.choices(string.ascii_letters + string.digits, k=int(length)))} for _ in range(count)
    ]


def _read(path: Path) -> Iterator[Fields]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadRequest(
            f"--prompts: must be a readable text file, received {clipped(path)}: {clipped(error)}"
        ) from error
    rows = _rows(text, path)
    if not rows:
        raise BadRequest(f"--prompts: must hold at least one prompt, received {clipped(path)}, which has none")
    read = (_fields(row, f"row {number} of {clipped(path)}") for number, row in enumerate(rows, 1))
    questions = [each for each in read if each is not None]
    if not questions:
        raise BadRequest(f"--prompts: must hold at least one question, received {clipped(path)}, which has none")
    yield from questions


def _rows(text: str, path: Path) -> list[Any]:
    """Return the rows of a JSON list, or of JSON lines."""
    try:
        if text.lstrip().startswith("["):
            whole: list[Any] = json.loads(text)
            return whole
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise BadRequest(
            f"--prompts: must be a JSON list or JSON lines, received {clipped(path)}: {clipped(error)}; convert other "
            "formats first"
        ) from error


def _fields(row: Any, where: str) -> Fields | None:
    """Return the prompt of a row; None for a conversation without a question. Raises BadRequest."""
    match row:
        case {"messages": [_, *_] as messages}:
            return {"messages": messages}
        case {"prompt": str(prompt)}:
            return {"prompt": prompt}
        case {"turns": [str(first), *_]}:
            return {"messages": [{"role": "user", "content": first}]}
        case {"conversations": list(turns)}:
            question = _first_question(turns)
            return None if question is None else {"messages": [{"role": "user", "content": question}]}
    raise BadRequest(
        f"--prompts: a row must have prompt, messages, turns or conversations, received {quoted(row)} in {where}"
    )


def _first_question(turns: list[Any]) -> str | None:
    """Return the first text of a person in a conversation of ShareGPT."""
    texts = (turn.get("value") for turn in turns if isinstance(turn, Mapping) and turn.get("from") in ("human", "user"))
    return next((text for text in texts if isinstance(text, str) and text), None)
