"""Soak the runtime with random requests of every kind.

    python -m tools.quality.soak --minutes 10
    python -m tools.quality.soak --requests 100000 --seed 7 --json soak.json
    python -m tools.quality.soak --first 4050 --minutes 10 --seed 7

The bundles hold tiny random models: with a draft model, with the overlap and the synchronous schedule, with n-gram
drafts, and with a paged cache that is too small for the longest requests of all slots, so that requests are preempted.
Now and then a bundle is closed and opened again, and its first requests are refused threads. Every answer must equal
the output of the same request alone; one that was cancelled or timed out must be a prefix of it. The runtime's
counters must agree with the answers, and memory and threads must not grow. One request in ten gets a fault of the
named kinds. The exit code is 1 on any finding. Several seeds may run in parallel, and parts of a
seed: a run of 4,050 requests is continued by ``--first 4050``, the number of requests of whole waves. ``--requests``
counts from the first request of the seed, so those before ``--first`` are included.
"""

import gc
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tandemrt.runtime.llm.llm import LLM
from tools.bench.report import Json
from tools.clients.triton import triton_server
from tools.quality.soak.driver import PATIENCE_S, Driver
from tools.quality.soak.faults import KINDS, faulty_text_streams, faulty_threads
from tools.quality.soak.models import PAGED_TOKENS, build_bundles
from tools.quality.soak.plans import WHOLE, Plan, draw_plans, draw_waves
from tools.quality.soak.reference import Reference
from tools.quality.soak.result import SoakResult
from tools.quality.soak.triton import TritonDriver

DISTINCT = 400  # plans to draw from
QUEUE = 14  # less than a flood minus the slots, and enough for every client
WRITE_EVERY = 20  # waves between two writes of the figures
SHOWN = 20  # findings that are printed


