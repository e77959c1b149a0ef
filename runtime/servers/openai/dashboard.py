"""The live page of a server: figures of /metrics, and the trace of one request of each model while it runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.params import Depends
from fastapi.responses import HTMLResponse
from tokenizers import Tokenizer

from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.trace import RequestTrace
from tandemrt.runtime.trace.data import token_texts
from tandemrt.runtime.trace.pages import self_contained

_PAGE = Path(__file__).with_name("dashboard.html")
_MOST_TOKENS = 400  # the newest of a text, which the page shows
_HEADERS = {"cache-control": "no-store", "x-frame-options": "DENY"}


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


def dashboard(traces: LiveTraces, find: Callable[[str | None], tuple[str, LLM]], key: Depends) -> APIRouter:
    """Return the routes of the page.

    The page holds no data and needs no key. It reads /metrics, and the trace, which contains a text and depends on
    ``key``. ``find`` is Models.find.
    """
    router = APIRouter(prefix="/dashboard")
    page = self_contained(_PAGE)

    @router.get("")
    def show() -> HTMLResponse:
        return HTMLResponse(page, headers=_HEADERS)

    @router.get("/trace", dependencies=[key])
    def trace(model: str | None = None) -> dict[str, Any]:
        name, llm = find(model)
        request = traces.find(name)
        return {"request": None if request is None else _request(request, llm.tokenizer.backend)}

    return router


def _request(request: Request, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the newest tokens of a traced request, with the fields of a trace page (runtime/trace/data.py)."""
    trace, output = request.trace, request.output
    assert trace is not None
    count = _num_tokens(trace) if output is None else len(output.token_ids)
    tokens = list(trace.tokens(max(0, count - _MOST_TOKENS), count))
    texts = token_texts(tokenizer, [token.id for token in tokens])
    return {
        "finish_reason": request.finish_reason,
        "num_tokens": count,
        "rounds": len(trace.rounds),
        "tokens": [{**token._asdict(), "text": text} for token, text in zip(tokens, texts, strict=True)],
    }


def _num_tokens(trace: RequestTrace) -> int:
    return sum(len(each.emitted) for each in list(trace.rounds))
