"""Prompts that a draft of SmolLM2 is trained with, and those it is measured with."""

import shutil
from pathlib import Path

import pytest

from tools.demo import lexicon
from tools.real import prompts as module
from tools.real.prompts import held_out, prompts


def test_a_seed_is_one_list_of_prompts() -> None:
    assert list(prompts(3, 20)) == list(prompts(3, 20))
    assert list(prompts(3, 20)) != list(prompts(4, 20))
    assert held_out(5) == held_out(20)[:5]


@pytest.mark.parametrize(
    "words", [lexicon.CITIES, lexicon.SUBJECTS, lexicon.LAST_NAMES], ids=["city", "subject", "name"]
)
def test_held_out_prompts_share_no_word_of_the_lists_with_those_of_training(words: list[str]) -> None:
    def used(texts: list[str]) -> set[str]:
        return {word for word in words if any(f" {word}" in text for text in texts if len(text) < 130)}

    measured, trained = used(held_out(200)), used(list(prompts(0, 2000)))
    assert measured
    assert len(trained) > len(measured)
    assert not measured & trained


def paragraphs(texts: list[str]) -> set[str]:
    return {text.partition(": ")[2] for text in texts if len(text) >= 160}


def test_a_paragraph_stays_held_out_where_another_is_written_in_front_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, trained = paragraphs(held_out(200)), paragraphs(list(prompts(0, 2000)))
    edited = tmp_path / "docs"
    shutil.copytree(module._DOCS, edited, ignore=lambda _, names: [name for name in names if not name.endswith(".md")])
    (edited / "0.md").write_text("A paragraph that is new, and comes before all others, " * 4)
    monkeypatch.setattr(module, "_DOCS", edited)
    assert paragraphs(held_out(200)) & measured
    assert not paragraphs(held_out(200)) & trained
    assert not paragraphs(list(prompts(0, 2000))) & measured


def test_held_out_prompts_share_no_paragraph_with_those_of_training() -> None:
    measured, trained = paragraphs(held_out(200)), paragraphs(list(prompts(0, 2000)))
    assert measured
    assert len(trained) > len(measured)
    assert not measured & trained
