"""Measure admission and soundness of schemas, and the cost of masks over a vocabulary of 128,000 tokens."""

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np

from tandemrt.engines.text.vocabulary import Vocabulary
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.grammars.compiler import CompiledGrammar, GrammarCompiler
from tandemrt.runtime.grammars.grammar import Grammar
from tandemrt.runtime.grammars.schema.emit import enforceable
from tools.bench.schemas.sources import Case
from tools.bench.schemas.walk import Walk

BYTES = Vocabulary((*(bytes([byte]) for byte in range(256)), b""), frozenset([256]), 257)
STOP = 256
WINDOW = 6  # mask rows of a draft window
_QUICK = 0.3  # probability of closing an open structure, so that random texts end


def judge_instances(cases: Sequence[Case], *, closed: bool) -> Counter[str]:
    """Count admitted schemas, and accepted instances by their authors' labels.

    ``closed``: objects have no names but the described ones.
    """
    compiler = GrammarCompiler(BYTES, [STOP])
    counts: Counter[str] = Counter()
    for case in cases:
        counts["schemas"] += 1
        try:
            schema = enforceable(case.schema, closed=closed)
            grammar = compiler.compile("json", json.dumps(schema))
        except BadRequest:
            counts["refused"] += 1
            continue
        counts["admitted"] += 1
        walk = Walk(grammar.matcher(), schema, STOP)
        wrong = False
        for value, valid in case.instances:
            taken = walk.takes(value, whole_numbers=valid)
            counts["valid" if valid else "invalid"] += 1
            counts["valid taken" if valid else "invalid taken"] += taken
            wrong |= taken and not valid
        counts["unsound"] += wrong
    return counts


def check_drawn_texts(schema: dict[str, Any], count: int, seed: int) -> int | None:
    """Return how many of ``count`` random texts of a schema's grammar violate it; None if the schema is refused."""
    try:
        grammar = GrammarCompiler(BYTES, [STOP]).compile("json", json.dumps(enforceable(schema)), whitespace="compact")
    except BadRequest:
        return None
    validator, chance = jsonschema.Draft202012Validator(schema), random.Random(seed)
    texts = (_text(grammar.matcher(), chance) for _ in range(count))
    return sum(text is not None and not validator.is_valid(json.loads(text)) for text in texts)


def compile_times(schemas: Sequence[Any]) -> list[float]:
    """Return milliseconds to compile each admitted schema to a grammar over bytes."""
    compiler, times = GrammarCompiler(BYTES, [STOP]), []
    compiler.compile("json", "{}")
    for schema in schemas:
        begin = time.perf_counter()
        try:
            compiler.compile("json", json.dumps(enforceable(schema)))
        except BadRequest:
            continue
        times.append(1e3 * (time.perf_counter() - begin))
    return times


def row_times(
    grammar: CompiledGrammar, vocabulary: Vocabulary, texts: Sequence[bytes]
) -> tuple[list[float], list[float]]:
    """Return CPU microseconds per mask row along texts, and per window of rows with its rollback."""
    rows, windows = [], []
    row = np.empty((len(vocabulary.tokens) + 31) // 32, np.int32)
    for text in texts:
        matcher, tokens = grammar.matcher(), vocabulary.greedy_tokens(text)
        for at, token in enumerate(tokens):
            begin = time.thread_time()
            matcher.fill_row(row)
            rows.append(1e6 * (time.thread_time() - begin))
            windows.append(1e6 * _window(matcher, row, tokens[at : at + WINDOW - 1]))
            assert matcher.accept(token)
    return rows, windows


def words(count: int, seed: int = 0) -> Vocabulary:
    """Return bytes, JSON punctuation, and words of two to nine letters, with and without a leading space."""
    chance = random.Random(seed)
    tokens = dict.fromkeys([*(bytes([byte]) for byte in range(256)), b'{"', b'":', b'", "', b'"}', b"true", b"false"])
    while len(tokens) < count:
        letters = bytes(chance.choices(b"etaoinshrdlucmfwypvbgkjqxz", k=chance.randint(2, 9)))
        tokens[b" " * chance.randint(0, 1) + letters] = None
    return Vocabulary((*tokens, b""), frozenset([count]), count + 1)


def text_of(schema: Any, seed: int) -> bytes:
    """Return a random text of a schema's grammar."""
    grammar = GrammarCompiler(BYTES, [STOP]).compile("json", json.dumps(enforceable(schema)), whitespace="compact")
    chance = random.Random(seed)
    return next(text for _ in range(1000) if (text := _text(grammar.matcher(), chance)) is not None)


def quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")


def _window(matcher: Grammar, row: np.ndarray, draft: Sequence[int]) -> float:
    begin = time.thread_time()
    taken = 0
    matcher.precompute_rows(draft)
    matcher.fill_row(row)
    for token in draft:
        if not matcher.accept(token):
            break
        taken += 1
        matcher.fill_row(row)
    matcher.rollback(taken)
    return time.thread_time() - begin


def _text(matcher: Grammar, chance: random.Random, limit: int = 6000) -> bytes | None:
    row, text = np.empty(9, np.int32), bytearray()
    while len(text) < limit:
        matcher.fill_row(row)
        legal = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        if STOP in legal and (len(legal) == 1 or chance.random() < 0.5):
            return bytes(text)
        legal = [token for token in legal if token != STOP]
        closing = [token for token in legal if token in b'"}]']
        plain = [token for token in legal if 0x20 <= token < 0x7F and token != 0x5C]
        token = chance.choice(closing if closing and chance.random() < _QUICK else plain or legal)
        assert matcher.accept(token)
        text.append(token)
    return None
