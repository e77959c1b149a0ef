"""Measure JSON schemas: ``python -m tools.bench.schemas [FOLDER]``; FOLDER holds published collections.

Without a folder only our own models and timings are measured. ``--every N`` takes each Nth schema of a collection.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tandemrt.runtime.grammars.compiler import GrammarCompiler
from tandemrt.runtime.grammars.schema.emit import enforceable
from tools.bench.schemas import measure, models, sources

_TEXT = {"type": "string"}
TIMED: dict[str, Any] = {
    "free object": {"type": "object"},
    "40 required fields": {
        "type": "object",
        "properties": {f"field{n}": _TEXT for n in range(40)},
        "required": [f"field{n}" for n in range(40)],
    },
    "40 optional fields": {"type": "object", "properties": {f"field{n}": _TEXT for n in range(40)}},
    "enum of 1,500": {"enum": [f"value {n}" for n in range(1500)]},
    "recursive tree": models.Tree.model_json_schema(),
    "pydantic Invoice": models.Invoice.model_json_schema(),
    "maxLength 50": {"type": "array", "items": {"type": "string", "maxLength": 50}},
    "map of strings": {"type": "object", "additionalProperties": _TEXT},
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.schemas", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--every", type=int, default=1, metavar="N")
    parser.add_argument(
        "--words", type=int, default=128_000, metavar="N", help="tokens of the vocabulary that is timed"
    )
    asked = parser.parse_args()
    _models()
    _times(asked.words)
    for name, cases in sources.collections(asked.folder).items() if asked.folder else ():
        _collection(name, cases[:: asked.every])


def _models() -> None:
    results = {name: measure.check_drawn_texts(schema, count=20, seed=0) for name, schema in models.schemas()}
    refused = [name for name, broken in results.items() if broken is None]
    unsound = [name for name, broken in results.items() if broken]
    print(
        f"pydantic: {len(results) - len(refused)} of {len(results)} admitted, unsound {unsound or 0}, refused {refused}"
    )


def _collection(name: str, cases: list[sources.Case]) -> None:
    times = measure.compile_times([case.schema for case in cases])
    print(f"{name}: admission and compilation, ms: {_spread(times)}")
    _judged(f"{name}, described names only", measure.judge_instances(cases, closed=True))
    _judged(f"{name}, other names too", measure.judge_instances(cases, closed=False))


def _judged(name: str, counts: Counter[str]) -> None:
    print(
        f"{name}: {counts['admitted']} of {counts['schemas']} admitted "
        f"({_percent(counts['admitted'], counts['schemas'])}), "
        f"{counts['unsound']} unsound ({counts['invalid taken']} of {counts['invalid']} invalid taken), "
        f"{counts['valid taken']} of {counts['valid']} valid taken "
        f"({_percent(counts['valid taken'], counts['valid'])})",
        flush=True,
    )


def _times(count: int) -> None:
    vocabulary = measure.words(count)
    compiler = GrammarCompiler(vocabulary, [count])
    compiler.compile("json", "{}")
    for name, schema in TIMED.items():
        texts = [measure.text_of(schema, seed) for seed in range(5)]
        grammar = compiler.compile("json", json.dumps(enforceable(schema)))
        rows, windows = measure.row_times(grammar, vocabulary, texts)
        print(f"{name}: row us {_spread(rows)}; window of {measure.WINDOW} rows us {_spread(windows)}")


def _spread(values: Iterable[float]) -> str:
    kept = list(values)
    shown = (
        f"{part} {measure.quantile(kept, value):.3g}" for part, value in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
    )
    return ", ".join([*shown, f"max {max(kept, default=float('nan')):.3g}"])


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


if __name__ == "__main__":
    main()
