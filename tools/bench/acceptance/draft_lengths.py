"""Case ``draft-lengths``: adaptive draft lengths against fixed ones, on one opened bundle.

    python -m tools.bench.acceptance draft-lengths engines/built/demo --texts sentences.txt
    python -m tools.bench.acceptance draft-lengths BUNDLE --device cuda --batches 1,16,64 --prompt 1000 --tokens 256

Without --texts prompts are random tokens, and drafts are accepted by the ``synthetic`` rule: each of --accepted tokens
a round, or the least and the most of them by turns (``mixed``). With --texts, one prompt a line, drafts are accepted by
the ordinary rule. The case prints tokens per second for every draft length, the adaptive
planner's share of the best fixed length, and its ratio to autoregressive decoding. The JSON also holds the time of
rounds and the planner's cost estimates. Autoregressive decoding is draft length 0 of the same bundle, which still
feeds the draft model, so a bundle without a draft would be faster.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tandemrt import LLM, SamplingParams
from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.contract.calls import bucket
from tandemrt.runtime.engine_loop.draft_windows import DraftWindowPlanner
from tools.bench.gpu import requests
from tools.bench.gpu.burst import Burst, Measured
from tools.bench.options import integers
from tools.bench.report import Json

console = Console(width=160, soft_wrap=True, highlight=False)


def main(
    bundle: Annotated[Path, typer.Argument(help="A bundle with a draft.")],
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cpu",
    batch_sizes: Annotated[str, typer.Option("--batches", help="Concurrent requests of each line.")] = "1,4",
    prompt: Annotated[int, typer.Option(help="Tokens per random prompt.", min=2)] = 64,
    tokens: Annotated[int, typer.Option(help="Measured tokens per request.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="Temperature of every request.", min=0.0)] = 0.7,
    accepted: Annotated[str, typer.Option(help="Tokens per round of each line, 1: useless drafts.")] = "3.0,1.0",
    texts: Annotated[Path | None, typer.Option(help="A file of prompts, one a line.")] = None,
    repeats: Annotated[int, typer.Option(help="Runs of each line, alternating; the best counts.", min=1)] = 2,
    out: Json = None,
) -> None:
    """Print tokens per second of adaptive and of fixed draft lengths."""
    opened = Bundle.open(bundle)
    figures: dict[str, Any] = {}
    with LLM(bundle, device=device, adaptive_draft_tokens=True, lookup=False, synthetic_rule=True) as llm:
        lines = Lines(llm, opened, prompt, tokens, temperature)
        lengths = [float(each) for each in accepted.split(",")]
        of_kind: dict[str, list[float | None]] = {str(each): [each] for each in lengths}
        of_kind["mixed"] = [min(lengths), max(lengths)]
        for batch in integers(batch_sizes):
            for kind, rates in ({"texts": [None]} if texts else of_kind).items():
                lines_of_texts = texts.read_text().splitlines() if texts else []
                figures[f"{kind} x {batch}"] = lines.measure(kind, rates, batch, repeats, lines_of_texts)
                if out is not None:
                    out.write_text(json.dumps(figures, indent=2) + "\n")


class Lines:
    """Measures the lines of the report on one opened bundle."""

    def __init__(self, llm: LLM, bundle: Bundle, prompt: int, tokens: int, temperature: float) -> None:
        self._llm, self._bundle = llm, bundle
        self._prompt, self._tokens = prompt, tokens
        self._temperature = temperature
        self._adaptive = llm.loop.draft_windows

    def measure(
        self, kind: str, lengths: Sequence[float | None], batch: int, repeats: int, texts: Sequence[str]
    ) -> dict[str, Any]:
        """Return tokens per second of ``batch`` requests for every draft length, and the shares of the adaptive one.

        ``lengths``: tokens a round of the requests, by turns; None: as the ordinary rule accepts.
        """
        limit = self._bundle.limits.num_draft_tokens
        planners = {f"length {length}": DraftWindowPlanner(length, limit) for length in self._adaptive.usual(1)}
        planners["adaptive"] = self._adaptive
        best_of: dict[str, Measured] = {}
        prompts, params = self._requests(lengths, batch, texts)
        for _ in range(repeats):
            for name, planner in planners.items():
                self._llm.loop.draft_windows = planner
                measured = Burst(self._llm, self._tokens).run(prompts, params)
                if name not in best_of or measured.tokens_per_second > best_of[name].tokens_per_second:
                    best_of[name] = measured
        self._llm.loop.draft_windows = self._adaptive
        rates = {name: measured.tokens_per_second for name, measured in best_of.items()}
        fixed = {name: rate for name, rate in rates.items() if name != "adaptive"}
        best = max(fixed, key=lambda name: fixed[name])
        of_best, of_base = (rates["adaptive"] / each for each in (fixed[best], fixed["length 0"]))
        each = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        adaptive = best_of["adaptive"].metrics
        drafted = adaptive.drafted / max(1, adaptive.rounds) / batch
        console.print(
            f"{kind:>8} x {batch:<3} {each} tokens/s: {of_best:.3f} of {best}, {of_base:.3f} of autoregressive; "
            f"{drafted:.2f} drafted a row"
        )
        costs, rows = self._adaptive.costs, bucket(batch, self._bundle.limits.batch)
        return {
            "tokens_per_second": rates,
            "of_best": of_best,
            "of_autoregressive": of_base,
            "ms_per_round": {name: measured.ms_per_round for name, measured in best_of.items()},
            "drafted_per_row": drafted,
            "costs_ms": {length: 1e3 * costs.estimate(rows, length) for length in self._adaptive.usual(batch)},
        }

    def _requests(
        self, lengths: Sequence[float | None], batch: int, texts: Sequence[str]
    ) -> tuple[list[list[int]], list[SamplingParams]]:
        sizes = (self._bundle, batch, self._prompt, self._temperature, self._bundle.limits.num_draft_tokens)
        drawn = {length: requests.unconstrained(*sizes, length) for length in set(lengths)}
        params = [drawn[lengths[at % len(lengths)]][at] for at in range(batch)]
        if not texts:
            return requests.prompts(self._bundle, batch, self._prompt), params
        return [self._llm.tokenizer.encode(texts[at % len(texts)]) for at in range(batch)], params
