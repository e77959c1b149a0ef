"""Evaluate the demo checkpoints on held-out sentences: accuracy of the target, acceptance of the draft.

Run ``python -m tools.demo.evaluate`` in the root of the repository. transformers is the engine, so the results do not
depend on this project's runtime.
"""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from tools.bench.report import Report, Row
from tools.demo import models
from tools.demo.corpus import SCHEMAS, held_out
from tools.demo.decode import accepted_per_round, exact, greedy
from tools.demo.tokenizer import prompt_ids

_BATCH = 100
_COLUMNS = {
    "kind": "",
    "sentences": "d",
    "exact record": ".1%",
    "tokens each": ".0f",
    "acceptance length": ".2f",
    "accepted per position": "",
}


def main(
    target: Annotated[Path, typer.Option(help="Folder of the target")] = models.TARGET,
    draft: Annotated[Path, typer.Option(help="Folder of the draft")] = models.DRAFT,
    count: Annotated[int, typer.Option(min=1, help="Held-out sentences")] = 200,
    window: Annotated[int, typer.Option("--num-draft-tokens", min=1, help="Drafted tokens per round")] = 4,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file")] = None,
) -> None:
    result = evaluate(target, draft, count, window, device)
    title = f"Held-out sentences, greedy, {window} drafted tokens per round"
    Report(None).add(title, _COLUMNS, [_row(kind, result[kind]) for kind in (*SCHEMAS, "all")])
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n")


def evaluate(target_folder: Path, draft_folder: Path, count: int, window: int, device: str) -> dict[str, Any]:
    """Return the numbers as a dictionary that JSON can hold.

    ``acceptance_length`` is tokens emitted per round, the target's own token included: 1 to ``window`` + 1.
    ``accepted_at`` gives, for each drafted position, the share of rounds that accepted it.
    """
    started = time.perf_counter()
    target, tokenizer = models.load(target_folder, device)
    draft, _ = models.load(draft_folder, device)
    asked = held_out(count)
    answers: list[list[int]] = []
    for at in track(range(0, count, _BATCH), description="target answers"):
        answers += greedy(target, tokenizer, asked[at : at + _BATCH])
    rounds = [
        accepted_per_round(draft, prompt_ids(tokenizer, example), answer, window)
        for example, answer in track(list(zip(asked, answers, strict=True)), description="draft proposes")
    ]

    def summary(kind: str | None) -> dict[str, Any]:
        rows = [row for row, example in enumerate(asked) if kind in (None, example.kind)]
        right = sum(exact(tokenizer, asked[row], answers[row]) for row in rows)
        tokens = sum(len(answers[row]) for row in rows)
        counts = [accepted for row in rows for accepted in rounds[row]]
        return {
            "sentences": len(rows),
            "exact": right,
            "tokens": tokens,
            "rounds": len(counts),
            "acceptance_length": round(tokens / max(1, len(counts)), 4),
            "accepted_at": [round(sum(n > at for n in counts) / max(1, len(counts)), 4) for at in range(window)],
        }

    return {
        "window": window,
        "all": summary(None),
        **{kind: summary(kind) for kind in SCHEMAS},
        "seconds": round(time.perf_counter() - started, 1),
    }


def _row(kind: str, numbers: dict[str, Any]) -> Row:
    each = max(1, numbers["sentences"])
    shares = " ".join(f"{share:.2f}" for share in numbers["accepted_at"])
    figures = numbers["exact"] / each, numbers["tokens"] / each, numbers["acceptance_length"]
    return kind, numbers["sentences"], *figures, shares


if __name__ == "__main__":
    typer.run(main)
