"""The soak in short (``python -m tools.soak`` for longer ones), and that it would find what it looks for."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tandemrt.engines.params import SamplingParams
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.requests.outputs import RequestOutput, Speculation
from tools.soak.answers import Answer, problems
from tools.soak.books import Tally
from tools.soak.faults import KINDS
from tools.soak.figures import Soaked
from tools.soak.plans import Plan, Turn, draw_plans, draw_turn
from tools.soak.served import Said, published_rules

ROOT = Path(__file__).parents[2]
OUTPUT = RequestOutput("abc", "r", [5, 6, 7], [1], "length", None, 3, Speculation(4))
PLAN = Plan([1], SamplingParams(stop=("cd",)))


def test_mixed_requests_with_faults_and_floods_get_what_they_would_get_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.soak", "--requests", "150", "--seed", "1", "--json", str(tmp_path / "soak.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "soak.json").read_text())
    assert figures["findings"] == []
    assert figures["requests"] == sum(figures["ended"].values()) + figures["left"] + figures["refused"] == 150
    assert [name.split(",")[0] for name in figures["drivers"]] == ["model", "model", "ngram", "paged"]
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
        (Turn(0, "listen", fault="draft-nan"), {"finish_reason": "error"}, "ended with 'error'"),
        (Turn(0, "listen", fault="nan"), {"token_ids": [5, 6, 8]}, "token_ids"),
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
        (Turn(0, "listen", fault="nan"), {"finish_reason": "error", "token_ids": [5], "text": "a"}),
    ],
)
def test_a_beginning_is_enough_where_a_request_was_ended(turn: Turn, changed: dict) -> None:
    assert problems(turn, PLAN, Answer(replace(OUTPUT, **changed)), OUTPUT) == []


def test_a_stream_that_does_not_join_to_its_output_is_found() -> None:
    answer = Answer(OUTPUT, pieces=([5, 6], "abc", "r"))
    assert problems(Turn(0, "stream"), PLAN, answer, OUTPUT) == ["the pieces of its stream do not join to its output"]


@pytest.fixture
def counted() -> Metrics:
    """What one answer like OUTPUT and one that was cancelled at once leave in the counters."""
    metrics = Metrics(accepted=[1, 0])
    metrics.finished = {"length": 1, "cancelled": 1}
    metrics.emitted = metrics.kept = 3
    metrics.drafted, metrics.evaluated, metrics.steps = 2, 2, 1
    metrics.accepted_per_step.observe(1)
    return metrics


@pytest.fixture
def tally() -> Tally:
    speculation = Speculation(4)
    speculation.record(drafted=2, kept=2, emitted=2)
    answered = Tally()
    answered.add(Answer(replace(OUTPUT, speculation=speculation)))
    answered.add(Answer(replace(OUTPUT, token_ids=[], finish_reason="cancelled")))
    return answered


def test_books_in_order_have_nothing_wrong(tally: Tally, counted: Metrics) -> None:
    assert all(tally.rules(counted).values()), tally.rules(counted)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"finished": {"length": 1}}, "finished"),
        ({"finished": {"length": 2, "cancelled": 1}}, "finished"),
        ({"finished": {"length": 1, "timeout": 1}}, "finished"),
        ({"kept": 2}, "answers hold"),
        ({"kept": 4, "emitted": 4}, "answers hold"),
        ({"emitted": 2}, ">= kept"),
        ({"drafted": 3}, "drafted 3"),
        ({"steps": 2}, "steps"),
        ({"accepted": [1, 1]}, "steps and accepted drafts"),
    ],
)
def test_books_out_of_order_are_found(tally: Tally, counted: Metrics, changed: dict, named: str) -> None:
    wrong = [rule for rule, holds in tally.rules(replace(counted, **changed)).items() if not holds]
    assert any(named in rule for rule in wrong), wrong


def test_what_a_stream_that_was_left_came_to_may_be_any_reason_but_is_counted_once(
    tally: Tally, counted: Metrics
) -> None:
    tally.add(Answer(OUTPUT, left=True))
    assert not all(tally.rules(counted).values())
    assert all(tally.rules(replace(counted, finished={"length": 2, "cancelled": 1})).values())


def soaked(**changed: Any) -> Soaked:
    figures = {
        "ended": Counter({"length": 5, "cancelled": 2}),
        "memory_mb": [500.0] * 9,
        "threads": [4, 9, *[9] * 7],
    } | changed
    return Soaked(0, [], ["one"], requests=10, left=1, refused=2, **figures)


def test_a_run_that_adds_up_and_stays_flat_has_nothing_wrong() -> None:
    assert soaked().sums() == []


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"ended": Counter({"length": 6})}, "10 sent, 6 answered, 1 left, 2 refused"),
        ({"threads": [4, 9, 9, 9, 9, 9, 9, 10, 11]}, "threads rose from 9 to 11"),
        ({"memory_mb": [500.0 + 20 * wave for wave in range(9)]}, "memory rose by 100 MB, to 660 MB"),
    ],
)
def test_a_run_that_grows_or_loses_a_request_is_found(changed: dict, named: str) -> None:
    assert soaked(**changed).sums() == [named]


def test_every_kind_of_fault_is_drawn_where_it_can_be_met() -> None:
    plans, draw = draw_plans(Random(1), 60), Random(2)
    turns = [draw_turn(draw, plans, tuple(KINDS), streams_leave=True) for _ in range(2000)]
    broken = [turn for turn in turns if turn.fault is not None]
    assert {turn.fault for turn in broken} == set(KINDS)
    assert 0.05 < len(broken) / len(turns) < 0.15
    for turn in broken:
        params = plans[turn.plan].params
        assert turn.fault not in ("grammar", "compiler") or params.structured_outputs is not None
        assert turn.fault != "draft-nan" or params.rule == "coupled"


PUBLISHED = {
    "finished_total": 3,
    "finished_total.length": 2,
    "finished_total.cancelled": 1,
    "accepted_per_step_count": 4,
    "steps_total": 4,
    "queue_seconds_count": 2,
    "drafted_total": 9,
    "evaluated_total": 7,
    "cut_drafts_total": 2,
    "emitted_total": 8,
    "kept_total": 7,
    "requests_waiting": 0,
    "requests_running": 0,
}


def wrong_of(**changed: int) -> list[str]:
    """Of a server that answered two of three requests, three tokens each, while a client that might hear four left."""
    before = Counter({"tandemrt_finished_total": 5, "tandemrt_finished_total.stop": 5, "tandemrt_kept_total": 30})
    now = Counter({f"tandemrt_{name}": value for name, value in (PUBLISHED | changed).items()})
    now += before
    answers = [Said("abc", "", [1, 2, 3], "length")] * 2
    return [rule for rule, holds in published_rules(before, now, answers, 3, 4).items() if not holds]


def test_published_metrics_that_add_up_have_nothing_wrong() -> None:
    assert wrong_of() == []


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("finished_total", 4, "finished"),
        ("finished_total.length", 1, "finished"),
        ("finished_total.stop", 1, "finished"),
        ("accepted_per_step_count", 3, "every step"),
        ("queue_seconds_count", 4, "two slots"),
        ("queue_seconds_count", 1, "two slots"),
        ("cut_drafts_total", 1, "drafted 9"),
        ("emitted_total", 6, ">= kept"),
        ("kept_total", 5, "answers hold 6"),
        ("kept_total", 11, "answers hold 6"),
        ("requests_running", 1, "nobody waits or runs"),
    ],
)
def test_published_metrics_that_do_not_add_up_are_found(name: str, value: int, named: str) -> None:
    wrong = wrong_of(**{name: value})
    assert any(named in rule for rule in wrong), wrong
