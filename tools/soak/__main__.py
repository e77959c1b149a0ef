"""Soak the runtime with random requests of every kind.

    python -m tools.soak --minutes 10
    python -m tools.soak --requests 100000 --seed 7 --json soak.json

Tiny models are made on the spot: with a draft model, with and without overlap, with n-grams, and with a paged cache
that is shorter than what all slots may ask for. Every answer is held against what the same request gets alone (one that
was cancelled or ran out of time must be a beginning of it), the runtime's counters against what the answers say, and
memory and threads against what they were. Faults of the named kinds break one request in ten. The exit code is 1 on any
finding. Several seeds may run side by side.
"""

import gc
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tandemrt.runtime.llm import LLM
from tools.soak.drive import PATIENCE_S, Driver, Reference
from tools.soak.faults import KINDS, Faults, breaking_transcripts
from tools.soak.figures import Soaked
from tools.soak.models import PAGED_TOKENS, build_bundles
from tools.soak.plans import Plan, draw_plans, draw_turn
from tools.soak.served import Served, serving

DISTINCT = 400  # requests to draw from: each must be run alone once
WAVE = 50
FLOOD = 30
MISFIT = 1  # of a flood: see Driver.wave
QUEUE = 14  # less than a flood and the slots leave over, and room for every client
NOTED = 20  # waves between two times that the figures are written
SHOWN = 20  # findings that are printed


