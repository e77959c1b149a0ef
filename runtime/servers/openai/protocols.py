"""The endpoints that generate: how each reads a request, and writes responses, events and errors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tandemrt.engines.text.tokenizer import Tokenizer
from tandemrt.runtime.requests.request import RequestOutput
from tandemrt.runtime.servers.anthropic.answer import MessageFormatter
from tandemrt.runtime.servers.anthropic.errors import anthropic_error
from tandemrt.runtime.servers.anthropic.request import parse_messages_request
from tandemrt.runtime.servers.json_text import encode_event
from tandemrt.runtime.servers.openai.errors import error_body
from tandemrt.runtime.servers.openai.formatters import ChatFormatter, CompletionFormatter
from tandemrt.runtime.servers.openai.request_body import CompletionRequest, parse_chat, parse_completion
from tandemrt.runtime.servers.openai.responses_answer import ResponsesFormatter, error_event
from tandemrt.runtime.servers.openai.responses_request import parse_responses
from tandemrt.runtime.servers.request_stream import OutputDelta


class Formatter(Protocol):
    """Formats the response to one request."""

    def complete(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the response without streaming."""

    def chunks(self, deltas: Sequence[OutputDelta], prompt_tokens: int) -> list[dict[str, Any]]:
        """Return the events of a stream for ``deltas``."""

    @property
    def finished(self) -> bool:
        """Whether all outputs have finished."""


@dataclass(frozen=True)
class Endpoint:
    """One endpoint that generates.

    Attributes:
        parse: returns the request in a body, with the model's chat templates by name. Raises BadRequest.
        formatter: of a request, the name of its model and the tokenizer.
        error: returns the response body for an error.
        stream_error: returns the event for an error in a stream.
        event_names: whether the events of a stream have names: their ``type``.
        end: last data of a stream.
    """

    parse: Callable[[Mapping[str, Any], Mapping[str, str]], CompletionRequest]
    formatter: Callable[[CompletionRequest, str, Tokenizer], Formatter]
    error: Callable[[BaseException], dict[str, Any]] = error_body
    stream_error: Callable[[BaseException], dict[str, Any]] = error_body
    event_names: bool = False
    end: str = ""

    def events(self, chunks: Sequence[Mapping[str, Any]], encode: Callable[[Any], str] = encode_event) -> str:
        """Return ``chunks`` as server-sent events. ``encode`` writes JSON in one line."""
        return "".join([f"{self._name(chunk)}{data_event(encode(chunk))}" for chunk in chunks])

    def failure(self, error: BaseException) -> str:
        """Return the last events of a stream that ``error`` ends."""
        return self.events([self.stream_error(error)]) + self.end

    def _name(self, chunk: Mapping[str, Any]) -> str:
        return f"event: {chunk['type']}\n" if self.event_names else ""


def data_event(data: str) -> str:
    """Return the server-sent event of ``data`` in one line."""
    return f"data: {data}\n\n"


_DONE = data_event("[DONE]")
_CHAT = Endpoint(parse_chat, ChatFormatter, end=_DONE)
_MESSAGES = Endpoint(
    parse_messages_request, MessageFormatter, error=anthropic_error, stream_error=anthropic_error, event_names=True
)

ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": Endpoint(parse_completion, CompletionFormatter, end=_DONE),
    "/v1/responses": Endpoint(parse_responses, ResponsesFormatter, stream_error=error_event, event_names=True),
    "/v1/messages": _MESSAGES,
}


def endpoint_of(path: str) -> Endpoint:
    """Return the endpoint whose forms a client of ``path`` reads, which also holds for errors of other paths."""
    return _MESSAGES if path.startswith("/v1/messages") else ENDPOINTS.get(path, _CHAT)
