"""Grammars by xgrammar: a vocabulary and a source in, mask rows out."""

import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from threading import Lock

import numpy as np

from tandemrt.engines.contract import mask_words
from tandemrt.engines.errors import BadRequest, InternalError, clipped
from tandemrt.engines.vocabulary import Vocabulary
from tandemrt.runtime.constraints import bitmask
from tandemrt.runtime.constraints.phases import Grammar as Grammar
from tandemrt.runtime.grammars import binding


class XGrammar:
    """The state of one request's grammar. Not for two threads at once.

    xgrammar writes wrong memory when handed a strided view and raises on a terminated matcher; both are refused here.
    """

    def __init__(
        self,
        matcher: binding.GrammarMatcher,
        words: int,
        stop_ids: Set[int],
        mute: Set[int] = frozenset(),
        stray: Sequence[int] = (),
    ) -> None:
        self.stop_ids = stop_ids
        self._matcher = matcher
        self._words = words
        self._mute = mute  # tokens that spell nothing: xgrammar refuses each with a line on stderr
        self._stray = stray  # stop tokens of the compiler that end nothing here: xgrammar leaves them in its rows

    def fill(self, row: np.ndarray) -> None:
        """Write int32[words]: the tokens that may come next. Raises InternalError for any other buffer."""
        if not isinstance(row, np.ndarray) or row.dtype != np.int32 or row.shape != (self._words,):
            raise InternalError(f"row: must be numpy int32 of shape [{self._words}], got {_describe(row)}")
        if not (row.flags.c_contiguous and row.flags.writeable):
            raise InternalError("row: must be C-contiguous and writable, got a strided or read-only view; pass a copy")
        if self._matcher.is_terminated():
            raise InternalError("grammar: must not be filled after its end; ask is_terminated() first")
        self._matcher.fill_next_token_bitmask(row)
        for token in self._stray:
            bitmask.forbid(row, token)

    def accept(self, token: int) -> bool:
        """Advance by one token; False leaves the state as it was."""
        if token in self._mute or self._matcher.is_terminated():
            return False
        return bool(self._matcher.accept_token(token))

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` accepted tokens."""
        if count < 0:
            raise InternalError(f"count: must be >= 0, got {count}")
        self._matcher.rollback(count)

    def fork(self) -> "XGrammar":
        return XGrammar(self._matcher.fork(), self._words, self.stop_ids, self._mute, self._stray)

    def is_terminated(self) -> bool:
        return bool(self._matcher.is_terminated())


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar ready to start. Immutable; share it between requests and threads."""

    compiled: binding.CompiledGrammar
    words: int
    stop_ids: tuple[int, ...]
    spelling_nothing: frozenset[int]

    @property
    def size_bytes(self) -> int:
        return int(self.compiled.memory_size_bytes)

    def matcher(self, stop_ids: Iterable[int] | None = None) -> XGrammar:
        """Start from the beginning. ``stop_ids`` end the text, where it is complete and nowhere else; None: those of
        the compiler."""
        stops = frozenset(self.stop_ids if stop_ids is None else stop_ids)
        matcher = binding.GrammarMatcher.of(self.compiled, sorted(stops))
        stray = frozenset(self.stop_ids) - stops
        return XGrammar(matcher, self.words, stops, (self.spelling_nothing | stray) - stops, sorted(stray))


class GrammarCompiler:
    """Compiles sources for one vocabulary. Compiling releases the GIL, may take seconds and cannot be cancelled.

    xgrammar's own cache stays off: it is keyed without the vocabulary, and with it patterns that repeat a class 129
    times or more fail to compile.
    """

    def __init__(self, vocabulary: Vocabulary, stop_ids: Iterable[int], *, threads: int = 1) -> None:
        self._words = mask_words(len(vocabulary.tokens))
        self._stop_ids = tuple(stop_ids)
        self._threads = threads
        self._tokens = vocabulary.tokens
        self._making = Lock()
        self._compilers: dict[bool, tuple[binding.GrammarCompiler, frozenset[int]]] = {}

    def compile(self, kind: str, source: str, *, any_whitespace: bool = True) -> CompiledGrammar:
        """Compile a ``json`` schema, a ``regex`` or an EBNF ``grammar``. Raises BadRequest."""
        compiler, spelling_nothing = self._compiler(json=kind == "json")
        try:
            match kind:
                case "json":
                    compiled = compiler.compile_json_schema(source, any_whitespace=any_whitespace)
                case "regex":
                    compiled = compiler.compile_regex(source)
                case "grammar":
                    compiled = compiler.compile_grammar(source)
                case _:
                    raise InternalError(f"kind: must be json, regex or grammar, got {kind!r}")
        except (RuntimeError, ValueError) as error:
            raise BadRequest(f"structured_outputs.{kind}: cannot be compiled: {clipped(_reason(error))}") from error
        return CompiledGrammar(compiled, self._words, self._stop_ids, spelling_nothing)

    def _compiler(self, *, json: bool) -> tuple[binding.GrammarCompiler, frozenset[int]]:
        # JSON has no raw control characters inside strings, yet xgrammar's bounded strings allow them. Nothing in JSON
        # needs a token with one, line breaks apart, so those tokens do not exist for it.
        with self._making:
            if json not in self._compilers:
                tokens = [b"" if json and _CONTROL.search(token) else token for token in self._tokens]
                compiler = binding.GrammarCompiler(tokens, self._stop_ids, max_threads=self._threads)
                self._compilers[json] = compiler, frozenset(i for i, token in enumerate(tokens) if not token)
            return self._compilers[json]


_CONTROL = re.compile(rb"[\x00-\x09\x0b-\x1f]")


def _describe(row: object) -> str:
    return f"{row.dtype} {list(row.shape)}" if isinstance(row, np.ndarray) else type(row).__name__


def _reason(error: Exception) -> str:
    # xgrammar begins its messages with the time and the place in its own sources.
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error).strip())
