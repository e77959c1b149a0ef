"""Drive servers that speak OpenAI's protocol with streamed requests, and print what their users would see."""

import asyncio
import itertools
import json
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from rich.console import Console

from tandemrt.engines.validation.errors import BadRequest, TandemError, clipped, quoted
from tools.bench.report import Json, Report, Row
from tools.bench.serving.pace import Closed, Open, Pace
from tools.bench.serving.prompts import Fields, prompts
from tools.bench.serving.streamed import Streamed, stream

_START_S, _POLL_S = 1800.0, 0.1  # how long a server may take until it answers
_COLUMNS = {
    "server": "",
    "requests": "d",
    "errors": "d",
    "tokens/s": ".0f",
    "first token p50": ".1f",
    "p90": ".1f",
    "p99": ".1f",
    "per token p50": ".2f",
    "gap p50": ".1f",
    "gap p90": ".1f",
    "gap p99": ".1f",
    "tokens per round": ".2f",
}


def load(
    urls: Annotated[list[str], typer.Argument(help="Base URLs of servers, such as http://127.0.0.1:8000/v1.")],
    start: Annotated[
        list[str] | None,
        typer.Option(help="Command that starts a server; it runs until the end. Repeat for each URL, in their order."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the model. By default the first that a server lists.")
    ] = None,
    clients: Annotated[str, typer.Option(help="Closed loops: numbers of clients, separated by commas.")] = "1,16",
    rates: Annotated[str, typer.Option(help="Open loops: requests per second, separated by commas.")] = "",
    requests: Annotated[int, typer.Option(min=1, help="Requests of each load.")] = 64,
    prompts_from: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            help="A file (JSON, JSON lines; ShareGPT, SPEED-Bench), random:LENGTH characters, or image:SIDE pixels.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each text, at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="Temperature of each request.")] = 0.7,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Write max_tokens tokens always.")] = False,
    extra: Annotated[str, typer.Option(help="Further fields of each request, a JSON object.")] = "{}",
    seed: Annotated[int, typer.Option(help="Seed of random prompts, of times, and the first request's.")] = 0,
    out: Json = None,
) -> None:
    """Measure tokens/s, time to first token, gaps and acceptance of servers under the same load. Times are ms.

    Of a server that a command starts, the seconds until it lists its models are printed, too.
    """
    try:
        paces: list[Pace] = [
            *map(Closed, _numbers("--clients", clients, int)),
            *(Open(rate, seed) for rate in _numbers("--rates", rates, float)),
        ]
        fields = {"max_tokens": max_tokens, "temperature": temperature, **({"ignore_eos": True} if ignore_eos else {})}
        # Each load has prompts of its own, and so has the first request, because servers cache prompts.
        bodies = [
            {**each, **fields, **_object("--extra", extra), "seed": seed + at}
            for at, each in enumerate(prompts(prompts_from, 1 + requests * len(paces), seed))
        ]
        if start and len(start) != len(urls):
            raise BadRequest(
                f"--start: must be given once for each of {len(urls)} URLs, received {len(start)} commands"
            )
        with ExitStack() as started:
            processes = [started.enter_context(_process(command)) for command in start or ()]
            asyncio.run(_run(urls, processes, model, paces, bodies, Report(out)))
    except TandemError as error:
        Console(stderr=True).print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


async def _run(
    urls: Sequence[str],
    processes: Sequence[subprocess.Popen[bytes]],
    model: str | None,
    paces: Sequence[Pace],
    bodies: Sequence[Fields],
    report: Report,
) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as client:
        started, running = time.perf_counter(), itertools.chain(processes, itertools.repeat(None))
        listed = await asyncio.gather(*map(partial(_first_model, client, started), urls, running))
        names = {url: model or name for url, name in zip(urls, listed, strict=True)}
        for url in urls:  # the first request compiles and allocates
            await stream(client, url, {**bodies[0], "model": names[url]})
        count = (len(bodies) - 1) // max(1, len(paces))
        for at, pace in enumerate(paces):
            own = bodies[1 + at * count : 1 + (at + 1) * count]
            rows = [await _measured(client, url, names[url], pace, own) for url in urls]
            report.add(str(pace), _COLUMNS, rows)


async def _measured(client: httpx.AsyncClient, url: str, model: str, pace: Pace, bodies: Sequence[Fields]) -> Row:
    begun = time.perf_counter()
    answers = await pace.run(lambda body: stream(client, url, {**body, "model": model}), bodies)
    seconds = time.perf_counter() - begun
    if failed := next((answer.error for answer in answers if answer.error is not None), None):
        Console(stderr=True).print(f"{url}: {clipped(failed)}", style="yellow", markup=False, soft_wrap=True)
    return (url, *figures(answers, seconds))


def figures(answers: Sequence[Streamed], seconds: float) -> tuple[int | float | None, ...]:
    """Return the figures of ``load`` from ``requests`` on; times in ms, None where there is nothing to measure."""
    done = [answer for answer in answers if answer.error is None]
    first = [answer.first_token for answer in done]
    gaps = [gap for answer in done for gap in answer.gaps]
    counted = [answer for answer in done if answer.rounds]
    rounds, accepted = (sum(getattr(answer, name) for answer in counted) for name in ("rounds", "accepted"))
    return (
        len(answers),
        len(answers) - len(done),
        sum(answer.output_tokens for answer in done) / seconds,
        *(_milliseconds(first, percent) for percent in (50, 90, 99)),
        _milliseconds([answer.per_token for answer in done], 50),
        *(_milliseconds(gaps, percent) for percent in (50, 90, 99)),
        1 + accepted / rounds if rounds else None,
    )


def _milliseconds(seconds: Sequence[float], percent: int) -> float | None:
    return float(np.percentile(seconds, percent)) * 1000 if seconds else None


async def _first_model(
    client: httpx.AsyncClient, started: float, url: str, process: subprocess.Popen[bytes] | None
) -> str:
    """Wait until a server answers, and return the first model that it lists. Raises BadRequest.

    If ``process`` is the server, print the seconds since ``started``.
    """
    rule = f"url: must answer GET {clipped(url)}/models within {_START_S:.0f} s"
    until = time.monotonic() + _START_S
    while True:
        try:
            answer = await client.get(f"{url}/models")
            if answer.status_code == 200:
                if process is not None:
                    Console().print(f"{url} is ready after {time.perf_counter() - started:.1f} s", highlight=False)
                return str(answer.json()["data"][0]["id"])
            problem = f"status {answer.status_code}"
        except httpx.HTTPError as error:
            problem = f"{type(error).__name__}: {error}"
        if process is not None and process.poll() is not None:
            raise BadRequest(f"{rule}; its command ended with exit status {process.returncode}")
        if process is None or time.monotonic() > until:
            raise BadRequest(f"{rule}, received {clipped(problem)}; start the server, or give its command with --start")
        await asyncio.sleep(_POLL_S)


@contextmanager
def _process(command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``command`` until the block ends. Raises BadRequest if it cannot be started."""
    try:
        process = subprocess.Popen(shlex.split(command))
    except (OSError, ValueError) as error:
        raise BadRequest(f"--start: must be a command, received {quoted(command)}: {clipped(error)}") from error
    with process:
        try:
            yield process
        finally:
            process.terminate()


def _numbers(option: str, text: str, kind: type[int] | type[float]) -> list[Any]:
    try:
        numbers = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = [0]
    if any(number <= 0 for number in numbers):
        raise BadRequest(f"{option}: must be positive numbers separated by commas, received {quoted(text)}")
    return numbers


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise BadRequest(f"{option}: must be a JSON object, received {quoted(text)}")
    return fields
