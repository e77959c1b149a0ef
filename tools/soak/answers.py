"""What came back, and whether it is what the same request gets alone."""

from dataclasses import dataclass

from tandemrt.runtime.requests.outputs import RequestOutput
from tools.soak.plans import Plan, Turn

OWN_ERROR = ("detokenizer", "grammar", "compiler", "nan")
"""Faults that end the request they belong to with an error, if it comes so far."""


@dataclass(frozen=True)
class Answer:
    """How a turn ended.

    Attributes:
        output: what came back; None where only an error did.
        error: what was raised or reported.
        pieces: tokens, text and reasoning of its stream joined, None if it did not stream.
        struck: whether an engine was made to fail while it was on its way.
        left: its client left the stream; ``output`` is what it had heard by then.
    """

    output: RequestOutput | None
    error: str | None = None
    pieces: tuple[list[int], str, str] | None = None
    struck: bool = False
    left: bool = False

    @property
    def reason(self) -> str:
        return self.output.finish_reason if self.output is not None else "error"


def problems(turn: Turn, plan: Plan, answer: Answer, alone: RequestOutput) -> list[str]:
    """Say, one line each, how ``answer`` departs from what the request gets ``alone``, or ends as it must not."""
    output, lines = answer.output, []
    if answer.reason not in _allowed(turn, answer, alone):
        lines.append(f"ended with {answer.reason!r} ({answer.error}), alone with {alone.finish_reason!r}")
    if output is None:
        return lines
    if answer.pieces is not None and answer.pieces != (output.token_ids, output.text, output.reasoning):
        lines.append("the pieces of its stream do not join to its output")
    if output.finish_reason == alone.finish_reason and output.finish_reason not in ("cancelled", "timeout", "error"):
        names = ("token_ids", "text", "reasoning", "stop_reason", "seed", "prompt_token_ids")
        pairs = [(name, getattr(output, name), getattr(alone, name)) for name in names]
        lines += [f"{name}: {mine!r}, alone {whole!r}" for name, mine, whole in pairs if mine != whole]
        return lines
    # An error may strike between a token and the stop string that would have cut it off.
    begins = output.token_ids[: len(alone.token_ids)] == alone.token_ids[: len(output.token_ids)]
    if not begins or (len(output.token_ids) > len(alone.token_ids) and output.finish_reason != "error"):
        lines.append(f"token_ids: {output.token_ids!r} is no beginning of {alone.token_ids!r}")
    for name in ("reasoning", "text"):
        mine, whole = getattr(output, name).rstrip("\ufffd"), getattr(alone, name)
        if mine[: len(whole)] != whole[: len(mine)] or not _may_follow(mine[len(whole) :], plan.params.stop, output):
            lines.append(f"{name}: {mine!r} is no beginning of {whole!r}")
    return lines


def _may_follow(rest: str, stops: tuple[str, ...], output: RequestOutput) -> bool:
    """What was held back because a stop string might have taken it is text of a request that ends before."""
    return not rest or output.finish_reason == "error" or any(stop.startswith(rest) for stop in stops)


def _allowed(turn: Turn, answer: Answer, alone: RequestOutput) -> set[str]:
    reasons = {alone.finish_reason}
    if turn.leave_after is not None or (turn.fault or "").startswith("listener"):
        reasons.add("cancelled")
    if turn.timeout_s is not None:
        reasons.add("timeout")
    if answer.struck or (turn.fault or "").startswith(OWN_ERROR):
        reasons.add("error")
    return reasons
