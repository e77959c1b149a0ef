"""Compare TandemRT on this CPU with other engines: the same model and tokens for all, in alternating runs.

python -m tools.bench.cpu                           # random weights of SmolLM2-135M's shape
python -m tools.bench.cpu --checkpoint FOLDER       # a Llama-like checkpoint with tokenizer.json
python -m tools.bench.cpu --gguf FILE               # a GGUF file as it is, beside llama.cpp
python -m tools.bench.cpu --only tandemrt --only genai --repeats 5
python -m tools.bench.cpu.tables FIGURES docs/data  # the tables of docs/benchmarks.md from a file of --json

pip installs each engine once, into an environment of its own in the folder --cache, which also holds the models. An
engine is left out, with the reason, if it cannot be installed, cannot read the model or does not support a measure.
Every engine runs in its own process with one thread per core, one at a time. Figures are medians. The ratio compares
our best form with the best other engine of the table: below 1 is faster, for rates above 1.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from tandemrt.export.quantize.gguf.checkpoint import read_gguf
from tools.bench.cpu.environments import Environment, prepare
from tools.bench.cpu.measures import Measure, measures
from tools.bench.cpu.models import ENTRANTS, Entrant, gguf_entrants, make, random_checkpoint
from tools.bench.cpu.process import Worker
from tools.bench.cpu.results import Results, agreement, markdown
from tools.bench.report import Json

console = Console(stderr=True)
CACHE = Path.home() / ".cache" / "tandemrt-bench-cpu"
Step = Callable[[str], None]


def main(
    checkpoint: Annotated[Path | None, typer.Option(help="A checkpoint folder; default: random weights.")] = None,
    gguf: Annotated[Path | None, typer.Option(help="A GGUF file, which only llama.cpp and we read as it is.")] = None,
    cache: Annotated[Path, typer.Option(help="Where environments and models are kept.")] = CACHE,
    only: Annotated[list[str] | None, typer.Option(help="An engine to measure; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measured runs of each kind, after one to warm up.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each engine.")] = len(os.sched_getaffinity(0)),
    install_s: Annotated[float, typer.Option(help="The longest an engine's installation may take.")] = 900.0,
    out: Json = None,
) -> None:
    """Measure and print the tables in Markdown."""
    cache.mkdir(parents=True, exist_ok=True)
    if gguf is not None:
        model, vocab = gguf, int(read_gguf(gguf).config["vocab_size"])
    else:
        model = checkpoint or random_checkpoint(cache / "smollm2-135m-random")
        vocab = int(json.loads((model / "config.json").read_text())["vocab_size"])
    entrants = [each for each in (gguf_entrants(gguf) if gguf else ENTRANTS) if not only or each.engine in only]
    results = Results()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress, ExitStack() as stack:
        task = progress.add_task("", total=len(entrants) * (repeats + 2))

        def step(title: str) -> None:
            progress.update(task, description=title, advance=1)

        ready = _prepared(entrants, cache, model, install_s, results, step)
        environments = {entrant.engine: environment for entrant, (environment, _) in ready.items()}
        workers = _started(ready, threads, repeats, cache, results, step)
        for worker in workers.values():
            stack.callback(worker.close)
        kinds = measures(vocab)
        for repeat in range(repeats + 1):  # the first run warms up
            for entrant in list(workers):
                step(f"run {repeat} of {repeats}: {entrant}")
                _measure(entrant, workers[entrant], kinds, results, count=repeat > 0)
    for quantized in (False, True):
        if table := markdown(results, kinds, quantized=quantized):
            print(table, end="\n\n")
    for name in () if gguf else ("autoregressive", "streams", "speculation"):
        print(f"same text, {name}: {agreement(results, name)} float32 engines")
    for entrant, why in results.left_out.items():
        print(f"left out: {entrant}: {why}")
    for (entrant, name), why in results.missing.items():
        print(f"without {name}: {entrant}: {why}")
    if out is not None:
        command = ["python -m tools.bench.cpu", *(f"--only {each}" for each in only or ())]
        command += [f"--checkpoint {checkpoint.name}"] if checkpoint else []
        command += [f"--gguf {gguf.name}"] if gguf else []
        origin = {"command": " ".join([*command, f"--repeats {repeats}"]), "machine": _machine(threads)}
        versions = {engine: environment.version(engine) for engine, environment in environments.items()}
        out.write_text(json.dumps(origin | {"versions": versions} | results.to_json(), indent=2) + "\n")


def _machine(threads: int) -> str:
    flags = Path("/proc/cpuinfo").read_text().split() if sys.platform == "linux" else []
    known = {"avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON"}
    best = next((name for flag, name in known.items() if flag in flags), "")
    return f"{threads} threads on {len(os.sched_getaffinity(0))} CPU cores{f' with {best}' if best else ''}"


def _prepared(
    entrants: Sequence[Entrant], cache: Path, model: Path, install_s: float, results: Results, step: Step
) -> dict[Entrant, tuple[Environment, str]]:
    """Return the environment and the model of every engine that can run."""
    ready: dict[Entrant, tuple[Environment, str]] = {}
    failed: dict[str, str] = {}
    for entrant in entrants:
        step(f"prepare {entrant}")
        try:
            if entrant.engine in failed:
                raise OSError(failed[entrant.engine])
            environment = prepare(entrant.engine, cache, timeout_s=install_s)
        except OSError as error:
            results.left_out[entrant] = failed[entrant.engine] = str(error)
            continue
        try:
            ready[entrant] = environment, make(entrant, environment, model, cache)
        except (OSError, ValueError, KeyError) as error:
            results.left_out[entrant] = str(error)
    return ready


def _started(
    ready: Mapping[Entrant, tuple[Environment, str]],
    threads: int,
    repeats: int,
    cache: Path,
    results: Results,
    step: Step,
) -> dict[Entrant, Worker]:
    """Start a worker per engine, several times to measure the start.

    The first start reads the files and is not counted.
    """
    workers: dict[Entrant, Worker] = {}
    for repeat in range(repeats + 1):
        for entrant, (environment, model) in ready.items():
            if entrant in results.left_out:
                continue
            if not repeat:
                step(f"start {entrant}")
            try:
                errors = cache / f"{entrant.engine}-{entrant.form}.log"
                worker = Worker(environment.python, entrant.engine, model, threads, errors)
            except OSError as error:
                results.left_out[entrant] = str(error)
                continue
            if repeat:
                results.add(entrant, "start", worker.seconds)
                results.add(entrant, "peak", worker.peak_mb)
            if repeat == repeats:
                workers[entrant] = worker
            else:
                worker.close()
    return workers


def _measure(entrant: Entrant, worker: Worker, kinds: Mapping[str, Measure], results: Results, *, count: bool) -> None:
    for name, kind in kinds.items():
        if (entrant, name) in results.missing:
            continue
        try:
            answer = worker.ask(kind.asked)
        except OSError as error:
            answer = {"unable": str(error)}
        if "unable" in answer:
            results.missing[entrant, name] = answer["unable"]
        elif count:
            tokens = sum(map(len, answer["outputs"]))
            results.add(entrant, name, kind.figure(answer["seconds"], tokens))
            results.outputs.setdefault(entrant, {})[name] = answer["outputs"]


if __name__ == "__main__":
    typer.run(main)
