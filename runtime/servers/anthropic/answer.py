"""Format the output of a request as a message of /v1/messages, complete or as the events of a stream."""

import math
import secrets
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from tandemrt.engines.text.tokenizer import Tokenizer
from tandemrt.runtime.requests.request import RequestOutput
from tandemrt.runtime.servers.openai.answer import AnswerBlocks, Block, BlockDelta, whole
from tandemrt.runtime.servers.openai.formatters import metrics_of, usage_of
from tandemrt.runtime.servers.openai.request_body import CompletionRequest
from tandemrt.runtime.servers.request_stream import OutputDelta

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_EMPTY: dict[str, dict[str, Any]] = {  # a block of each kind before its first delta
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
    "call": {"type": "tool_use", "input": {}},
}
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageFormatter:
    """Formats the response to one request to /v1/messages.

    Args:
        model: name of the served model.
    """

    def __init__(self, request: CompletionRequest, model: str, _tokenizer: Tokenizer) -> None:
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            **({"warnings": [*request.warnings]} if request.warnings else {}),
        }
        self._answer = AnswerBlocks(request.tool_calls)
        self._begun = False

    def complete(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the response without streaming."""
        for _ in self._answer.feed(whole(outputs[0])):
            pass
        content = [_block(each) for each in self._answer.blocks]
        return {**self._head, "content": content, **self._stop(), **_figures(outputs[0])}

    def chunks(self, deltas: Sequence[OutputDelta], prompt_tokens: int) -> list[dict[str, Any]]:
        """Return the events for ``deltas``."""
        events: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
            message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            events.append({"type": "message_start", "message": message})
        for delta in deltas:
            for each in self._answer.feed(delta):
                events += _block_events(each)
        if self._answer.output is not None:
            events.append({"type": "message_delta", "delta": self._stop(), **_figures(self._answer.output)})
            events.append({"type": "message_stop"})
        return events

    @property
    def finished(self) -> bool:
        """Whether the output has finished."""
        return self._answer.output is not None

    def _stop(self) -> dict[str, Any]:
        output = self._answer.output
        assert output is not None
        stop = output.stop_reason if isinstance(output.stop_reason, str) else None
        reason = _STOP_REASONS.get(self._answer.finish_reason, "end_turn" if stop is None else "stop_sequence")
        return {
            "stop_reason": reason,
            "stop_sequence": stop,
            "native_finish_reason": output.finish_reason,
            "seed": output.seed,
            **({} if output.error is None else {"constraint_error": output.error}),
        }


def _block_events(delta: BlockDelta) -> Iterator[dict[str, Any]]:
    block = delta.block
    if delta.begins:
        yield {"type": "content_block_start", "index": block.index, "content_block": _begun(block)}
    if delta.text:
        kind, field = _DELTAS[block.kind]
        yield {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, field: delta.text}}
    if delta.ends:
        yield {"type": "content_block_stop", "index": block.index}


def _begun(block: Block) -> dict[str, Any]:
    call = {} if block.call is None else {"id": block.call.id, "name": block.call.name}
    return {**_EMPTY[block.kind], **call}


def _block(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        # The length may have cut the arguments: their complete members remain.
        return {**_begun(block), "input": _finite(from_json(block.text or "{}", allow_partial=True))}
    return {**_begun(block), _DELTAS[block.kind][1]: block.text}


def _finite(value: Any) -> Any:
    """Return a JSON value with the largest number in place of those beyond it, such as 1e400."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return math.copysign(sys.float_info.max, value) if isinstance(value, float) and math.isinf(value) else value


def _figures(output: RequestOutput) -> dict[str, Any]:
    return {"usage": _usage(output), "metrics": metrics_of([output])}


def _usage(output: RequestOutput) -> dict[str, Any]:
    """Return the token counts; those of the prompt do not include what was cached, as Anthropic counts."""
    usage = usage_of([output])
    return {
        "input_tokens": usage["prompt_tokens"] - output.num_cached_tokens,
        "cache_read_input_tokens": output.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": output.reasoning_tokens},
    }
