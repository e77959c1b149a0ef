"""Format and encode answers: small ones at once, large ones in a thread, so that no other client waits for them."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tandemrt.runtime.requests.request import RequestOutput
from tandemrt.runtime.servers.json_text import encode_event
from tandemrt.runtime.servers.openai.formatters import CompletionFormatter
from tandemrt.runtime.servers.openai.protocols import Endpoint, Formatter, data_event
from tandemrt.runtime.servers.request_stream import OutputDelta
from tandemrt.runtime.workers.clients import Client
from tandemrt.runtime.workers.fair import FairExecutor

T = TypeVar("T")
WRITER_THREADS = 2  # one client occupies one of them at most
SMALL = 2048  # values, of some microseconds each
_SLICE = 64  # members of a list that are encoded in one call
_LEVELS = 5  # of an answer that are encoded one by one: answer, choices, choice, logprobs, list of tokens

Encode = Callable[[Any], str]
_encode_answer: Encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True)
class AnswerWriter:
    """Formats and encodes the answer of one request.

    Attributes:
        threads: run what takes long; clients share them.
        values: what the answer has besides its outputs, as in ``render``.
    """

    threads: FairExecutor
    client: Client
    endpoint: Endpoint
    formatter: Formatter
    values: int

    async def answer(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the response without streaming."""
        values = self.values + sum(map(_values_of_output, outputs))
        encode = _encode_answer if values <= SMALL else _in_pieces(_encode_answer)
        return await render(
            self.threads, self.client, values, lambda: encode(self.formatter.complete(outputs)).encode()
        )

    def text_event(self, delta: OutputDelta) -> bytes | None:
        """Return the event of a short ``delta`` that differs from earlier ones in its text alone, else None."""
        size = len(delta.text) + len(delta.reasoning)
        if not isinstance(self.formatter, CompletionFormatter) or values_of_text(size) > SMALL:
            return None
        chunk = self.formatter.text_chunk(delta)
        return None if chunk is None else data_event(chunk).encode()

    async def events(self, deltas: Sequence[OutputDelta], prompt_tokens: int) -> bytes:
        """Return the events of a stream for ``deltas``."""
        values = self.values + sum(map(_values_of_delta, deltas))
        encode = encode_event if values <= SMALL else _in_pieces(encode_event)

        def events() -> bytes:
            return self.endpoint.events(self.formatter.chunks(deltas, prompt_tokens), encode).encode()

        return await render(self.threads, self.client, values, events)


async def render(threads: FairExecutor, client: Client, values: int, function: Callable[[], T]) -> T:
    """Return ``function()``, which formats about so many ``values``: tokens, logprobs, or 16 bytes of text each."""
    if values <= SMALL:
        return function()
    return await asyncio.wrap_future(threads.submit(client, function))


def values_of_text(size: int) -> int:
    """Return how many values take as much time as a text of ``size`` bytes, about."""
    return size // 16


def json_pieces(value: Any, encode: Encode, levels: int = _LEVELS) -> Iterator[str]:
    """Yield the JSON text of ``value`` in pieces: a call of ``encode`` does not release the interpreter lock."""
    if levels and isinstance(value, dict) and value:
        for at, (name, member) in enumerate(value.items()):
            yield f"{',' if at else '{'}{encode(name)}:"
            yield from json_pieces(member, encode, levels - 1)
        yield "}"
    elif levels > 2 and isinstance(value, list) and value:
        for at, member in enumerate(value):
            yield "," if at else "["
            yield from json_pieces(member, encode, levels - 1)
        yield "]"
    elif isinstance(value, list) and len(value) > _SLICE:
        for at in range(0, len(value), _SLICE):
            yield ("," if at else "[") + encode(value[at : at + _SLICE])[1:-1]
        yield "]"
    else:
        yield encode(value)


def _in_pieces(encode: Encode) -> Encode:
    return lambda value: "".join(json_pieces(value, encode))


def _values_of_delta(delta: OutputDelta) -> int:
    values = values_of_text(len(delta.text) + len(delta.reasoning)) + len(delta.token_ids) + _listed(delta.logprobs)
    return values if delta.output is None else values + _values_of_output(delta.output)


def _values_of_output(output: RequestOutput) -> int:
    values = values_of_text(len(output.text) + len(output.reasoning))
    values += len(output.token_ids) + len(output.prompt_token_ids)
    return values + _listed(output.logprobs or ()) + _listed(output.prompt_logprobs or ())


def _listed(logprobs: Sequence[TokenLogprobs]) -> int:
    return len(logprobs) * (1 + len(logprobs[0].top)) if logprobs else 0
