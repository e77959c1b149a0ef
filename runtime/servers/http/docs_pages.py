"""The documentation of this version as pages of the server: docs/*.md as HTML, and what these files show."""

import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response

from tandemrt.runtime.servers.http.pages import page_response
from tandemrt.runtime.trace.pages import self_contained

_HERE = Path(__file__).parent
_DOCS = _HERE / "docs"  # a link to the documentation, whose files a wheel contains
_FIRST = "index.md"


async def show_start(_request: Request) -> Response:
    """Redirect to the first page."""
    return RedirectResponse(f"docs/{_FIRST}")


def show_file(request: Request) -> Response:
    """Return a page or a picture. It is named as in the repository, so that relative links work."""
    file = _files().get(request.path_params["path"])
    if file is None:
        raise HTTPException(404, f"is no page of the documentation; see /docs/{_FIRST}")
    return page_response(_html(file)) if file.suffix == ".md" else FileResponse(file)


@lru_cache(maxsize=1)
def _files() -> Mapping[str, Path]:
    return {file.relative_to(_DOCS).as_posix(): file for file in _DOCS.rglob("*") if file.is_file()}


@lru_cache
def _html(file: Path) -> str:
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(file.read_text(encoding="utf-8"))
    for heading, text in pairwise(tokens):
        if heading.type == "heading_open":
            heading.attrSet("id", _anchor(text.content))
    content = markdown.renderer.render(tokens, markdown.options, {})
    return self_contained(_HERE / "docs.html").replace("/* content */", content, 1)


def _anchor(heading: str) -> str:
    """Return the anchor of a heading, as the documentation site has it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
