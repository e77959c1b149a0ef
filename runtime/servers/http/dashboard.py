"""The data of the dashboard that /metrics does not have: the trace of one request of each model while it runs."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from fastapi.params import Depends
from tokenizers import Tokenizer

from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.trace.data import token_texts

_MOST_TOKENS = 400  # the newest of a text, which the page shows


class LiveTraces:
    """The request of each model that the page shows: one at a time, from its submission to its end and beyond.

    Only the event loop's thread calls ``wanted`` and ``follow``; any thread may call ``find``.
    """

    def __init__(self) -> None:
        self._followed: dict[str, Request] = {}

    def wanted(self, model: str) -> bool:
        """Whether the next request to ``model`` should be traced: no traced one is running."""
        followed = self._followed.get(model)
        return followed is None or followed.finished

    def follow(self, model: str, request: Request) -> None:
        """Show ``request`` from now on, if it is traced and no other one is running."""
        if request.trace is not None and self.wanted(model):
            self._followed[model] = request

    def find(self, model: str) -> Request | None:
        """The newest traced request to ``model``, if any."""
        return self._followed.get(model)


def dashboard(traces: LiveTraces | None, find: Callable[[str | None], tuple[str, LLM]], key: Depends) -> APIRouter:
    """Return the route of the trace, which contains a text and depends on ``key``.

    ``traces`` is None if the server shows no texts. ``find`` is Models.find.
    """
    router = APIRouter(prefix="/dashboard")

    @router.get("/trace", dependencies=[key])
    def trace(model: str | None = None) -> dict[str, Any]:
        name, llm = find(model)
        request = None if traces is None else traces.find(name)
        traced = None if request is None else _request(request, llm.tokenizer.backend)
        return {"texts": traces is not None, "request": traced}

    return router


def _request(request: Request, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the newest tokens of a traced request, with the fields of a trace page (runtime/trace/data.py)."""
    trace, output = request.trace, request.output
    assert trace is not None
    count = trace.num_emitted if output is None else len(output.token_ids)
    tokens = list(trace.tokens(max(0, count - _MOST_TOKENS), count))
    texts = token_texts(tokenizer, [token.id for token in tokens])
    return {
        "finish_reason": request.finish_reason,
        "num_tokens": count,
        "rounds": len(trace.rounds),
        "tokens": [{**token._asdict(), "text": text} for token, text in zip(tokens, texts, strict=True)],
    }
