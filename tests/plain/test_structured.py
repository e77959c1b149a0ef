"""Structured outputs: what may be asked for, and compilations that are shared, bounded and harmless when they fail."""

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

from tandemrt.engines.errors import BadRequest, Closed
from tandemrt.engines.params import StructuredOutputs
from tandemrt.runtime.grammars import structured
from tandemrt.runtime.grammars.library import GrammarCache, GrammarLibrary
from tandemrt.runtime.grammars.readings import Readings
from tests.plain.constraints import STOP, VOCABULARY, spell
from tests.waiting import PATIENCE_S, eventually

PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
# Counted repetitions are slow to compile, the more so the more words a vocabulary has: a second or two for these.
SLOW = " | ".join(f'"{name}" [a-z0-9]{{0,{200 + ord(name)}}}' for name in "abc")
CHANCE = random.Random(0)
WORDS = tuple(bytes(CHANCE.choices(range(97, 123), k=CHANCE.randint(2, 9))) for _ in range(4000))
MANY_WORDS = replace(VOCABULARY, tokens=VOCABULARY.tokens + WORDS, valid_tokens=len(VOCABULARY.tokens) + len(WORDS))


@pytest.fixture
def library():
    made = []

    def make(**options) -> GrammarLibrary:
        made.append(GrammarLibrary(options.pop("vocabulary", VOCABULARY), [STOP], **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def takes(compiled, text: str) -> bool:
    matcher = compiled.matcher()
    return all(map(matcher.accept, spell(text))) and matcher.accept(STOP)


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"json": PERSON}, '{"name": "x"}', '{"name": 1}'),
        ({"json": json.dumps(PERSON)}, '{ "name" : "x" }', "{}"),
        ({"json": PERSON, "disable_any_whitespace": True}, '{"name": "x"}', '{ "name": "x"}'),
        ({"json": PERSON, "disable_additional_properties": False}, '{"name": "x", "more": 1}', '{"more": 1}'),
        ({"json": True}, "[1]", "["),
        ({"json_object": True}, '{"a": [{}]}', "[]"),
        ({"json_object": True, "disable_any_whitespace": True}, '{"a": 1}', '{ "a": 1}'),
        ({"regex": '"[a-z]"'}, '"a"', '"1"'),
        ({"choice": ['y"\\', "né😀", "a\nb\u2028", "a\nb"]}, "a\nb\u2028", "a"),
        ({"choice": ["yes"]}, "yes", "yesyes"),
        ({"grammar": 'root ::= "a" | "(" root ")"'}, "((a))", "((a)"),
    ],
)
def test_every_kind_takes_what_it_asks_for_and_nothing_else(library, asked, good, bad):
    compiled = library().compile(StructuredOutputs(**asked)).result(timeout=PATIENCE_S)
    assert takes(compiled, good)
    assert not takes(compiled, bad)
    assert compiled.check is None


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
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace must come with json"),
        ({"regex": "a", "disable_additional_properties": False}, "disable_additional_properties=False must come with"),
    ],
)
def test_what_is_not_exactly_one_well_formed_kind_is_refused(asked, message):
    with pytest.raises(BadRequest, match=message):
        StructuredOutputs(**asked)


def test_structured_outputs_cannot_be_changed_afterwards():
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
        ({"json": {"type": 5}}, "not a JSON schema at #/type"),
        ({"json": {"type": "integer", "not": {}}}, "no finite text fits"),
        ({"json": deep}, "nested at most 64 levels"),
        ({"json": {"enum": ["x" * 3000]}}, "must be at most 2000 bytes"),
        ({"regex": "(?=a)b"}, r"the group \(\?= cannot be enforced"),
        ({"grammar": "root[max_tokens=3] ::= [a-z]+"}, r"rule options and token macros .* got 'root\[max_tokens=3\]"),
        ({"grammar": "root ::= Token(5)"}, "rule options and token macros"),
        ({"grammar": 'root ::= [^"] Token(5) "x"'}, "rule options and token macros .* got 'Token\\('"),
        ({"grammar": 'root ::= [\\]"] r "x"\nr[max_tokens=3] ::= "y"'}, r"rule options .* got 'r\[max_tokens=3\]"),
        ({"grammar": '# a "quote\nroot ::= Token(5) "x"'}, "rule options and token macros"),
    ],
)
def test_what_needs_no_compiler_to_refuse_is_refused_at_once(library, asked, message):
    with pytest.raises(BadRequest, match=message):
        library(max_source_bytes=2000).compile(StructuredOutputs(**asked))


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('root ::= "a[max_tokens=3] ::="', "a[max_tokens=3] ::="),
        ('root ::= "x" # not a Token(5)', "x"),
        ('root ::= [Token(5)] "#" [#]', "T##"),
    ],
)
def test_what_stands_in_a_literal_a_class_or_a_comment_is_no_rule_option(library, grammar, text):
    assert takes(library().compile(StructuredOutputs(grammar=grammar)).result(timeout=PATIENCE_S), text)


