"""Trial runs end what compiles for too long or is too ambiguous, before this process or its engine loop runs it."""

import gc
import json
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import closing
from dataclasses import replace
from itertools import count

import pytest

from tandemrt.engines.validation.errors import BadRequest, Closed, QueueFull
from tandemrt.runtime.grammars.ebnf_trial import try_grammar
from tandemrt.runtime.grammars.grammar_cache import GrammarCache
from tandemrt.runtime.grammars.library import GrammarLibrary
from tandemrt.runtime.grammars.random_text import ROWS_PER_STEP, match_random_text
from tandemrt.runtime.grammars.schema.emit import enforceable
from tandemrt.runtime.grammars.sources import Source
from tandemrt.runtime.grammars.time_limit import STEP_ALLOWANCE_S, GrammarTimeLimit
from tandemrt.runtime.grammars.trial import SMALL_CHARACTERS, needs_trial
from tandemrt.runtime.workers.clients import UNNAMED, Client
from tandemrt.runtime.workers.sandbox.lanes import ProcessLanes
from tandemrt.runtime.workers.sandbox.pool import ProcessPool
from tests.plain.constraints import STOP, VOCABULARY, WIDTH, compiled
from tests.waiting import PATIENCE_S, eventually

TWICE = "".join(f"\na{i} ::= a{i + 1} a{i + 1}" for i in range(40)) + "\na40 ::= [a-z]?"
LIST = 'root ::= "[" ws (item ("," ws item)*)? "]"\nitem ::= root | [0-9]+ | word\nword ::= [a-z]{1,20}\nws ::= [ \\n]*'


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    pool = ProcessPool(processes=1)
    yield pool
    pool.close()


@pytest.fixture
def attempt(pool: ProcessPool) -> Callable[..., None]:
    """Try a grammar as the library does, in the worker process of all earlier trials."""

    def attempt(source: str, slowest_s: float = 0.25) -> None:
        before = pool.submit(UNNAMED, "asking", PATIENCE_S, os.getpid).result()
        try:
            pool.submit(
                UNNAMED, "trying it", PATIENCE_S, try_grammar, VOCABULARY.tokens, (STOP,), source, slowest_s
            ).result()
        finally:
            assert pool.submit(UNNAMED, "asking", PATIENCE_S, os.getpid).result() == before

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
    ids=["at once", "after words", "after a choice", "after a long text"],
)
def test_an_endless_row_is_rejected_at_any_position(attempt, source: str) -> None:
    with pytest.raises(
        BadRequest, match=r"computing its mask rows takes more than 0\.1 s \(fill_timeout_s\); make it less ambiguous"
    ):
        attempt(source, 0.1)


def test_many_slow_rows_are_rejected_together(monkeypatch) -> None:
    asked = count()
    monkeypatch.setattr(time, "thread_time", lambda: 0.04 * next(asked))  # each draft window takes 40 ms
    grammar = compiled("grammar", 'root ::= "ab" root').matcher()
    match_random_text(grammar, WIDTH, 0.25, 8 * ROWS_PER_STEP)
    with pytest.raises(BadRequest, match="beyond its share"):
        match_random_text(grammar, WIDTH, 0.25, 9 * ROWS_PER_STEP)


def test_an_invalid_grammar_is_rejected(attempt) -> None:
    with pytest.raises(BadRequest, match="grammar: cannot be compiled: EBNF parser error"):
        attempt("root ::= (")


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """CPU time so far, in seconds: one value that the test changes."""
    seconds = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: seconds[0])
    return seconds


def take_step(limit: GrammarTimeLimit, spent: list[float], seconds: float) -> None:
    with limit.step():
        spent[0] += seconds


def test_any_number_of_quick_steps_is_free(spent: list[float]) -> None:
    limit = GrammarTimeLimit(0.1)
    for _ in range(1000):
        take_step(limit, spent, STEP_ALLOWANCE_S)
    assert limit.last_step_s == pytest.approx(STEP_ALLOWANCE_S)


