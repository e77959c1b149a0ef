"""The load: held-out sentences of the demo, answered through the Python API or by concurrent clients of a server."""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from tandemrt.engines.parameters.sampling import SamplingParams, StructuredOutputs
from tandemrt.runtime.llm.llm import LLM
from tools.clients.openai import OpenAIServer
from tools.clients.triton import TritonClient
from tools.demo.corpus import Example

Request = Callable[[Example], tuple[int, str]]
"""Requests one answer and returns its number of tokens and its text. Raises ValueError for an error."""


@dataclass(frozen=True)
class Run:
    """All sentences answered in one way. ``texts`` has None for an error."""

    seconds: float
    tokens: int
    errors: int
    texts: list[str | None]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def run_python(llm: LLM, examples: Sequence[Example]) -> Run:
    """Answer all sentences with one call of ``generate``."""
    params = [SamplingParams(temperature=0.0, structured_outputs=StructuredOutputs(json=e.schema)) for e in examples]
    prompts: list[Any] = [example.prompt_messages() for example in examples]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return Run(
        time.perf_counter() - start,
        sum(len(output.token_ids) for output in outputs),
        sum(output.finish_reason == "error" for output in outputs),
        [output.text for output in outputs],
    )


def run_clients(request: Request, examples: Sequence[Example], clients: int) -> Run:
    """Answer all sentences with ``clients`` concurrent clients."""

    def answer(example: Example) -> tuple[int, str | None]:
        try:
            return request(example)
        except ValueError:
            return 0, None

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(answer, examples))
    return Run(
        time.perf_counter() - start,
        sum(tokens for tokens, _ in answers),
        sum(text is None for _, text in answers),
        [text for _, text in answers],
    )


def requests_by_way(server: OpenAIServer | TritonClient) -> dict[str, Request]:
    """Return a request function for whole and for streamed responses of ``server``."""
    request = _request_openai if isinstance(server, OpenAIServer) else _request_triton
    return {
        "HTTP": partial(request, server, stream=False),  # type: ignore[arg-type]
        "HTTP stream": partial(request, server, stream=True),  # type: ignore[arg-type]
    }


def _request_openai(server: OpenAIServer, example: Example, *, stream: bool) -> tuple[int, str]:
    fields = {"messages": example.prompt_messages(), "structured_outputs": {"json": example.schema}, "temperature": 0.0}
    answer = server.chat(fields, stream=stream)
    return answer.tokens, answer.text


def _request_triton(client: TritonClient, example: Example, *, stream: bool) -> tuple[int, str]:
    fields = {
        "messages": json.dumps(example.prompt_messages()),
        "structured_outputs": json.dumps({"json": example.schema}),
        "temperature": 0.0,
    }
    answer = client.generate(fields, stream=stream)
    return len(answer.token_ids), answer.text
