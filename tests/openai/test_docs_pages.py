"""The documentation that a server shows."""

import re
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest

from tests.openai.client import Served

DOCS = Path(__file__).parents[2] / "docs"


def test_docs_lead_to_the_first_page(served: Served) -> None:
    status, _, headers = served.ask("/docs")
    assert (status, urljoin("/docs", headers["location"])) == (307, "/docs/index.md")


@pytest.mark.parametrize("name", sorted(file.name for file in DOCS.glob("*.md")))
def test_the_links_and_pictures_of_a_page_exist(served: Served, name: str) -> None:
    status, page, headers = served.ask(f"/docs/{name}")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "script-src 'none'" in headers["content-security-policy"]
    targets = {
        urlsplit(urljoin(f"/docs/{name}", target))
        for target in re.findall(r'(?:href|src)="([^"]+)"', page)
        if not re.match(r"https?:|data:", target)
    }
    pages = {path: served.ask(path) for path in {target.path for target in targets}}
    assert {path: status for path, (status, *_) in pages.items() if status != 200} == {}
    for target in targets:
        assert not target.fragment or f'id="{target.fragment}"' in pages[target.path][1]


@pytest.mark.parametrize("path", ["/docs/none.md", "/docs/../pyproject.toml", "/docs/%2e%2e/pyproject.toml", "/docs/"])
def test_other_files_are_not_shown(served: Served, path: str) -> None:
    assert served.ask(path)[0] == 404