def test_one_slow_step_or_many_moderate_ones_spend_the_budget(spent: list[float]) -> None:
    with pytest.raises(BadRequest, match=r"took 0\.50 s for a step, and is 0\.49 s beyond its share, more than 0\.1"):
        take_step(GrammarTimeLimit(0.1), spent, 0.5)
    limit = GrammarTimeLimit(0.1)
    for _ in range(4):
        take_step(limit, spent, STEP_ALLOWANCE_S + 0.024)
    take_step(limit, spent, 0.0)  # leaves the unused time
    take_step(limit, spent, STEP_ALLOWANCE_S + 0.009)
    with pytest.raises(BadRequest, match=r"took 0\.03 s for a step"):
        take_step(limit, spent, STEP_ALLOWANCE_S + 0.024)


def test_time_between_steps_counts_for_the_next_step(spent: list[float]) -> None:
    limit = GrammarTimeLimit(0.1)
    with limit.shared_work():
        spent[0] += 0.15
    with pytest.raises(BadRequest, match=r"is 0\.14 s beyond its share"):
        take_step(limit, spent, 0.0)


def test_a_collection_of_all_garbage_is_not_the_grammars_time(spent: list[float]) -> None:
    limit = GrammarTimeLimit(0.1)
    with limit.step(), limit.shared_work():
        gc.collect()
        spent[0] += 0.5
    take_step(limit, spent, STEP_ALLOWANCE_S)


def test_an_exception_of_a_step_is_not_replaced(spent: list[float]) -> None:
    limit = GrammarTimeLimit(0.1)
    with pytest.raises(KeyError), limit.step():
        {}[take_step(GrammarTimeLimit(9.0), spent, 1.0)]


ENDLESS = Source("json", '{"type": "integer", "multipleOf": 9999991}', "llguidance")  # admission rejects it today
SLOW_KIND = Source("json", '{"type": "integer", "multipleOf": 7}', "llguidance")


@pytest.fixture
def library(request: pytest.FixtureRequest) -> Iterator[GrammarLibrary]:
    """A library with a timeout of 4 s, or of the test's parameter."""
    processes = ProcessLanes(processes=1)
    library = GrammarLibrary(VOCABULARY, [STOP], processes=processes, timeout_s=getattr(request, "param", 4.0))
    yield library
    library.close()


def test_an_endless_compilation_ends_and_delays_no_small_source(library: GrammarLibrary) -> None:
    assert library.compile((SLOW_KIND, None)).result(PATIENCE_S)
    endless = [library.compile((ENDLESS, None), Client(name)) for name in ("a", "a", "b", "c")]
    small = [library.compile((Source("regex", f"a{number}", "llguidance"), None)) for number in range(20)]
    assert all(future.result(PATIENCE_S) for future in small)
    assert not any(future.done() for future in endless)
    for future in endless:
        with pytest.raises(BadRequest, match=r"json: compiling (it took longer than 2|took longer than 4\.0) s"):
            future.result(PATIENCE_S)
    assert library.compile((replace(SLOW_KIND, loose=True), None)).result(PATIENCE_S)
    assert library.waiting == 0
    assert eventually(lambda: not any(isinstance(thread, threading.Timer) for thread in threading.enumerate()))


@pytest.mark.parametrize("library", [2 * PATIENCE_S], indirect=True)
def test_a_quick_trial_does_not_wait_for_the_slow_ones_of_other_clients(library: GrammarLibrary) -> None:
    endless = [library.compile((replace(ENDLESS, text=ENDLESS.text + " " * n), None), Client(f"{n}")) for n in range(2)]
    slow = library._lanes[-1].trials._threads
    assert eventually(lambda: len(slow) == 2 and None not in slow.values())
    for process in slow.values():
        os.kill(process._popen.pid, signal.SIGSTOP)  # else it needs more memory than it may after a few seconds
    assert library.compile((SLOW_KIND, None), Client("x")).result(PATIENCE_S)
    assert not any(future.done() for future in endless)


@pytest.mark.parametrize("library", [2 * PATIENCE_S], indirect=True)
def test_an_abandoned_compilation_is_not_tried_slowly(library: GrammarLibrary) -> None:
    endless = library.compile((ENDLESS, None))
    assert eventually(lambda: any(compilation.begun for compilation in library._waiting.values()))
    library.abandon(endless)
    with pytest.raises(CancelledError):
        endless.result(PATIENCE_S)
    assert eventually(lambda: not library._waiting)
    assert library.waiting == 0


