"""Structured outputs: valid options, and compilations that are shared, bounded and isolated on failure."""

import json
import random
import socketserver
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any

import pytest

from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.engines.text import formats
from tandemrt.engines.validation.errors import BadRequest, Closed, InternalError, QueueFull
from tandemrt.runtime.grammars import source_cache, sources
from tandemrt.runtime.grammars.grammar_cache import GrammarCache
from tandemrt.runtime.grammars.library import MAX_WAITING, GrammarLibrary
from tandemrt.runtime.grammars.source_cache import SourceCache
from tandemrt.runtime.workers.clients import Client
from tests.plain.constraints import STOP, VOCABULARY, byte_tokens, compiled_by
from tests.plain.drawing import grammar_of, write
from tests.waiting import PATIENCE_S, eventually

PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
# Counted repetitions compile slowly, and more slowly with more words: these take a second or two.
SLOW = " | ".join(f'"{name}" [a-z0-9]{{0,{200 + ord(name)}}}' for name in "abc")
CHANCE = random.Random(0)
WORDS = tuple(bytes(CHANCE.choices(range(97, 123), k=CHANCE.randint(2, 9))) for _ in range(4000))
MANY_WORDS = replace(VOCABULARY, tokens=VOCABULARY.tokens + WORDS, valid_tokens=len(VOCABULARY.tokens) + len(WORDS))


@pytest.fixture
def library():
    libraries = []

    def make(**options) -> GrammarLibrary:
        libraries.append(GrammarLibrary(options.pop("vocabulary", VOCABULARY), [STOP], **options))
        return libraries[-1]

    yield make
    for one in libraries:
        one.close()


def accepts(compiled, text: str) -> bool:
    matcher = compiled.matcher()
    return all(map(matcher.accept, byte_tokens(text))) and matcher.accept(STOP)


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"json": PERSON}, '{"name": "x"}', '{"name": 1}'),
        ({"json": json.dumps(PERSON)}, '{ "name" : "x" }', "{}"),
        ({"json": PERSON, "disable_additional_properties": False}, '{"name": "x", "more": 1}', '{"more": 1}'),
        ({"json": True}, "[1]", "["),
        ({"json_object": True}, '{"a": [{}]}', "[]"),
        ({"regex": '"[a-z]"'}, '"a"', '"1"'),
        ({"choice": ['y"\\', "né😀", "a\nb\u2028", "a\nb"]}, "a\nb\u2028", "a"),
        ({"choice": ["yes"]}, "yes", "yesyes"),
        ({"grammar": 'root ::= "a" | "(" root ")"'}, "((a))", "((a)"),
    ],
)
def test_every_kind_accepts_exactly_its_own_texts(library, asked, good, bad):
    compiled = compiled_by(library(), StructuredOutputs(**asked)).result(timeout=PATIENCE_S)
    assert accepts(compiled, good)
    assert not accepts(compiled, bad)
    assert compiled.check is None


TAG = {"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": PERSON}, "end": ">"}
COMPACT = ['{"name": "x"}']
BOUNDED = [
    '{"name":"x"}',
    '{ "name" : "x" }',
    '{\n  "name":\n\n\t"x"\n}',
    "{\n\n" + " \t" * 16 + '"name": "x"}',
]
ANY = [
    '{  "name": "x"}',
    '{"name":\t"x"}',
    '{\n\n\n"name": "x"}',
    '{"name": "x"\n' + " " * 33 + "}",
    '{\r\n"name": "x"}',
]


