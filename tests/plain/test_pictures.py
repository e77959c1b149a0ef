"""The pictures of the docs are what their command draws, from figures that the docs state."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tools.pictures.__main__ import FOLDER, HERE, drawn

ROOT = Path(__file__).parents[2]
MEASURED: dict[str, Any] = json.loads((HERE / "h200.json").read_text())
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text()


def figures(begins: str) -> list[list[float | None]]:
    """The figures of the table's row that ``begins`` so, ours, and of the two behind it, the peers'."""
    lines = BENCHMARKS[BENCHMARKS.index(f"\n| {begins}") + 1 :].splitlines()[:3]
    assert [re.sub(r".*: ", "", line).split()[0] for line in lines] == ["TandemRT", "|", "|"]
    rows = [line.strip("| ").split("|")[1:] for line in lines]
    return [[float(cell.replace(",", "")) if cell.strip() else None for cell in row] for row in rows]


def test_the_pictures_are_those_that_their_command_draws() -> None:
    assert {file.stem: file.read_text() for file in FOLDER.glob("*.svg")} == drawn()


@pytest.mark.parametrize("name", drawn())
def test_a_picture_is_well_formed_says_what_it_shows_and_is_in_the_docs(name: str) -> None:
    root = ElementTree.fromstring(drawn()[name])
    assert root.findtext("{http://www.w3.org/2000/svg}title")
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert any(f"pictures/{name}.svg" in page.read_text() for page in pages)


def test_the_readme_has_at_most_three_pictures() -> None:
    assert (ROOT / "README.md").read_text().count(".svg)") <= 3


def test_the_figures_beside_the_peers_are_those_of_the_benchmarks() -> None:
    for begins, drawn_from in (
        ("round of 4 drafts: TandemRT", "ms_per_round"),
        ("first tokens of all requests, prompts of 1,000 tokens: TandemRT", "ms_to_first_tokens"),
    ):
        stated = [[value for value in row if value is not None] for row in figures(begins)]
        assert stated == [[value for value in row if value is not None] for row in MEASURED[drawn_from].values()]
        assert list(MEASURED[drawn_from]) == ["TandemRT", "vLLM", "SGLang"]


def test_the_figures_by_weights_are_those_of_the_benchmarks() -> None:
    _, float8 = BENCHMARKS.split("The same shapes with products in float8")
    rows = re.findall(r"^\| (\d+) \| 0 \| ([\d.]+) \|.*\| ([\d.]+) \|$", float8, re.MULTILINE)
    drawn_from = MEASURED["ms_per_token_by_weights"]
    assert [int(batch) for batch, *_ in rows] == MEASURED["batches_by_weights"]
    assert [float(ours) for _, ours, _ in rows] == drawn_from["float8"]
    assert [float(whole) for *_, whole in rows] == drawn_from["bfloat16"]
    peer = " / ".join(f"{each:.2f}" for each in drawn_from["vLLM, float8"])
    assert f"With FP8 weights vLLM takes {peer} ms" in BENCHMARKS


def test_the_figures_of_acceptance_are_those_of_the_benchmarks() -> None:
    section = BENCHMARKS[BENCHMARKS.index("## Acceptance by temperature") :].split("\n## ")[0]
    rows = [line.strip("| ").split("|") for line in section.splitlines() if re.match(r"\| \d", line)]
    lengths = [[float(cell.split()[0]) for cell in cells] for _, *cells in rows]
    assert [list(column) for column in zip(*lengths, strict=True)] == list(MEASURED["acceptance_length"].values())
    assert [row[0].split("(")[0].strip() for row in rows] == MEASURED["temperatures"]


def test_the_figures_of_speculation_are_those_of_the_benchmarks() -> None:
    bfloat16, _ = BENCHMARKS.split("The same shapes with products in float8")
    table = re.findall(r"^\| (\d+) \| ([04]) \| ([\d.]+) \|.*\| ([\d,]+) \| [\d.]+ \|", bfloat16, re.MULTILINE)
    by_window = {
        window: [float(tokens.replace(",", "")) for _, each, _, tokens in table if each == window] for window in "04"
    }
    assert by_window == {"0": MEASURED["tokens_per_second"]["plain"], "4": MEASURED["tokens_per_second"]["4 drafts"]}
    assert [int(batch) for batch, window, *_ in table if window == "4"] == MEASURED["batches"]
    one = MEASURED["round_at_batch_16_ms"]
    stated = f"| 16 | 4 | {one['round']:.2f} | {one['propose']:.2f} | {one['target']:.2f} | {one['verify']:.3f} |"
    assert stated in BENCHMARKS
