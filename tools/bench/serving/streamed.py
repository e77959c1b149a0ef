"""One streamed request to a server, with the times of its chunks."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Streamed:
    """What came back for one request. Times are seconds.

    Attributes:
        sent: when the request was sent, by ``time.perf_counter``.
        chunks: when each chunk with tokens arrived, likewise.
        prompt_tokens: as the server counted.
        output_tokens: likewise.
        rounds: draft windows that were verified; None if the server does not report it.
        accepted: draft tokens that were accepted, likewise.
        error: what the server or the connection answered in place of a text.
    """

    sent: float
    chunks: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    rounds: int | None = None
    accepted: int | None = None
    error: str | None = None

    @property
    def first_token(self) -> float:
        """Time to first token."""
        return self.chunks[0] - self.sent

    @property
    def per_token(self) -> float:
        """Time per output token after the first."""
        return (self.chunks[-1] - self.chunks[0]) / max(1, self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Times between chunks."""
        return [later - earlier for earlier, later in zip(self.chunks, self.chunks[1:], strict=False)]


async def stream(client: httpx.AsyncClient, url: str, body: Mapping[str, Any]) -> Streamed:
    """Send ``body`` to the server at ``url`` (up to /v1), as a chat if it has messages, and read the stream.

    An error of the server or of the connection is part of the result.
    """
    path = "/chat/completions" if "messages" in body else "/completions"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = Streamed(time.perf_counter())
    try:
        async with client.stream("POST", url + path, json={**body, **options}) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code}: {(await response.aread()).decode(errors='replace')}"
                return answer
            async for line in response.aiter_lines():
                if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                    _take(answer, json.loads(data))
    except (httpx.HTTPError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if answer.error is None and not answer.chunks:
        answer.error = "the stream ended without a token"
    return answer


def _take(answer: Streamed, chunk: Mapping[str, Any]) -> None:
    if "error" in chunk:
        answer.error = str(chunk["error"])
        return
    if any(_has_tokens(choice) for choice in chunk.get("choices", ())):
        answer.chunks.append(time.perf_counter())
    if usage := chunk.get("usage"):
        answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        if speculation := (chunk.get("metrics") or {}).get("speculative_decoding"):
            answer.rounds = speculation["num_spec_steps"]
            answer.accepted = speculation["num_accepted_draft_tokens"]


def _has_tokens(choice: Mapping[str, Any]) -> bool:
    """Whether a choice has tokens. Text of a completion may be empty, because a token can be part of a character."""
    if "text" in choice:
        return bool(choice["text"]) or choice.get("finish_reason") is None
    delta = choice.get("delta") or {}
    return any(delta.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls"))
