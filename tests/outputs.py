"""What holds for every finished request, whatever its test is about: see ``consistent_outputs``."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch
from weakref import WeakKeyDictionary

import pytest

from tandemrt.runtime.constraints.rules import ConstraintRules
from tandemrt.runtime.requests.request import Finish, Request, RequestOutput, Speculation, StreamOutput
from tandemrt.runtime.requests.running import RunningRequest

_WHOLE = ("stop", "length", "constraint")
_CUT_OFF = ("cancelled", "timeout", "error")


@pytest.fixture(scope="module", autouse=True)
def consistent_outputs() -> Iterator[None]:
    """Fail a module in which a request ended with an output that contradicts itself or its request."""
    checks = OutputChecks()
    with checks.watch():
        yield
    assert not checks.problems, "\n".join(checks.problems)


class OutputChecks:
    """Checks the output of each request when it ends, and its stream against the output.

    Of outputs that a fault, a timeout or a client cut off little is checked: tests of those compare them.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._streamed: WeakKeyDictionary[Request, list[StreamOutput]] = WeakKeyDictionary()
        self._finished: WeakKeyDictionary[Request, RequestOutput] = WeakKeyDictionary()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Check all requests of this process while the block runs."""
        finish, notify, end = Request.finish, Request.notify, RunningRequest._end
        since = time.monotonic()

        def checked_finish(request: Request, end: Finish, output: RequestOutput | None = None) -> None:
            first = not request.finished
            finish(request, end, output)
            if first and request.output is not None and request.output.finish_reason in _CUT_OFF:
                self._note(request, _broken_logprobs(request, request.output))
            if first and output is not None and output.finish_reason in _WHOLE:
                self._finished[request] = output
                self._note(request, _broken(request, output))

        def checked_notify(request: Request, item: StreamOutput) -> None:
            if not request._end_notified and request.submitted >= since:  # else a part of it came before
                self._streamed.setdefault(request, []).append(item)
                if item.output is not None and item.output is self._finished.get(request):
                    self._note(request, _unequal(self._streamed[request], item.output))
            notify(request, item)

        def checked_end(running: RunningRequest, how: Finish) -> list[int]:
            accepted, output = end(running, how), running.request.output
            if output is not None and output.finish_reason in _WHOLE:
                forced = running.constraint.forced_end_spans
                self._note(running.request, broken_reasoning(output, running.constraint._rules, forced))
            return accepted

        with (
            patch.object(Request, "finish", checked_finish),
            patch.object(Request, "notify", checked_notify),
            patch.object(RunningRequest, "_end", checked_end),
        ):
            yield

    def _note(self, request: Request, broken: Iterator[str]) -> None:
        self.problems += [f"{line} ({request.params}, {request.output})" for line in broken]


def _broken(request: Request, output: RequestOutput) -> Iterator[str]:
    """Yield the rules that ``output`` breaks."""
    params, count, reason = request.params, len(output.token_ids), output.finish_reason
    copied = (output.prompt_token_ids, output.seed, output.index, output.grammar_engine)
    times = [time for time in (request.submitted, request.joined, request.first_token_time, request.ended) if time]
    rules = {
        "an output repeats what its request says": copied
        == (request.prompt, request.seed, request.index, request.grammar_engine),
        "a text has at most max_tokens, and all of them if it ends with length": count <= request.max_tokens
        and (reason != "length" or count == request.max_tokens),
        "no stop token comes before min_tokens": reason != "stop"
        or isinstance(output.stop_reason, str)
        or count >= params.min_tokens,
        "reasoning is a part of the output": 0 <= output.reasoning_tokens <= count,
        "no banned token is written": not set(params.banned_token_ids or ()) & {*output.token_ids},
        "a cache has less than the prompt": 0 <= output.num_cached_tokens < max(1, len(request.prompt)),
        "a request is submitted, then joins, then writes, then ends": times == sorted(times),
    }
    if isinstance(output.stop_reason, str):
        rules["a stop string ends the text"] = output.stop_reason in params.stop and (
            output.text.endswith(output.stop_reason) == params.include_stop_str_in_output
        )
    elif output.stop_reason is not None:
        rules["a stop token ends the text"] = output.token_ids[-1:] == [output.stop_reason]
    if not params.include_stop_str_in_output:
        rules["no stop string is in the text"] = not any(stop in output.text for stop in params.stop)
    yield from (rule for rule, holds in rules.items() if not holds)
    yield from _broken_logprobs(request, output)
    yield from _broken_counts(output.speculation, request)


def broken_reasoning(output: RequestOutput, rules: ConstraintRules, forced: list[range]) -> Iterator[str]:
    """Yield the rules of the reasoning budget that ``output`` breaks. ``forced``: the places of forced ends."""
    tokens, spans = output.token_ids, [span for span in forced if span.start < len(output.token_ids)]
    if len(spans) != output.forced_ends:
        yield "forced ends are counted"
    for span in spans:
        written = tuple(tokens[span.start : span.stop])
        if written != tuple(rules.forced_end[: len(written)]):
            yield "a forced end has the tokens of the rule"
    if rules.budget in (None, -1):
        return
    symbols = [symbol for token in tokens for symbol in rules.symbols(token)]
    start = list(rules.think_start)
    blocks = 1 + sum(symbols[at : at + len(start)] == start for at in range(len(symbols)))
    message = sum(  # tokens of a forced end that begin before its delimiter
        len([each for token in rules.forced_end[:at] for each in rules.symbols(token)]) < rules.forced_delimiter.start
        for at in range(len(rules.forced_end))
    )
    if output.reasoning_tokens > (rules.budget or 0) * blocks + message * len(spans):
        yield "each block of reasoning keeps its budget, and a forced end adds its own text only"


def _broken_logprobs(request: Request, output: RequestOutput) -> Iterator[str]:
    asked = request.params.logprobs
    if asked is None or output.logprobs is None:
        if (asked is None) != (output.logprobs is None):
            yield "logprobs come where they are asked for"
        return
    if [each.token for each in output.logprobs] != output.token_ids:
        yield "logprobs are those of the tokens"
    for each in output.logprobs:
        top = [logprob for _, logprob in each.top]
        if each.logprob > 1e-5 or len(top) > asked or top != sorted(top, reverse=True):
            yield "logprobs are logarithms of probabilities, the largest first"
        if (
            len({token for token, _ in each.top}) != len(top)
            or dict(each.top).get(each.token, each.logprob) != each.logprob
        ):
            yield "a token has one logprob"


def _broken_counts(counts: Speculation, request: Request) -> Iterator[str]:
    histogram = counts.acceptance_histogram
    by_histogram = (sum(histogram), sum(number * steps for number, steps in enumerate(histogram)))
    if by_histogram != (counts.num_spec_steps, counts.num_accepted_draft_tokens):
        yield "the histogram has every step and every accepted token"
    if counts.num_accepted_draft_tokens > counts.num_draft_tokens:
        yield "what is accepted was drafted"
    if (len(histogram), counts.num_spec_tokens) != (request.num_draft_tokens + 1, request.num_draft_tokens):
        yield "steps have at most num_draft_tokens drafts"


def _unequal(items: list[StreamOutput], output: RequestOutput) -> Iterator[str]:
    tokens = [token for item in items for token in item.token_ids]
    texts = "".join(item.text for item in items), "".join(item.reasoning for item in items)
    if (tokens, texts) != (output.token_ids, (output.text, output.reasoning)):
        yield f"the parts of a stream join to its output; they join to {tokens}, {texts}"
    if output.logprobs is not None and [each for item in items for each in item.logprobs or ()] != output.logprobs:
        yield "the logprobs of a stream's parts join to those of its output"
