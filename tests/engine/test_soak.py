"""The soak in short (``python -m tools.soak`` for longer ones), and that it would find what it looks for."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tandemrt.engines.params import SamplingParams
from tandemrt.runtime.requests.outputs import RequestOutput, Speculation
from tools.soak.answers import Answer, problems
from tools.soak.plans import Plan, Turn

ROOT = Path(__file__).parents[2]
OUTPUT = RequestOutput("abc", "r", [5, 6, 7], [1], "length", None, 3, Speculation(4))
PLAN = Plan([1], SamplingParams(stop=("cd",)))


def test_mixed_requests_with_faults_and_floods_get_what_they_would_get_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.soak", "--requests", "100", "--seed", "1", "--json", str(tmp_path / "soak.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "soak.json").read_text())
    assert figures["findings"] == []
    assert figures["requests"] == 100
    assert {"length", "stop", "cancelled", "error"} <= set(figures["ended"])
    assert figures["strikes"] > 0
    assert figures["refused"] > 0


def test_an_answer_that_is_the_one_alone_has_no_problem() -> None:
    assert problems(Turn(0, "generate"), PLAN, Answer(OUTPUT, pieces=([5, 6, 7], "abc", "r")), OUTPUT) == []


@pytest.mark.parametrize(
    ("turn", "changed", "named"),
    [
        (Turn(0, "generate"), {"token_ids": [5, 6, 8]}, "token_ids"),
        (Turn(0, "generate"), {"text": "abd"}, "text"),
        (Turn(0, "generate"), {"finish_reason": "cancelled"}, "ended with 'cancelled'"),
        (Turn(0, "listen", leave_after=1), {"finish_reason": "timeout", "token_ids": [5]}, "ended with 'timeout'"),
        (Turn(0, "listen", leave_after=1), {"finish_reason": "cancelled", "token_ids": [6]}, "no beginning"),
        (Turn(0, "listen", leave_after=1), {"finish_reason": "cancelled", "text": "ax"}, "text"),
        (Turn(0, "listen", leave_after=1), {"finish_reason": "cancelled", "text": "abcx"}, "text"),
        (Turn(0, "listen", fault="listener"), {"finish_reason": "error"}, "ended with 'error'"),
    ],
)
def test_an_answer_that_departs_from_the_one_alone_is_found(turn: Turn, changed: dict, named: str) -> None:
    assert any(named in line for line in problems(turn, PLAN, Answer(replace(OUTPUT, **changed)), OUTPUT))


@pytest.mark.parametrize(
    ("turn", "changed"),
    [
        (Turn(0, "listen", leave_after=1), {"finish_reason": "cancelled", "token_ids": [5], "text": "a\ufffd"}),
        (Turn(0, "listen", leave_after=1), {"finish_reason": "cancelled", "text": "abcc"}),
        (Turn(0, "listen", timeout_s=1.0), {"finish_reason": "timeout", "token_ids": [], "text": "", "reasoning": ""}),
        (Turn(0, "listen", fault="grammar"), {"finish_reason": "error", "token_ids": [5, 6], "text": "ab"}),
    ],
)
def test_a_beginning_is_enough_where_a_request_was_ended(turn: Turn, changed: dict) -> None:
    assert problems(turn, PLAN, Answer(replace(OUTPUT, **changed)), OUTPUT) == []


def test_a_stream_that_does_not_join_to_its_output_is_found() -> None:
    answer = Answer(OUTPUT, pieces=([5, 6], "abc", "r"))
    assert problems(Turn(0, "stream"), PLAN, answer, OUTPUT) == ["the pieces of its stream do not join to its output"]
