"""The same requests through a Triton server, over HTTP, streaming or not; some clients hang up."""

import http.client
import json
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tools.soak.books import Rules
from tools.soak.plans import Plan, Turn

if TYPE_CHECKING:
    from tools.serve import TritonServer
    from tools.soak.drive import Reference

MODEL = "soak"
CLIENTS = 12
_FINISHED = "tandemrt_finished_total"
PATIENCE_S = 30.0  # until what the server publishes, a few times a second, must be what its answers say


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


class Said(NamedTuple):
    """What a server answered."""

    text: str
    reasoning: str
    token_ids: list[int]
    finish_reason: str


class Served:
    """Sends waves to ``server``; under the rejection rule texts depend on drafts: ``reference`` is of its bundle."""

    def __init__(self, server: "TritonServer", plans: Sequence[Plan], reference: "Reference") -> None:
        self._server, self._plans, self._reference = server, plans, reference

    def wave(self, turns: Sequence[Turn]) -> list[str]:
        """Send what ``turns`` ask for, all of it learned; return what is wrong, one line each."""
        before = _published(self._server)
        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = list(pool.map(self._asked, turns))
        found, said, unheard = [], list[Said](), 0
        for turn, answer in zip(turns, answers, strict=True):
            alone = self._reference.output(turn.plan)
            if isinstance(answer, str):
                found.append(f"{turn}: {answer}")
            elif answer is None:
                unheard += len(alone.token_ids)
            else:
                said.append(answer)
                expected = Said(alone.text, alone.reasoning, alone.token_ids, alone.finish_reason)
                found += [f"{turn}: {answer!r}, alone {expected!r}"] if answer != expected else []
        if not found:  # what failed on its way may have been counted or not
            found = self._metrics(before, said, len(turns), unheard)
        return [f"Triton, {line}" for line in found]

    def _asked(self, turn: Turn) -> "Said | str | None":
        """What came back, or why nothing did; None for a client that hung up."""
        try:
            return _ask(self._server, turn, self._plans[turn.plan])
        except (OSError, ValueError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}"

    def _metrics(self, before: Counter[str], said: Sequence[Said], asked: int, unheard: int) -> list[str]:
        """What the server publishes once all have ended, against what it answered."""
        end = time.monotonic() + PATIENCE_S
        while True:
            now = _published(self._server)
            wrong = [rule for rule, holds in published_rules(before, now, said, asked, unheard).items() if not holds]
            if not wrong or time.monotonic() > end:
                return [f"its metrics do not hold: {rule}" for rule in wrong]
            time.sleep(0.1)


def published_rules(before: Counter[str], now: Counter[str], said: Sequence[Said], asked: int, unheard: int) -> Rules:
    """What must hold of the server's metrics behind a wave of ``asked`` requests, of which it answered ``said``.

    ``before`` and ``now`` are metrics by name, ends of requests also by name.reason. Clients that hung up may have left
    up to ``unheard`` tokens.
    """
    more = Counter({name: now[name] - before[name] for name in now})
    finished = {name.partition(".")[2]: count for name, count in more.items() if name.startswith(f"{_FINISHED}.")}
    told = Counter(answer.finish_reason for answer in said)
    tokens, kept = sum(len(answer.token_ids) for answer in said), more["tandemrt_kept_total"]
    drafted, emitted = more["tandemrt_drafted_total"], more["tandemrt_emitted_total"]
    steps, queued = more["tandemrt_steps_total"], more["tandemrt_queue_seconds_count"]
    return {
        f"finished {finished}, answered {dict(told)}, {asked - len(said)} hung up": more[_FINISHED] == asked
        and sum(finished.values()) == asked
        and all(finished.get(reason, 0) >= count for reason, count in told.items()),
        f"every step ({steps}) is in the histogram": more["tandemrt_accepted_per_step_count"] == steps,
        f"no request had two slots ({queued} of {asked})": len(said) <= queued <= asked,
        f"drafted {drafted} = evaluated + cut": drafted
        == more["tandemrt_evaluated_total"] + more["tandemrt_cut_drafts_total"],
        f"emitted {emitted} >= kept {kept}": emitted >= kept,
        f"kept {kept}, answers hold {tokens}, {unheard} more at most": tokens <= kept <= tokens + unheard,
        "nobody waits or runs": now["tandemrt_requests_waiting"] == now["tandemrt_requests_running"] == 0,
    }


def _published(server: "TritonServer") -> Counter[str]:
    """What the server publishes of the runtime, by name; of the ends of requests also by name.reason."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics}/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    values: Counter[str] = Counter()
    for line in lines:
        if found := re.fullmatch(r"(tandemrt_\w+)\{(.*)\} (\S+)", line):
            name, labels, value = found.groups()
            values[name] += float(value)  # type: ignore[assignment]  # seconds are no integers
            if reason := re.search(r'reason="(\w+)"', labels):
                values[f"{name}.{reason[1]}"] += int(float(value))
    return values


def _ask(server: "TritonServer", turn: Turn, plan: Plan) -> Said | None:
    """The whole answer; None for a client that hung up."""
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
    return Said(text, reasoning, tokens, pieces[-1]["finish_reason"])


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
