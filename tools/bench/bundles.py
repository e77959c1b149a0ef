"""Measure bundles of one model in different engines, such as onnxruntime's and TensorRT's.

    python -m tools.bench.bundles BUNDLE ... --batches 1,16 --json figures.json

The model may have random weights: prompts are random tokens, and the rule ``synthetic`` accepts the drafts. Each bundle
is opened alone. A line has milliseconds per autoregressive token, per round with drafts, and until all prompts have
their first token.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from tandemrt import LLM
from tandemrt.engines.bundle.bundle import Bundle
from tools.bench.gpu import requests
from tools.bench.gpu.burst import Burst
from tools.bench.gpu.prompts import first_tokens
from tools.bench.options import integers

_REPEATS = 5  # of first tokens
_TEMPERATURE = 0.7


def main(
    bundles: Annotated[list[Path], typer.Argument(help="Folders of bundles.")],
    batch_sizes: Annotated[str, typer.Option("--batches", help="Concurrent requests of each line.")] = "1,16",
    prompt: Annotated[int, typer.Option(help="Tokens per prompt.", min=2)] = 1000,
    tokens: Annotated[int, typer.Option(help="Measured tokens per request.", min=1)] = 128,
    acceptance: Annotated[float, typer.Option(help="Tokens per round, by the rule synthetic.")] = 3.0,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Measure every bundle at every batch size."""
    figures: dict[str, list[dict[str, Any]]] = {}
    for folder in bundles:
        bundle = Bundle.open(folder)
        with LLM(folder, profile=True, synthetic_rule=True, adaptive_draft_tokens=False) as llm:
            figures[str(folder)] = []
            for batch in integers(batch_sizes):
                line = measure(llm, bundle, batch, prompt, tokens, acceptance)
                print(folder, *(f"{name}: {_short(value)}" for name, value in line.items()), sep="; ", flush=True)
                figures[str(folder)].append(line)
        if out is not None:
            out.write_text(json.dumps(figures, indent=2) + "\n")


def measure(llm: LLM, bundle: Bundle, batch: int, prompt: int, tokens: int, acceptance: float) -> dict[str, Any]:
    """Return the figures of ``batch`` requests with prompts of ``prompt`` tokens."""
    seeds: Iterator[int] = iter(range(_REPEATS + 3))
    prompts = partial(requests.prompts, bundle, batch, prompt)
    params = partial(requests.unconstrained, bundle, batch, prompt, _TEMPERATURE)
    alone = params(0)
    first_tokens(llm, prompts(next(seeds)), alone)  # binds the calls
    firsts = [first_tokens(llm, prompts(next(seeds)), alone) for _ in range(_REPEATS)]
    window = bundle.limits.num_draft_tokens
    single, rounds = (
        Burst(llm, tokens).run(prompts(next(seeds)), params(drafted, acceptance)) for drafted in (0, window)
    )
    return {
        "batch": batch,
        "ms_per_token": single.ms_per_round,
        "ms_per_round": rounds.ms_per_round,
        "acceptance_length": rounds.acceptance_length,
        "target_ms_per_token": single.device_ms.get("target"),
        "target_ms_per_round": rounds.device_ms.get("target"),
        "first_tokens_ms": median(firsts),
        "eager_runs": {reason: count for reason, count in rounds.metrics.eager_runs.items() if count},
    }


def _short(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    typer.run(main)
