"""Split the outputs of a request into reasoning, text and tool calls: what every protocol writes in its own form."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tandemrt.runtime.requests.request import RequestOutput
from tandemrt.runtime.servers.openai.tools import ToolCallDelta, ToolCallParser, ToolCallSpec
from tandemrt.runtime.servers.request_stream import OutputDelta

Kind = Literal["reasoning", "text", "call"]

_FINISH_REASONS = {"timeout": "length", "constraint": "content_filter"}


class AnswerParser:
    """Incremental parser of one output.

    Models write white space around calls. So in an answer that may contain calls, white space alone is no text.

    Args:
        tool_calls: how the text writes tool calls; None: it contains none.
    """

    def __init__(self, tool_calls: ToolCallSpec | None) -> None:
        self._parser = None if tool_calls is None else ToolCallParser(tool_calls)
        self._blank = ""  # white space that no other text has followed yet
        self._has_text = False  # since the last call

    def parts(self, text: str, *, last: bool) -> list[str | ToolCallDelta]:
        """Return what ``text`` adds to the answer. ``last`` also releases text that might have become a call."""
        if self._parser is None:
            return [text] if text else []
        return list(self._without_blanks(self._parser.feed(text, last=last)))

    def _without_blanks(self, parts: Iterable[str | ToolCallDelta]) -> Iterator[str | ToolCallDelta]:
        for part in parts:
            if not isinstance(part, str):
                self._blank, self._has_text = "", False
                yield part
                continue
            self._blank += part
            self._has_text = self._has_text or not self._blank.isspace()
            if self._has_text:
                yield self._blank
                self._blank = ""

    @property
    def calls(self) -> Sequence[ToolCallDelta]:
        """All calls so far, each with its joined arguments."""
        return () if self._parser is None else self._parser.calls

    def finish_reason(self, output: RequestOutput) -> str:
        """Return why ``output`` ended, with OpenAI's reasons; a timeout is "length".

        A text that its constraint could not continue, or that failed validation, is "content_filter", so that clients
        do not parse it.
        """
        reason = _FINISH_REASONS.get(output.finish_reason, output.finish_reason)
        # A text that a stop string ended may contain half a call.
        called = bool(self.calls) and not isinstance(output.stop_reason, str)
        return "tool_calls" if called and reason == "stop" else reason


@dataclass
class Block:
    """A run of one kind in an answer: reasoning, text, or one call.

    Attributes:
        index: its position among the blocks of the answer.
        text: all of it so far; the arguments of a call.
        call: the first delta of a call, with its id and name.
    """

    index: int
    kind: Kind
    text: str = ""
    call: ToolCallDelta | None = None


@dataclass(frozen=True)
class BlockDelta:
    """New text of a block, and whether it begins or ends there."""

    block: Block
    text: str = ""
    begins: bool = False
    ends: bool = False


class AnswerBlocks:
    """Splits the only output of a request into blocks, for protocols whose answers are lists of blocks.

    Attributes:
        blocks: all blocks so far.
        in_reasoning: whether the newest text is reasoning. Text of the answer may be in no block yet.
        output: the finished output, or None.
    """

    def __init__(self, tool_calls: ToolCallSpec | None) -> None:
        self._parser = AnswerParser(tool_calls)
        self.blocks: list[Block] = []
        self.in_reasoning = False
        self.output: RequestOutput | None = None

    @property
    def finish_reason(self) -> str:
        """Why the answer ended (AnswerParser.finish_reason). Only after its last delta."""
        assert self.output is not None
        return self._parser.finish_reason(self.output)

    def feed(self, delta: OutputDelta) -> Iterator[BlockDelta]:
        """Yield what ``delta`` adds to the blocks."""
        if delta.reasoning:
            yield from self._add("reasoning", delta.reasoning)
        if delta.reasoning or delta.text:
            self.in_reasoning = not delta.text
        for part in self._parser.parts(delta.text, last=delta.output is not None):
            if isinstance(part, str):
                yield from self._add("text", part)
            else:
                yield from self._add("call", part.arguments, None if part.name is None else part)
        if delta.output is not None:
            self.output = delta.output
            yield from self._end()

    def _add(self, kind: Kind, text: str, call: ToolCallDelta | None = None) -> Iterator[BlockDelta]:
        if call is not None or not self.blocks or self.blocks[-1].kind != kind:
            yield from self._end()
            self.blocks.append(Block(len(self.blocks), kind, call=call))
            yield BlockDelta(self.blocks[-1], begins=True)
        self.blocks[-1].text += text
        if text:
            yield BlockDelta(self.blocks[-1], text)

    def _end(self) -> Iterator[BlockDelta]:
        if self.blocks:
            yield BlockDelta(self.blocks[-1], ends=True)


def whole(output: RequestOutput) -> OutputDelta:
    """Return all of a finished output as one delta."""
    logprobs = output.logprobs or ()
    return OutputDelta(output.index, output.text, output.reasoning, output.token_ids, logprobs, output)
