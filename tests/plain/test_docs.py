"""Every link of the documentation leads somewhere, tests that it names are there, and the menu has every page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
READ = [*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names that a heading is linked by: GitHub's rule, which the site's follows for the headings that we have."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading_of_it(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        place = page.parent / name if name else page
        assert place.exists(), target
        if anchor:
            assert anchor in anchors(place), target


def test_the_sites_menu_has_every_page_once() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2].partition("plugins:")[0]
    assert sorted(re.findall(r"- (\w+\.md)", menu)) == [page.name for page in PAGES]


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_every_test_that_is_named_is_there(page: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()):
        assert (ROOT / file).is_file(), file
        assert not name or f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


def test_the_reference_names_what_there_is() -> None:
    from importlib import import_module

    for name in re.findall(r"^::: (\S+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE):
        module, _, last = name.rpartition(".")
        assert hasattr(import_module(module), last), name
