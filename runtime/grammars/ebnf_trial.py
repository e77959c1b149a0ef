"""Try an EBNF grammar in a worker process, and reject it if it is too ambiguous to be fast.

xgrammar has no time limit and cannot be interrupted, and an ambiguous grammar may take unbounded time for one mask row.
The trial matches random tokens, first from the root and then from each other rule, so that slow rules are found
wherever they are used. It runs in a forked child, which a timer kills, so that the worker process survives.
"""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from tandemrt.engines.text.vocabulary import Vocabulary
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.grammars.random_text import RANDOM_TOKENS, ROWS_PER_STEP, match_random_text
from tandemrt.runtime.grammars.time_limit import STEP_ALLOWANCE_S
from tandemrt.runtime.grammars.xgrammar_matcher import XGrammarCompiler
from tandemrt.runtime.workers.sandbox.parent import end_with_parent

MAX_RULES = 128  # rules that are tried as the start rule
_RULE = re.compile(r"^\s*+([A-Za-z_][\w-]*+)\s*+::=", re.MULTILINE)
_NO_MEMORY = 3  # exit status of the forked child


def try_grammar(tokens: tuple[bytes, ...], stop_ids: tuple[int, ...], source: str, slowest_s: float) -> None:
    """Raise BadRequest if ``source`` does not compile, or a row takes more than ``slowest_s`` CPU seconds.

    ``tokens``: the bytes of every id of the logits. Forks, so the process must not have threads.
    """
    compiler = _compiler(tokens, stop_ids)
    reading, writing = os.pipe()
    worker, child = os.getpid(), os.fork()
    if not child:
        status = 1
        try:
            end_with_parent(worker)
            os.write(writing, _rejection(compiler, len(tokens), source, slowest_s).encode())
            status = 0
        except MemoryError:
            status = _NO_MEMORY
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        rejection = pipe.read().decode()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended == -signal.SIGPROF:
        rejection = _too_slow(slowest_s)
    elif ended == _NO_MEMORY:
        raise MemoryError
    elif ended:
        rejection = f"the trial ended with {'signal' if ended < 0 else 'status'} {abs(ended)}; simplify it"
    if rejection:
        raise BadRequest(f"structured_outputs.grammar: {rejection}")


def _rejection(compiler: XGrammarCompiler, vocab: int, source: str, slowest_s: float) -> str:
    """Return why ``source`` is rejected, or "". A timer signal ends the process if a step takes too long."""
    try:
        rules = [
            ("root", RANDOM_TOKENS),
            *((rule, ROWS_PER_STEP) for rule in dict.fromkeys(_RULE.findall(source)[:MAX_RULES])),
        ]
        for rule, most in rules:
            match_random_text(
                compiler.compile(source, root=rule).matcher(), vocab, slowest_s, most, lambda: _timer(slowest_s)
            )
    except BadRequest:
        return _too_slow(slowest_s)
    except ValueError as error:
        return f"cannot be compiled: {error}"
    return ""


def _too_slow(slowest_s: float) -> str:
    return (
        f"computing its mask rows takes more than {slowest_s:g} s (fill_timeout_s); make it less ambiguous: "
        "avoid rules that may be empty and rules that begin with themselves"
    )


@lru_cache(maxsize=2)
def _compiler(tokens: tuple[bytes, ...], stop_ids: tuple[int, ...]) -> XGrammarCompiler:
    return XGrammarCompiler(Vocabulary(tokens, frozenset(), len(tokens)), stop_ids)


@contextmanager
def _timer(slowest_s: float) -> Iterator[None]:
    """End the process by a signal if the block takes too long."""
    signal.setitimer(signal.ITIMER_PROF, slowest_s + 2 * STEP_ALLOWANCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
