"""Match a random text with a grammar, to see before it is served whether its mask rows are fast enough."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from random import Random

import numpy as np

from tandemrt.engines.contract.masks import mask_words
from tandemrt.runtime.grammars.grammar import Grammar
from tandemrt.runtime.grammars.time_limit import GrammarTimeLimit

RANDOM_TOKENS = 80  # length of the random text
ROWS_PER_STEP = 5  # mask rows, as for a draft window of 4 tokens


def match_random_text(
    grammar: Grammar,
    vocab: int,
    slowest_s: float,
    tokens: int = RANDOM_TOKENS,
    guard: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Match random tokens in steps of ``ROWS_PER_STEP`` rows, each inside a ``guard``.

    Raises BadRequest if the text becomes too complex, or the steps are further beyond their share of time than
    ``slowest_s``.
    """
    row, draw, limit = np.zeros(mask_words(vocab), np.int32), Random(0), GrammarTimeLimit(slowest_s)
    for begin in range(0, tokens, ROWS_PER_STEP):
        with guard(), limit.step():
            ended = not all(_advance(grammar, row, draw) for _ in range(begin, min(begin + ROWS_PER_STEP, tokens)))
        if ended:
            return


def _advance(grammar: Grammar, row: np.ndarray, draw: Random) -> bool:
    """Fill a row and accept a random token that it allows; return False if it allows none."""
    grammar.fill_row(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    allowed = [token for token in np.flatnonzero(bits).tolist() if token not in grammar.stop_ids]
    return bool(allowed) and grammar.accept(draw.choice(allowed))
