"""A short soak (``python -m tools.quality.soak`` runs longer ones), and that its checks find violations."""

import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import typer

from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.engines.validation.errors import InternalError
from tandemrt.runtime.grammars.grammar import Grammar
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.request import RequestOutput, Speculation
from tandemrt.runtime.requests.text import TextStream
from tests.waiting import PATIENCE_S
from tools.clients.triton import TritonResponse
from tools.quality.soak.__main__ import main, soak
from tools.quality.soak.answers import Answer, problems
from tools.quality.soak.counters import Tally
from tools.quality.soak.faults import KINDS, Fault, Faults, Injected, _FaultyGrammar, _FaultyTextStream
from tools.quality.soak.plans import Attempt, Plan, Wave, draw_attempt, draw_plans, draw_waves
from tools.quality.soak.result import SoakResult
from tools.quality.soak.triton import metrics_rules

ROOT = Path(__file__).parents[2]
# The command in a process of its own, without compiled kernels, which take most of the time otherwise.
SOAK = """
import runpy
from tandemrt.plugins.kernels import compile as compiler
from tests.engine.conftest import compile_for_tensorrt
compiler.compile_program = compile_for_tensorrt
runpy.run_module("tools.quality.soak", run_name="__main__")
"""
OUTPUT = RequestOutput("abc", "r", [5, 6, 7], [1], "length", None, 3, Speculation(4))
PLAN = Plan([1], SamplingParams(stop=("cd",)))