def test_a_source_that_does_not_compile_fails_alone_and_is_not_remembered(library):
    """G18."""
    cache = GrammarCache()
    grammars = library(cache=cache)
    for _ in range(2):
        with pytest.raises(BadRequest, match="cannot be compiled"):
            grammars.compile(StructuredOutputs(grammar="root := 1")).result(timeout=PATIENCE_S)
    assert takes(grammars.compile(StructuredOutputs(regex="a")).result(timeout=PATIENCE_S), "a")
    assert len(cache) == 1


class Alarms(list):
    """The timers of a library, which go off when a test says so and never by themselves."""

    def __init__(self, monkeypatch):
        super().__init__()

        class Alarm(threading.Timer):
            def start(alarm):  # noqa: N805  # the list is self here
                self.append(alarm)

        monkeypatch.setattr(threading, "Timer", Alarm)

    def ring(self, which):
        alarm = self[which]
        assert not alarm.finished.is_set()
        alarm.function(*alarm.args)


@pytest.fixture
def alarms(monkeypatch):
    return Alarms(monkeypatch)


class Held:
    """The compiler of a library, which begins no JSON schema before it is let go, and notes what it began."""

    def __init__(self, grammars):
        self.begun, self._go, self._compile = [], threading.Event(), grammars._compiler.compile
        grammars._compiler.compile = self

    def __call__(self, kind, text, **options):
        self.begun.append((kind, text))
        if kind == "json":
            self._go.wait(PATIENCE_S)
        return self._compile(kind, text, **options)

    def let_go(self):
        self._go.set()


SLOWLY = StructuredOutputs(json={"type": "integer"})


def test_a_slow_compilation_fails_its_own_request_in_time_and_nobody_else(library, alarms):
    """G18: the compilation goes on alone, its result is kept, and another request is served meanwhile."""
    grammars = library(timeout_s=0.15)
    held = Held(grammars)
    slow = grammars.compile(SLOWLY)
    assert eventually(lambda: held.begun)
    assert takes(grammars.compile(StructuredOutputs(regex="a")).result(timeout=PATIENCE_S), "a")
    assert [alarm.interval for alarm in alarms] == [0.15, 0.15]
    alarms.ring(0)
    with pytest.raises(BadRequest, match=r"compiling took longer than 0\.15 s"):
        slow.result(timeout=PATIENCE_S)
    held.let_go()
    assert takes(grammars.compile(SLOWLY).result(timeout=PATIENCE_S), "5")
    assert [kind for kind, _ in held.begun].count("json") == 1


def test_an_impatient_request_takes_the_grammar_from_nobody_who_waits_for_the_same(library, alarms):
    grammars = library()
    held = Held(grammars)
    impatient = grammars.compile(SLOWLY)
    assert eventually(lambda: held.begun)
    patient = grammars.compile(SLOWLY)
    alarms.ring(0)
    held.let_go()
    with pytest.raises(BadRequest, match="took longer"):
        impatient.result(timeout=PATIENCE_S)
    assert takes(patient.result(timeout=PATIENCE_S), "5")