@pytest.mark.parametrize(
    ("asked", "form"),
    [
        ({"json": PERSON}, "{}"),
        ({"json_object": True}, "{}"),
        ({"structural_tag": {"type": "structural_tag", "format": TAG}}, "<{}>"),
    ],
    ids=["json", "json_object", "structural_tag"],
)
@pytest.mark.parametrize(
    ("options", "allowed", "others"),
    [
        ({"whitespace": "compact"}, COMPACT, BOUNDED + ANY),
        ({}, COMPACT + BOUNDED, ANY),
        ({"whitespace": "any"}, COMPACT + BOUNDED + ANY, []),
    ],
    ids=["compact", "bounded by default", "any"],
)
def test_whitespace_between_tokens_of_json_is_that_of_the_option(library, asked, form, options, allowed, others):
    compiled = compiled_by(library(), StructuredOutputs(**asked, **options)).result(timeout=PATIENCE_S)
    assert [text for text in allowed if not accepts(compiled, form.format(text))] == []
    assert [text for text in others if accepts(compiled, form.format(text))] == []
    for text in COMPACT:
        assert not accepts(compiled, form.format(f" {text}"))
        assert not accepts(compiled, form.format(f"{text} "))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "exactly one of .* got none"),
        ({"json": {}, "regex": "a"}, "exactly one of .* got json and regex"),
        ({"json_object": False}, "json_object must be True"),
        ({"choice": []}, "choice must be a non-empty list"),
        ({"choice": ["a", ""]}, "choice.1: must not be empty"),
        ({"choice": ["a\ud800"]}, "choice.0: must be a valid string"),
        ({"regex": ""}, "regex: must not be empty"),
        ({"regex": 5}, "regex: must be a valid string; got 5"),
        ({"json": 1.5}, "json"),
        ({"schema": {}}, "schema: is not a known key"),
        ({"regex": "a", "validate_output": True}, "validate_output must come with json"),
        ({"choice": ["a"], "validate_output": True}, "validate_output must come with json, got choice"),
        ({"json_object": True, "validate_output": True}, "validate_output must come with json, got json_object"),
        (
            {"regex": "a", "whitespace": "any"},
            "whitespace must come with json, json_object or structural_tag, got regex",
        ),
        ({"json": {}, "whitespace": "wide"}, "whitespace: must be 'compact', 'bounded' or 'any'; got 'wide'"),
        ({"json": {}, "disable_any_whitespace": True}, 'got True; instead of true, write whitespace "compact"'),
        ({"regex": "a", "disable_additional_properties": False}, "disable_additional_properties=False must come with"),
    ],
)
def test_options_that_are_not_exactly_one_valid_kind_are_rejected(asked, message):
    with pytest.raises(BadRequest, match=message):
        StructuredOutputs(**asked)


def test_structured_outputs_are_immutable():
    asked = StructuredOutputs(regex="a")
    with pytest.raises(ValueError, match="frozen"):
        asked.regex = "b"


deep = {"type": "integer"}
for _ in range(70):
    deep = {"type": "array", "items": deep}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"json": "{"}, "the schema is not JSON"),
        ({"json": '{"const": NaN}'}, "NaN is not a JSON number"),
        ({"json": "5"}, "a schema is an object or a boolean"),
        ({"json": {"type": "str"}}, r"not a JSON schema at #/type: 'str' is not one of \['array', 'boolean'"),
        ({"json": {"type": "integer", "not": {}}}, "no finite text fits"),
        ({"json": deep}, "nested at most 64 levels"),
        ({"json": {"enum": ["x" * 3000]}}, "must be at most 2000 bytes"),
        ({"regex": "(?=a)b"}, "a pattern that no text matches cannot be enforced"),
        ({"grammar": "root[max_tokens=3] ::= [a-z]+"}, r"rule options and token macros .* got 'root\[max_tokens=3\]"),
        ({"grammar": "root ::= Token(5)"}, "rule options and token macros"),
        ({"grammar": 'root ::= [^"] Token(5) "x"'}, "rule options and token macros .* got 'Token\\('"),
        ({"grammar": 'root ::= [\\]"] r "x"\nr[max_tokens=3] ::= "y"'}, r"rule options .* got 'r\[max_tokens=3\]"),
        ({"grammar": '# a "quote\nroot ::= Token(5) "x"'}, "rule options and token macros"),
    ],
)
def test_errors_that_need_no_compiler_are_raised_at_once(library, asked, message):
    with pytest.raises(BadRequest, match=message):
        compiled_by(library(max_source_bytes=2000), StructuredOutputs(**asked))


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('root ::= "a[max_tokens=3] ::="', "a[max_tokens=3] ::="),
        ('root ::= "x" # not a Token(5)', "x"),
        ('root ::= [Token(5)] "#" [#]', "T##"),
    ],
)
def test_options_inside_literals_classes_and_comments_are_ordinary_text(library, grammar, text):
    assert accepts(compiled_by(library(), StructuredOutputs(grammar=grammar)).result(timeout=PATIENCE_S), text)


def test_an_invalid_source_fails_alone_and_is_not_cached(library):
    cache = GrammarCache()
    grammars = library(cache=cache)
    for _ in range(2):
        with pytest.raises(BadRequest, match="cannot be compiled"):
            compiled_by(grammars, StructuredOutputs(grammar="root := 1")).result(timeout=PATIENCE_S)
    assert accepts(compiled_by(grammars, StructuredOutputs(regex="a")).result(timeout=PATIENCE_S), "a")
    assert len(cache) == 1


class ManualTimers(list):
    """The timers of a library. They fire only through ``fire``."""

    def __init__(self, monkeypatch):
        super().__init__()

        class ManualTimer(threading.Timer):
            def start(timer):  # noqa: N805  # the list is self here
                self.append(timer)

        monkeypatch.setattr(threading, "Timer", ManualTimer)

    def fire(self, which):
        timer = self[which]
        assert not timer.finished.is_set()
        timer.function(*timer.args)


