"""The answer to a request, and a comparison with the answer that the request gets alone."""

from dataclasses import dataclass

from tandemrt.runtime.requests.request import RequestOutput
from tools.quality.soak.faults import THREAD_REFUSED
from tools.quality.soak.plans import Attempt, Plan

OWN_ERROR = ("detokenizer", "grammar", "compiler", "nan")
"""Prefixes of the faults that end only their own request with an error, if they are reached."""


@dataclass(frozen=True)
class Answer:
    """The result of an attempt.

    Attributes:
        output: the output; None if there was only an error.
        error: the exception or the reported error.
        streamed: tokens, text and reasoning of the stream, joined; None if it did not stream.
        engine_failed: whether an engine was made to fail during the request.
        threads_refused: whether the runtime was refused a thread during the request.
        abandoned: the client closed the stream; ``output`` holds what it had received by then.
    """

    output: RequestOutput | None
    error: str | None = None
    streamed: tuple[list[int], str, str] | None = None
    engine_failed: bool = False
    threads_refused: bool = False
    abandoned: bool = False

    @property
    def reason(self) -> str:
        return self.output.finish_reason if self.output is not None else "error"

    @property
    def refused(self) -> bool:
        """Whether there is no output for want of a thread: before the request was counted, or after."""
        return self.output is None and self.needed_thread

    @property
    def needed_thread(self) -> bool:
        return self.threads_refused and THREAD_REFUSED in (self.error or "")


def problems(attempt: Attempt, plan: Plan, answer: Answer, alone: RequestOutput) -> list[str]:
    """Return one line for each difference between ``answer`` and the output of the same request ``alone``.

    A request that was cancelled, timed out or failed must be a prefix of the output alone.
    """
    output, lines = answer.output, []
    if answer.reason not in _allowed(attempt, answer, alone):
        lines.append(f"ended with {answer.reason!r} ({answer.error}), alone with {alone.finish_reason!r}")
    if output is None:
        return lines
    if answer.streamed is not None and answer.streamed != (output.token_ids, output.text, output.reasoning):
        lines.append("the parts of its stream do not join to its output")
    if output.finish_reason == alone.finish_reason and output.finish_reason not in ("cancelled", "timeout", "error"):
        names = ("token_ids", "text", "reasoning", "stop_reason", "seed", "prompt_token_ids")
        pairs = [(name, getattr(output, name), getattr(alone, name)) for name in names]
        lines += [f"{name}: {ours!r}, alone {expected!r}" for name, ours, expected in pairs if ours != expected]
        return lines
    # An error may occur between a token and the stop string that would have removed it.
    is_prefix = output.token_ids[: len(alone.token_ids)] == alone.token_ids[: len(output.token_ids)]
    if not is_prefix or (len(output.token_ids) > len(alone.token_ids) and output.finish_reason != "error"):
        lines.append(f"token_ids: {output.token_ids!r} is not a prefix of {alone.token_ids!r}")
    for name in ("reasoning", "text"):
        ours, expected = getattr(output, name).rstrip("\ufffd"), getattr(alone, name)
        rest = ours[len(expected) :]
        if ours[: len(expected)] != expected[: len(ours)] or not _may_follow(rest, plan.params.stop, output):
            lines.append(f"{name}: {ours!r} is not a prefix of {expected!r}")
    return lines


def _may_follow(rest: str, stops: tuple[str, ...], output: RequestOutput) -> bool:
    """Return whether ``rest`` may follow the text alone: the start of a stop string is emitted when a request ends."""
    return not rest or output.finish_reason == "error" or any(stop.startswith(rest) for stop in stops)


def _allowed(attempt: Attempt, answer: Answer, alone: RequestOutput) -> set[str]:
    reasons = {alone.finish_reason}
    if attempt.cancel_after is not None or (attempt.fault or "").startswith("listener"):
        reasons.add("cancelled")
    if attempt.timeout_s is not None:
        reasons.add("timeout")
    if answer.engine_failed or (attempt.fault or "").startswith(OWN_ERROR) or answer.needed_thread:
        reasons.add("error")
    return reasons
