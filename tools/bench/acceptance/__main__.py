"""Measure which drafts a bundle accepts, and the rounds and time that they save.

    python -m tools.bench.acceptance temperature BUNDLE             # acceptance by temperature and draft sampling
    python -m tools.bench.acceptance draft-lengths BUNDLE           # adaptive against fixed draft lengths
    python -m tools.bench.acceptance lookup BUNDLE                  # rounds that copies from the text save

``python -m tools.bench.acceptance CASE --help`` lists a case's options. Every case writes its figures to ``--json
FILE`` as well.
"""

from collections.abc import Callable

from tools.bench.acceptance import draft_lengths, lookup, temperature
from tools.bench.cases import run_cases

CASES: dict[str, Callable[..., None]] = {
    "temperature": temperature.main,
    "draft-lengths": draft_lengths.main,
    "lookup": lookup.main,
}

if __name__ == "__main__":
    run_cases(CASES)
