"""JSON data of the trace page: requests with their tokens, rounds and times."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.trace import TracedRound
from tandemrt.runtime.trace.recorder import Recorder, Step, step_at

MAX_PROMPT = 20_000  # characters shown of a prompt


def page_data(recorder: Recorder, tokenizer: Tokenizer, bundle: str) -> dict[str, Any]:
    """Return the data of the page. Times are in milliseconds since the first step."""
    steps = recorder.steps()
    return {"bundle": bundle, "requests": [_request(each, tokenizer, steps) for each in recorder.finished]}


class TokenTexts:
    """Splits a text into the texts of its tokens, special tokens included, while the tokens come."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # the last tokens that added text; decoders join it with the next ones
        self._group: list[int] = []

    def push(self, token: int, *, last: bool) -> str:
        """Return the text that ``token`` adds; "" if it ends within a character and is not the ``last`` token."""
        self._group.append(token)
        before = _decode(self._tokenizer, self._context)
        both = _decode(self._tokenizer, self._context + self._group)
        added = both[len(before) :] if both.startswith(before) else _decode(self._tokenizer, self._group)
        if added.endswith("\ufffd") and not last:
            return ""
        if added:
            self._context, self._group = self._group, []
        return added


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token, special tokens included; "" for tokens that end within a character."""
    texts = TokenTexts(tokenizer)
    return [texts.push(token, last=at == len(ids)) for at, token in enumerate(ids, start=1)]


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _request(request: Request, tokenizer: Tokenizer, steps: Sequence[Step]) -> dict[str, Any]:
    output, trace, params = request.output, request.trace, request.params
    assert output is not None
    assert trace is not None
    tokens = list(trace.tokens(0, len(output.token_ids)))
    texts = token_texts(tokenizer, output.token_ids)
    prompt = _decode(tokenizer, request.prompt)
    begin, rounds = 0, []
    for each in trace.rounds:
        rounds.append(_round(each, tokenizer, step_at(steps, each.filled), steps, len(tokens) - begin))
        begin += len(each.emitted)
    return {
        "prompt": prompt if len(prompt) <= MAX_PROMPT else prompt[:MAX_PROMPT] + "…",
        "prompt_tokens": len(request.prompt),
        "cached_tokens": output.num_cached_tokens,
        "finish_reason": output.finish_reason,
        "error": output.error,
        "seed": str(output.seed),  # a browser's numbers have 53 bits
        "temperature": params.temperature,
        "rule": params.rule,
        "budget": params.thinking_token_budget,
        "reasoning_tokens": output.reasoning_tokens,
        "forced_ends": output.forced_ends,
        "grammar_engine": output.grammar_engine,
        "speculation": output.speculation.to_json(),
        "tokens": [{**token._asdict(), "text": text} for token, text in zip(tokens, texts, strict=True)],
        "rounds": rounds,
    }


def _round(
    traced: TracedRound, tokenizer: Tokenizer, step: Step | None, steps: Sequence[Step], remaining: int
) -> dict[str, Any]:
    """Return one round. ``remaining``: number of output tokens from the round's first one on."""
    phases: dict[str, float] = {}
    for span in step.spans if step else ():
        phases[span.phase] = phases.get(span.phase, 0.0) + 1e3 * (span.end - span.start)
    return {
        "step": None if step is None else step.number,
        "start": None if step is None else 1e3 * (step.start - steps[0].start),
        "ms": None if step is None else 1e3 * (step.end - step.start),
        "phases": phases,
        "drafted": [
            {"id": token, "text": _decode(tokenizer, [token]), "fate": _fate(traced, at, remaining)}
            for at, token in enumerate(traced.drafted)
        ],
        "passed": traced.passed,
        "accepted": traced.accepted,
        "emitted": len(traced.emitted),
        "kept": max(0, min(remaining, len(traced.emitted))),
        "allowed": traced.allowed,
    }


def _fate(traced: TracedRound, at: int, remaining: int) -> str:
    """Return the outcome of the drafted token at ``at``."""
    if at < min(traced.accepted, remaining):
        return "accepted"
    if remaining < len(traced.emitted):
        return "after the end"
    if at > traced.accepted:
        return "after a rejected draft"
    return "rejected by the target" if at < traced.passed else "rejected by the mask"
