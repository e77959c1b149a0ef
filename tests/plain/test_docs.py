"""Every link of the documentation leads somewhere, every page is in the site's menu, and what they name is there."""

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


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_the_files_tests_and_commands_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text()
    for folder, rest, test in re.findall(
        r"`(docs|engines|export|plugins|runtime|tests|tools)(/[\w/.-]+\.\w+)(?:::(\w+))?`", text
    ):
        assert (ROOT / (folder + rest)).is_file(), folder + rest
        assert not test or f"def {test}(" in (ROOT / (folder + rest)).read_text(), test
    for module in re.findall(r"python3? -m (tools[\w.]*\w)", text):
        file = ROOT / Path(*module.split("."))
        assert file.with_suffix(".py").is_file() or (file / "__main__.py").is_file(), module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_site_shows_comments_of_code_whole(page: Path) -> None:
    """It cuts lines of code at the right, so a comment that makes a line long stands above the code."""
    code = "\n".join(re.findall(r"^```\w*\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL))
    assert not [line for line in code.splitlines() if len(line) > 84 and re.search(r"\S +# ", line)]


def test_the_sites_menu_has_every_page_once() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2].partition("plugins:")[0]
    assert sorted(re.findall(r"- (\w+\.md)", menu)) == [page.name for page in PAGES]


def test_the_reference_names_what_there_is() -> None:
    from importlib import import_module

    for name in re.findall(r"^::: (\S+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE):
        module, _, last = name.rpartition(".")
        assert hasattr(import_module(module), last), name
