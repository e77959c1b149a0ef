"""The server's pages for browsers. A page is one file: it holds no data, needs no key, and loads nothing else."""

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from tandemrt.runtime.trace.pages import self_contained

_HERE = Path(__file__).parent
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def pages() -> Mapping[str, Callable[[Request], Awaitable[Response]]]:
    """Return the endpoint of each page by its path."""
    return {"/": _endpoint("chat.html"), "/dashboard": _endpoint("dashboard.html")}


def content_policy(html: str) -> str:
    """Return the Content-Security-Policy that allows only the page's own scripts and styles, and its server."""
    blocks = {kind: re.findall(f"<{kind}>(.*?)</{kind}>", html, re.DOTALL) for kind in ("script", "style")}
    allowed = {kind: " ".join(map(_digest, texts)) or "'none'" for kind, texts in blocks.items()}
    return "; ".join([_POLICY, *(f"{kind}-src {digests}" for kind, digests in allowed.items())])


def page_response(html: str) -> HTMLResponse:
    """Return the response that shows a page."""
    headers = {
        "content-security-policy": content_policy(html),
        "cache-control": "no-store",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return HTMLResponse(html, headers=headers)


def _endpoint(name: str) -> Callable[[Request], Awaitable[Response]]:
    html = self_contained(_HERE / name)

    async def show(_request: Request) -> Response:
        return page_response(html)

    return show


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
