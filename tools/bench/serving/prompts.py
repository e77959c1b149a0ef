"""The requests of a load: from a file that other benchmarks use, from the included questions, or random text."""

import json
import random
import string
from base64 import b64encode
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from tandemrt.engines.validation.errors import BadRequest, clipped, quoted
from tandemrt.runtime.cli.commands import BENCH_PROMPTS

Fields = dict[str, Any]
"""The part of a request's body that holds its prompt: ``messages`` for a chat, ``prompt`` for a completion."""


def prompts(source: str | None, count: int, seed: int) -> list[Fields]:
    """Return ``count`` prompts, from the beginning again if ``source`` has fewer.

    ``source`` is a file, ``random:LENGTH`` (that many random letters and digits each), ``image:SIDE`` (a question about
    a random image of SIDE x SIDE pixels), or None: the included questions. A file is JSON or JSON lines. A row has
    ``prompt``, ``messages``, ``conversations`` (ShareGPT) or ``turns`` (SPEED-Bench, MT-Bench). Of a conversation the
    first turn is the prompt. Conversations without a question are left out; ShareGPT has some. Raises BadRequest.
    """
    if source is not None and source.startswith("random:"):
        return _random(_size(source), count, seed)
    if source is not None and source.startswith("image:"):
        drawn = random.Random(seed)
        return [_about_image(_size(source), drawn) for _ in range(count)]
    rows = list(_read(BENCH_PROMPTS if source is None else Path(source)))
    return [rows[at % len(rows)] for at in range(count)]


def _size(source: str) -> int:
    kind, _, size = source.partition(":")
    if not size.isdecimal() or not int(size):
        unit = {"random": "characters", "image": "pixels"}[kind]
        raise BadRequest(f"--prompts: {kind}: must be followed by a number of {unit}, received {quoted(size)}")
    return int(size)


def _random(length: int, count: int, seed: int) -> list[Fields]:
    drawn = random.Random(seed)
    return [{"prompt": "".join(drawn.choices(string.ascii_letters + string.digits, k=length))} for _ in range(count)]


def _about_image(side: int, drawn: random.Random) -> Fields:
    from PIL import Image

    file = BytesIO()
    squares = Image.frombytes("RGB", (8, 8), drawn.randbytes(192))
    squares.resize((side, side), Image.Resampling.NEAREST).save(file, "PNG")
    url = f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What do you see?"}]
    return {"messages": [{"role": "user", "content": parts}]}


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
