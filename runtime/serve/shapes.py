"""What answers look like: OpenAI's objects, whole and in chunks, with what vLLM's and our own clients read beside them.

OpenAI's finish reasons are fewer than ours, which is in ``native_finish_reason``: a timeout is "length", and a text
that its constraint let no further, or that failed its check, is "content_filter", so that nobody parses it.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from tandemrt.runtime.requests.outputs import RequestOutput, Speculation
from tandemrt.runtime.serve.ask import Ask
from tandemrt.runtime.serve.choices import ChatChoice, TextChoice
from tandemrt.runtime.serve.reply import Piece


class Shape:
    """The answer of one request to /v1/completions: a choice for each of its outputs."""

    object = chunk_object = "text_completion"
    prefix = "cmpl"
    choice = TextChoice

    def __init__(self, ask: Ask, model: str, spell: Callable[[int], str]) -> None:
        self._ask = ask
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._choices = [
            self.choice(index, spell, spelling=ask.calls, token_ids=ask.token_ids) for index in range(ask.params.n)
        ]
        self._tokens = 0  # told
        self._ended: dict[int, RequestOutput] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer that is not a stream."""
        choices = [choice.whole(output) for choice, output in zip(self._choices, outputs, strict=True)]
        return {**self._head, "object": self.object, "choices": choices, "usage": usage(outputs)}

    def chunks(self, pieces: Sequence[Piece], prompt_tokens: int) -> list[dict[str, Any]]:
        """What ``pieces`` add to a stream; with the last one of all outputs the usage, if it was asked for."""
        return [chunk for piece in pieces for chunk in self._chunks(piece, prompt_tokens)]

    @property
    def ended(self) -> bool:
        """Whether all outputs have."""
        return len(self._ended) == len(self._choices)

    def _chunks(self, piece: Piece, prompt_tokens: int) -> list[dict[str, Any]]:
        self._tokens += len(piece.token_ids)
        if piece.output is not None:
            self._ended[piece.index] = piece.output
        choices = self._choices[piece.index].added(piece)
        whole = usage([self._ended[index] for index in range(len(self._choices))]) if self.ended else None
        so_far = whole or _counts(prompt_tokens, self._tokens)
        more = {"usage": so_far if self._ask.usage.continuous_usage_stats else None} if self._tells_usage else {}
        chunks = [{**self._head, "object": self.chunk_object, "choices": [choice], **more} for choice in choices]
        if whole is not None and self._ask.usage.include_usage:
            chunks.append({**self._head, "object": self.chunk_object, "choices": [], "usage": whole})
        return chunks

    @property
    def _tells_usage(self) -> bool:
        return self._ask.usage.include_usage or self._ask.usage.continuous_usage_stats


class ChatShape(Shape):
    """The answer of one request to /v1/chat/completions."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"
    choice = ChatChoice


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """What the outputs of a prompt took, in tokens, and how drafting went."""
    return {
        **_counts(len(outputs[0].prompt_token_ids), sum(len(output.token_ids) for output in outputs)),
        "prompt_tokens_details": {"cached_tokens": outputs[0].num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": sum(output.reasoning_tokens for output in outputs)},
        "speculation": Speculation.total([output.speculation for output in outputs]).to_json(),
    }


def _counts(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
