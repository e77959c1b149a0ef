"""JSON lines between the driver and the process of an engine. Needs only Python.

A worker opens its engine and its tokenizer, which every text needs, generates one token and reports its memory. Then it
answers requests one by one, each with seconds and tokens.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from tools.bench.memory import peak_mb


class Engine(Protocol):
    """An engine of the comparison. All texts are greedy and end after ``tokens`` tokens."""

    def generate(self, prompts: list[list[int]], tokens: int, *, schema: str, speculate: bool) -> list[list[int]]:
        """Return the output of each prompt of one batch. A non-empty JSON ``schema`` may end a text sooner.

        ``speculate``: use drafts from n-gram lookup. Raises Unable for an unsupported request.
        """


class Unable(Exception):
    """The engine does not support the request."""


FIRST = list(range(300, 316))  # the prompt of the first token


def serve(open_engine: Callable[[str, int], Engine]) -> None:
    """Open the engine of the command line (model, threads) and answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines may write to stdout
    engine = open_engine(sys.argv[1], int(sys.argv[2]))
    engine.generate([FIRST], 1, schema="", speculate=False)
    _write(answers, {"peak_mb": peak_mb()})
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        try:
            outputs = engine.generate(**asked)
            _write(answers, {"seconds": time.perf_counter() - start, "outputs": outputs})
        except Unable as missing:
            _write(answers, {"unable": str(missing)})
        except Exception as error:  # any error of an engine is its answer
            _write(answers, {"unable": f"{type(error).__name__}: {error}"[:200]})


def _write(answers: Any, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()