@pytest.fixture
def timers(monkeypatch):
    return ManualTimers(monkeypatch)


class BlockedCompiler:
    """The compiler of a library. It waits for ``release`` before the first JSON schema and records what it began."""

    def __init__(self, grammars):
        self.begun, self._go, self._compile = [], threading.Event(), grammars._compiler.compile
        grammars._compiler.compile = self

    def __call__(self, kind, text, **options):
        self.begun.append((kind, text))
        if kind == "json":
            self._go.wait(PATIENCE_S)
        return self._compile(kind, text, **options)

    def release(self):
        self._go.set()


BLOCKED_SCHEMA = StructuredOutputs(json={"type": "integer"})


def test_a_slow_compilation_times_out_only_its_own_request(library, timers):
    """The compilation continues, its result is cached, and other requests are served meanwhile."""
    grammars = library(timeout_s=0.15)
    blocked = BlockedCompiler(grammars)
    slow = compiled_by(grammars, BLOCKED_SCHEMA)
    assert eventually(lambda: blocked.begun)
    assert accepts(compiled_by(grammars, StructuredOutputs(regex="a")).result(timeout=PATIENCE_S), "a")
    assert [timer.interval for timer in timers] == [0.15, 0.15]
    timers.fire(0)
    with pytest.raises(BadRequest, match=r"compiling took longer than 0\.15 s"):
        slow.result(timeout=PATIENCE_S)
    blocked.release()
    assert accepts(compiled_by(grammars, BLOCKED_SCHEMA).result(timeout=PATIENCE_S), "5")
    assert [kind for kind, _ in blocked.begun].count("json") == 1


def test_a_timeout_of_one_request_keeps_the_grammar_for_others_that_wait(library, timers):
    grammars = library()
    blocked = BlockedCompiler(grammars)
    impatient = compiled_by(grammars, BLOCKED_SCHEMA)
    assert eventually(lambda: blocked.begun)
    patient = compiled_by(grammars, BLOCKED_SCHEMA)
    timers.fire(0)
    blocked.release()
    with pytest.raises(BadRequest, match="took longer"):
        impatient.result(timeout=PATIENCE_S)
    assert accepts(patient.result(timeout=PATIENCE_S), "5")


def test_a_queued_compilation_without_a_waiting_request_is_not_begun(library, timers):
    grammars = library(workers=1)
    blocked = BlockedCompiler(grammars)
    left = [compiled_by(grammars, BLOCKED_SCHEMA), compiled_by(grammars, StructuredOutputs(regex="b"))]
    assert eventually(lambda: len(blocked.begun) == 1)
    timers.fire(0)
    with pytest.raises(BadRequest, match="took longer"):
        left[0].result(timeout=PATIENCE_S)
    grammars.abandon(left[1])
    blocked.release()
    assert accepts(compiled_by(grammars, StructuredOutputs(regex="c")).result(timeout=PATIENCE_S), "c")
    assert [kind for kind, _ in blocked.begun] == ["json", "regex"]
    assert blocked.begun[1][1] == "c", "the one after the slow one was never begun"


def test_abandoned_compilations_leave_nothing(library):
    """A thousand requests come and go while the worker is busy: the next one is the only one that waits."""
    grammars = library(workers=1)
    blocked = BlockedCompiler(grammars)
    slow = compiled_by(grammars, BLOCKED_SCHEMA)
    assert eventually(lambda: blocked.begun)
    for number in range(1000):
        grammars.abandon(compiled_by(grammars, StructuredOutputs(regex=f"a{number}"), Client("a", str(number))))
    assert (grammars.waiting, len(grammars._waiting)) == (0, 1)
    patient = compiled_by(grammars, StructuredOutputs(regex="b"))
    assert (grammars.waiting, len(grammars._waiting)) == (1, 2)
    blocked.release()
    assert accepts(patient.result(timeout=PATIENCE_S), "b")
    assert slow.result(timeout=PATIENCE_S)
    assert [text for kind, text in blocked.begun if kind == "regex"] == ["b"]


