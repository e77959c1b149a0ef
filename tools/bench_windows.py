"""Measure windows that adapt against fixed ones, on one opened bundle.

    python -m tools.bench_windows engines/built/demo --texts sentences.txt
    python -m tools.bench_windows BUNDLE --device cuda --batches 1,16,64 --prompt 1000 --tokens 256

Without --texts prompts are random tokens, and drafts are accepted by the rule synthetic: as many as --accepted says
(``useful``), none (``useless``), or the one for every second request (``mixed``). With --texts, one prompt a line, they
are accepted by the ordinary rule. Prints tokens per second for every window, and for windows that adapt their share of
the best fixed one's; beside plain decoding, what useless drafts cost. The file has what rounds took, too, and what
windows were held to cost. Plain decoding is window 0 of the same bundle: it still feeds the draft, so what a bundle
without one would gain is not in it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tandemrt import LLM, SamplingParams
from tandemrt.engines.bundle import Bundle
from tandemrt.engines.calls import bucket
from tandemrt.runtime.round.windows import Windows
from tools.gpu import requests
from tools.gpu.burst import Burst, Measured
from tools.gpu.prompt_parts import numbers

console = Console(width=160, soft_wrap=True, highlight=False)
WARM = 32  # tokens of every request before anything is measured


def main(
    bundle: Annotated[Path, typer.Argument(help="A bundle with a draft.")],
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cpu",
    batch_sizes: Annotated[str, typer.Option("--batches", help="Requests that run together, per line.")] = "1,4",
    prompt: Annotated[int, typer.Option(help="Tokens per random prompt.", min=2)] = 64,
    tokens: Annotated[int, typer.Option(help="Measured tokens per request.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="Of every request.", min=0.0)] = 0.7,
    accepted: Annotated[float, typer.Option(help="Tokens per round where drafts are useful.", min=1.0)] = 3.0,
    texts: Annotated[Path | None, typer.Option(help="A file of prompts, one a line.")] = None,
    repeats: Annotated[int, typer.Option(help="Runs of each line, in turns; the best counts.", min=1)] = 2,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Open the bundle once, with windows that adapt, and measure every line."""
    opened = Bundle.open(bundle)
    found: dict[str, Any] = {}
    with LLM(bundle, device=device, adaptive_window=True, synthetic_rule=True) as llm:
        lines = Lines(llm, opened, prompt, tokens, temperature, accepted)
        for batch in numbers(batch_sizes):
            for kind in ("texts",) if texts else ("useful", "useless", "mixed"):
                found[f"{kind} x {batch}"] = lines.measure(kind, batch, repeats, texts.read_text() if texts else "")
                if out is not None:
                    out.write_text(json.dumps(found, indent=2) + "\n")


class Lines:
    """The lines of the report."""

    def __init__(self, llm: LLM, bundle: Bundle, prompt: int, tokens: int, temperature: float, accepted: float) -> None:
        self._llm, self._bundle = llm, bundle
        self._prompt, self._tokens = prompt, tokens
        self._temperature, self._accepted = temperature, accepted
        self._adaptive = llm.loop.windows

    def measure(self, kind: str, batch: int, repeats: int, texts: str) -> dict[str, Any]:
        """Tokens per second of ``batch`` requests for every window, and how near those that adapt come."""
        limit = self._bundle.limits.window
        ways = {f"window {window}": Windows(window, limit) for window in self._adaptive.usual(1)}
        ways["adaptive"] = self._adaptive
        best_of: dict[str, Measured] = {}
        asked = self._asked(kind, batch, texts)
        for _ in range(repeats):
            for name, windows in ways.items():
                self._llm.loop.windows = windows
                measured = Burst(self._llm, WARM, self._tokens).run(*asked)
                if name not in best_of or measured.tokens_per_second > best_of[name].tokens_per_second:
                    best_of[name] = measured
        self._llm.loop.windows = self._adaptive
        rates = {name: measured.tokens_per_second for name, measured in best_of.items()}
        fixed = {name: rate for name, rate in rates.items() if name != "adaptive"}
        best = max(fixed, key=lambda name: fixed[name])
        share, of_plain = (rates["adaptive"] / each for each in (fixed[best], fixed["window 0"]))
        each = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        adaptive = best_of["adaptive"].metrics
        drafted = adaptive.drafted / max(1, adaptive.rounds) / batch
        console.print(
            f"{kind:>8} x {batch:<3} {each} tokens/s: {share:.3f} of {best}, {of_plain:.3f} of plain decoding; "
            f"{drafted:.2f} drafted a row"
        )
        costs, rows = self._adaptive.costs, bucket(batch, self._bundle.limits.batch)
        return {
            "tokens_per_second": rates,
            "of_best": share,
            "of_plain": of_plain,
            "ms_per_round": {name: measured.ms_per_round for name, measured in best_of.items()},
            "drafted_per_row": drafted,
            "costs_ms": {window: 1e3 * costs.of(rows, window) for window in self._adaptive.usual(batch)},
        }

    def _asked(self, kind: str, batch: int, texts: str) -> tuple[list[list[int]], list[SamplingParams]]:
        of_kind: dict[str, list[float | None]] = {
            "useful": [self._accepted],
            "useless": [1.0],
            "mixed": [1.0, self._accepted],
            "texts": [None],
        }
        lengths = of_kind[kind]
        sizes = (self._bundle, batch, self._prompt, self._temperature, self._bundle.limits.window)
        drawn = {length: requests.plain(*sizes, length) for length in set(lengths)}
        params = [drawn[lengths[at % len(lengths)]][at] for at in range(batch)]
        if kind != "texts":
            return requests.prompts(self._bundle, batch, self._prompt), params
        lines: Sequence[str] = texts.splitlines()
        return [self._llm.tokenizer.encode(lines[at % len(lines)]) for at in range(batch)], params


if __name__ == "__main__":
    typer.run(main)