def test_a_compilation_nobody_waits_for_any_more_is_not_begun(library, alarms):
    grammars = library(workers=1)
    held = Held(grammars)
    left = [grammars.compile(SLOWLY), grammars.compile(StructuredOutputs(regex="b"))]
    assert eventually(lambda: len(held.begun) == 1)
    alarms.ring(0)
    with pytest.raises(BadRequest, match="took longer"):
        left[0].result(timeout=PATIENCE_S)
    grammars.abandon(left[1])
    held.let_go()
    assert takes(grammars.compile(StructuredOutputs(regex="c")).result(timeout=PATIENCE_S), "c")
    assert [kind for kind, _ in held.begun] == ["json", "regex"]
    assert held.begun[1][1] == "c", "the one behind the slow one was never begun"


def test_waiting_for_a_worker_is_no_compiling(library, alarms):
    """Two slow grammars do not make a trivial one of somebody else fail with "took longer"."""
    grammars = library(workers=1)
    held = Held(grammars)
    slow, trivial = grammars.compile(SLOWLY), grammars.compile(StructuredOutputs(regex="a"))
    assert eventually(lambda: held.begun)
    assert len(alarms) == 1, "the time of one that waits does not run"
    alarms.ring(0)
    with pytest.raises(BadRequest, match="took longer"):
        slow.result(timeout=PATIENCE_S)
    assert not trivial.done()
    held.let_go()
    assert takes(trivial.result(timeout=PATIENCE_S), "a")


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit, KeyboardInterrupt, CancelledError, GeneratorExit])
def test_whatever_the_compiler_raises_is_heard_and_the_next_request_begins_again(library, monkeypatch, kind):
    grammars = library(workers=1)
    compiler = grammars._compiler

    def broken(*_, **__):
        raise kind("a panic")

    with monkeypatch.context() as patched:
        patched.setattr(compiler, "compile", broken)
        failed = grammars.compile(SLOWLY)
        assert isinstance(failed.exception(timeout=PATIENCE_S), kind)
    assert takes(grammars.compile(SLOWLY).result(timeout=PATIENCE_S), "5")


def test_who_waits_for_a_grammar_that_has_not_begun_hears_that_the_library_closed(library):
    grammars = library(workers=1)
    held = Held(grammars)
    begun, queued = grammars.compile(SLOWLY), grammars.compile(StructuredOutputs(regex="a"))
    assert eventually(lambda: held.begun)
    grammars.close()
    with pytest.raises(Closed, match="closed"):
        queued.result(timeout=PATIENCE_S)
    held.let_go()
    assert takes(begun.result(timeout=PATIENCE_S), "5")


def test_no_timer_outlives_its_compilation(library, alarms):
    grammars = library()
    grammars.compile(StructuredOutputs(regex="a")).result(timeout=PATIENCE_S)
    assert eventually(lambda: [alarm.finished.is_set() for alarm in alarms] == [True])


def test_requests_of_one_source_share_one_grammar(library):
    grammars = library()
    futures = [grammars.compile(StructuredOutputs(json=PERSON)) for _ in range(8)]
    assert len({id(future.result(timeout=PATIENCE_S).grammar) for future in futures}) == 1
    assert grammars.compile(StructuredOutputs(json=PERSON)).done(), "a known grammar is there at once"


def test_the_order_of_properties_is_part_of_a_schema(library):
    grammars = library()
    one, two = ({"type": "object", "properties": {a: {"const": 1}, b: {"const": 2}}} for a, b in ("xy", "yx"))
    assert takes(grammars.compile(StructuredOutputs(json=one)).result(timeout=PATIENCE_S), '{"x": 1, "y": 2}')
    assert not takes(grammars.compile(StructuredOutputs(json=two)).result(timeout=PATIENCE_S), '{"x": 1, "y": 2}')


def test_vocabularies_of_one_size_share_a_cache_but_no_grammar(library):
    """G17: in the second vocabulary the letters a and b change places."""
    tokens = list(VOCABULARY.tokens)
    tokens[97], tokens[98] = tokens[98], tokens[97]
    cache = GrammarCache()
    first = library(cache=cache).compile(StructuredOutputs(regex="a")).result(timeout=PATIENCE_S)
    swapped = library(cache=cache, vocabulary=replace(VOCABULARY, tokens=tuple(tokens)))
    second = swapped.compile(StructuredOutputs(regex="a")).result(timeout=PATIENCE_S)
    assert first.matcher().accept(97)
    assert not second.matcher().accept(97)
    assert second.matcher().accept(98)
    assert len(cache) == 2


