"""Measure prompts: times of first tokens, and gaps of decoding requests while prompts arrive."""

import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import quantiles
from typing import Any

from tandemrt import LLM, SamplingParams
from tools.bench.gpu.submitted import SubmittedRequests

_ROUND_S = 0.05  # the round that was enqueued before earlier requests ended has ended after it


def first_tokens(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> float:
    """Milliseconds until all of ``prompts``, sent at once to an idle device, have their first token."""
    time.sleep(_ROUND_S)
    sent = SubmittedRequests(llm, prompts, params)
    milliseconds = 1e3 * sent.first_tokens()
    sent.end()
    return milliseconds


def arrivals(
    llm: LLM,
    running: tuple[Sequence[list[int]], Sequence[SamplingParams]],
    coming: tuple[Sequence[list[int]], Sequence[SamplingParams]],
    alike: tuple[Sequence[list[int]], Sequence[SamplingParams]],
    *,
    seconds: float,
) -> dict[str, Any]:
    """Measure ``running`` requests while ``coming`` requests of one output token each arrive at once.

    The gaps are those between parts of the text of a running request. ``work`` compares the time until the last arrival
    has its token with the sum of both parts alone: ``running`` for ``seconds`` or half of its tokens, whichever comes
    first, and ``alike``, other prompts of the same length as ``coming``, because cached prefixes would distort the
    result. Raises RuntimeError if a running request ends before the last arrival has its token.
    """
    alone = first_tokens(llm, *alike) / 1e3
    sent = SubmittedRequests(llm, *running)
    sent.first_tokens()
    begin, before = time.perf_counter(), sent.tokens
    half = sum(each.max_tokens or 0 for each in running[1]) // 2
    sent.wait_at_most(lambda: sent.tokens >= half, seconds)
    rate = (sent.tokens - before) / (time.perf_counter() - begin)
    start, tokens = time.perf_counter(), sent.tokens
    came = SubmittedRequests(llm, *coming)
    took = came.first_tokens()
    decoded = sent.tokens - tokens
    came.finish()
    if sent.ended:
        raise RuntimeError(f"arrivals: {sent.ended} requests ended while others arrived; raise --length")
    sent.end()
    gaps = [
        1e3 * (later - earlier)
        for times in sent.at
        for earlier, later in pairwise(times)
        if later > start and earlier < start + took
    ]
    return {
        "first_tokens_ms": 1e3 * took,
        "first_tokens_alone_ms": 1e3 * alone,
        "gap_p50_ms": quantiles(gaps, n=100)[49],
        "gap_p99_ms": quantiles(gaps, n=100)[98],
        "gap_worst_ms": max(gaps),
        "tokens_per_second_alone": rate,
        "tokens_decoded": decoded,
        "work": (decoded / rate + alone) / took,
    }
