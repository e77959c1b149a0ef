"""Try a compilation in a worker process, where it can be ended, before it runs in this process.

A compiler cannot be interrupted, and its result cannot be sent to another process. But it does the same work each time:
a source that compiled within limits of time and memory in a worker process compiles here, too. The trial also matches a
random text, because the mask rows of some sources are slow. A small source without the parts that can be slow needs no
trial, because the limits of the engines bound its work.
"""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandemrt.engines.text.vocabulary import Vocabulary
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.grammars.compiler import CompiledGrammar, GrammarCompiler
from tandemrt.runtime.grammars.random_text import match_random_text

if TYPE_CHECKING:
    from tandemrt.engines.parameters.sampling import Whitespace
    from tandemrt.runtime.grammars.sources import Source

MEMORY_BYTES = 256 << 20  # of one compilation
SMALL_CHARACTERS = 1 << 12  # smaller sources without a slow part compile within about 0.3 s
# The engine searches for a text that fits several expressions at once, or a multiple, without a limit.
_SLOW_KEYWORDS = frozenset({"allOf", "multipleOf", "patternProperties"})

_compilers: list[tuple[GrammarCompiler, Vocabulary, tuple[int, ...], float]] = []


def needs_trial(source: "Source") -> bool:
    """Return whether no limit of its engine bounds the time and memory that ``source`` takes to compile."""
    if source.kind == "grammar" or len(source.text) > SMALL_CHARACTERS:
        return True
    return source.kind != "regex" and _has_slow_part(json.loads(source.text))


def open_compiler(vocabulary: Vocabulary, stop_ids: tuple[int, ...], slowest_row_s: float) -> None:
    """Create the compiler of this process. ``vocabulary`` needs no ``encode``."""
    _compilers[:] = [(GrammarCompiler(vocabulary, stop_ids), vocabulary, stop_ids, slowest_row_s)]


def try_source(kind: str, text: str, whitespace: "Whitespace", loose: bool) -> int:
    """Compile ``Source.text``, match a random text, and return by how many bytes this process grew. Raises BadRequest.

    A process that needs more than ``MEMORY_BYTES`` ends, because the engines do not survive a failed allocation.
    """
    (compiler, vocabulary, stop_ids, slowest_row_s) = _compilers[0]
    if kind == "grammar":
        from tandemrt.runtime.grammars.ebnf_trial import try_grammar

        try_grammar(vocabulary.tokens, stop_ids, text, slowest_row_s)
        return 0
    if kind == "structural_tag":  # imports that count into no limit
        from tandemrt.runtime.grammars.unique import tags  # noqa: F401
    resident = _pages()[1]
    with _limited_memory():
        grammar = compiler.compile(kind, text, whitespace=whitespace, loose=loose)
        _try_rows(kind, grammar, len(vocabulary.tokens), slowest_row_s)
        grown = (_pages()[1] - resident) * resource.getpagesize()
        del grammar
    return max(0, grown)


def _try_rows(kind: str, grammar: CompiledGrammar, vocab: int, slowest_row_s: float) -> None:
    try:
        match_random_text(grammar.matcher(), vocab, slowest_row_s)
    except BadRequest as error:
        failure = str(error).removeprefix("structured_outputs: ")
        raise BadRequest(f"structured_outputs.{kind}: a random text was tried: {failure}") from error


def _has_slow_part(value: Any) -> bool:
    if not isinstance(value, dict):
        return isinstance(value, list) and any(map(_has_slow_part, value))
    bounded_pattern = "pattern" in value and not value.keys().isdisjoint({"minLength", "maxLength"})
    ended_pattern = value.get("type") == "regex"  # of a structural tag: the end of its tag follows
    slow = bounded_pattern or ended_pattern or not _SLOW_KEYWORDS.isdisjoint(value)
    return slow or any(map(_has_slow_part, value.values()))


@contextmanager
def _limited_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _pages()[0] * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (min(limit, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _pages() -> tuple[int, int]:
    """Return the pages of this process: of its address space, and in memory."""
    size, resident, *_ = Path("/proc/self/statm").read_text().split()
    return int(size), int(resident)
