"""Acceptance by temperature and by how drafts are drawn: ``python -m tools.bench_acceptance BUNDLE``.

Each temperature's prompts run in one batch, three ways: drafts drawn to the target's noise (coupled), drawn with
probabilities (the rejection rule), and greedy under the rejection rule, which knows no probabilities then.
"""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from tandemrt import LLM, SamplingParams
from tools.demo.corpus import held_out

TEMPERATURES = (0.0, 0.3, 0.5, 0.7, 1.0, 1.3, 1.5, 2.0)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"rule": "rejection", "draft_sampling": "greedy"},
    "probabilistic": {"rule": "rejection"},
    "coupled": {},
}


def main(
    bundle: Annotated[Path, typer.Argument(help="A bundle with a draft.")],
    prompts: Annotated[
        Path | None, typer.Option(help='JSON lines with "messages"; else held-out sentences of the demo')
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each text")] = 100,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0, help="One of those to measure; may be given several times")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each engine")] = 1,
) -> None:
    """Print a row for each temperature as it is measured: acceptance length, its standard error, and acceptance per
    position."""
    chats = _chats(prompts, count)
    _row("temperature", *WAYS)
    _row(*("---" for _ in range(1 + len(WAYS))))
    with LLM(bundle, threads=threads) as llm:
        for each in temperature or TEMPERATURES:
            _row(f"{each:g}", *(_figures(llm, each, chats, tokens, way) for way in WAYS.values()))


def _row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def _chats(prompts: Path | None, count: int) -> list[list[dict[str, str]]]:
    if prompts is None:
        return [example.prompt_messages() for example in held_out(count)]
    lines = prompts.read_text(encoding="utf-8").splitlines()
    if len(lines) < count:
        raise typer.BadParameter(f"{prompts} should have {count} lines, it has {len(lines)}", param_hint="--prompts")
    return [json.loads(line)["messages"] for line in lines[:count]]


def _figures(llm: LLM, temperature: float, chats: list[list[dict[str, str]]], tokens: int, way: dict[str, Any]) -> str:
    before = llm.metrics.copy()
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens, ignore_eos=True, **way)
        for seed in range(len(chats))
    ]
    outputs = llm.generate(chats, params)
    spent = llm.metrics.since(before)
    lengths = [
        n for output in outputs for n, times in enumerate(output.speculation.acceptance_histogram) for _ in range(times)
    ]
    mean = sum(lengths) / len(lengths)
    error = math.sqrt(sum((n - mean) ** 2 for n in lengths) / len(lengths) / len(lengths))
    positions = " ".join(f"{each / spent.steps:.2f}" for each in spent.accepted)
    return f"{1 + mean:.2f} ± {error:.2f} ({positions})"


if __name__ == "__main__":
    typer.run(main)
