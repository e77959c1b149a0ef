"""What a page shows of a recorder, as JSON: requests, their tokens and rounds, and the time that steps took."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.trace.recorder import Recorder, Step, step_at
from tandemrt.runtime.trace.trace import TracedRound

MOST_PROMPT = 20_000  # characters of a prompt


def page_data(recorder: Recorder, tokenizer: Tokenizer, bundle: str) -> dict[str, Any]:
    """Return what the page of a bundle's recorder shows. Times are milliseconds, from the first step on."""
    steps = recorder.steps()
    return {"bundle": bundle, "requests": [_request(each, tokenizer, steps) for each in recorder.finished]}


def spelled(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return each token's part of the text, special tokens included; "" for all but the last part of a character."""
    texts: list[str] = []
    context: list[int] = []  # the last tokens that gave text: what follows is spelled behind them
    group: list[int] = []
    for at, token in enumerate(ids, start=1):
        group.append(token)
        before = _decode(tokenizer, context)
        both = _decode(tokenizer, context + group)
        added = both[len(before) :] if both.startswith(before) else _decode(tokenizer, group)
        if added.endswith("\ufffd") and at < len(ids):
            texts.append("")
            continue
        texts.append(added)
        if added:
            context, group = group, []
    return texts


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _request(request: Request, tokenizer: Tokenizer, steps: Sequence[Step]) -> dict[str, Any]:
    output, trace, params = request.output, request.trace, request.params
    assert output is not None
    assert trace is not None
    tokens = list(trace.tokens(0, len(output.token_ids)))
    texts = spelled(tokenizer, output.token_ids)
    prompt = _decode(tokenizer, request.prompt)
    begin, rounds = 0, []
    for each in trace.rounds:
        rounds.append(_round(each, tokenizer, step_at(steps, each.filled), steps, len(tokens) - begin))
        begin += len(each.emitted)
    return {
        "prompt": prompt if len(prompt) <= MOST_PROMPT else prompt[:MOST_PROMPT] + "…",
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
    traced: TracedRound, tokenizer: Tokenizer, step: Step | None, steps: Sequence[Step], room: int
) -> dict[str, Any]:
    """One round of a request whose output goes on for ``room`` tokens from its first one on."""
    verbs: dict[str, float] = {}
    for span in step.spans if step else ():
        verbs[span.verb] = verbs.get(span.verb, 0.0) + 1e3 * (span.end - span.start)
    return {
        "step": None if step is None else step.number,
        "start": None if step is None else 1e3 * (step.start - steps[0].start),
        "ms": None if step is None else 1e3 * (step.end - step.start),
        "verbs": verbs,
        "drafted": [
            {"id": token, "text": _decode(tokenizer, [token]), "fate": _fate(traced, at, room)}
            for at, token in enumerate(traced.drafted)
        ],
        "passed": traced.passed,
        "accepted": traced.accepted,
        "emitted": len(traced.emitted),
        "kept": max(0, min(room, len(traced.emitted))),
        "allowed": traced.allowed,
    }


def _fate(traced: TracedRound, at: int, room: int) -> str:
    """What became of the drafted token at ``at``."""
    if at < min(traced.accepted, room):
        return "kept"
    if room < len(traced.emitted):
        return "behind the end"
    if at > traced.accepted:
        return "behind it"
    return "refused by the target" if at < traced.passed else "refused by the mask"