def test_the_cache_is_bounded_and_forgets_what_was_used_longest_ago(library):
    grammars = library()
    compiled = [
        grammars.compile(StructuredOutputs(regex=letter)).result(timeout=PATIENCE_S).grammar for letter in "abc"
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


def test_a_waiting_request_cannot_be_cancelled_from_outside_and_harms_no_worker(library):
    grammars = library(workers=1)
    assert not grammars.compile(StructuredOutputs(regex="a+")).cancel()
    assert takes(grammars.compile(StructuredOutputs(regex="b")).result(timeout=PATIENCE_S), "b")


def test_validate_output_lets_a_schema_in_and_checks_the_text_instead(library):
    """G19."""
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    compiled = library().compile(StructuredOutputs(json=schema, validate_output=True)).result(timeout=PATIENCE_S)
    assert takes(compiled, "[1, 1]")
    assert compiled.check("[1, 2]") is None
    assert "non-unique" in compiled.check("[1, 1]")
    assert "not JSON" in compiled.check("[1, ")


class Recorder(socketserver.BaseRequestHandler):
    """Notes that somebody called and hangs up."""

    def handle(self):
        self.server.calls += 1


def test_a_check_fetches_nothing(library):
    with socketserver.TCPServer(("127.0.0.1", 0), Recorder) as server:
        server.calls = 0
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        schema = {"$ref": f"http://127.0.0.1:{server.server_address[1]}/schema"}
        compiled = library().compile(StructuredOutputs(json=schema, validate_output=True)).result(timeout=PATIENCE_S)
        try:
            assert "cannot be checked" in compiled.check("1")
        finally:
            server.shutdown()
            thread.join()
        assert server.calls == 0


def test_closing_a_library_ends_its_threads_and_refuses_what_comes(library):
    before = set(threading.enumerate())
    grammars = library(workers=3)
    for letter in "abc":
        grammars.compile(StructuredOutputs(regex=letter)).result(timeout=PATIENCE_S)
    threads = {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("grammar")}
    assert 1 <= len(threads) <= 3
    grammars.close()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    with pytest.raises(Closed, match="closed"):
        grammars.compile(StructuredOutputs(regex="d"))


def test_a_process_may_end_while_a_grammar_compiles():
    """The compiler cannot be interrupted, and a thread that the interpreter ends inside it would abort the process."""
    script = (
        "from tests.plain.test_structured import MANY_WORDS, SLOW\n"
        "from tandemrt.engines.params import StructuredOutputs\n"
        "from tandemrt.runtime.grammars.library import GrammarLibrary\n"
        "GrammarLibrary(MANY_WORDS, ()).compile(StructuredOutputs(grammar=f'root ::= {SLOW}'))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def cycle() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    schema["properties"] = {"a": schema, "b": schema}
    return schema


def doubled(times: int) -> dict[str, Any]:
    """The same object twice in the same object twice: as text, 2 to the power of ``times``."""
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
        (cycle(), r"must not hold itself, got a cycle; use \$ref for what repeats \(at #/properties/a"),
        (doubled(30), r"json: must be at most 262144 bytes \(max_grammar_bytes\), got more"),
        (doubled(40), "must be nested at most 64 levels deep"),
        ({"type": "string", "pattern": "(" * 5000 + "a" + ")" * 5000}, "a pattern nests too deep"),
        (
            {"type": "string", "pattern": "(" * 70 + "a" + ")" * 70},
            "within more than 64 others is not held",
        ),
        ({"type": "string", "pattern": "a{%s}" % ("9" * 99)}, "a pattern nests too deep or repeats too often"),
    ],
    ids=map(str, range(12)),
)
@pytest.mark.parametrize("validate_output", [False, True])
def test_a_schema_that_is_no_json_or_has_no_bounds_is_refused_in_our_words(
    library, schema: Any, message: str, validate_output: bool
) -> None:
    if validate_output and "not held" in message:
        library().compile(StructuredOutputs(json=schema, validate_output=True)).result()
        return
    with pytest.raises(BadRequest, match=message):
        library().compile(StructuredOutputs(json=schema, validate_output=validate_output))


