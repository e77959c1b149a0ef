"""The library of grammars: compiled off the loop, once each, within a time and a size."""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tandemrt.engines.errors import BadRequest, Closed
from tandemrt.engines.params import StructuredOutputs
from tandemrt.engines.vocabulary import Vocabulary
from tandemrt.runtime.grammars.grammar import CompiledGrammar, GrammarCompiler, XGrammar
from tandemrt.runtime.grammars.structured import Check, Source, read


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
    check: Check | None = None  # says what is wrong with the text, or None

    def matcher(self, stop_ids: Iterable[int] | None = None) -> XGrammar:
        """A fresh matcher; ``stop_ids`` end the text where it is complete (None: the library's)."""
        return self.grammar.matcher(stop_ids)


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
        # A thread that the interpreter ends inside the compiler takes the process down; the pool's are joined at exit.
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="grammar")
        self._closed = False

    def compile(self, structured: StructuredOutputs) -> "Future[Compiled]":
        """Return a future of the compiled grammar; it fails with BadRequest, after ``timeout_s`` at the latest.

        Raises:
            BadRequest: at once, for what needs no compiler: an invalid schema, a keyword that cannot be enforced, a
                source that is too large.
        """
        source, check = read(structured)
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
        """Take no more requests and begin no compilation; requests that wait are refused when their time is up."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _grammar(self, source: Source) -> "Future[CompiledGrammar]":
        future: Future[CompiledGrammar] = Future()
        with self._lock:
            if self._closed:
                raise Closed("this runtime was closed; open the bundle again")
            known = self._cache.get(self._key(source))
            if known is None:
                if source not in self._waiting:
                    self._pool.submit(self._compile, source)
                self._waiting.setdefault(source, []).append(future)
        if known is not None:
            future.set_result(known)
            return future
        timer = threading.Timer(min(self._timeout_s, threading.TIMEOUT_MAX), self._give_up, [source, future])
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

    def _compile(self, source: Source) -> None:
        with self._lock:
            if not self._waiting[source]:  # nobody is left; the next request for it begins it again
                del self._waiting[source]
                return
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