def test_a_client_may_have_so_many_compilations_waiting(library):
    grammars = library(workers=1)
    blocked = BlockedCompiler(grammars)
    begun = compiled_by(grammars, BLOCKED_SCHEMA)
    assert eventually(lambda: blocked.begun)
    users = [Client("address", str(number)) for number in range(MAX_WAITING + 1)]
    waiting = [compiled_by(grammars, StructuredOutputs(regex=f"a{user.user}"), user) for user in users[:-1]]
    with pytest.raises(QueueFull):
        compiled_by(grammars, StructuredOutputs(regex="b"), users[-1])
    shared = compiled_by(grammars, StructuredOutputs(regex="a0"), users[-1])
    other = compiled_by(grammars, StructuredOutputs(regex="c"), Client("other address"))
    blocked.release()
    assert all(future.result(timeout=PATIENCE_S) for future in (begun, *waiting, shared, other))
    assert [text for kind, text in blocked.begun if kind == "regex"][:2] in (["a0", "c"], ["c", "a0"])


def test_a_source_is_compiled_while_any_of_its_requests_waits(library):
    grammars = library(workers=1)
    blocked = BlockedCompiler(grammars)
    compiled_by(grammars, BLOCKED_SCHEMA)
    assert eventually(lambda: blocked.begun)
    first, second = (compiled_by(grammars, StructuredOutputs(regex="b")) for _ in range(2))
    grammars.abandon(first)
    assert grammars.waiting == 1
    blocked.release()
    assert accepts(second.result(timeout=PATIENCE_S), "b")


def test_time_in_the_queue_counts_and_the_error_says_so(library, timers):
    """A request gets an answer although the grammars before it never end, and the worker does not begin its own."""
    grammars = library(workers=1, timeout_s=0.5)
    blocked = BlockedCompiler(grammars)
    slow = compiled_by(grammars, BLOCKED_SCHEMA)
    assert eventually(lambda: blocked.begun)
    waiting = [compiled_by(grammars, StructuredOutputs(regex="a")) for _ in range(2)]
    timers.fire(1)
    with pytest.raises(QueueFull, match=r"longer than 0\.5 s \(grammar_timeout_s\), because other grammars compiled"):
        waiting[0].result(timeout=PATIENCE_S)
    assert (waiting[1].done(), grammars.waiting) == (False, 1)
    timers.fire(2)
    assert isinstance(waiting[1].exception(timeout=PATIENCE_S), QueueFull)
    assert grammars.waiting == 0
    blocked.release()
    assert accepts(slow.result(timeout=PATIENCE_S), "5")
    assert [kind for kind, _ in blocked.begun] == ["json"]


def test_a_timeout_without_a_thread_leaves_nothing_that_waits(library, monkeypatch):
    grammars = library()

    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Timer, "start", refuse)
        with pytest.raises(InternalError, match="structured_outputs: a thread could not start"):
            compiled_by(grammars, StructuredOutputs(regex="a"))
    assert (grammars.waiting, grammars._waiting) == (0, {})


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit, KeyboardInterrupt, CancelledError, GeneratorExit])
def test_an_exception_of_the_compiler_reaches_the_request_and_the_next_one_retries(library, monkeypatch, kind):
    grammars = library(workers=1)
    compiler = grammars._compiler

    def broken(*_, **__):
        raise kind("a panic")

    with monkeypatch.context() as patched:
        patched.setattr(compiler, "compile", broken)
        failed = compiled_by(grammars, BLOCKED_SCHEMA)
        assert isinstance(failed.exception(timeout=PATIENCE_S), kind)
    assert accepts(compiled_by(grammars, BLOCKED_SCHEMA).result(timeout=PATIENCE_S), "5")


def test_closing_the_library_fails_requests_in_the_queue(library):
    grammars = library(workers=1)
    blocked = BlockedCompiler(grammars)
    begun, queued = compiled_by(grammars, BLOCKED_SCHEMA), compiled_by(grammars, StructuredOutputs(regex="a"))
    assert eventually(lambda: blocked.begun)
    grammars.close()
    with pytest.raises(Closed, match="closed"):
        queued.result(timeout=PATIENCE_S)
    blocked.release()
    assert accepts(begun.result(timeout=PATIENCE_S), "5")


def test_no_timer_outlives_its_compilation(library, timers):
    grammars = library()
    compiled_by(grammars, StructuredOutputs(regex="a")).result(timeout=PATIENCE_S)
    assert eventually(lambda: [timer.finished.is_set() for timer in timers] == [True])


def test_requests_of_one_source_share_one_grammar(library):
    grammars = library()
    futures = [compiled_by(grammars, StructuredOutputs(json=PERSON)) for _ in range(8)]
    assert len({id(future.result(timeout=PATIENCE_S).grammar) for future in futures}) == 1
    assert compiled_by(grammars, StructuredOutputs(json=PERSON)).done(), "a known grammar is there at once"