def soak(
    *,
    requests: int | None,
    minutes: float | None,
    seed: int = 0,
    faults: tuple[str, ...] = tuple(KINDS),
    distinct: int = DISTINCT,
    triton: bool = False,
    patience_s: float = PATIENCE_S,
    console: Console | None = None,
    out: Path | None = None,
) -> Soaked:
    """Send ``requests``, or as many as ``minutes`` have room for, in waves; return what was found.

    ``out`` holds the figures so far, should the run be ended before its end.
    """
    # What breaks on purpose is logged by the runtime; what breaks otherwise is a finding.
    logging.getLogger("tandemrt").setLevel(logging.CRITICAL + 1)
    result, start = Soaked(seed, list(faults)), time.monotonic()
    plans, draw = draw_plans(Random(seed), distinct), Random(seed + 1)
    columns = (TextColumn("soaking"), MofNCompleteColumn(), TextColumn("{task.fields[found]} findings"))
    console = console or Console(quiet=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandemrt-soak-")))
        bundles = build_bundles(folder)
        drivers = _open(stack, bundles, plans, patience_s)
        result.drivers = [driver.name for driver in drivers]
        server = None
        if triton:
            server = Served(stack.enter_context(serving(bundles["model"], folder)), plans, drivers[0].reference)
        stack.enter_context(breaking_transcripts([driver.faults for driver in drivers]))
        progress = stack.enter_context(
            Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
        )
        task = progress.add_task("soak", total=requests, found=0)
        gc.freeze()  # what is there now stays: collecting after every wave need not look at it
        stack.callback(gc.unfreeze)
        number = 0
        while not _over(result.requests, requests, time.monotonic() - start, minutes):
            driver = drivers[number % len(drivers)]
            missing = WAVE + FLOOD + MISFIT if requests is None else requests - result.requests
            size, leaving = min(WAVE, missing), (number // len(drivers)) % 2 == 1
            turns = [draw_turn(draw, plans, faults, streams_leave=leaving) for _ in range(size)]
            flood = turns[:FLOOD] if missing >= WAVE + FLOOD + MISFIT else []
            result.findings += driver.wave(turns, flood)
            result.requests += size + (len(flood) + MISFIT if flood else 0)
            if server is not None:
                result.findings += server.wave(turns)
                result.served += len(turns)
            gc.collect()
            result.measure()
            progress.update(task, completed=result.requests, found=len(result.findings))
            number += 1
            if driver.stuck or number % NOTED == 0:
                _sum_up(result, drivers, start)
                if out is not None:
                    result.write(out)
            if driver.stuck:  # not even closing would come to an end
                stack.pop_all()
                break
    _sum_up(result, drivers, start)
    result.findings += result.sums()
    if out is not None:
        result.write(out)
    return result


def main(
    minutes: Annotated[float | None, typer.Option(min=0.0, help="How long; 5 if --requests is not given.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="How many requests, floods included.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="What is asked, and what happens to it.")] = 0,
    faults: Annotated[
        str, typer.Option(help=f"Kinds, with commas, of {', '.join(KINDS)}; none switches them off.")
    ] = ",".join(KINDS),
    triton: Annotated[bool, typer.Option("--triton", help="Send every wave to a Triton server as well.")] = False,
    patience: Annotated[float, typer.Option(min=1.0, help="Seconds until a wave counts as stuck.")] = PATIENCE_S,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file as well.")] = None,
) -> None:
    """Soak the runtime, and print what was found."""
    console = Console(highlight=False)
    kinds = tuple(kind for kind in faults.split(",") if kind != "none")
    if unknown := set(kinds) - KINDS.keys():
        console.print(f"--faults: must be of {', '.join(KINDS)}, received {sorted(unknown)[0]!r}; choose among them")
        raise typer.Exit(2)
    minutes = 5.0 if minutes is None and requests is None else minutes
    result = soak(
        requests=requests,
        minutes=minutes,
        seed=seed,
        faults=kinds,
        triton=triton,
        patience_s=patience,
        console=console,
        out=out,
    )
    console.print(result.table())
    for finding in result.findings[:SHOWN]:
        console.print(f"- {finding}", markup=False)
    repeat = f"python -m tools.soak --requests {result.requests} --seed {seed} --faults {faults}"
    console.print(f"{len(result.findings)} findings; to repeat it: {repeat}{' --triton' if triton else ''}")
    if result.stuck:  # the interpreter would wait for whoever waits
        sys.stdout.flush()
        os._exit(1)
    if result.findings:
        raise typer.Exit(1)


def _open(stack: ExitStack, bundles: dict[str, Path], plans: list[Plan], patience_s: float) -> list[Driver]:
    """Open every bundle in the ways it is soaked, each beside one that says what its requests get alone."""

    def opened(kind: str, **options: Any) -> LLM:
        # Under the rejection rule a text depends on whether tokens are forced, and by default that goes with overlap.
        return stack.enter_context(LLM(bundles[kind], device="cpu", threads=1, forced_drafts=True, **options))

    def driver(name: str, kind: str, reference: Reference, **options: Any) -> Driver:
        llm = opened(kind, queue_limit=QUEUE, **options)
        return Driver(name, llm, Faults(llm), plans, reference, patience_s=patience_s)

    alone = Reference(opened("model"), plans)
    drivers = [
        driver("model, overlap", "model", alone, overlap=True),
        driver("model, lockstep", "model", alone, overlap=False),
        driver("ngram, overlap", "ngram", Reference(opened("ngram"), plans, alone), overlap=True),
    ]
    if "paged" in bundles:
        # Its products and attention are others, so its logits are the same but for their last bits.
        paged = Reference(opened("paged"), plans)
        drivers.append(driver("paged, overlap", "paged", paged, overlap=True, cache_tokens=PAGED_TOKENS))
    return drivers


def _sum_up(result: Soaked, drivers: list[Driver], start: float) -> None:
    result.seconds = time.monotonic() - start
    result.stuck = any(driver.stuck for driver in drivers)
    result.ended = sum((driver.ended for driver in drivers), Counter())
    result.left = sum(driver.left for driver in drivers)
    result.refused = sum(driver.refused for driver in drivers)
    result.strikes = sum(driver.faults.strikes for driver in drivers)


def _over(done: int, requests: int | None, seconds: float, minutes: float | None) -> bool:
    enough = requests is not None and done >= requests
    return enough or (minutes is not None and seconds >= 60 * minutes)


if __name__ == "__main__":
    typer.run(main)
