"""A conversation with a model: what was said so far, how answers are asked for, and one answer as it comes."""

import queue
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from tokenizers import Tokenizer

from tandemrt.engines.params import SamplingParams
from tandemrt.runtime.llm import LLM
from tandemrt.runtime.requests.outputs import RequestOutput, StreamOutput
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.stops import StopMatcher
from tandemrt.runtime.requests.text import Section

Kind = Literal["reasoning", "answer"]


@dataclass(frozen=True)
class Said:
    """Text of an answer; ``drafted``: the draft model said it first."""

    kind: Kind
    text: str
    drafted: bool


@dataclass
class Conversation:
    """Messages in turns. ``params`` are those of every answer."""

    llm: LLM
    params: SamplingParams
    messages: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, text: str) -> "Answer":
        """Ask for the answer to ``text``. Raises BadRequest if it cannot be given; nothing was said then."""
        return Answer(self, [*self.messages, {"role": "user", "content": text}])


class Answer:
    """One answer. Iterating gives its text as it becomes certain; then ``output`` is there and the turn is kept."""

    def __init__(self, conversation: Conversation, messages: list[dict[str, Any]]) -> None:
        self.output: RequestOutput | None = None
        self._conversation = conversation
        self._messages = messages
        self._items: queue.SimpleQueue[StreamOutput] = queue.SimpleQueue()
        llm = conversation.llm
        self._request = llm.submit(messages, conversation.params, self._items.put, traced=True)
        self._marks = Marks(llm.tokenizer.backend, self._request)

    def __iter__(self) -> Iterator[Said]:
        while self.output is None:
            item = self._items.get()
            yield from self._marks.take(item)
            self._end(item.output)

    def stop(self) -> None:
        """End the answer within a round; what was said so far stays in the conversation. Iterate to its end then."""
        self._conversation.llm.cancel(self._request)

    def _end(self, output: RequestOutput | None) -> None:
        self.output = output
        if output is not None and output.finish_reason != "error":
            reasoning = {"reasoning_content": output.reasoning} if output.reasoning else {}
            said = {"role": "assistant", "content": output.text, **reasoning}
            self._conversation.messages = [*self._messages, said]


class Marks:
    """Says of every character of a request's text whether it was drafted."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self._request = request
        self._tokens = 0  # told
        self._sections = {kind: Section(tokenizer, StopMatcher(())) for kind in ("reasoning", "answer")}
        self._drafted: dict[str, list[bool]] = {kind: [] for kind in self._sections}  # of characters to come

    def take(self, item: StreamOutput) -> Iterator[Said]:
        """Yield what ``item`` adds to the text, in stretches that were drafted or not."""
        trace, end = self._request.trace, self._tokens + len(item.token_ids)
        assert trace is not None
        drafted = [token.drafted for token in trace.tokens(self._tokens, end)]
        for part in trace.parts(self._tokens, end):
            section = self._sections.get(part.kind)
            if section is not None:
                before = len(section.text)
                section.push([part.id], include_stop=False)
                self._drafted[part.kind] += [drafted[part.at - self._tokens]] * (len(section.text) - before)
        self._tokens = end
        yield from self._stretches("reasoning", item.reasoning)
        yield from self._stretches("answer", item.text)

    def _stretches(self, kind: Kind, text: str) -> Iterator[Said]:
        flags = self._drafted[kind]
        flags += [False] * (len(text) - len(flags))  # the bytes of half a character that ends a text
        marked = zip(text, flags, strict=False)
        for drafted, group in groupby(marked, key=lambda each: each[1]):
            yield Said(kind, "".join(character for character, _ in group), drafted)
        del flags[: len(text)]