def test_schemas_with_another_order_of_properties_are_different_grammars(library):
    grammars = library()
    one, two = ({"type": "object", "properties": {a: {"const": 1}, b: {"const": 2}}} for a, b in ("xy", "yx"))
    assert accepts(compiled_by(grammars, StructuredOutputs(json=one)).result(timeout=PATIENCE_S), '{"x": 1, "y": 2}')
    swapped = compiled_by(grammars, StructuredOutputs(json=two)).result(timeout=PATIENCE_S)
    assert not accepts(swapped, '{"x": 1, "y": 2}')


def test_different_vocabularies_of_one_size_share_no_cached_grammar(library):
    """The letters a and b are swapped in the second vocabulary."""
    tokens = list(VOCABULARY.tokens)
    tokens[97], tokens[98] = tokens[98], tokens[97]
    cache = GrammarCache()
    first = compiled_by(library(cache=cache), StructuredOutputs(regex="a")).result(timeout=PATIENCE_S)
    swapped = library(cache=cache, vocabulary=replace(VOCABULARY, tokens=tuple(tokens)))
    second = compiled_by(swapped, StructuredOutputs(regex="a")).result(timeout=PATIENCE_S)
    assert first.matcher().accept(97)
    assert not second.matcher().accept(97)
    assert second.matcher().accept(98)
    assert len(cache) == 2


def test_the_cache_is_bounded_and_evicts_the_least_recently_used(library):
    grammars = library()
    compiled = [
        compiled_by(grammars, StructuredOutputs(regex=letter)).result(timeout=PATIENCE_S).grammar for letter in "abc"
    ]
    cache = GrammarCache(limit_bytes=20)
    for name, grammar in zip("ab", compiled, strict=False):
        cache.put((name,), grammar, 10)
    assert cache.get(("a",)) is compiled[0]
    cache.put(("c",), compiled[2], 10)
    assert cache.get(("b",)) is None
    assert cache.get(("a",)) is compiled[0]
    cache.put(("huge",), compiled[1], 21)
    assert cache.get(("huge",)) is None
    assert len(cache) == 2


def test_the_future_of_a_compilation_cannot_be_cancelled(library):
    grammars = library(workers=1)
    assert not compiled_by(grammars, StructuredOutputs(regex="a+")).cancel()
    assert accepts(compiled_by(grammars, StructuredOutputs(regex="b")).result(timeout=PATIENCE_S), "b")


def test_validate_output_accepts_any_schema_and_checks_the_finished_text(library):
    schema = {"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}}
    compiled = compiled_by(library(), StructuredOutputs(json=schema, validate_output=True)).result(timeout=PATIENCE_S)
    assert accepts(compiled, "[2]")
    assert compiled.check("[1, 2]") is None
    assert "does not contain" in compiled.check("[2]")
    assert "not JSON" in compiled.check("[1, ")


def test_validate_output_reads_groups_named_as_in_javascript(library):
    schema = {"type": "string", "pattern": r"^(?<year>\d{4})-(?<month>\d\d)$", "enum": ["2026-11", "x"]}
    compiled = compiled_by(library(), StructuredOutputs(json=schema, validate_output=True)).result(timeout=PATIENCE_S)
    assert compiled.check('"2026-11"') is None
    assert "does not match" in compiled.check('"x"')
    assert accepts(compiled, '"2026-11"')
    assert not accepts(compiled, '"x"')


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"multipleOf": 0.01}, ["1.15", "0.07", "19.99"], ["1.155"]),
        ({"exclusiveMaximum": 1}, ["0.99999999999999999999"], ["1.00000000000000000000"]),
        ({"maximum": 1}, ["1.0"], ["1.00000000000000000001"]),
        ({"format": "time"}, ['"12:00:00Z"', '"23:59:59.5+01:00"'], []),
        ({"format": "regex"}, [r'"^\\p{Lu}{2}$"', r'"(?i)a"'], ['"a("']),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1, "exclusiveMinimum": True}, ["2"], ["1"]),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1}, ["1"], ["0.5"]),
    ],
)
def test_validate_output_reads_numbers_and_formats_as_the_grammar_does(schema, good, bad):
    _, check = sources.read(StructuredOutputs(json=schema, validate_output=True))
    assert [text for text in good if check(text) is not None] == []
    assert [text for text in bad if check(text) is None] == []


@pytest.mark.parametrize("name", formats.PATTERNS)
def test_validate_output_takes_every_text_of_a_format(name):
    schema = {"type": "string", "format": name}
    _, check = sources.read(StructuredOutputs(json=schema, validate_output=True))
    chance = random.Random(name)
    texts = [write(grammar_of(schema), chance) for _ in range(20)]
    assert [text for text in texts if text is not None and check(text.decode()) is not None] == []


