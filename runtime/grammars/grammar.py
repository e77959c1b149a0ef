"""From sources to grammars: which engine compiles what, behind one protocol."""

import json
from collections.abc import Iterable
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from tandemrt.engines.errors import BadRequest, InternalError, clipped
from tandemrt.engines.vocabulary import Vocabulary
from tandemrt.runtime.constraints.grammar import Grammar

if TYPE_CHECKING:
    from tandemrt.runtime.grammars.by_xgrammar import XGrammarCompiler
    from tandemrt.runtime.grammars.guidance_compiler import GuidanceCompiler


class CompiledGrammar(Protocol):
    """A grammar ready to start. Share it between requests and threads."""

    @property
    def size_bytes(self) -> int:
        """About how much memory it holds."""

    def matcher(self, stop_ids: Iterable[int] | None = None) -> Grammar:
        """Start from the beginning. ``stop_ids`` end the text, where it is complete and nowhere else; None: those of
        the compiler."""


class GrammarCompiler:
    """Compiles sources for one vocabulary; each engine is made when it is first needed."""

    def __init__(self, vocabulary: Vocabulary, stop_ids: Iterable[int]) -> None:
        self._vocabulary = vocabulary
        self._stop_ids = tuple(stop_ids)
        self._making = Lock()
        self._guidance: GuidanceCompiler | None = None
        self._xgrammar: XGrammarCompiler | None = None

    def compile(self, kind: str, source: str, *, any_whitespace: bool = True) -> CompiledGrammar:
        """Compile a ``json`` schema, a ``regex``, an EBNF ``grammar`` or a ``structural_tag``.

        Each in the form that this package writes.

        Raises:
            BadRequest: the engine does not take it.
        """
        try:
            match kind:
                case "json":
                    return self._by_llguidance().compile_json(json.loads(source), any_whitespace=any_whitespace)
                case "regex":
                    return self._by_llguidance().compile_regex(source)
                case "grammar":
                    return self._by_xgrammar().compile(source)
                case "structural_tag":
                    from tandemrt.runtime.grammars.structural_tag import read

                    return self._by_llguidance().compile_tags(read({"format": json.loads(source)}))
                case _:
                    raise InternalError(f"kind: must be json, regex, grammar or structural_tag, got {kind!r}")
        except ValueError as error:
            raise BadRequest(f"structured_outputs.{kind}: cannot be compiled: {clipped(error)}") from error

    def _by_llguidance(self) -> "GuidanceCompiler":
        from tandemrt.runtime.grammars.guidance_compiler import GuidanceCompiler

        with self._making:
            if self._guidance is None:
                self._guidance = GuidanceCompiler(self._vocabulary, self._stop_ids)
            return self._guidance

    def _by_xgrammar(self) -> "XGrammarCompiler":
        from tandemrt.runtime.grammars.by_xgrammar import XGrammarCompiler

        with self._making:
            if self._xgrammar is None:
                self._xgrammar = XGrammarCompiler(self._vocabulary, self._stop_ids)
            return self._xgrammar
