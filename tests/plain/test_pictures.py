"""The pictures of the documents are what their command draws from the measured tables."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.pictures.__main__ import FOLDER, drawn
from tools.pictures.data import FOLDER as DATA
from tools.pictures.data import rows

ROOT = Path(__file__).parents[2]


def test_pictures_are_those_that_their_command_draws() -> None:
    assert {file.stem: file.read_text() for file in FOLDER.glob("*.svg")} == drawn()


@pytest.mark.parametrize("name", drawn())
def test_a_picture_is_well_formed_has_a_title_and_is_used_by_a_page(name: str) -> None:
    root = ElementTree.fromstring(drawn()[name])
    assert root.findtext("{http://www.w3.org/2000/svg}title")
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert any(f"pictures/{name}.svg" in page.read_text() for page in pages)


def test_the_readme_has_at_most_three_pictures() -> None:
    assert (ROOT / "README.md").read_text().count(".svg)") <= 3


@pytest.mark.parametrize("file", sorted(DATA.glob("*.csv")), ids=lambda file: file.stem)
def test_a_measured_table_names_its_command_and_machine_and_a_page_links_to_it(file: Path) -> None:
    title, command, machine, *_ = file.read_text().splitlines()
    assert all(line.startswith("# ") and len(line) > 4 for line in (title, command, machine))
    table = rows(file.stem)
    assert table
    assert all(None not in row and None not in row.values() for row in table)
    assert any(f"data/{file.name}" in page.read_text() for page in (ROOT / "docs").glob("*.md"))