def soak(
    *,
    requests: int | None,
    minutes: float | None,
    seed: int = 0,
    first: int = 0,
    faults: tuple[str, ...] = tuple(KINDS),
    distinct: int = DISTINCT,
    triton: bool = False,
    patience_s: float = PATIENCE_S,
    console: Console | None = None,
    out: Path | None = None,
) -> SoakResult:
    """Send ``requests`` requests in waves, or as many as fit into ``minutes``; return the result.

    The first ``first`` of them, those of whole waves, are only drawn: an earlier run has sent them. ``out`` gets the
    figures so far every WRITE_EVERY waves.
    """
    result, start = SoakResult(seed, list(faults), first), time.monotonic()
    plans, draw = draw_plans(Random(seed), distinct), Random(seed + 1)
    columns = (TextColumn("soaking"), MofNCompleteColumn(), TextColumn("{task.fields[found]} findings"))
    console = console or Console(quiet=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandemrt-soak-")))
        bundles = build_bundles(folder)
        alone = Reference(stack.enter_context(_open(bundles["model"])), plans)
        drivers = _drivers(stack, bundles, plans, alone, patience_s)
        result.drivers = [driver.name for driver in drivers]
        triton_driver = None
        if triton:
            client = stack.enter_context(triton_server(bundles["model"], threads=1))
            triton_driver = TritonDriver(client, plans, alone)
        stack.enter_context(faulty_text_streams([driver.faults for driver in drivers]))
        stack.enter_context(faulty_threads(driver.faults for driver in drivers))
        progress = stack.enter_context(
            Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
        )
        task = progress.add_task("soak", total=requests, completed=first, found=0)
        gc.freeze()  # live until the end: the collection after every wave skips them
        stack.callback(gc.unfreeze)
        result.measure()
        for wave in draw_waves(draw, plans, faults, len(drivers), requests):
            if wave.first < first:
                continue
            if minutes is not None and time.monotonic() - start >= 60 * minutes:
                break
            driver = drivers[wave.number % len(drivers)]
            if wave.refused_threads is not None:
                driver.reopen(refused_threads=wave.refused_threads)
            result.findings += driver.wave(wave.attempts, wave.flood)
            result.requests += wave.requests
            if triton_driver is not None:
                result.findings += triton_driver.wave(wave.attempts)
                result.triton_requests += len(wave.attempts)
            gc.collect()
            result.measure()
            progress.update(task, completed=first + result.requests, found=len(result.findings))
            if driver.stuck or wave.number % WRITE_EVERY == WRITE_EVERY - 1:
                _sum_up(result, drivers, start)
                if out is not None:
                    result.write(out)
            if driver.stuck:  # closing would block as well
                stack.pop_all()
                break
    _sum_up(result, drivers, start)
    result.findings += result.violations()
    if out is not None:
        result.write(out)
    return result


def main(
    minutes: Annotated[float | None, typer.Option(min=0.0, help="Duration. Default: 5 without --requests.")] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Number of requests, floods and those before --first included.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of requests and faults.")] = 0,
    first: Annotated[
        int, typer.Option(min=0, help=f"Requests of this seed that earlier runs have sent, a multiple of {WHOLE}.")
    ] = 0,
    faults: Annotated[str, typer.Option(help=f"Kinds of faults, with commas: {', '.join(KINDS)}; or none.")] = ",".join(
        KINDS
    ),
    distinct: Annotated[
        int, typer.Option(min=2, help="Different requests to draw from; each is run alone once.")
    ] = DISTINCT,
    triton: Annotated[bool, typer.Option("--triton", help="Send every wave to a Triton server as well.")] = False,
    patience: Annotated[float, typer.Option(min=1.0, help="Seconds after which a wave counts as stuck.")] = PATIENCE_S,
    out: Json = None,
) -> None:
    """Soak the runtime, and print the findings."""
    console = Console(highlight=False)
    kinds = tuple(kind for kind in faults.split(",") if kind != "none")
    if unknown := set(kinds) - KINDS.keys():
        console.print(f"--faults: must be among {', '.join(KINDS)}, got {sorted(unknown)[0]!r}; choose among them")
        raise typer.Exit(2)
    if first % WHOLE:
        least = first // WHOLE * WHOLE
        console.print(
            f"--first: must be a multiple of {WHOLE}, the requests of a wave, got {first}; choose {least}, or "
            f"{least + WHOLE} to skip the wave"
        )
        raise typer.Exit(2)
    if requests is not None and requests <= first:
        console.print(
            f"--requests: must be above --first ({first}), whose requests it includes, got {requests}; choose more"
        )
        raise typer.Exit(2)
    logging.getLogger("tandemrt").setLevel(logging.CRITICAL + 1)  # injected faults are logged; findings are errors
    minutes = 5.0 if minutes is None and requests is None else minutes
    result = soak(
        requests=requests,
        minutes=minutes,
        seed=seed,
        first=first,
        faults=kinds,
        distinct=distinct,
        triton=triton,
        patience_s=patience,
        console=console,
        out=out,
    )
    console.print(result.table())
    for finding in result.findings[:SHOWN]:
        console.print(f"- {finding}", markup=False)
    asked = (
        f"--requests {first + result.requests} --first {first} --seed {seed} --distinct {distinct} --faults {faults}"
    )
    repeat = f"python -m tools.quality.soak {asked}"
    console.print(f"{len(result.findings)} findings; to repeat it: {repeat}{' --triton' if triton else ''}")
    if result.stuck:  # the interpreter would wait for the blocked threads
        sys.stdout.flush()
        os._exit(1)
    if result.findings:
        raise typer.Exit(1)


def _drivers(
    stack: ExitStack, bundles: dict[str, Path], plans: list[Plan], alone: Reference, patience_s: float
) -> list[Driver]:
    """Open every bundle with the options to soak, and a second time as the reference for requests alone.

    ``alone``: the reference of the bundle "model".
    """

    def driver(name: str, kind: str, reference: Reference, **options: Any) -> Driver:
        open_llm = partial(_open, bundles[kind], queue_limit=QUEUE, **options)
        opened = Driver(name, open_llm, plans, reference, patience_s=patience_s)
        stack.callback(opened.close)
        return opened

    def reference(kind: str, coupled: Reference | None = None) -> Reference:
        return Reference(stack.enter_context(_open(bundles[kind])), plans, coupled)

    drivers = []
    if "paged" in bundles:
        # Other matmul and attention implementations: its logits differ in their last bits.
        paged = reference("paged")
        ngram = reference("paged ngram", paged)
        drivers += [
            driver("paged, overlap", "paged", paged, overlap=True, cache_tokens=PAGED_TOKENS),
            driver("paged, synchronous", "paged", paged, overlap=False, cache_tokens=PAGED_TOKENS),
            driver("paged ngram, overlap", "paged ngram", ngram, overlap=True, cache_tokens=PAGED_TOKENS),
        ]
    return [
        *drivers,
        driver("model, overlap", "model", alone, overlap=True),
        driver("model, synchronous", "model", alone, overlap=False),
        driver("ngram, overlap", "ngram", reference("ngram", alone), overlap=True),
    ]


def _open(bundle: Path, **options: Any) -> LLM:
    # Under the rejection rule fast-forward drafts change texts, and their default depends on the schedule.
    return LLM(bundle, device="cpu", threads=1, fast_forward_drafts=True, **options)


def _sum_up(result: SoakResult, drivers: list[Driver], start: float) -> None:
    result.seconds = time.monotonic() - start
    result.stuck = any(driver.stuck for driver in drivers)
    result.ended = sum((driver.ended for driver in drivers), Counter())
    result.abandoned = sum(driver.abandoned for driver in drivers)
    result.rejected = sum(driver.rejected for driver in drivers)
    result.engine_failures = sum(driver.faults.engine_failures for driver in drivers)
    result.thread_refusals = sum(driver.faults.thread_refusals for driver in drivers)
    result.preemptions = sum(driver.preemptions for driver in drivers)


if __name__ == "__main__":
    typer.run(main)
