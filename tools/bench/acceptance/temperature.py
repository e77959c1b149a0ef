"""Case ``temperature``: acceptance length by temperature and by how drafts are sampled.

python -m tools.bench.acceptance temperature BUNDLE

The prompts of a temperature run in one batch in three ways: coupled (drafts sampled with the target's noise),
probabilistic (sampled from the draft distribution, under the rejection rule), and greedy under the rejection rule.
Under the rejection rule texts depend on the drafts, so the ways are compared over different texts. Rounds of one text
are correlated, so the standard error is that of a ratio over texts.
"""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from tandemrt import LLM, SamplingParams
from tools.bench.report import Json, Report, Row
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
        Path | None, typer.Option(help='JSON lines with "messages". Default: held-out sentences of the demo.')
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each text.")] = 100,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0, help="A temperature to measure; may be repeated. Default: eight.")
    ] = None,
    scale: Annotated[
        float | None, typer.Option(help="Scale of the draft's temperature. Default: the bundle's.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each engine.")] = 1,
    out: Json = None,
) -> None:
    """Print the acceptance length, its standard error and the acceptance per position of each temperature and way."""
    chats = _chats(prompts, count)
    with LLM(bundle, threads=threads, adaptive_draft_tokens=False, lookup=False) as llm:
        scaled = {"draft_temperature_scale": scale}  # greedy drafts have no temperature
        ways = [way if way.get("draft_sampling") == "greedy" else way | scaled for way in WAYS.values()]
        rows: list[Row] = [
            (each, *(_figures(llm, each, chats, tokens, way) for way in ways))
            for each in track(temperature or TEMPERATURES, description=bundle.name)
        ]
    Report(out).add("acceptance length", {"temperature": "g"} | dict.fromkeys(WAYS, ""), rows)


def _chats(prompts: Path | None, count: int) -> list[list[dict[str, str]]]:
    if prompts is None:
        return [example.prompt_messages() for example in held_out(count)]
    lines = prompts.read_text(encoding="utf-8").splitlines()
    if len(lines) < count:
        raise typer.BadParameter(f"{prompts} must have {count} lines, got {len(lines)}", param_hint="--prompts")
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