def test_mixed_requests_with_faults_and_floods_get_the_same_output_as_alone(tmp_path: Path) -> None:
    soak = [sys.executable, "-c", SOAK, "--first", "81", "--requests", "201", "--seed", "1", "--distinct", "16"]
    done = subprocess.run(
        [*soak, "--json", str(tmp_path / "soak.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "soak.json").read_text())
    assert figures["findings"] == []
    assert figures["requests"] == sum(figures["ended"].values()) + figures["abandoned"] + figures["rejected"] == 120
    names = ["paged", "paged", "paged ngram", "model", "model", "ngram"]
    assert [name.split(",")[0] for name in figures["drivers"]] == names
    assert {"length", "stop", "cancelled", "error"} <= set(figures["ended"])
    assert figures["engine_failures"] > 0
    assert figures["rejected"] > 0
    assert figures["preemptions"] > 0
    assert figures["thread_refusals"] > 0


def test_a_wave_depends_on_the_requests_before_it_and_not_on_where_the_run_begins_or_ends() -> None:
    plans = draw_plans(Random(1), 60)

    def waves(requests: int) -> list[Wave]:
        return list(draw_waves(Random(2), plans, tuple(KINDS), 2, requests))

    whole = waves(1650)
    assert [wave.number for wave in whole] == list(range(len(whole)))
    assert [wave.first for wave in whole] == [81 * number for number in range(len(whole))]
    assert whole[-1].first + whole[-1].requests == 1650
    assert waves(1620) == whole[:20]
    assert [wave.number for wave in whole if wave.refused_threads is not None] == [10, 11]


@pytest.mark.parametrize(
    ("requests", "first", "message"),
    [
        (50, 81, "--requests: must be above --first (81), whose requests it includes, got 50; choose more"),
        (81, 81, "--requests: must be above --first (81), whose requests it includes, got 81; choose more"),
        (200, 100, "--first: must be a multiple of 81, the requests of a wave, got 100; choose 81, or 162"),
    ],
)
def test_a_soak_that_would_send_nothing_or_skip_requests_is_rejected(
    capsys: pytest.CaptureFixture[str], requests: int, first: int, message: str
) -> None:
    with pytest.raises(typer.Exit) as ended:
        main(requests=requests, first=first, distinct=2)
    assert ended.value.exit_code == 2
    assert message in " ".join(capsys.readouterr().out.split())


def test_a_soak_without_time_for_a_wave_has_no_finding() -> None:
    assert soak(requests=None, minutes=0.0, distinct=2).findings == []


def test_an_answer_equal_to_the_output_alone_has_no_problem() -> None:
    assert problems(Attempt(0, "generate"), PLAN, Answer(OUTPUT, streamed=([5, 6, 7], "abc", "r")), OUTPUT) == []


@pytest.mark.parametrize(
    ("attempt", "changed", "named"),
    [
        (Attempt(0, "generate"), {"token_ids": [5, 6, 8]}, "token_ids"),
        (Attempt(0, "generate"), {"text": "abd"}, "text"),
        (Attempt(0, "generate"), {"finish_reason": "cancelled"}, "ended with 'cancelled'"),
        (Attempt(0, "listen", cancel_after=1), {"finish_reason": "timeout", "token_ids": [5]}, "ended with 'timeout'"),
        (Attempt(0, "listen", cancel_after=1), {"finish_reason": "cancelled", "token_ids": [6]}, "not a prefix"),
        (Attempt(0, "listen", cancel_after=1), {"finish_reason": "cancelled", "text": "ax"}, "text"),
        (Attempt(0, "listen", cancel_after=1), {"finish_reason": "cancelled", "text": "abcx"}, "text"),
        (Attempt(0, "listen", fault="listener"), {"finish_reason": "error"}, "ended with 'error'"),
        (Attempt(0, "listen", fault="draft-nan"), {"finish_reason": "error"}, "ended with 'error'"),
        (Attempt(0, "listen", fault="nan"), {"token_ids": [5, 6, 8]}, "token_ids"),
    ],
)
def test_an_answer_that_differs_from_the_output_alone_is_found(attempt: Attempt, changed: dict, named: str) -> None:
    assert any(named in line for line in problems(attempt, PLAN, Answer(replace(OUTPUT, **changed)), OUTPUT))


@pytest.mark.parametrize(
    ("attempt", "changed"),
    [
        (Attempt(0, "listen", cancel_after=1), {"finish_reason": "cancelled", "token_ids": [5], "text": "a\ufffd"}),
        (Attempt(0, "listen", cancel_after=1), {"finish_reason": "cancelled", "text": "abcc"}),
        (
            Attempt(0, "listen", timeout_s=1.0),
            {"finish_reason": "timeout", "token_ids": [], "text": "", "reasoning": ""},
        ),
        (Attempt(0, "listen", fault="grammar"), {"finish_reason": "error", "token_ids": [5, 6], "text": "ab"}),
        (Attempt(0, "listen", fault="nan"), {"finish_reason": "error", "token_ids": [5], "text": "a"}),
    ],
)
def test_a_prefix_is_enough_for_a_request_that_was_ended_early(attempt: Attempt, changed: dict) -> None:
    assert problems(attempt, PLAN, Answer(replace(OUTPUT, **changed)), OUTPUT) == []


def test_a_stream_that_does_not_join_to_its_output_is_found() -> None:
    answer = Answer(OUTPUT, streamed=([5, 6], "abc", "r"))
    assert problems(Attempt(0, "stream"), PLAN, answer, OUTPUT) == ["the parts of its stream do not join to its output"]


@pytest.fixture
def counted() -> Metrics:
    """The metrics of one answer like OUTPUT and of one that was cancelled at once."""
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


def test_counters_that_agree_with_the_answers_violate_no_rule(tally: Tally, counted: Metrics) -> None:
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
def test_counters_that_disagree_with_the_answers_are_found(
    tally: Tally, counted: Metrics, changed: dict, named: str
) -> None:
    wrong = [rule for rule, holds in tally.rules(replace(counted, **changed)).items() if not holds]
    assert any(named in rule for rule in wrong), wrong


def test_an_abandoned_stream_is_counted_once_with_any_finish_reason(tally: Tally, counted: Metrics) -> None:
    tally.add(Answer(OUTPUT, abandoned=True))
    assert not all(tally.rules(counted).values())
    assert all(tally.rules(replace(counted, finished={"length": 2, "cancelled": 1})).values())


def soak_result(**changed: Any) -> SoakResult:
    figures = {
        "ended": Counter({"length": 5, "cancelled": 2}),
        "memory_mb": [500.0] * 9,
        "threads": [4, 9, *[9] * 7],
        "drivers": ["one"],
    } | changed
    return SoakResult(0, [], requests=10, abandoned=1, rejected=2, **figures)


def test_a_run_without_growth_or_lost_requests_has_no_violation() -> None:
    assert soak_result().violations() == []
    assert soak_result(threads=[4, 9, 9, 9, 9, 9, 12, 12, 9]).violations() == []  # a pool that started late


def test_memory_of_runtimes_that_still_start_is_no_growth() -> None:
    """Each kind of bundle allocates its memory in its first waves."""
    rising = [500.0 + 20 * wave for wave in range(7)]
    assert soak_result(memory_mb=rising, drivers=["one", "two", "three"]).violations() == []
    assert soak_result(memory_mb=rising).violations() == ["memory rose by 80 MB, to 620 MB"]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"ended": Counter({"length": 6})}, "10 sent, 6 answered, 1 abandoned, 2 rejected"),
        ({"threads": [4, 9, 9, 9, 9, 9, 9, 10, 11]}, "threads rose from 9 to 11"),
        ({"memory_mb": [500.0 + 20 * wave for wave in range(9)]}, "memory rose by 100 MB, to 660 MB"),
    ],
)
def test_a_run_that_grows_or_loses_a_request_is_found(changed: dict, named: str) -> None:
    assert soak_result(**changed).violations() == [named]