def test_a_schema_may_be_changed_once_it_is_asked_for(library) -> None:
    schema = {"enum": ["a"]}
    asked = StructuredOutputs(json=schema)
    compiled = library().compile(asked)
    schema["enum"].append("b")
    assert takes(compiled.result(), '"a"')
    assert not takes(compiled.result(), '"b"')


@pytest.mark.parametrize("deep", [300, 5000])
def test_deep_parentheses_compile_or_are_refused(library, deep: int) -> None:
    future = library().compile(StructuredOutputs(grammar="root ::= " + "(" * deep + '"a"' + ")" * deep))
    if deep == 300:
        assert takes(future.result(), "a")
    else:
        with pytest.raises(BadRequest, match="cannot be compiled"):
            future.result()


@pytest.mark.parametrize("deep", [64, 65, 5000])
def test_a_regex_nests_as_deep_as_it_may(library, deep: int) -> None:
    asked = StructuredOutputs(regex="(" * deep + "a" + ")" * deep)
    if deep == 64:
        assert takes(library().compile(asked).result(), "a")
    else:
        with pytest.raises(BadRequest, match="a group within more than 64 others cannot be enforced"):
            library().compile(asked)


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
def test_an_engine_is_taken_where_it_holds_the_kind_and_refused_elsewhere(library, asked, engines, engine) -> None:
    wanted = StructuredOutputs(**asked, engine=engine)
    if engine not in engines:
        with pytest.raises(BadRequest, match=rf"engine: .* is held by {'|'.join(engines)}, got {engine!r}"):
            library().compile(wanted)
        return
    compiled = library().compile(wanted).result()
    assert compiled.engine == engine
    for choice in asked.get("choice", ()):
        assert takes(compiled, choice)
        assert not takes(compiled, choice + "a")


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
def test_each_kind_has_an_engine_unless_a_request_names_one(library, asked, engine) -> None:
    assert library().compile(StructuredOutputs(**asked)).result().engine == engine


def test_a_schema_is_worked_out_once_however_often_it_is_asked_for(library, monkeypatch) -> None:
    grammars, read = library(), []
    worked_out = structured.read
    monkeypatch.setattr(structured, "read", lambda asked, _: read.append(asked) or worked_out(asked))
    for _ in range(3):
        assert takes(grammars.compile(StructuredOutputs(json=PERSON)).result(timeout=PATIENCE_S), '{"name": "x"}')
    assert len(read) == 1
    others = ({"validate_output": True}, {"disable_any_whitespace": True}, {"disable_additional_properties": False})
    for other in (*others, {"engine": "llguidance"}):
        grammars.compile(StructuredOutputs(json=PERSON, **other)).result(timeout=PATIENCE_S)
    assert len(read) == 5


def test_a_refusal_is_not_remembered(library) -> None:
    grammars = library()
    for _ in range(2):
        with pytest.raises(BadRequest, match="did you mean 'maxLength'"):
            grammars.compile(StructuredOutputs(json={"type": "string", "maxLenght": 3}))


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
def test_what_is_too_large_is_refused_before_it_is_read(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        Readings(most_bytes=2000).read(StructuredOutputs(**asked))


def test_a_regular_expression_has_a_length() -> None:
    with pytest.raises(BadRequest, match=r"regex: must be at most 32768 bytes, got more: 'aaa"):
        Readings().read(StructuredOutputs(regex="a" * 32_769))


MANY_CHOICES = {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(12)]}


@pytest.mark.parametrize("schema", [MANY_CHOICES, {"enum": ["x" * 17_000]}], ids=["laborious", "long"])
def test_a_schema_that_is_not_quick_to_read_is_read_elsewhere_to_the_same_end(schema: dict[str, Any]) -> None:
    asked, called = StructuredOutputs(json=schema, validate_output=True), []

    def elsewhere(function: Any, *arguments: Any) -> tuple[str, str]:
        called.append(function)
        return function(*json.loads(json.dumps(arguments)))

    assert Readings().read(asked, elsewhere) == Readings().read(asked)
    assert len(called) == 1
    called.clear()
    Readings().read(StructuredOutputs(json=PERSON), elsewhere)
    assert not called
