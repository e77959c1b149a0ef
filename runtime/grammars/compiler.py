"""Compile sources to grammars, with llguidance or xgrammar by the kind of source."""

import json
from collections.abc import Iterable
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from tandemrt.engines.text.vocabulary import Vocabulary
from tandemrt.engines.validation.errors import BadRequest, InternalError, clipped
from tandemrt.runtime.grammars.grammar import Grammar
from tandemrt.runtime.grammars.schema.looser import looser

if TYPE_CHECKING:
    from tandemrt.engines.parameters.sampling import Whitespace
    from tandemrt.runtime.grammars.llguidance_compiler import LLGuidanceCompiler
    from tandemrt.runtime.grammars.xgrammar_matcher import XGrammarCompiler


class CompiledGrammar(Protocol):
    """A compiled grammar. Requests and threads may share it."""

    @property
    def size_bytes(self) -> int:
        """An estimate of its memory, in bytes."""

    @property
    def exhausted(self) -> bool:
        """Whether further requests must compile it again."""

    def matcher(self, stop_ids: Iterable[int] | None = None) -> Grammar:
        """Return a matcher of a new text. ``stop_ids`` end a complete text; None: those of the compiler."""


class GrammarCompiler:
    """Compile sources for one vocabulary; each engine is created on first use."""

    def __init__(self, vocabulary: Vocabulary, stop_ids: Iterable[int]) -> None:
        self._vocabulary = vocabulary
        self._stop_ids = tuple(stop_ids)
        self._lock = Lock()
        self._llguidance: LLGuidanceCompiler | None = None
        self._xgrammar: XGrammarCompiler | None = None

    def compile(
        self, kind: str, source: str, *, whitespace: "Whitespace" = "bounded", loose: bool = False
    ) -> CompiledGrammar:
        """Compile ``Source.text``: a ``json`` schema, a ``regex``, an EBNF ``grammar`` or a ``structural_tag``.

        ``whitespace``: between tokens of JSON.

        ``loose``: compile a looser schema if the engine rejects it, because the finished text is validated.

        Raises:
            BadRequest: the engine rejects the source.
        """
        try:
            match kind:
                case "json":
                    return self._compile_json(json.loads(source), whitespace, loose)
                case "regex":
                    return self._llguidance_compiler().compile_regex(source)
                case "grammar":
                    return self._xgrammar_compiler().compile(source)
                case "structural_tag":
                    return self._compile_tags(json.loads(source), whitespace)
                case _:
                    raise InternalError(f"kind: must be json, regex, grammar or structural_tag, got {kind!r}")
        except ValueError as error:
            raise BadRequest(f"structured_outputs.{kind}: cannot be compiled: {clipped(error)}") from error

    def _compile_json(self, schema: dict[str, Any] | bool, whitespace: "Whitespace", loose: bool) -> CompiledGrammar:
        compiler = self._llguidance_compiler()
        try:
            return compiler.compile_json(schema, whitespace=whitespace)
        except ValueError as error:
            if not isinstance(schema, dict):
                raise
            failure = error
        for other in looser(schema) if loose else ():
            with suppress(ValueError):
                return compiler.compile_json(other, whitespace=whitespace)
        raise failure

    def _compile_tags(self, part: Any, whitespace: "Whitespace") -> CompiledGrammar:
        from tandemrt.runtime.grammars.structural_tag import parse

        return self._llguidance_compiler().compile_tags(parse(part), whitespace=whitespace)

    def _llguidance_compiler(self) -> "LLGuidanceCompiler":
        from tandemrt.runtime.grammars.llguidance_compiler import LLGuidanceCompiler

        with self._lock:
            if self._llguidance is None:
                self._llguidance = LLGuidanceCompiler(self._vocabulary, self._stop_ids)
            return self._llguidance

    def _xgrammar_compiler(self) -> "XGrammarCompiler":
        from tandemrt.runtime.grammars.xgrammar_matcher import XGrammarCompiler

        with self._lock:
            if self._xgrammar is None:
                self._xgrammar = XGrammarCompiler(self._vocabulary, self._stop_ids)
            return self._xgrammar
