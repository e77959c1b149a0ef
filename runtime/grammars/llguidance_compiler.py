"""Compiler for llguidance: JSON schemas, regular expressions and structural tags."""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import llguidance

from tandemrt.engines.text.vocabulary import Vocabulary
from tandemrt.runtime.grammars.json_grammar import json_rules, nested_rule
from tandemrt.runtime.grammars.llguidance_matcher import NO_TOKEN, SILENT, LLGuidanceGrammar, reason
from tandemrt.runtime.grammars.unique.matcher import UniqueItemsGrammar
from tandemrt.runtime.grammars.unique.places import Places, without_unique_items
from tandemrt.runtime.grammars.unique.reader import Reader
from tandemrt.runtime.grammars.unique.token_index import TokenIndex, token_index

if TYPE_CHECKING:
    from tandemrt.engines.parameters.sampling import Whitespace
    from tandemrt.runtime.grammars.structural_tag import Format

# no_forcing: rows allow every token whose text fits, not only the tokenizer's canonical tokens.
_BYTES = Vocabulary((*(bytes([byte]) for byte in range(256)), b""), frozenset([256]), 257)
_HEADER = '%llguidance {"no_forcing": true}\n'


class LLGuidanceCompiler:
    """Compile sources for one vocabulary. Compiling releases the GIL and is bounded by llguidance's own limits."""

    def __init__(self, vocabulary: Vocabulary, stop_ids: Iterable[int]) -> None:
        self._vocabulary = vocabulary
        self._stop_ids = tuple(stop_ids)
        self._bytes = llguidance.LLTokenizer(_Tokens(_BYTES))
        self._tokenizer = llguidance.LLTokenizer(_Tokens(vocabulary), slices=llguidance.LLTokenizer.json_slices())

    def compile_json(
        self, schema: dict[str, Any] | bool, *, whitespace: "Whitespace"
    ) -> LLGuidanceGrammar | UniqueItemsGrammar:
        """Compile a JSON schema from ``schema.emit``. Raises ValueError."""
        bare = without_unique_items(schema)
        grammar = self._compile(json_rules(bare, whitespace, self._fits))
        return grammar if bare == schema else UniqueItemsGrammar(grammar, Reader(Places(schema)), self._index)

    def compile_regex(self, expression: str) -> LLGuidanceGrammar:
        """Compile an expression from ``patterns.fullmatch_expression``. Raises ValueError."""
        return self._compile(f"start: /(?:{expression})/")

    def compile_tags(self, part: "Format", *, whitespace: "Whitespace") -> LLGuidanceGrammar | UniqueItemsGrammar:
        """Compile a structural tag whose schemas come from ``schema.emit``. Raises ValueError."""
        # These import pydantic, which a worker process needs for structural tags alone.
        from tandemrt.runtime.grammars.structural_tag import parse, with_schemas
        from tandemrt.runtime.grammars.unique.tags import TagReader

        plain, unique = with_schemas(part, lambda schema: schema), with_schemas(part, without_unique_items)
        if plain == unique:
            return self._compile_tags(part, whitespace)
        reader = TagReader(part, self._vocabulary.control, self._index)
        return UniqueItemsGrammar(self._compile_tags(parse(unique), whitespace), reader, self._index)

    @property
    def _index(self) -> TokenIndex:
        return token_index(self._vocabulary)

    def _compile_tags(self, part: "Format", whitespace: "Whitespace") -> LLGuidanceGrammar:
        from tandemrt.runtime.grammars.tag_grammar import TagGrammar

        grammar = TagGrammar(self._vocabulary.control, partial(nested_rule, whitespace=whitespace, fits=self._fits))
        rules = grammar.write(part)
        for lexeme in grammar.lexemes:
            name, _, _ = lexeme.partition(":")
            if not self._fits(f"{lexeme}\nT: {name}"):
                raise ValueError("no text fits an expression together with its end, or a trigger with its exclusions")
        return self._compile(rules)

    def _fits(self, rules: str) -> bool:
        """Return whether a text fits the terminal T of some rules."""
        alone = llguidance.LLMatcher(self._bytes, f"{_HEADER}start: T\n{rules}", log_level=SILENT)
        alone.compute_bitmask()
        if alone.is_error() and not alone.get_error().startswith(NO_TOKEN):
            raise ValueError(reason(alone))
        return not alone.is_error()

    def _compile(self, rules: str) -> LLGuidanceGrammar:
        return LLGuidanceGrammar(self._vocabulary, self._tokenizer, _HEADER + rules, self._stop_ids)


class _Tokens:
    """A vocabulary in the form that llguidance reads.

    One token is added as llguidance's end of text, because each request chooses its own stop tokens. Control tokens
    have no text; a grammar allows them only where it names their ids.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = len(vocabulary.tokens)
        control = vocabulary.special
        texts = (b"%d" % index if index in control else token for index, token in enumerate(vocabulary.tokens))
        self.tokens = [*texts, b"</s>"]
        self.special_token_ids = [*sorted(control), self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        raise NotImplementedError("llguidance does not need to tokenize")
