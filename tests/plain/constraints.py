"""Shared by the constraint tests: a byte-level vocabulary with control tokens, and mask rows as sets of tokens."""

import json
from concurrent.futures import Future
from functools import cache

import numpy as np

from tandemrt.engines.contract.masks import mask_words
from tandemrt.engines.parameters.sampling import StructuredOutputs, Whitespace
from tandemrt.engines.text.vocabulary import Vocabulary
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.rows import MaskRows
from tandemrt.runtime.grammars.compiler import CompiledGrammar, GrammarCompiler
from tandemrt.runtime.grammars.library import Compiled, GrammarLibrary
from tandemrt.runtime.grammars.schema.emit import enforceable
from tandemrt.runtime.workers.clients import UNNAMED, Client

MERGES = (b'{"', b'":', b'",', b"true", b"<|", b"think", b"/think", b"  ", b'"}', b"\n\n", b"12")
MERGED = {text: 256 + index for index, text in enumerate(MERGES)}
SPECIAL = range(256 + len(MERGES), 256 + len(MERGES) + 6)
STOP, THINK, END, CALL, OTHER_STOP, OTHER = SPECIAL
VALID = SPECIAL.stop
WIDTH = VALID + 7  # the logits are wider than the vocabulary
WORDS = mask_words(WIDTH)
EVERYTHING = frozenset(range(VALID))
UNREAD = 0x55555555  # what rows hold that nothing was written to

VOCABULARY = Vocabulary(
    tokens=tuple(bytes([byte]) for byte in range(256)) + MERGES + (b"",) * (WIDTH - 256 - len(MERGES)),
    special=frozenset(SPECIAL),
    valid_tokens=VALID,
)

# llguidance finds this grammar too complex after an opening brace. A number stays simple.
TOO_COMPLEX_AFTER_A_BRACE = {
    "anyOf": [
        {"type": "integer"},
        *(
            {"type": "object", "properties": {f"{k}-{n}": {"type": "integer"} for n in range(50)}}
            | {"additionalProperties": False}
            for k in range(12)
        ),
    ]
}


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(VOCABULARY, [STOP])


@cache
def compiled(kind: str, source: str, whitespace: Whitespace = "compact") -> CompiledGrammar:
    return compiler().compile(kind, source, whitespace=whitespace)


def json_grammar(schema):
    return compiled("json", json.dumps(enforceable(schema))).matcher()


def regex_grammar(pattern):
    return compiled("regex", pattern).matcher()


def constraint(stop_ids=(STOP,), **options) -> Constraint:
    return Constraint(WIDTH, stop_ids, valid_tokens=VALID, **options)


def rows_for(draft) -> np.ndarray:
    return np.full((len(draft) + 1, WORDS), UNREAD, np.int32)


def fill(state: Constraint, draft, rows) -> int:
    return len(state.fill_rows(draft, MaskRows(rows), 0).tokens)


def tokens_in(row) -> frozenset[int]:
    bits = np.unpackbits(np.ascontiguousarray(row).view(np.uint8), bitorder="little")
    return frozenset(np.flatnonzero(bits).tolist())


def allowed(state: Constraint) -> frozenset[int]:
    """The tokens that may follow; anything for a finished request, whose row is never read."""
    rows = rows_for([])
    assert fill(state, [], rows) == 0
    return tokens_in(rows[0])


def byte_tokens(text: str | bytes) -> list[int]:
    return list(text.encode() if isinstance(text, str) else text)


def joined_spans(commits) -> list[tuple[str, tuple[int, ...]]]:
    """The spans of several commits; adjacent spans of one role are joined."""
    joined: list[tuple[str, tuple[int, ...]]] = []
    for commit in commits:
        for span in commit.spans:
            before = joined.pop()[1] if joined and joined[-1][0] == span.role else ()
            joined.append((span.role, before + span.tokens))
    return joined


def compiled_by(library: GrammarLibrary, structured: StructuredOutputs, client: Client = UNNAMED) -> "Future[Compiled]":
    """Read and compile, as admission and the queue do one after the other."""
    return library.compile(library.read(structured, client), client)