def test_every_request_for_an_endless_compilation_gets_an_answer(library: GrammarLibrary) -> None:
    sources = [replace(ENDLESS, text=ENDLESS.text + " " * number) for number in range(8)]
    waiting = [library.compile((source, None), Client("a")) for source in sources]
    errors = [future.exception(PATIENCE_S) for future in waiting]
    assert isinstance(errors[0], BadRequest)
    assert isinstance(errors[-1], QueueFull)
    assert all(isinstance(error, BadRequest | QueueFull) for error in errors)


def test_closing_ends_an_endless_compilation(library: GrammarLibrary) -> None:
    endless = library.compile((ENDLESS, None))
    assert library.compile((SLOW_KIND, None)).result(PATIENCE_S)  # in the other process
    begun = time.monotonic()
    library.close()
    with pytest.raises(Closed):
        endless.result(PATIENCE_S)
    assert time.monotonic() - begun < 1.5


@pytest.mark.parametrize("library", [2 * PATIENCE_S], indirect=True)
def test_a_rejected_source_is_tried_once_more_when_it_comes_again(library: GrammarLibrary) -> None:
    bad = Source("json", '{"type": "string", "minLength": 5, "pattern": "^(a$"}', "llguidance")
    for _ in range(2):
        with pytest.raises(BadRequest, match=r"structured_outputs\.json: cannot be compiled"):
            library.compile((bad, None)).result(PATIENCE_S)


def test_a_grammar_that_the_cache_dropped_ends_with_its_requests() -> None:
    with closing(GrammarLibrary(VOCABULARY, [STOP], cache=GrammarCache(limit_bytes=0))) as library:
        done = library.compile((Source("regex", "ab", "llguidance"), None))
        grammar = weakref.ref(done.result(PATIENCE_S).grammar)
        del done
        assert eventually(lambda: gc.collect() >= 0 and grammar() is None)


def text_of(length: int) -> Source:
    """An object with a text whose mask rows take the more work, the longer it may be."""
    text = {"type": "string", "pattern": r"^([^,]+,\s*)*[^,]+$", "maxLength": length}
    schema = {"type": "object", "properties": {"a": text}, "required": ["a"], "additionalProperties": False}
    return Source("json", json.dumps(enforceable(schema)), "llguidance")


@pytest.mark.parametrize("library", [2 * PATIENCE_S], indirect=True)
def test_a_source_whose_random_text_is_too_complex_is_rejected(library: GrammarLibrary) -> None:
    assert library.compile((text_of(1000), None)).result(PATIENCE_S)
    with pytest.raises(BadRequest, match=r"json: a random text was tried: .* too complex: lexer error: too many"):
        library.compile((text_of(60_000), None)).result(PATIENCE_S)


def structured_tag(content: dict[str, object]) -> str:
    return json.dumps({"type": "tag", "begin": "<", "content": content, "end": ">"})


@pytest.mark.parametrize(
    ("kind", "text", "tried"),
    [
        ("grammar", 'root ::= "a"', True),
        ("regex", "(a|b)*" + "c" * (SMALL_CHARACTERS - 6), False),
        ("regex", "(a|b)*" + "c" * (SMALL_CHARACTERS - 5), True),
        ("json", '{"type": "string", "pattern": "^a$"}', False),
        ("json", '{"type": "string", "maxLength": 5}', False),
        ("json", '{"type": "string", "pattern": "^a$", "maxLength": 5}', True),
        ("json", '{"type": "string", "pattern": "^a$", "minLength": 1}', True),
        ("json", '{"anyOf": [{}, {"items": {"type": "integer", "multipleOf": 3}}]}', True),
        ("json", '{"type": "string", "allOf": [{"pattern": "a"}]}', True),
        ("json", '{"type": "object", "patternProperties": {"^a": {}}}', True),
        ("json", "true", False),
        ("structural_tag", structured_tag({"type": "json_schema", "json_schema": {"type": "integer"}}), False),
        ("structural_tag", structured_tag({"type": "json_schema", "json_schema": {"multipleOf": 3}}), True),
        ("structural_tag", structured_tag({"type": "regex", "pattern": "a"}), True),
    ],
)
def test_only_sources_whose_work_no_limit_bounds_are_tried(kind: str, text: str, tried: bool) -> None:
    assert needs_trial(Source(kind, text, "llguidance")) is tried
