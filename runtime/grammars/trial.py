"""An EBNF grammar is tried before the runtime takes it, in a process: one that is too ambiguous has no end of work.

xgrammar has no limits of its own and cannot be interrupted. A rule is as slow wherever it stands, so each is begun as
if it were the whole grammar, and a text of random tokens is followed for a while.
"""

import re
import time
from functools import lru_cache
from random import Random

import numpy as np

from tandemrt.engines.contract import mask_words
from tandemrt.engines.errors import BadRequest
from tandemrt.engines.vocabulary import Vocabulary
from tandemrt.runtime.grammars.by_xgrammar import XGrammar, XGrammarCompiler

MOST_RULES = 128  # that are begun by themselves
TOKENS = 48  # of the text
_RULE = re.compile(r"^\s*+([A-Za-z_][\w-]*+)\s*+::=", re.MULTILINE)


def tried(tokens: tuple[bytes, ...], stop_ids: tuple[int, ...], source: str, slowest_s: float) -> None:
    """Raise BadRequest if ``source`` does not compile, or a row of it takes more than ``slowest_s`` of the processor.

    ``tokens``: what every id of the logits spells.
    """
    compiler = _compiler(tokens, stop_ids)
    row = np.zeros(mask_words(len(tokens)), np.int32)
    try:
        _follow(compiler.compile(source).matcher(), row, slowest_s, TOKENS)
        for rule in dict.fromkeys(_RULE.findall(source)[:MOST_RULES]):
            _follow(compiler.compile(source, root=rule).matcher(), row, slowest_s, 1)
    except ValueError as error:
        raise BadRequest(f"structured_outputs.grammar: cannot be compiled: {error}") from error


@lru_cache(maxsize=2)
def _compiler(tokens: tuple[bytes, ...], stop_ids: tuple[int, ...]) -> XGrammarCompiler:
    return XGrammarCompiler(Vocabulary(tokens, frozenset(), len(tokens)), stop_ids)


def _follow(grammar: XGrammar, row: np.ndarray, slowest_s: float, tokens: int) -> None:
    draw = Random(0)
    for _ in range(tokens):
        begun = time.thread_time()
        grammar.fill(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        allowed = [token for token in np.flatnonzero(bits).tolist() if token not in grammar.stop_ids]
        if allowed:
            grammar.accept(draw.choice(allowed))
        if time.thread_time() - begun > slowest_s:
            raise BadRequest(
                f"structured_outputs.grammar: a row of it takes more than {slowest_s:g} s (fill_timeout_s); make it "
                "less ambiguous: rules that may be empty, or begin with themselves, repeat each other's work"
            )
        if not allowed:
            return
