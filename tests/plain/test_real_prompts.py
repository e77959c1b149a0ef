"""Prompts that a draft of SmolLM2 is trained with, and those it is measured with."""

import pytest

from tools.demo import lexicon
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


def test_held_out_prompts_share_no_paragraph_with_those_of_training() -> None:
    def paragraphs(texts: list[str]) -> set[str]:
        return {text.partition(": ")[2] for text in texts if len(text) >= 160}

    measured, trained = paragraphs(held_out(200)), paragraphs(list(prompts(0, 2000)))
    assert measured
    assert len(trained) > len(measured)
    assert not measured & trained
