"""Grammars that are too ambiguous are found out before the loop meets them, and their share of its time is counted."""

import os
import time
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import pytest

from tandemrt.engines.errors import BadRequest
from tandemrt.runtime.grammars.trial import WINDOW, follow, tried
from tandemrt.runtime.processes.pool import ProcessPool
from tandemrt.runtime.requests.share import FREE_S, GrammarShare
from tests.plain.constraints import STOP, VOCABULARY, WORDS, compiled
from tests.waiting import PATIENCE_S

TWICE = "".join(f"\na{i} ::= a{i + 1} a{i + 1}" for i in range(40)) + "\na40 ::= [a-z]?"
LIST = 'root ::= "[" ws (item ("," ws item)*)? "]"\nitem ::= root | [0-9]+ | word\nword ::= [a-z]{1,20}\nws ::= [ \\n]*'


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    pool = ProcessPool(processes=1)
    yield pool
    pool.close()


@pytest.fixture
def attempt(pool: ProcessPool) -> Callable[..., None]:
    """Try a grammar, as the library does; in the same process as all before."""

    def attempt(source: str, slowest_s: float = 0.25) -> None:
        before = pool.submit("", "asking", PATIENCE_S, os.getpid).result()
        try:
            pool.submit("", "trying it", PATIENCE_S, tried, VOCABULARY.tokens, (STOP,), source, slowest_s).result()
        finally:
            assert pool.submit("", "asking", PATIENCE_S, os.getpid).result() == before

    return attempt


@pytest.mark.parametrize("source", [LIST, 'root ::= "a"', 'root ::= "yes" | "no"'])
def test_an_ordinary_grammar_passes(attempt, source: str) -> None:
    attempt(source)


@pytest.mark.parametrize(
    "source",
    [
        f"root ::= a0{TWICE}",
        f'root ::= "some words before it " a0{TWICE}',
        f'root ::= "a" | "b" later\nlater ::= a0{TWICE}',
        f"root ::= [a-z]{{2000}} a0{TWICE}",
    ],
    ids=["at once", "behind words", "behind a choice", "behind a long text"],
)
def test_a_row_without_end_is_refused_wherever_it_stands(attempt, source: str) -> None:
    with pytest.raises(
        BadRequest, match=r"a row of it takes more than 0\.1 s \(fill_timeout_s\), or several .* make it less ambiguous"
    ):
        attempt(source, 0.1)


def test_rows_that_are_all_slow_are_refused_together_as_they_would_end_a_request(monkeypatch) -> None:
    asked = count()
    monkeypatch.setattr(time, "thread_time", lambda: 0.04 * next(asked))  # each window takes 40 ms
    grammar, row = compiled("grammar", 'root ::= "ab" root').matcher(), np.zeros(WORDS, np.int32)
    follow(grammar, row, 0.25, 8 * WINDOW)
    with pytest.raises(BadRequest, match="beyond its share"):
        follow(grammar, row, 0.25, 9 * WINDOW)


def test_what_does_not_compile_is_refused(attempt) -> None:
    with pytest.raises(BadRequest, match="grammar: cannot be compiled: EBNF parser error"):
        attempt("root ::= (")


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the processor has spent so far, in seconds: one value, for the test to change."""
    seconds = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: seconds[0])
    return seconds


def take(share: GrammarShare, spent: list[float], seconds: float) -> None:
    with share.step():
        spent[0] += seconds


def test_steps_within_what_is_free_cost_nothing_however_many(spent: list[float]) -> None:
    share = GrammarShare(0.1)
    for _ in range(1000):
        take(share, spent, FREE_S)
    assert share.newest == pytest.approx(FREE_S)


def test_one_slow_step_ends_the_share_and_so_do_many_that_are_not_quick(spent: list[float]) -> None:
    with pytest.raises(BadRequest, match=r"took 0\.50 s for a step, and is 0\.49 s beyond its share, more than 0\.1"):
        take(GrammarShare(0.1), spent, 0.5)
    share = GrammarShare(0.1)
    for _ in range(4):
        take(share, spent, FREE_S + 0.024)
    take(share, spent, 0.0)  # leaves what it does not need
    take(share, spent, FREE_S + 0.009)
    with pytest.raises(BadRequest, match=r"took 0\.03 s for a step"):
        take(share, spent, FREE_S + 0.024)


def test_what_is_done_between_steps_counts_for_the_next_one(spent: list[float]) -> None:
    share = GrammarShare(0.1)
    with share.between():
        spent[0] += 0.15
    with pytest.raises(BadRequest, match=r"is 0\.14 s beyond its share"):
        take(share, spent, 0.0)


def test_what_a_step_raises_is_not_replaced(spent: list[float]) -> None:
    share = GrammarShare(0.1)
    with pytest.raises(KeyError), share.step():
        {}[take(GrammarShare(9.0), spent, 1.0)]
