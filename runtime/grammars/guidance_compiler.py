"""Compiles grammars by llguidance: schemas, expressions and tags."""

import json
from collections.abc import Iterable
from typing import Any

import llguidance

from tandemrt.engines.vocabulary import Vocabulary
from tandemrt.runtime.grammars.by_llguidance import SILENT, GuidanceGrammar
from tandemrt.runtime.grammars.structural_tag import Format
from tandemrt.runtime.grammars.tag_grammar import TagGrammar

# Rows hold every token that spells legal text, not only the one spelling that a tokenizer would choose.
_HEADER = '%llguidance {"no_forcing": true}\n'


class GuidanceCompiler:
    """Compiles sources for one vocabulary. Compiling releases the GIL and is bounded by llguidance's own limits."""

    def __init__(self, vocabulary: Vocabulary, stop_ids: Iterable[int]) -> None:
        self._vocabulary = vocabulary
        self._stop_ids = tuple(stop_ids)
        self._tokenizer = llguidance.LLTokenizer(_Tokens(vocabulary), slices=llguidance.LLTokenizer.json_slices())

    def compile_json(self, schema: dict[str, Any] | bool, *, any_whitespace: bool) -> GuidanceGrammar:
        """Compile a schema in the forms that ``schema.emit`` writes. Raises ValueError."""
        return self._compile(f"start: {_json_rule(schema, any_whitespace=any_whitespace)}")

    def compile_regex(self, expression: str) -> GuidanceGrammar:
        """Compile an expression for the whole text, as ``patterns.full`` writes it. Raises ValueError."""
        return self._compile(f"start: /(?:{expression})/")

    def compile_tags(self, part: Format) -> GuidanceGrammar:
        """Compile a structural tag whose schemas are in the forms that ``schema.emit`` writes. Raises ValueError."""
        grammar = TagGrammar(self._vocabulary.control, _json_rule)
        rules = grammar.write(part)
        for lexeme in grammar.lexemes:
            name, _, _ = lexeme.partition(":")
            alone = llguidance.LLMatcher(self._tokenizer, f"{_HEADER}start: {name}\n{lexeme}", log_level=SILENT)
            alone.compute_bitmask()
            if alone.is_error():
                raise ValueError("no text fits an expression together with its end, or a trigger with what is excluded")
        return self._compile(rules)

    def _compile(self, rules: str) -> GuidanceGrammar:
        return GuidanceGrammar(self._vocabulary, self._tokenizer, _HEADER + rules, self._stop_ids)


class _Tokens:
    """A vocabulary as llguidance reads it, with an end of text of its own: a request chooses what ends its text.

    Control tokens stand in no text: a grammar has them where it names their ids.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = len(vocabulary.tokens)
        control = vocabulary.special
        spelled = (b"%d" % index if index in control else token for index, token in enumerate(vocabulary.tokens))
        self.tokens = [*spelled, b"</s>"]
        self.special_token_ids = [*sorted(control), self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        raise NotImplementedError("nothing here tokenizes a text")


def _json_rule(schema: dict[str, Any] | bool, *, any_whitespace: bool = False) -> str:
    options: dict[str, bool | str] = {
        "whitespace_flexible": any_whitespace,
        "json_allow_general_unicode_escapes": True,
    }
    if not any_whitespace:
        options |= {"item_separator": ", ", "key_separator": ": "}
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"
