"""Prompts for SmolLM2, made from the demo's words and this project's documentation.

``python -m tools.real.prompts 32`` prints held-out prompts as JSON lines for ``tandemrt bench --prompts``. The prompts
depend on the seed and on the text of docs/. Held-out prompts share neither a word of the lists nor a paragraph with
training prompts, also not with training prompts from before an edit of docs/.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from tools.demo import lexicon

_DOCS = Path(__file__).parents[2] / "docs"
_EVERY = 8  # one word in 8 is held out, and about one paragraph in 8
_PARAGRAPH = (120, 700)  # characters
_FORMS = (
    "Write a short story about {name}, who finds a {material} {article} in {city}.",
    "Write a letter in which {name} complains to {company} about a broken {article}.",
    "{name} from {company} needs a {material} {article} for the {subject}. Write a polite e-mail that asks for it.",
    "List five uses of a {material} {article}.",
    "Explain to a child what a {article} is and what it is made of.",
    "Give me some advice for a weekend in {city}.",
    "What should {name} ask before a {subject}? Give a list.",
    "Write a poem about {city} and a {material} {article}.",
    "Compare {material} with {other} as a material for a {article}.",
    "Write a Python function that returns the number of times that the word {article} occurs in a text.",
    "Write a dialogue between {name} and a guide in {city}.",
    "How do I clean a {article} of {material}? Answer in three steps.",
    "Write an advertisement of {company} for its new {article}.",
    "Plan a {subject} for {name} in {city}, hour by hour.",
    "Summarize this text in one sentence: {paragraph}",
    "Explain this text in simple words: {paragraph}",
    "Write three questions about this text: {paragraph}",
    "Which terms in this text need an explanation? Explain them: {paragraph}",
)


def prompts(seed: int, count: int) -> Iterator[str]:
    """Yield ``count`` training prompts; none is held out."""
    return _stream(random.Random(f"train {seed}"), count, held_out=False)


def held_out(count: int) -> list[str]:
    """Return the first ``count`` held-out prompts."""
    return list(_stream(random.Random("held out"), count, held_out=True))


def _stream(rng: random.Random, count: int, *, held_out: bool) -> Iterator[str]:
    def draw(of: Sequence[str]) -> str:
        return rng.choice([each for at, each in enumerate(of) if (at % _EVERY == 0) == held_out])

    paragraphs = [each for each in _paragraphs() if _is_held_out(each) == held_out]
    articles = [one for one, _ in lexicon.ARTICLES]
    for _ in range(count):
        material, other = draw(lexicon.MATERIALS), draw(lexicon.MATERIALS)
        yield rng.choice(_FORMS).format(
            name=f"{draw(lexicon.FIRST_NAMES)} {draw(lexicon.LAST_NAMES)}",
            material=material,
            other=other,
            article=draw(articles),
            city=draw(lexicon.CITIES),
            company=draw(lexicon.COMPANIES),
            subject=draw(lexicon.SUBJECTS),
            paragraph=rng.choice(paragraphs),
        )


def _is_held_out(paragraph: str) -> bool:
    """Return whether a paragraph is held out, by its content: an edit elsewhere must not change that."""
    return hashlib.sha256(paragraph.encode()).digest()[0] % _EVERY == 0


def _paragraphs() -> list[str]:
    """Return paragraphs of prose: no headings, tables, lists or code."""
    blocks = [block for path in sorted(_DOCS.glob("*.md")) for block in path.read_text("utf-8").split("\n\n")]
    lines = [" ".join(block.split()) for block in blocks if block[:1].isupper()]
    least, most = _PARAGRAPH
    return [line for line in lines if least <= len(line) <= most]


def main(count: Annotated[int, typer.Argument(help="Number of prompts.")] = 32) -> None:
    """Print ``count`` held-out prompts."""
    for prompt in held_out(count):
        print(json.dumps({"messages": [{"role": "user", "content": prompt}]}, ensure_ascii=False))


if __name__ == "__main__":
    typer.run(main)
