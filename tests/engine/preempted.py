"""Texts of requests that a lack of memory preempts at a chosen point, with what each of their rounds drafted."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tandemrt import LLM, SamplingParams
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.requests.running import RunningRequest


def preempting(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, prompt: Sequence[int], params: SamplingParams
) -> Callable[[int], tuple[list[int], dict[int, list[int]]]]:
    """Return a function that generates a text, and preempts it when its memory grows for the n-th time; 0: never.

    It returns the text, and by length of the output the drafts that verification got.
    """
    grow, write = llm.loop.slots.grow, llm.loop._verify_inputs.write
    calls, lacking, drafted = 0, 0, dict[int, list[int]]()

    def lacks_memory_once(running: RunningRequest) -> bool:
        nonlocal calls
        calls += 1
        return calls != lacking and grow(running)

    def watched(round_: Round) -> Any:
        drafts = write(round_)
        proposed = llm.loop.target.buffers.draft_tokens.host_view(round_.batch, round_.window).numpy()
        for slot, running in round_.rows.items():
            alone = drafts.alone.get(slot)
            tokens = proposed[slot, : drafts.lengths[slot]].tolist() if alone is None else list(alone.tokens)
            drafted[running.output_length] = tokens
        return drafts

    def text(at: int) -> tuple[list[int], dict[int, list[int]]]:
        nonlocal calls, lacking
        calls, lacking = 0, at
        drafted.clear()
        ids = llm.generate(list(prompt), params).token_ids
        return ids, dict(drafted)

    monkeypatch.setattr(llm.loop.slots, "unchanged_until", lambda _: 0)  # grow in every round
    monkeypatch.setattr(llm.loop.slots, "grow", lacks_memory_once)
    monkeypatch.setattr(llm.loop._verify_inputs, "write", watched)
    return text
