"""One answer in the terminal: its text while it is generated, drafted text underlined, and a line of figures."""

import queue
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer

from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.engines.validation.errors import InternalError, TandemError, named
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.prompt import Prompt
from tandemrt.runtime.requests.request import Request, RequestOutput, StreamOutput
from tandemrt.runtime.requests.text import Detokenizer, StopMatcher

Kind = Literal["reasoning", "answer"]


@dataclass(frozen=True)
class TextSpan:
    """Part of an answer. ``drafted``: its tokens were accepted drafts."""

    kind: Kind
    text: str
    drafted: bool


class StreamedAnswer:
    """An answer that is being generated. Iteration yields its text and then sets ``output`` and ``seconds``."""

    def __init__(self, llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
        self.output: RequestOutput | None = None
        self.seconds = 0.0
        self._llm = llm
        self._items: queue.SimpleQueue[StreamOutput] = queue.SimpleQueue()
        self._start = time.perf_counter()
        self._request = llm.submit(prompt, params, self._items.put, traced=True)
        self._drafted = DraftedText(llm.tokenizer.backend, self._request)

    def __iter__(self) -> Iterator[TextSpan]:
        while self.output is None:
            item = self._items.get()
            if item.output is not None:
                self.seconds = time.perf_counter() - self._start
            yield from self._drafted.spans(item)
            self.output = item.output

    def wait(self) -> RequestOutput:
        """Return the output after its end. Raises what made the request fail."""
        for _ in self:
            pass
        return self.result()

    def result(self) -> RequestOutput:
        """Return the output of a finished answer. Raises what made the request fail."""
        failure = self._request.failure
        if failure is not None:
            raise failure if isinstance(failure, TandemError) else InternalError(named(failure))
        assert self.output is not None
        return self.output

    def stop(self) -> None:
        """End the answer within a round. Iterate to the end afterwards."""
        self._llm.cancel(self._request)


def print_answer(console: Console, answer: StreamedAnswer) -> None:
    """Print an answer while it is generated. Ctrl-C stops it."""
    kind, text = "", ""
    while answer.output is None:
        try:
            for span in answer:
                if kind and span.kind != kind:
                    console.print("" if text.endswith("\n") else "\n")
                kind, text = span.kind, span.text
                style = ("dim " if kind == "reasoning" else "") + ("underline" if span.drafted else "")
                console.print(Text(span.text, style=style), end="", soft_wrap=True)
        except KeyboardInterrupt:
            answer.stop()
    console.print()


def figures(output: RequestOutput, seconds: float, *, sampled: bool) -> str:
    """Return the line that ends an answer: tokens, time, tokens/s, tokens per round, and how the answer ended.

    It names the seed of a ``sampled`` answer; a greedy one has no use for it.
    """
    tokens = len(output.token_ids)
    facts = [f"{tokens} tokens in {seconds:.2f} s", f"{tokens / max(seconds, 1e-9):.1f} tokens/s"]
    if output.speculation.num_spec_tokens:
        facts.append(f"{output.speculation.mean_acceptance_length:.2f} tokens per round")
    facts += [f"finish: {output.finish_reason}", *([f"seed: {output.seed}"] if sampled else [])]
    if output.forced_ends:
        facts.append("thinking budget reached")
    return ", ".join(facts)


def wrapped(facts: str, width: int) -> str:
    """Break ``facts`` between two of them where a line would exceed ``width``."""
    unbroken = facts.replace(" ", "\u00a0").replace(",\u00a0", ", ")
    return textwrap.fill(unbroken, width).replace("\u00a0", " ")


class DraftedText:
    """Splits a request's text into spans that were drafted and spans that were not, from its trace."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self._request = request
        self._tokens = 0  # processed
        self._sections = {kind: Detokenizer(tokenizer, StopMatcher(())) for kind in ("reasoning", "answer")}
        self._drafted: dict[str, list[bool]] = {kind: [] for kind in self._sections}  # flag of each coming character

    def spans(self, item: StreamOutput) -> Iterator[TextSpan]:
        """Yield the text that ``item`` adds."""
        trace, end = self._request.trace, self._tokens + len(item.token_ids)
        assert trace is not None
        drafted = [token.drafted for token in trace.tokens(self._tokens, end)]
        for part in trace.parts(self._tokens, end):
            section = self._sections.get(part.role)
            if section is not None:
                before = len(section.text)
                section.push([part.id], include_stop=False)
                self._drafted[part.role] += [drafted[part.at - self._tokens]] * (len(section.text) - before)
        self._tokens = end
        yield from self._split("reasoning", item.reasoning)
        yield from self._split("answer", item.text)

    def _split(self, kind: Kind, text: str) -> Iterator[TextSpan]:
        flags = self._drafted[kind]
        flags += [False] * (len(text) - len(flags))  # the text may end with an incomplete character
        characters = zip(text, flags, strict=False)
        for drafted, group in groupby(characters, key=lambda each: each[1]):
            yield TextSpan(kind, "".join(character for character, _ in group), drafted)
        del flags[: len(text)]