def test_validate_output_loosens_a_schema_that_the_engine_rejects(library):
    label = "[a-z0-9]([a-z0-9]|-[a-z0-9])*"
    letters = {"type": "string", "pattern": rf"^\w+(\.\w+)*@{label}(\.{label})+$", "minLength": 60_000}
    schema = {"type": "object", "properties": {"pattern": letters, "b": {"type": "integer"}}, "required": ["b"]}
    with pytest.raises(BadRequest, match="fuel exhausted"):
        compiled_by(library(), StructuredOutputs(json=schema)).result(timeout=PATIENCE_S)
    compiled = compiled_by(library(), StructuredOutputs(json=schema, validate_output=True)).result(timeout=PATIENCE_S)
    assert accepts(compiled, '{"pattern": "?", "b": 1}')
    assert not accepts(compiled, '{"pattern": "?", "b": "x"}')
    assert not accepts(compiled, '{"pattern": "?"}')
    assert "does not match" in compiled.check('{"pattern": "?", "b": 1}')


class CallCounter(socketserver.BaseRequestHandler):
    """Counts connections and closes them."""

    def handle(self):
        self.server.calls += 1


def test_checking_a_text_fetches_no_remote_reference(library):
    with socketserver.TCPServer(("127.0.0.1", 0), CallCounter) as server:
        server.calls = 0
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        schema = {"$ref": f"http://127.0.0.1:{server.server_address[1]}/schema"}
        asked = StructuredOutputs(json=schema, validate_output=True)
        compiled = compiled_by(library(), asked).result(timeout=PATIENCE_S)
        try:
            assert "cannot be checked" in compiled.check("1")
        finally:
            server.shutdown()
            thread.join()
        assert server.calls == 0


def test_closing_a_library_ends_its_threads_and_rejects_new_requests(library):
    before = set(threading.enumerate())
    grammars = library(workers=3)
    for letter in "abc":
        compiled_by(grammars, StructuredOutputs(regex=letter)).result(timeout=PATIENCE_S)
    threads = {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("grammar")}
    assert 1 <= len(threads) <= 3
    grammars.close()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    with pytest.raises(Closed, match="closed"):
        compiled_by(grammars, StructuredOutputs(regex="d"))


def test_a_process_exits_cleanly_while_a_grammar_compiles():
    """A running compilation cannot be interrupted. A thread inside it at interpreter exit would abort the process."""
    script = (
        "from tests.plain.test_structured import MANY_WORDS, SLOW, compiled_by\n"
        "from tandemrt.engines.parameters.sampling import StructuredOutputs\n"
        "from tandemrt.runtime.grammars.library import GrammarLibrary\n"
        "compiled_by(GrammarLibrary(MANY_WORDS, ()), StructuredOutputs(grammar=f'root ::= {SLOW}'))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def cycle() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    schema["properties"] = {"a": schema, "b": schema}
    return schema


def doubled(times: int) -> dict[str, Any]:
    """Return nested ``anyOf`` schemas that share objects: as text, 2 to the power of ``times`` copies."""
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(times):
        schema = {"anyOf": [schema, schema]}
    return schema


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"const": 10**5000},
            r"numbers must be finite and below 2\^1024, got int with .* \(at #/const\)",
        ),
        ('{"const": 1%s}' % ("0" * 5000), "the schema is not JSON: Exceeds the limit"),
        ({"minimum": float("nan")}, "numbers must be finite"),
        ({"const": b"a"}, r"must be JSON, got b'a' of type bytes; leave it out \(at #/const\)"),
        ({"enum": [1, object]}, r"must be JSON, got <class 'object'> of type type; leave it out \(at #/enum/1\)"),
        ({"const": {1: 2}}, r"keys must be texts, got 1; write it as one \(at #/const\)"),
        (cycle(), r"must not contain itself, got a cycle; use \$ref for recursion \(at #/properties/a"),
        (doubled(30), r"json: must be at most 262144 bytes \(max_grammar_bytes\), got more"),
        (doubled(40), "must be nested at most 64 levels deep"),
        ({"type": "string", "pattern": "(" * 5000 + "a" + ")" * 5000}, "a pattern nests too deep"),
        (
            {"type": "string", "pattern": "(" * 70 + "a" + ")" * 70},
            "more than 64 nested groups is not supported",
        ),
        ({"type": "string", "pattern": "a{%s}" % ("9" * 99)}, "a pattern nests too deep or repeats too often"),
    ],
    ids=map(str, range(12)),
)
@pytest.mark.parametrize("validate_output", [False, True])
def test_schemas_that_are_no_json_or_unbounded_are_rejected_with_our_message(
    library, schema: Any, message: str, validate_output: bool
) -> None:
    if validate_output and "not supported" in message:
        compiled_by(library(), StructuredOutputs(json=schema, validate_output=True)).result()
        return
    with pytest.raises(BadRequest, match=message):
        compiled_by(library(), StructuredOutputs(json=schema, validate_output=validate_output))


