"""The ends of prompts that a round processes: some drafters prepare there for requests that decode only after it."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from tandemrt.runtime.device.prompt_plan import Chunk
from tandemrt.runtime.requests.round import Round


class PromptEnd(NamedTuple):
    """The last token of the prompt in ``slot`` is token ``at`` of the target's call; ``following`` comes next."""

    slot: int
    at: int
    following: int


class PromptEnds:
    """Notes the ends among the prompts of a round over paged caches."""

    def __init__(self) -> None:
        self._ends: list[PromptEnd] = []  # ``at`` is counted from the first token of a prompt

    def note(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]]) -> None:
        """Note which of ``chunks`` end a prompt; for Drafter.write_prompts."""
        rows = accumulate(chunk.tokens for chunk in chunks)
        self._ends = [
            PromptEnd(chunk.slot, row - 1, texts[chunk.slot][-1])
            for chunk, row in zip(chunks, rows, strict=True)
            if chunk.end == len(texts[chunk.slot]) - 1
        ]

    def of_later_rows(self, round_: Round) -> Iterator[PromptEnd]:
        """Yield the ends of requests that decode only after the round. Other drafts follow what the round emits."""
        for end in self._ends:
            if end.slot in round_.undrafted and end.slot not in round_.rows:
                yield end._replace(at=round_.window_tokens + end.at)
