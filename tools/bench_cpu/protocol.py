"""What the driver says to an engine's process and hears from it: JSON lines. Needs nothing but Python.

A worker opens its engine, generates one token and says how long that took since the process began; then it answers
requests one by one, each with its seconds and tokens.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from tools.memory import peak_mb


class Engine(Protocol):
    """An engine of the comparison. All of its texts are greedy and end after ``tokens`` tokens and nowhere else."""

    def generate(self, prompts: list[list[int]], tokens: int, *, schema: str, speculate: bool) -> list[list[int]]:
        """The output of each prompt, all at once; a JSON ``schema``, unless it is empty, may end a text sooner.

        ``speculate`` asks for drafts looked up in the text. Raises Unable for what the engine cannot do.
        """


class Unable(Exception):
    """The engine has no such thing."""


FIRST = list(range(300, 316))  # the prompt of the first token


def serve(open_engine: Callable[[str, int], Engine]) -> None:
    """Open the engine that the command line names (model, threads) and answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines write to stdout what they like
    engine = open_engine(sys.argv[1], int(sys.argv[2]))
    engine.generate([FIRST], 1, schema="", speculate=False)
    _say(answers, {"peak_mb": peak_mb()})
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        try:
            outputs = engine.generate(**asked)
            _say(answers, {"seconds": time.perf_counter() - start, "outputs": outputs})
        except Unable as missing:
            _say(answers, {"unable": str(missing)})
        except Exception as error:  # whatever an engine raises is its answer
            _say(answers, {"unable": f"{type(error).__name__}: {error}"[:200]})


def _say(answers: Any, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()
