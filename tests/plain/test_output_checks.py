"""The checks that tests of real requests share find outputs that contradict themselves."""

from dataclasses import replace

from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.runtime.requests.request import Finish, Request, StreamOutput
from tandemrt.runtime.requests.text import TextDelta
from tests.outputs import OutputChecks


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
