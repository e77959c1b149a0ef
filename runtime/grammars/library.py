"""The library of grammars: compiled off the loop, once each, within a time and a size."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakMethod

from tandemrt.engines.errors import BadRequest, Closed
from tandemrt.engines.params import StructuredOutputs
from tandemrt.engines.vocabulary import Vocabulary
from tandemrt.runtime import leaving
from tandemrt.runtime.constraints.grammar import Grammar
from tandemrt.runtime.fair import FairExecutor
from tandemrt.runtime.grammars.engine import Engine
from tandemrt.runtime.grammars.grammar import CompiledGrammar, GrammarCompiler
from tandemrt.runtime.grammars.output import OutputCheck
from tandemrt.runtime.grammars.readings import Readings
from tandemrt.runtime.processes.pool import ProcessPool

if TYPE_CHECKING:
    from tandemrt.runtime.grammars.structured import Source


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


@dataclass(frozen=True)
class Compiled:
    """A grammar ready to start, and the check of the finished text that ``validate_output`` asked for."""

    grammar: CompiledGrammar
    engine: Engine
    check: OutputCheck | None = None

    def matcher(self, stop_ids: Iterable[int] | None = None) -> Grammar:
        """A fresh matcher; ``stop_ids`` end the text where it is complete (None: the library's)."""
        return self.grammar.matcher(stop_ids)


class GrammarLibrary:
    """Compiles the grammars of requests for one vocabulary, off the loop.

    A compilation cannot be cancelled. One that outlives the patience of every request that waits for it goes on alone
    and its result is kept; ``workers`` bounds how many run at once. Waiting for a worker is not compiling: nobody's
    slow grammar uses up another's time. No failure is remembered.

    Args:
        vocabulary: what every id of the logits spells.
        stop_ids: end the text where it is complete.
        timeout_s: how long a request waits for its grammar from where the compiler has begun with it.
        max_source_bytes: larger sources are refused.
        workers: compilations at once.
        cache: None for one of its own.
        processes: where a schema is read that is not quick to read, and an EBNF grammar is tried; None: here, and not.
        slowest_row_s: of the processor's time, that a row may take where a grammar is tried.
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
        processes: ProcessPool | None = None,
        slowest_row_s: float = 0.1,
    ) -> None:
        self._stop_ids = tuple(stop_ids)
        self._compiler = GrammarCompiler(vocabulary, self._stop_ids)
        self._vocabulary = vocabulary
        self._slowest_row_s = slowest_row_s
        self._timeout_s = timeout_s
        self._max_source_bytes = max_source_bytes
        self._cache = GrammarCache() if cache is None else cache
        self._processes = processes
        self._readings = Readings(max_source_bytes)
        self._lock = threading.Lock()
        self._waiting: dict[Source, _Compilation] = {}
        self._pool = FairExecutor(workers, "grammar", initializer=_wait_for, initargs=(WeakMethod(self.close),))
        self._asked: WeakKeyDictionary[Future[Compiled], Future[CompiledGrammar]] = WeakKeyDictionary()
        self._closed = False

    def compile(self, structured: StructuredOutputs, client: str = "") -> "Future[Compiled]":
        """Return a future of the compiled grammar; it fails with BadRequest when compiling takes ``timeout_s``.

        It cannot be cancelled; see ``abandon``. ``client``: whose it is; nobody's grammars take up all workers.

        Raises:
            BadRequest: at once, for what needs no compiler: an invalid schema, a keyword that cannot be enforced, a
                source that is too large.
        """
        source, check = self._readings.read(
            structured, None if self._processes is None else partial(self._read, client)
        )
        size = len(source.text.encode())
        if size > self._max_source_bytes:
            raise BadRequest(
                f"structured_outputs.{source.kind}: must be at most {self._max_source_bytes} bytes, got {size}"
            )
        result: Future[Compiled] = Future()
        result.set_running_or_notify_cancel()
        compiled = self._grammar(source, client)

        def hand_over(grammar: "Future[CompiledGrammar]") -> None:
            failure = CancelledError() if grammar.cancelled() else grammar.exception()
            if failure is None:
                result.set_result(Compiled(grammar.result(), source.engine, check))
            else:
                result.set_exception(failure)

        self._asked[result] = compiled
        compiled.add_done_callback(hand_over)
        return result

    def abandon(self, result: "Future[Compiled]") -> None:
        """Nobody waits for ``result`` any more: what nobody waits for is not begun."""
        self._asked[result].cancel()

    def close(self) -> None:
        """Take no more requests and begin no compilation; who waits for one that has not begun is told so."""
        with self._lock:
            self._closed = True
            stranded = [source for source, compilation in self._waiting.items() if not compilation.begun]
            futures = [future for source in stranded for future in self._waiting.pop(source).futures]
        self._pool.shutdown(wait=False)
        for future in futures:
            _settle(future, None, Closed("this runtime was closed; open the bundle again"))

    def _read(self, client: str, *work: Any) -> tuple[str, str]:
        assert self._processes is not None
        what = "structured_outputs.json: reading the schema"
        text, dialect = self._processes.submit(client, what, self._timeout_s, *work).result()
        return text, dialect

    def _grammar(self, source: "Source", client: str) -> "Future[CompiledGrammar]":
        future: Future[CompiledGrammar] = Future()
        with self._lock:
            if self._closed:
                raise Closed("this runtime was closed; open the bundle again")
            known = self._cache.get(self._key(source))
            if known is None:
                if source not in self._waiting:
                    self._pool.submit(client, self._compile, source, client)
                    self._waiting[source] = _Compilation()
                self._waiting[source].futures.append(future)
                if self._waiting[source].begun:
                    self._limit(source, future)
        if known is not None:
            future.set_result(known)
        return future

    def _limit(self, source: "Source", future: "Future[CompiledGrammar]") -> None:
        """From here on the compiler works for ``future``, and its time runs."""
        timer = threading.Timer(min(self._timeout_s, threading.TIMEOUT_MAX), self._give_up, [source, future])
        timer.daemon = True
        timer.start()
        future.add_done_callback(lambda _: timer.cancel())

    def _give_up(self, source: "Source", future: "Future[CompiledGrammar]") -> None:
        with self._lock:
            compilation = self._waiting.get(source)
            if compilation is None or future not in compilation.futures:
                return
            compilation.futures.remove(future)
        rule = f"structured_outputs.{source.kind}: compiling took longer than {self._timeout_s} s; simplify it (long "
        rule += "bounded strings and repetitions are the slow ones) or raise the limit"
        _settle(future, None, BadRequest(rule))

    def _compile(self, source: "Source", client: str) -> None:
        """Compile for all who wait for ``source``. Whatever is raised is theirs."""
        with self._lock:
            compilation = self._waiting.get(source)
            if compilation is None:  # closed meanwhile
                return
            if all(future.done() for future in compilation.futures):  # the next request for it begins it again
                del self._waiting[source]
                return
            compilation.begun, patient = True, list(compilation.futures)
        grammar, failure = None, None
        try:
            for future in patient:
                self._limit(source, future)
            if source.engine == "xgrammar" and self._processes is not None:
                self._try(source.text, client, self._processes)
            grammar = self._compiler.compile(source.kind, source.text, any_whitespace=source.any_whitespace)
            self._cache.put(self._key(source), grammar, grammar.size_bytes + len(source.text))
        except BaseException as error:
            failure = error
        with self._lock:
            del self._waiting[source]
        for future in compilation.futures:
            _settle(future, grammar, failure)

    def _try(self, grammar: str, client: str, processes: ProcessPool) -> None:
        """Raise BadRequest for a grammar that has too much work in it; see trial.py."""
        from tandemrt.runtime.grammars.trial import tried

        work = (self._vocabulary.tokens, self._stop_ids, grammar, self._slowest_row_s)
        processes.submit(client, "structured_outputs.grammar: trying it", self._timeout_s, tried, *work).result()

    def _key(self, source: "Source") -> tuple[Any, ...]:
        return self._vocabulary.digest, self._stop_ids, source


@dataclass(eq=False)
class _Compilation:
    """Who waits for a source, and whether the compiler works on it."""

    futures: "list[Future[CompiledGrammar]]" = field(default_factory=list)
    begun: bool = False


def _settle(future: "Future[CompiledGrammar]", grammar: CompiledGrammar | None, failure: BaseException | None) -> None:
    """Tell ``future``, unless whoever waited for it has given up."""
    if not future.set_running_or_notify_cancel():
        return
    if grammar is not None:
        future.set_result(grammar)
    else:
        future.set_exception(failure)


def _wait_for(close: "WeakMethod[Callable[[], None]]") -> None:
    """In each thread of the pool: the interpreter ends behind what it compiles."""

    def stop() -> None:
        if (bound := close()) is not None:
            bound()

    leaving.wait_for(threading.current_thread(), stop)