def test_changing_a_schema_after_the_request_has_no_effect(library) -> None:
    schema = {"enum": ["a"]}
    asked = StructuredOutputs(json=schema)
    compiled = compiled_by(library(), asked)
    schema["enum"].append("b")
    assert accepts(compiled.result(), '"a"')
    assert not accepts(compiled.result(), '"b"')


@pytest.mark.parametrize("deep", [300, 5000])
def test_deep_parentheses_compile_or_are_rejected(library, deep: int) -> None:
    future = compiled_by(library(), StructuredOutputs(grammar="root ::= " + "(" * deep + '"a"' + ")" * deep))
    if deep == 300:
        assert accepts(future.result(), "a")
    else:
        with pytest.raises(BadRequest, match="cannot be compiled"):
            future.result()


@pytest.mark.parametrize("deep", [64, 65, 5000])
def test_a_regex_may_nest_up_to_its_limit(library, deep: int) -> None:
    asked = StructuredOutputs(regex="(" * deep + "a" + ")" * deep)
    if deep == 64:
        assert accepts(compiled_by(library(), asked).result(), "a")
    else:
        with pytest.raises(BadRequest, match="more than 64 nested groups cannot be enforced"):
            compiled_by(library(), asked)


@pytest.mark.parametrize(
    ("asked", "engines"),
    [
        ({"json": PERSON}, {"llguidance"}),
        ({"json_object": True}, {"llguidance"}),
        ({"regex": "a"}, {"llguidance"}),
        ({"choice": ["a", "b|c.", 'né\n"', "c:\\n"]}, {"xgrammar", "llguidance"}),
        ({"grammar": 'root ::= "a"'}, {"xgrammar"}),
    ],
)
@pytest.mark.parametrize("engine", ["llguidance", "xgrammar"])
def test_a_requested_engine_is_used_if_it_supports_the_kind(library, asked, engines, engine) -> None:
    wanted = StructuredOutputs(**asked, engine=engine)
    if engine not in engines:
        with pytest.raises(BadRequest, match=rf"engine: must be ({'|'.join(engines)}) for .*, got {engine!r}"):
            compiled_by(library(), wanted)
        return
    compiled = compiled_by(library(), wanted).result()
    assert compiled.engine == engine
    for choice in asked.get("choice", ()):
        assert accepts(compiled, choice)
        assert not accepts(compiled, choice + "a")


@pytest.mark.parametrize(
    ("asked", "engine"),
    [
        ({"json": PERSON}, "llguidance"),
        ({"json_object": True}, "llguidance"),
        ({"regex": "a"}, "llguidance"),
        ({"choice": ["a"]}, "llguidance"),
        ({"grammar": 'root ::= "a"'}, "xgrammar"),
    ],
)
def test_each_kind_has_a_default_engine(library, asked, engine) -> None:
    assert compiled_by(library(), StructuredOutputs(**asked)).result().engine == engine


def test_a_schema_is_read_once_for_equal_requests(library, monkeypatch) -> None:
    grammars, read = library(), []
    worked_out = sources.read
    monkeypatch.setattr(sources, "read", lambda asked, *_, **how: read.append(asked) or worked_out(asked, **how))
    for _ in range(3):
        compiled = compiled_by(grammars, StructuredOutputs(json=PERSON)).result(timeout=PATIENCE_S)
        assert accepts(compiled, '{"name": "x"}')
    assert len(read) == 1
    others = ({"validate_output": True}, {"whitespace": "compact"}, {"disable_additional_properties": False})
    for other in (*others, {"engine": "llguidance"}):
        compiled_by(grammars, StructuredOutputs(json=PERSON, **other)).result(timeout=PATIENCE_S)
    assert len(read) == 5


