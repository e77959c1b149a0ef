"""Acceptance by temperature and by how drafts are drawn: ``python -m tools.bench_acceptance BUNDLE``.

Each temperature's prompts run in one batch, three ways: drafts drawn to the target's noise (coupled), drawn with
probabilities (the rejection rule), and greedy under the rejection rule, which knows no probabilities then. Under the
rejection rule texts depend on the drafts, so ways are compared over different texts. Rounds of one text are alike: the
standard error is that of a ratio over texts, each drawn by itself.
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
    scale: Annotated[float | None, typer.Option(help="Of the draft's temperature; else the bundle's")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each engine")] = 1,
) -> None:
    """Print a row for each temperature as it is measured: acceptance length, its standard error, and acceptance per
    position."""
    chats = _chats(prompts, count)
    _row("temperature", *WAYS)
    _row(*("---" for _ in range(1 + len(WAYS))))
    with LLM(bundle, threads=threads) as llm:
        for each in temperature or TEMPERATURES:
            ways = [way | {"draft_temperature_scale": scale} for way in WAYS.values()]
            _row(f"{each:g}", *(_figures(llm, each, chats, tokens, way) for way in ways))


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
    texts = [(each.speculation.num_accepted_draft_tokens, each.speculation.num_spec_steps) for each in outputs]
    steps = sum(rounds for _, rounds in texts)
    mean = sum(accepted for accepted, _ in texts) / steps
    error = math.sqrt(sum((accepted - mean * rounds) ** 2 for accepted, rounds in texts)) / steps
    positions = " ".join(f"{each / spent.steps:.2f}" for each in spent.accepted)
    return f"{1 + mean:.2f} ± {error:.2f} ({positions})"


if __name__ == "__main__":
    typer.run(main)