def test_every_kind_of_fault_is_drawn_for_requests_that_can_reach_it() -> None:
    plans, draw = draw_plans(Random(1), 60), Random(2)
    attempts = [draw_attempt(draw, plans, tuple(KINDS), close_streams=True) for _ in range(2000)]
    broken = [attempt for attempt in attempts if attempt.fault is not None]
    assert {attempt.fault for attempt in broken} == set(KINDS)
    assert 0.05 < len(broken) / len(attempts) < 0.15
    for attempt in broken:
        params = plans[attempt.plan].params
        assert attempt.fault not in ("grammar", "compiler") or params.structured_outputs is not None
        assert attempt.fault != "draft-nan" or params.rule == "coupled"


METRICS = {
    "finished_total": 3,
    "finished_total.length": 2,
    "finished_total.cancelled": 1,
    "accepted_per_step_count": 4,
    "steps_total": 4,
    "queue_seconds_count": 2,
    "drafted_total": 9,
    "evaluated_total": 7,
    "constraint_rejected_drafts_total": 2,
    "emitted_total": 8,
    "kept_total": 7,
    "requests_waiting": 0,
    "requests_running": 0,
}


def violated(**changed: int) -> list[str]:
    """The violated rules after two of three requests got three tokens each, and one client with up to four hung up."""
    before = Counter({"tandemrt_finished_total": 5, "tandemrt_finished_total.stop": 5, "tandemrt_kept_total": 30})
    now = Counter({f"tandemrt_{name}": value for name, value in (METRICS | changed).items()})
    now += before
    answers = [TritonResponse("abc", "", [1, 2, 3], "length")] * 2
    return [rule for rule, holds in metrics_rules(before, now, answers, 3, 4).items() if not holds]


def test_server_metrics_that_add_up_violate_no_rule() -> None:
    assert violated() == []


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("finished_total", 4, "finished"),
        ("finished_total.length", 1, "finished"),
        ("finished_total.stop", 1, "finished"),
        ("accepted_per_step_count", 3, "every step"),
        ("queue_seconds_count", 4, "two slots"),
        ("queue_seconds_count", 1, "two slots"),
        ("constraint_rejected_drafts_total", 1, "drafted 9"),
        ("emitted_total", 6, ">= kept"),
        ("kept_total", 5, "answers hold 6"),
        ("kept_total", 11, "answers hold 6"),
        ("requests_running", 1, "no request waits or runs"),
    ],
)
def test_server_metrics_that_do_not_add_up_are_found(name: str, value: int, named: str) -> None:
    wrong = violated(**{name: value})
    assert any(named in rule for rule in wrong), wrong


def test_faulty_objects_override_methods_that_the_runtime_calls() -> None:
    for faulty, original in ((_FaultyGrammar, Grammar), (_FaultyTextStream, TextStream)):
        overridden = {name for name in vars(faulty) if not name.startswith("_")}
        assert overridden
        assert overridden <= vars(original).keys(), "a renamed method would never fail"


@pytest.mark.parametrize("kind", ["grammar", "compiler"])
def test_a_request_with_a_faulty_grammar_is_answered_if_its_compilation_fails(kind: str) -> None:
    """Another fault of the same wave may refuse the thread that compiles."""
    faults, refused = Faults(), InternalError("a thread could not start")
    with faults.inject(Fault(kind, 0)):
        ready = faults._compiled(compiling := Future())
    compiling.set_exception(refused)
    error = ready.exception(PATIENCE_S)
    assert error is refused if kind == "grammar" else isinstance(error, Injected)
