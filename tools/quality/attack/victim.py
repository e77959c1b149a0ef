"""The client that is attacked. As a program it streams once, ``python -m tools.quality.attack.victim PORT``."""

import sys
import time
from typing import Any

from tools.clients.http import post_lines

VICTIM: dict[str, Any] = {"prompt": "x", "ignore_eos": True, "max_tokens": 300, "seed": 1}


def main(port: int) -> None:
    """Print the arrival time of each part, in seconds of ``time.perf_counter``, which all processes share."""
    for line in post_lines(port, "/v1/completions", {**VICTIM, "stream": True, "user": "victim"}):
        if line.startswith(b"data: {"):
            print(time.perf_counter(), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
