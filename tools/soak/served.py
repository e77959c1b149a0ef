"""The same requests through a Triton server, over HTTP, streaming or not; some clients hang up."""

import http.client
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.soak.plans import Plan, Turn

if TYPE_CHECKING:
    from tools.serve import TritonServer
    from tools.soak.drive import Reference

MODEL = "soak"
CLIENTS = 12


@contextmanager
def serving(bundle: Path, folder: Path) -> "Iterator[TritonServer]":
    """A server with the bundle, for as long as the block lasts. Raises RuntimeError where no server is installed."""
    from tandemrt.engines.bundle import Bundle
    from tandemrt.export.triton.repository import write_model
    from tools.serve import TritonServer

    repository = folder / "repository"
    write_model(Bundle.open(bundle), repository, name=MODEL, threads=1)
    with TritonServer(repository) as server:
        yield server


def served_wave(
    server: "TritonServer", turns: Sequence[Turn], plans: Sequence[Plan], reference: "Reference"
) -> list[str]:
    """Send what ``turns`` ask for; say, one line each, which answer differs from what the request gets alone.

    Under the rejection rule the text depends on the drafts: the server must serve the reference's own bundle.
    """

    def ask(turn: Turn) -> list[str]:
        plan = plans[turn.plan]
        try:
            answer = _ask(server, turn, plan)
        except (OSError, ValueError, http.client.HTTPException) as error:
            return [f"Triton, {turn}: {type(error).__name__}: {error}"]
        if answer is None:
            return []
        alone = reference.output(turn.plan)
        expected = (alone.text, alone.reasoning, alone.token_ids, alone.finish_reason)
        return [] if answer == expected else [f"Triton, {turn}: {answer!r}, alone {expected!r}"]

    with ThreadPoolExecutor(CLIENTS) as pool:
        return [line for lines in pool.map(ask, turns) for line in lines]


def _ask(server: "TritonServer", turn: Turn, plan: Plan) -> tuple[str, str, list[int], str] | None:
    """Text, reasoning, tokens and finish reason; None for a client that hung up."""
    stream = turn.way == "stream" or turn.leave_after is not None
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=300)
    try:
        endpoint = "generate_stream" if stream else "generate"
        connection.request("POST", f"/v2/models/{MODEL}/{endpoint}", json.dumps(_body(plan, stream=stream)))
        answer = connection.getresponse()
        if turn.leave_after is not None:
            answer.readline()
            return None
        data = answer.read()
    finally:
        connection.close()
    pieces = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: ")] if stream else []
    pieces = pieces or [json.loads(data)]
    if any("error" in piece for piece in pieces):
        raise ValueError(str(pieces)[:200])
    tokens = [token for piece in pieces for token in _list(piece["token_ids"])]
    text, reasoning = ("".join(piece[f"{name}_output"] for piece in pieces) for name in ("text", "reasoning"))
    return text, reasoning, tokens, pieces[-1]["finish_reason"]


def _body(plan: Plan, *, stream: bool) -> dict[str, Any]:
    # Numbers are 32-bit tensors there, but any value may come in sampling_parameters.
    params = plan.params.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    prompt = plan.prompt
    if isinstance(prompt, str):
        given: dict[str, Any] = {"text_input": prompt}
    elif isinstance(prompt[0], int):
        given = {"input_ids": prompt}
    else:
        given = {"messages": json.dumps(prompt)}
    return {**given, "sampling_parameters": json.dumps(params), "stream": stream}


def _list(value: Any) -> list[int]:
    return value if isinstance(value, list) else [value]  # the server writes a list of one element as a number