def test_a_rejection_is_not_cached(library) -> None:
    grammars = library()
    for _ in range(2):
        with pytest.raises(BadRequest, match="'uri-template' is not supported"):
            compiled_by(grammars, StructuredOutputs(json={"type": "string", "format": "uri-template"}))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"json": "[" * 3000}, r"json: must be at most 2000 bytes \(max_grammar_bytes\), got more: '\[\[\["),
        ({"json": {"title": "x" * 3000}}, r"json: must be at most 2000 bytes .*at #/title"),
        ({"json": {"x" * 3000: 1}}, "json: must be at most 2000 bytes"),
        ({"json": {"enum": list(range(3000))}}, "json: must be at most 2000 bytes"),
        ({"choice": ["x"] * 3000}, r"choice: must be at most 2000 bytes \(max_grammar_bytes\), got more: \('x', 'x'"),
        ({"grammar": '"' * 3000}, "grammar: must be at most 2000 bytes"),
    ],
)
def test_a_source_that_is_too_large_is_rejected_before_it_is_read(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        SourceCache(max_bytes=2000).read(StructuredOutputs(**asked))


def numbers(*multiples: float) -> dict[str, Any]:
    return {"type": "array", "prefixItems": [{"type": "number", "multipleOf": multiple} for multiple in multiples]}


@pytest.mark.parametrize(
    ("multiples", "rejected"),
    [
        ((9001, 9003, 1996), None),
        ((9001, 9003, 1997), "20001 of 3 values"),
        ((9001, 9001, 9001, 9003, 1996), None),
        ((9001, 900_300, 1996), None),
        ((9001, 9003, 199.6), None),  # 998 fifths
        ((9001, 9003, 399.4), "2000. of . values"),  # 1,997 fifths
    ],
)
def test_all_multiples_of_a_request_are_few_together(multiples: tuple[float, ...], rejected: str | None) -> None:
    """The time to compile them grows with the square of their sum."""
    schema = numbers(*multiples)
    tag = {"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": schema}, "end": ">"}
    tags = {"type": "structural_tag", "format": {"type": "sequence", "elements": [tag, tag]}}
    for structured in (StructuredOutputs(json=schema), StructuredOutputs(structural_tag=tags)):
        if rejected is None:
            assert SourceCache().read(structured)
        else:
            with pytest.raises(BadRequest, match=rf"multipleOf must be at most 20000 together, .* got {rejected}"):
                SourceCache().read(structured)


def test_a_value_that_looks_like_a_multiple_is_none() -> None:
    schema = {"anyOf": [numbers(9001, 9003), {"const": {"multipleOf": 9007}}]}
    assert SourceCache().read(StructuredOutputs(json=schema))


def test_the_maximum_of_a_source_may_be_above_its_default() -> None:
    schema = {"enum": ["x" * 300_000]}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    for asked in ({"json": schema}, {"json": json.dumps(schema)}, {"structural_tag": tag}):
        assert SourceCache(max_bytes=301_000).read(StructuredOutputs(**asked))[0].text
        with pytest.raises(BadRequest, match=r"must be at most 300000 bytes \(max_grammar_bytes\), got more"):
            SourceCache(max_bytes=300_000).read(StructuredOutputs(**asked))


def test_a_regular_expression_has_a_maximum_length() -> None:
    with pytest.raises(BadRequest, match=r"regex: must be at most 32768 bytes, got more: 'aaa"):
        SourceCache().read(StructuredOutputs(regex="a" * 32_769))


MANY_CHOICES = {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(12)]}


@pytest.mark.parametrize("schema", [MANY_CHOICES, {"enum": ["x" * 17_000]}], ids=["laborious", "long"])
def test_a_slow_schema_is_read_in_a_worker_with_the_same_result(schema: dict[str, Any]) -> None:
    asked, called = StructuredOutputs(json=schema, validate_output=True), []

    def in_worker(function: Any, *arguments: Any) -> tuple[str, str]:
        called.append(function)
        return function(*json.loads(json.dumps(arguments)))

    assert SourceCache().read(asked, in_worker) == SourceCache().read(asked)
    assert len(called) == 1
    called.clear()
    SourceCache().read(StructuredOutputs(json=PERSON), in_worker)
    assert not called


def test_a_schema_beyond_the_size_of_an_entry_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, small, large = SourceCache(), *(StructuredOutputs(json={"const": "x" * size}) for size in (500, 1500))
    monkeypatch.setattr(source_cache, "MAX_ENTRY_BYTES", 1000)
    assert cache.read(small) is cache.read(small)
    assert cache.read(large) is not cache.read(large)


def test_the_cache_of_schemas_is_bounded() -> None:
    assert source_cache.MAX_ENTRIES * source_cache.MAX_ENTRY_BYTES <= 64 << 20


def test_the_schemas_used_last_stay_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_cache, "MAX_ENTRIES", 2)
    cache = SourceCache()
    first, second = (cache.read(StructuredOutputs(json={"const": value})) for value in (1, 2))
    assert cache.read(StructuredOutputs(json={"const": 1})) is first
    cache.read(StructuredOutputs(json={"const": 3}))
    assert cache.read(StructuredOutputs(json={"const": 1})) is first
    assert cache.read(StructuredOutputs(json={"const": 2})) is not second
