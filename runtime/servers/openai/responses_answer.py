"""Format the output of a request as a response object of /v1/responses, complete or as the events of a stream."""

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tandemrt.engines.text.tokenizer import Tokenizer
from tandemrt.runtime.requests.request import RequestOutput
from tandemrt.runtime.servers.openai.answer import AnswerBlocks, Block, BlockDelta, whole
from tandemrt.runtime.servers.openai.errors import error_body
from tandemrt.runtime.servers.openai.formatters import metrics_of, usage_of
from tandemrt.runtime.servers.openai.request_body import CompletionRequest
from tandemrt.runtime.servers.request_stream import OutputDelta

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


class ResponsesFormatter:
    """Formats the response to one request to /v1/responses: an item for every block of the answer.

    Args:
        model: name of the served model.
    """

    def __init__(self, request: CompletionRequest, model: str, _tokenizer: Tokenizer) -> None:
        self._head = {
            "id": request.request_id or _id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **request.repeated,
            **({"warnings": [*request.warnings]} if request.warnings else {}),
        }
        self._answer = AnswerBlocks(request.tool_calls)
        self._ids: list[str] = []  # of the items
        self._events = 0

    def complete(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the response without streaming."""
        for delta in self._answer.feed(whole(outputs[0])):
            self._begin(delta)
        return self._finished_response()

    def chunks(self, deltas: Sequence[OutputDelta], _prompt_tokens: int) -> list[dict[str, Any]]:
        """Return the events for ``deltas``."""
        events = [] if self._events else [*self._opening()]
        for delta in deltas:
            for each in self._answer.feed(delta):
                events += self._block_events(each)
        if self.finished:
            response = self._finished_response()
            events.append({"type": f"response.{response['status']}", "response": response})
        for event in events:
            event["sequence_number"] = self._events
            self._events += 1
        return events

    @property
    def finished(self) -> bool:
        """Whether the output has finished."""
        return self._answer.output is not None

    def _opening(self) -> Iterator[dict[str, Any]]:
        for state in ("created", "in_progress"):
            yield {"type": f"response.{state}", "response": self._response("in_progress")}

    def _block_events(self, delta: BlockDelta) -> Iterator[dict[str, Any]]:
        self._begin(delta)
        block = delta.block
        place = {"item_id": self._ids[block.index], "output_index": block.index}
        item_at = {"output_index": block.index}
        name, field = "response.function_call_arguments", "arguments"
        if block.kind != "call":
            name, field = f"response.{_part(block)['type']}", "text"
            place["content_index"] = 0
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if delta.begins:
            yield {"type": "response.output_item.added", **item_at, "item": self._begun_item(block)}
            if block.kind != "call":
                yield {"type": "response.content_part.added", **place, "part": _part(block) | {"text": ""}}
        if delta.text:
            yield {"type": f"{name}.delta", **place, "delta": delta.text, **more}
        if delta.ends:
            yield {"type": f"{name}.done", **place, field: block.text, **more}
            if block.kind != "call":
                yield {"type": "response.content_part.done", **place, "part": _part(block)}
            yield {"type": "response.output_item.done", **item_at, "item": self._item(block)}

    def _begin(self, delta: BlockDelta) -> None:
        if delta.begins:
            self._ids.append(_id(_PREFIXES[delta.block.kind]))

    def _finished_response(self) -> dict[str, Any]:
        output = self._answer.output
        assert output is not None
        reason = _INCOMPLETE.get(self._answer.finish_reason)
        return self._response("completed" if reason is None else "incomplete", output) | {
            "incomplete_details": None if reason is None else {"reason": reason},
            "native_finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "seed": output.seed,
            "metrics": metrics_of([output]),
            **({} if output.error is None else {"constraint_error": output.error}),
        }

    def _response(self, status: str, output: RequestOutput | None = None) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [self._item(block) for block in self._answer.blocks],
            "usage": None if output is None else _usage(output),
        }

    def _begun_item(self, block: Block) -> dict[str, Any]:
        empty: dict[str, Any] = {"arguments": ""} if block.kind == "call" else {"content": []}
        return self._item(block) | {"status": "in_progress"} | empty

    def _item(self, block: Block) -> dict[str, Any]:
        last = self.finished and block is self._answer.blocks[-1]
        unfinished = last and (block.kind == "reasoning") == self._answer.in_reasoning
        cut = unfinished and self._answer.finish_reason in _INCOMPLETE
        head = {"id": self._ids[block.index], "status": "incomplete" if cut else "completed"}
        if block.call is not None:
            call = {"call_id": block.call.id, "name": block.call.name, "arguments": block.text}
            return {**head, "type": "function_call", **call}
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": [_part(block)]}
        return {**head, "type": "message", "role": "assistant", "content": [_part(block)]}


def error_event(error: BaseException) -> dict[str, Any]:
    """Return the event for an error in a stream. OpenAI's client raises an exception for its field ``error``."""
    body = error_body(error)
    return {"type": "error", **{name: body["error"][name] for name in ("code", "message", "param")}, **body}


def _part(block: Block) -> dict[str, Any]:
    """Return the content part of reasoning or text."""
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _usage(output: RequestOutput) -> dict[str, Any]:
    usage = usage_of([output])
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
