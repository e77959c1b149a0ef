"""An EBNF grammar is tried before the runtime takes it, in a process: one that is too ambiguous has no end of work.

xgrammar has no limits of its own and cannot be interrupted. A rule is as slow wherever it stands, so each is begun as
if it were the whole grammar, and a text of random tokens is followed for a while. That happens in a fork, which its
own timer kills: the process stays warm, and whoever asked hears it as soon as a row takes too long.
"""

import os
import re
import signal
from functools import lru_cache
from random import Random

import numpy as np

from tandemrt.engines.contract import mask_words
from tandemrt.engines.errors import BadRequest
from tandemrt.engines.vocabulary import Vocabulary
from tandemrt.runtime.grammars.by_xgrammar import XGrammar, XGrammarCompiler
from tandemrt.runtime.requests.share import FREE_S, GrammarShare

MOST_RULES = 128  # that are begun by themselves
TOKENS = 80  # of the text
WINDOW = 5  # rows that a round asks for at once
_RULE = re.compile(r"^\s*+([A-Za-z_][\w-]*+)\s*+::=", re.MULTILINE)
_NO_MEMORY = 3  # exit status


def tried(tokens: tuple[bytes, ...], stop_ids: tuple[int, ...], source: str, slowest_s: float) -> None:
    """Raise BadRequest if ``source`` does not compile, or its rows take more than a request's share, ``slowest_s``.

    ``tokens``: what every id of the logits spells. Forks, so it is for a process without threads.
    """
    compiler = _compiler(tokens, stop_ids)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.write(writing, _refusal(compiler, len(tokens), source, slowest_s).encode())
            status = 0
        except MemoryError:
            status = _NO_MEMORY
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        refusal = pipe.read().decode()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended == -signal.SIGPROF:
        refusal = _too_slow(slowest_s)
    elif ended == _NO_MEMORY:
        raise MemoryError
    elif ended:
        refusal = f"trying it ended with {'signal' if ended < 0 else 'status'} {abs(ended)}; simplify it"
    if refusal:
        raise BadRequest(f"structured_outputs.grammar: {refusal}")


def _refusal(compiler: XGrammarCompiler, vocab: int, source: str, slowest_s: float) -> str:
    """Why ``source`` is refused; empty if it is not. The kernel kills this process where a step takes too long."""
    row = np.zeros(mask_words(vocab), np.int32)
    try:
        rules = [("root", TOKENS), *((rule, WINDOW) for rule in dict.fromkeys(_RULE.findall(source)[:MOST_RULES]))]
        for rule, most in rules:
            follow(compiler.compile(source, root=rule).matcher(), row, slowest_s, most)
    except BadRequest:
        return _too_slow(slowest_s)
    except ValueError as error:
        return f"cannot be compiled: {error}"
    return ""


def _too_slow(slowest_s: float) -> str:
    return (
        f"a row of it takes more than {slowest_s:g} s (fill_timeout_s), or several together; make it less ambiguous: "
        "rules that may be empty, or begin with themselves, repeat each other's work"
    )


@lru_cache(maxsize=2)
def _compiler(tokens: tuple[bytes, ...], stop_ids: tuple[int, ...]) -> XGrammarCompiler:
    return XGrammarCompiler(Vocabulary(tokens, frozenset(), len(tokens)), stop_ids)


def follow(grammar: XGrammar, row: np.ndarray, slowest_s: float, tokens: int) -> None:
    """Raise BadRequest, or be killed, where a text of random tokens takes more than its share, window by window."""
    draw, share = Random(0), GrammarShare(slowest_s)
    for begin in range(0, tokens, WINDOW):
        signal.setitimer(signal.ITIMER_PROF, slowest_s + 2 * FREE_S)
        try:
            with share.step():
                ended = not all(_goes_on(grammar, row, draw) for _ in range(begin, min(begin + WINDOW, tokens)))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if ended:
            return


def _goes_on(grammar: XGrammar, row: np.ndarray, draw: Random) -> bool:
    """Fill a row, and go on with one of its tokens; False if there is none."""
    grammar.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    allowed = [token for token in np.flatnonzero(bits).tolist() if token not in grammar.stop_ids]
    return bool(allowed) and grammar.accept(draw.choice(allowed))
