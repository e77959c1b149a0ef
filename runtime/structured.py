"""Structured outputs: what a request may ask for, and the library of grammars compiled for it off the loop."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import jsonschema
import referencing
import referencing.exceptions
from pydantic import ConfigDict, Field, StrictBool, ValidationError, model_validator

from tandemrt.engines.errors import BadRequest
from tandemrt.engines.validation import Record, explain, refuse
from tandemrt.runtime import schema as schemas
from tandemrt.runtime.grammar import CompiledGrammar, GrammarCompiler, XGrammar
from tandemrt.runtime.patterns import unenforceable
from tandemrt.runtime.vocabulary import Vocabulary
from tandemrt.runtime.vocabulary import vocabulary_from_tokenizer as vocabulary_from_tokenizer

ANY_OBJECT = {"type": "object", "additionalProperties": True}
DEEPEST = 64  # levels of nesting in a schema

Check = Callable[[str], str | None]


class StructuredOutputs(Record):
    """The shape an answer must have: exactly one of the five kinds. Anything else raises BadRequest.

    Attributes:
        json: a JSON schema (draft 2020-12), as an object or as text.
        json_object: True for any JSON object.
        regex: a regular expression for the whole answer.
        choice: the answers to choose from.
        grammar: an EBNF grammar with a rule ``root``.
        disable_any_whitespace: JSON in one fixed layout instead of with any whitespace.
        validate_output: accept schemas with keywords that a grammar cannot enforce, and check the finished text.
    """

    model_config = ConfigDict(strict=False)

    json_schema: dict[str, Any] | StrictBool | str | None = Field(None, alias="json")
    json_object: StrictBool | None = None
    regex: str | None = Field(None, min_length=1)
    choice: tuple[str, ...] | None = None
    grammar: str | None = Field(None, min_length=1)
    disable_any_whitespace: StrictBool = False
    validate_output: StrictBool = False

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise BadRequest("\n".join(f"structured_outputs: {line}" for line in explain(error).split("\n"))) from error

    @model_validator(mode="after")
    def _one_kind(self) -> "StructuredOutputs":
        kinds = ("json", "json_object", "regex", "choice", "grammar")
        values = (self.json_schema, self.json_object, self.regex, self.choice, self.grammar)
        named = [kind for kind, value in zip(kinds, values, strict=True) if value is not None]
        if len(named) != 1:
            raise refuse(f"exactly one of {', '.join(kinds)} must be given, got {' and '.join(named) or 'none'}")
        if self.json_object is False:
            raise refuse("json_object must be True, got False; leave it out for free text")
        if self.choice is not None and (not self.choice or not all(self.choice)):
            raise refuse(f"choice must be a non-empty list of non-empty texts, got {list(self.choice)}")
        if self.validate_output and self.json_schema is None:
            raise refuse(f"validate_output must come with json, got {named[0]}, which is enforced without it")
        if self.disable_any_whitespace and named[0] not in ("json", "json_object"):
            raise refuse(f"disable_any_whitespace must come with json or json_object, got {named[0]}")
        return self


@dataclass(frozen=True)
class Compiled:
    """A grammar ready to start, and the check of the finished text that ``validate_output`` asked for."""

    grammar: CompiledGrammar
    check: Check | None = None  # says what is wrong with the text, or None

    def matcher(self, stop_ids: Iterable[int] | None = None) -> XGrammar:
        """A fresh matcher; ``stop_ids`` end the text where it is complete (None: the library's)."""
        return self.grammar.matcher(stop_ids)


@dataclass(frozen=True)
class Source:
    """What is handed to the compiler. Two requests of one source share one compilation."""

    kind: str
    text: str
    any_whitespace: bool


class GrammarCache:
    """Compiled grammars, the least recently used leave first. May be shared by libraries of several vocabularies."""

    def __init__(self, limit_bytes: int = 256 << 20) -> None:
        self._limit = limit_bytes
        self._entries: OrderedDict[tuple[Any, ...], tuple[CompiledGrammar, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: tuple[Any, ...]) -> CompiledGrammar | None:
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: tuple[Any, ...], grammar: CompiledGrammar, size: int) -> None:
        """Keep ``grammar``, unless it alone is larger than the limit."""
        with self._lock:
            if key in self._entries or size > self._limit:
                return
            self._entries[key] = grammar, size
            self._bytes += size
            while self._bytes > self._limit:
                _, (_, freed) = self._entries.popitem(last=False)
                self._bytes -= freed


class GrammarLibrary:
    """Compiles the grammars of requests for one vocabulary, off the loop.

    A compilation cannot be cancelled. One that outlives the patience of every request that waits for it goes on alone
    and its result is kept; ``workers`` bounds how many run at once. No failure is remembered.

    Args:
        vocabulary: what every id of the logits spells.
        stop_ids: end the text where it is complete.
        timeout_s: how long a request waits for its grammar, queueing included.
        max_source_bytes: larger sources are refused.
        workers: compilations at once.
        cache: None for one of its own.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop_ids: Iterable[int],
        *,
        timeout_s: float = 10.0,
        max_source_bytes: int = 1 << 18,
        workers: int = 2,
        cache: GrammarCache | None = None,
    ) -> None:
        self._stop_ids = tuple(stop_ids)
        self._compiler = GrammarCompiler(vocabulary, self._stop_ids)
        self._digest = vocabulary.digest
        self._timeout_s = timeout_s
        self._max_source_bytes = max_source_bytes
        self._cache = GrammarCache() if cache is None else cache
        self._lock = threading.Lock()
        self._waiting: dict[Source, list[Future[CompiledGrammar]]] = {}
        self._queue: SimpleQueue[Source | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True, name="grammar") for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def compile(self, structured: StructuredOutputs) -> "Future[Compiled]":
        """Return a future of the compiled grammar; it fails with BadRequest, after ``timeout_s`` at the latest.

        Raises:
            BadRequest: at once, for what needs no compiler: an invalid schema, a keyword that cannot be enforced, a
                source that is too large.
        """
        source, check = _read(structured)
        size = len(source.text.encode())
        if size > self._max_source_bytes:
            raise BadRequest(
                f"structured_outputs.{source.kind}: must be at most {self._max_source_bytes} bytes, got {size}"
            )
        result: Future[Compiled] = Future()
        result.set_running_or_notify_cancel()  # whoever waits for it cannot cancel it, only ignore it

        def hand_over(grammar: "Future[CompiledGrammar]") -> None:
            failure = grammar.exception()
            if failure is None:
                result.set_result(Compiled(grammar.result(), check))
            else:
                result.set_exception(failure)

        self._grammar(source).add_done_callback(hand_over)
        return result

    def close(self) -> None:
        """Let the workers end once they are done; requests that still wait are refused when their time is up."""
        for _ in self._threads:
            self._queue.put(None)

    def _grammar(self, source: Source) -> "Future[CompiledGrammar]":
        future: Future[CompiledGrammar] = Future()
        with self._lock:
            known = self._cache.get(self._key(source))
            if known is None:
                if source not in self._waiting:
                    self._queue.put(source)
                self._waiting.setdefault(source, []).append(future)
        if known is not None:
            future.set_result(known)
            return future
        timer = threading.Timer(self._timeout_s, self._give_up, [source, future])
        timer.daemon = True
        timer.start()
        future.add_done_callback(lambda _: timer.cancel())
        return future

    def _give_up(self, source: Source, future: "Future[CompiledGrammar]") -> None:
        with self._lock:
            waiting = self._waiting.get(source, [])
            if future not in waiting:
                return
            waiting.remove(future)
        future.set_exception(
            BadRequest(
                f"structured_outputs.{source.kind}: compiling took longer than {self._timeout_s} s; simplify it (long "
                "bounded strings and repetitions are the slow ones) or raise the limit"
            )
        )

    def _work(self) -> None:
        while (source := self._queue.get()) is not None:
            with self._lock:
                if not self._waiting[source]:  # nobody is left; the next request for it queues it again
                    del self._waiting[source]
                    continue
            grammar, failure = None, None
            try:
                grammar = self._compiler.compile(source.kind, source.text, any_whitespace=source.any_whitespace)
            except Exception as error:
                failure = error
            with self._lock:
                if grammar is not None:
                    self._cache.put(self._key(source), grammar, grammar.size_bytes + len(source.text))
                waiting = self._waiting.pop(source)
            for future in waiting:
                if grammar is not None:
                    future.set_result(grammar)
                else:
                    future.set_exception(failure)

    def _key(self, source: Source) -> tuple[Any, ...]:
        return self._digest, self._stop_ids, source


def _read(structured: StructuredOutputs) -> tuple[Source, Check | None]:
    if structured.json_schema is not None:
        schema = _schema(structured.json_schema)
        schemas.check_valid(schema)
        if not structured.validate_output:
            schemas.check_enforceable(schema)
        check = _validator(schema) if structured.validate_output else None
        return Source("json", json.dumps(schemas.lowered(schema)), not structured.disable_any_whitespace), check
    if structured.json_object:
        return Source("json", json.dumps(ANY_OBJECT), not structured.disable_any_whitespace), None
    if structured.regex is not None:
        return Source("regex", _checked_regex(structured.regex), any_whitespace=True), None
    if structured.choice is not None:
        return Source("grammar", _choice_grammar(structured.choice), any_whitespace=True), None
    return Source("grammar", _checked_ebnf(structured.grammar or ""), any_whitespace=True), None


def _schema(given: dict[str, Any] | bool | str) -> Any:
    if isinstance(given, str):
        try:
            given = json.loads(given, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"structured_outputs.json: the schema is not JSON: {error}") from None
    level = [given]
    for _ in range(DEEPEST):
        level = [child for node in level for child in _children(node)]
        if not level:
            return given
    raise BadRequest(f"structured_outputs.json: must be nested at most {DEEPEST} levels deep, got more; flatten it")


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list | tuple) else ()


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _validator(schema: Any) -> Check:
    # The empty registry keeps references to other documents from being fetched.
    validator = jsonschema.Draft202012Validator(
        schema, registry=referencing.Registry(), format_checker=jsonschema.FormatChecker()
    )

    def check(text: str) -> str | None:
        try:
            error = jsonschema.exceptions.best_match(validator.iter_errors(json.loads(text)))
        except ValueError as failure:
            return f"the text is not JSON: {failure}"
        except (referencing.exceptions.Unresolvable, RecursionError, OverflowError) as failure:
            return f"the text cannot be checked: {failure}"
        return None if error is None else f"{error.json_path}: {error.message}"

    return check


def _checked_regex(pattern: str) -> str:
    reason = unenforceable(pattern, quoted=False)
    if reason:
        raise BadRequest(f"structured_outputs.regex: {reason} cannot be enforced; rewrite it without, got {pattern!r}")
    return pattern


def _checked_ebnf(source: str) -> str:
    bare = _LITERAL.sub('""', source)
    found = _RULE_OPTIONS.search(bare) or _TOKEN_MACRO.search(bare)
    if found:
        raise BadRequest(
            f"structured_outputs.grammar: rule options and token macros do not hold under speculation, got "
            f"{found.group().strip()!r}; write the limit as a repetition"
        )
    return source


def _choice_grammar(choices: tuple[str, ...]) -> str:
    return "root ::= " + " | ".join(f'"{"".join(map(_escape, choice))}"' for choice in choices)


def _escape(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else f"\\U{ord(character):08x}"


_LITERAL = re.compile(r'"(?:\\.|[^"\\])*"')
_RULE_OPTIONS = re.compile(r"\w+\s*\[[^\]]*\]\s*::=")
_TOKEN_MACRO = re.compile(r"\b(?:Token|ExcludeToken|AnyTokens|TagDispatch|TokenTagDispatch)\s*\(")
