"""Random texts from the mask rows of a grammar, for tests that compare grammars with a reference."""

import json
import random

import numpy as np

from tandemrt.runtime.grammars.schema.emit import enforceable
from tests.plain.constraints import STOP, WORDS, byte_tokens, compiler, tokens_in


def write(grammar, chance: random.Random, limit: int = 250, prefer: bytes = b"") -> bytes | None:
    """Return a random text of the grammar, or None if it grew past ``limit`` bytes. Open brackets close early.

    ``prefer``: bytes that are written half of the time if they are allowed.
    """
    matcher, row, text = grammar.matcher(), np.empty(WORDS, np.int32), []
    while len(text) < limit:
        matcher.fill_row(row)
        legal = sorted(token for token in tokens_in(row) if token < 256 or token == STOP)
        assert legal, "a grammar must not run dry"
        if STOP in legal and (legal == [STOP] or chance.random() < 0.5):
            return bytes(text)
        legal = [token for token in legal if token != STOP]
        closing = [token for token in legal if token in b'"}]']
        readable = [token for token in legal if 0x20 <= token < 0x7F and token != 0x5C]
        if (preferred := [token for token in legal if token in prefer]) and chance.random() < 0.5:
            legal = readable = preferred
        luck = chance.random()
        token = chance.choice(closing if closing and luck < 0.3 else readable if readable and luck < 0.95 else legal)
        assert matcher.accept(token)
        text.append(token)
    return None


def accepts(grammar, text: str | bytes) -> bool:
    matcher = grammar.matcher()
    return all(map(matcher.accept, byte_tokens(text))) and matcher.accept(STOP)


def grammar_of(schema, whitespace="compact", closed=True):
    return compiler().compile("json", json.dumps(enforceable(schema, closed=closed)), whitespace=whitespace)
