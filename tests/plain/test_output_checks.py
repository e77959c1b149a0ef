"""The checks that tests of real requests share find outputs that contradict themselves."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.request import Finish, Request, RequestOutput, Speculation, StreamOutput
from tandemrt.runtime.requests.text import TextDelta
from tests.closed_loops import broken_sums
from tests.outputs import OutputChecks, broken_reasoning


def found(text: str, tokens: list[int], streamed: str) -> set[str]:
    checks, end = OutputChecks(), Finish("length")
    with checks.watch():
        params = SamplingParams(stop=("b",))
        request = Request(
            [1], params, seed=1, max_tokens=2, num_draft_tokens=1, listener=lambda _: None, arrival_time=0.0
        )
        request.finish(end, replace(request.empty_output(end), text=text, token_ids=tokens))
        request.notify(StreamOutput(TextDelta(text=streamed), tokens, request.output))
    return {problem.partition(" (")[0].partition(";")[0] for problem in checks.problems}


def test_an_output_that_contradicts_its_request_or_its_stream_is_found() -> None:
    assert found("aa", [5, 6], "aa") == set()
    assert found("ab", [5, 6, 7], "a") == {
        "a text has at most max_tokens, and all of them if it ends with length",
        "no stop string is in the text",
        "the parts of a stream join to its output",
    }


def output(tokens: list[int], *, reasoning: int = 0, forced: int = 0) -> RequestOutput:
    return RequestOutput(
        "", "", tokens, [1], "length", None, 1, Speculation(1), reasoning_tokens=reasoning, forced_ends=forced
    )


@pytest.mark.parametrize(
    ("tokens", "reasoning", "forced", "broken"),
    [
        ([1, 2, 7, 8, 3], 3, 1, set()),  # two tokens of the budget, and the text of the forced end
        ([1, 2, 3, 7, 8], 4, 1, {"each block"}),
        ([1, 2, 7, 8, 5, 1, 2], 5, 1, set()),  # a second block
        ([1, 2, 7, 9, 3], 3, 1, {"a forced end has"}),
        ([1, 2, 7, 8, 3], 3, 2, {"forced ends are"}),
        ([1, 2, 7], 3, 1, set()),  # cut off
    ],
)
def test_reasoning_over_its_budget_and_other_forced_ends_are_found(
    tokens: list[int], reasoning: int, forced: int, broken: set[str]
) -> None:
    rules = SimpleNamespace(
        forced_end=(7, 8), forced_delimiter=range(1, 2), think_start=(5,), budget=2, symbols=lambda token: (token,)
    )
    begin = tokens.index(7)
    span = range(begin, min(begin + 2, len(tokens)))
    lines = broken_reasoning(output(tokens, reasoning=reasoning, forced=forced), cast("Any", rules), [span])
    assert {line[: len(start)] for line, start in zip(lines, broken, strict=True)} == broken


def test_counters_of_a_loop_that_are_not_those_of_its_outputs_are_found() -> None:
    outputs = [output([1, 2]), output([3], forced=1)]
    metrics = Metrics(kept=3, emitted=3, forced_ends=1, finished={"length": 2})
    for each in outputs:
        metrics.output_tokens.observe(len(each.token_ids))
    assert not [*broken_sums(metrics, outputs)]
    metrics.kept, metrics.forced_ends, metrics.drafted = 4, 0, 1
    assert {line.partition(" are ")[0] for line in broken_sums(metrics, outputs)} == {
        "tokens", "forced ends", "a draft is verified, or a constraint rejected it", "what is kept was emitted",
    }  # fmt: skip
