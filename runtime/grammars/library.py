"""Compile the grammars of requests outside of the engine loop, each source once, with limits of time and size."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakMethod

from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.engines.text.vocabulary import Vocabulary
from tandemrt.engines.validation.errors import BadRequest, Closed, QueueFull, TandemError
from tandemrt.runtime.grammars.compiler import CompiledGrammar, GrammarCompiler
from tandemrt.runtime.grammars.engine_choice import Engine
from tandemrt.runtime.grammars.grammar import Grammar
from tandemrt.runtime.grammars.grammar_cache import GrammarCache
from tandemrt.runtime.grammars.output_check import OutputCheck
from tandemrt.runtime.grammars.source_cache import ReadSource, SourceCache
from tandemrt.runtime.workers import shutdown
from tandemrt.runtime.workers.clients import UNNAMED, Client
from tandemrt.runtime.workers.fair import FairExecutor
from tandemrt.runtime.workers.sandbox.lanes import QUICK_S, ProcessLanes
from tandemrt.runtime.workers.sandbox.pool import ProcessPool, TooSlow, wait_for
from tandemrt.runtime.workers.threads import start

if TYPE_CHECKING:
    from tandemrt.runtime.grammars.sources import Source


MAX_WAITING = 64  # compilations of one client; one more would wait for long, and so would other users of its address


@dataclass(frozen=True)
class Compiled:
    """A compiled grammar, and the check of the finished text if the request sets ``validate_output``."""

    grammar: CompiledGrammar
    engine: Engine
    check: OutputCheck | None

    def matcher(self, stop_ids: Iterable[int] | None = None) -> Grammar:
        """Return a matcher of a new text. ``stop_ids`` end a complete text; None: those of the library."""
        return self.grammar.matcher(stop_ids)


class GrammarLibrary:
    """Compile the grammars of requests for one vocabulary, outside of the engine loop.

    A compilation waits for a worker only while a request waits for it, so the queue of requests bounds them. It is
    tried in a worker process before if no limit bounds its work (trial.py); other compilations do not wait for these.
    A trial that takes more than ``QUICK_S`` ends and starts again in processes of slow ones: a few clients with
    slow sources delay the others by that time only.
    A running one cannot be cancelled: after all its requests have timed out, it continues and its result is cached. The
    timeout includes the wait for a worker and the trial, which gets half of it. Failures are not cached.

    Args:
        vocabulary: the text of every id of the logits.
        stop_ids: tokens that end a complete text.
        timeout_s: how long a request waits for its grammar, in seconds.
        max_source_bytes: larger sources are rejected.
        workers: concurrent compilations, and as many of sources that are tried quickly, and slowly.
        cache: a cache to share with other libraries; None creates one.
        processes: worker processes that convert slow schemas and check finished texts; ``close`` closes them. None:
            schemas are converted in this thread, and no source is tried.
        slowest_row_s: an EBNF grammar is rejected if one of its rows takes more CPU seconds than this.
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
        processes: ProcessLanes | None = None,
        slowest_row_s: float = 0.1,
    ) -> None:
        self._stop_ids = tuple(stop_ids)
        self._compiler = GrammarCompiler(vocabulary, self._stop_ids)
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s
        self._max_source_bytes = max_source_bytes
        self._cache = GrammarCache() if cache is None else cache
        self._processes = processes
        self._sources = SourceCache(max_source_bytes)
        self._lock = threading.Lock()
        self._waiting: dict[Source, _Compilation] = {}
        self._untried = self._lane(workers, "grammar", None, 0.0)
        self._quick = self._slow = None
        if processes is not None:
            limit_s = timeout_s / 2
            self._slow = self._lane(workers, "grammar-slow", self._trial_processes(workers, slowest_row_s), limit_s)
            quick_s = min(QUICK_S, limit_s)
            self._quick = self._lane(workers, "grammar-tried", self._trial_processes(workers, slowest_row_s), quick_s)
        self._compiled_of: WeakKeyDictionary[Future[Compiled], Future[CompiledGrammar]] = WeakKeyDictionary()
        self._closed = False

    def read(
        self, structured: StructuredOutputs, client: Client = UNNAMED, deadline: float | None = None
    ) -> ReadSource:
        """Return the source that ``compile`` takes, and the check of the finished text.

        ``deadline`` (in seconds of ``time.monotonic``) limits the wait for a worker process that converts a schema.

        Raises:
            BadRequest: an error that needs no compiler: an invalid schema, an unsupported keyword, or a source that is
                too large.
            QueueFull: a conversion waited ``timeout_s`` for a process.
        """
        what = f"structured_outputs.{structured.kind}: reading it"
        in_worker = None if self._processes is None else partial(self._read_in_process, what, client, deadline)
        source, check = self._sources.read(structured, in_worker)
        size = len(source.text.encode())
        if size > self._max_source_bytes:
            raise BadRequest(
                f"structured_outputs.{source.kind}: must be at most {self._max_source_bytes} bytes, got {size}"
            )
        return source, check

    def compile(self, read: ReadSource, client: Client = UNNAMED) -> "Future[Compiled]":
        """Return a future of the compiled grammar; it fails with BadRequest if compiling takes ``timeout_s``, and with
        QueueFull if it has not begun by then.

        The future cannot be cancelled; see ``abandon``. Workers are shared fairly between clients. Raises Closed, and
        QueueFull if ``MAX_WAITING`` compilations of the client wait for one.
        """
        source, check = read
        result: Future[Compiled] = Future()
        result.set_running_or_notify_cancel()
        compiled = self._grammar(source, client)

        def pass_on(grammar: "Future[CompiledGrammar]") -> None:
            self._compiled_of.pop(result, None)  # its value keeps this callback, which keeps the key
            failure = CancelledError() if grammar.cancelled() else grammar.exception()
            if failure is None:
                result.set_result(Compiled(grammar.result(), source.engine, check))
            else:
                result.set_exception(failure)

        self._compiled_of[result] = compiled
        compiled.add_done_callback(pass_on)
        return result

    def abandon(self, result: "Future[Compiled]") -> None:
        """Stop waiting for ``result``. Its compilation leaves the queue if no other request waits for it.

        A compilation that has begun continues, because it cannot be interrupted.
        """
        compiled = self._compiled_of.get(result)
        if compiled is not None:
            compiled.cancel()

    def validate(self, check: OutputCheck, text: str, client: Client = UNNAMED) -> "Future[str | None]":
        """Return a future of the problem that ``check`` finds in a finished text, or None.

        The check begins within ``timeout_s`` and ends within another, so that every text gets an answer. Needs
        ``processes``: a pattern of the request may take any time.
        """
        assert self._processes is not None
        what = "structured_outputs.json: checking the finished text"
        return self._processes.submit(client, what, self._timeout_s, check, text, wait_s=self._timeout_s)

    @property
    def waiting(self) -> int:
        """Number of compilations that wait for a worker."""
        return sum(len(lane.pool) for lane in self._lanes)

    def close(self) -> None:
        """Reject new requests, start no more compilations and end trials and checks; their futures fail with Closed."""
        with self._lock:
            self._closed = True
            stranded = [compilation for compilation in self._waiting.values() if not compilation.begun]
            futures = [future for compilation in stranded for future in compilation.futures]
            for compilation in stranded:
                del self._waiting[compilation.source]
                compilation.futures = []  # the shutdown below fails the task, whose callback would fail these again
        for lane in self._lanes:
            if lane.trials is not None:
                lane.trials.close()
            lane.pool.shutdown(wait=False)
        if self._processes is not None:
            self._processes.close()
        for future in futures:
            _finish(future, None, Closed("this runtime was closed; open the bundle again"))

    def _read_in_process(self, what: str, client: Client, deadline: float | None, *work: Any) -> Any:
        assert self._processes is not None
        limit_s = self._timeout_s
        return wait_for(
            self._processes.submit(client, what, limit_s, *work, deadline=deadline, wait_s=limit_s), what, deadline
        )

    def _grammar(self, source: "Source", client: Client) -> "Future[CompiledGrammar]":
        future: Future[CompiledGrammar] = Future()
        compilation = submitted = None
        with self._lock:
            if self._closed:
                raise Closed("this runtime was closed; open the bundle again")
            known = self._cache.get(self._key(source))
            if known is None:
                timer = self._start_timeout(source, future)
                compilation = self._waiting.get(source)
                if compilation is None:
                    compilation = submitted = _Compilation(source)
                    try:
                        self._submit(compilation, client, self._first_lane(source))
                    except BaseException:
                        timer.cancel()
                        raise
                compilation.futures.append(future)
        # Without the lock, because callbacks of futures that are done run here.
        if known is not None:
            future.set_result(known)
        elif compilation is not None:
            future.add_done_callback(lambda _: timer.cancel())
            future.add_done_callback(self._leave(compilation))
        if submitted is not None:
            submitted.task.add_done_callback(partial(self._on_refused, submitted))
        return future

    @property
    def _lanes(self) -> "list[_Lane]":
        return [lane for lane in (self._untried, self._quick, self._slow) if lane is not None]

    def _first_lane(self, source: "Source") -> "_Lane":
        from tandemrt.runtime.grammars.trial import needs_trial

        return self._quick if self._quick is not None and needs_trial(source) else self._untried

    def _submit(self, compilation: "_Compilation", client: Client, lane: "_Lane") -> None:
        """Let ``compilation`` wait for a worker of ``lane``. The caller holds the lock."""
        compilation.task = lane.pool.submit(client, self._compile, compilation, client, lane)
        compilation.begun = False
        self._waiting[compilation.source] = compilation

    def _leave(self, compilation: "_Compilation") -> "Callable[[Future[CompiledGrammar]], None]":
        """Return a callback for a future of ``compilation``: if it is cancelled as the last one, the task is, too."""

        def leave(future: "Future[CompiledGrammar]") -> None:
            if future.cancelled():
                with self._lock:
                    needless = self._remove(compilation, future)
                if needless:
                    compilation.task.cancel()

        return leave

    def _remove(self, compilation: "_Compilation", future: "Future[CompiledGrammar]") -> bool:
        """Remove ``future`` from those that wait for a compilation. Return whether the compilation left the queue.

        The caller holds the lock, and cancels the task without it.
        """
        if future in compilation.futures:
            compilation.futures.remove(future)
        needless = not compilation.futures and not compilation.begun
        if needless and self._waiting.get(compilation.source) is compilation:
            del self._waiting[compilation.source]
        return needless

    def _on_refused(self, compilation: "_Compilation", task: "Future[None]") -> None:
        """Fail the futures of a compilation whose thread could not start."""
        failure = None if task.cancelled() else task.exception()
        if failure is None:
            return
        with self._lock:
            if self._waiting.get(compilation.source) is compilation:
                del self._waiting[compilation.source]
            futures, compilation.futures = compilation.futures, []
        for future in futures:
            _finish(future, None, failure)

    def _start_timeout(self, source: "Source", future: "Future[CompiledGrammar]") -> threading.Timer:
        """Start the timeout of ``future``. Raises InternalError without a thread."""
        timer = threading.Timer(min(self._timeout_s, threading.TIMEOUT_MAX), self._time_out, [source, future])
        timer.daemon = True
        start(timer, "structured_outputs")
        return timer

    def _time_out(self, source: "Source", future: "Future[CompiledGrammar]") -> None:
        with self._lock:
            compilation = self._waiting.get(source)
            if compilation is None or future not in compilation.futures:
                return
            compilation.timed_out = True
            needless = self._remove(compilation, future)
        if needless:
            compilation.task.cancel()
        limit = f"structured_outputs.{source.kind}: compiling took longer than {self._timeout_s} s (grammar_timeout_s)"
        failure: TandemError = BadRequest(f"{limit}; simplify it (long bounded strings and repetitions are slow)")
        if not compilation.begun:
            failure = QueueFull(f"{limit}, because other grammars compiled for so long; send it again later")
        _finish(future, None, failure)

    def _compile(self, compilation: "_Compilation", client: Client, lane: "_Lane") -> None:
        """Compile a source for all futures that wait for it. They get the exception if it fails."""
        source = compilation.source
        with self._lock:
            if self._waiting.get(source) is not compilation:  # abandoned, or the library was closed
                return
            compilation.begun = True
        grammar, failure = None, None
        try:
            grown = self._try(source, client, lane)
            if lane.trials is not None and self._abandoned(compilation):
                return
            grammar = self._compiler.compile(source.kind, source.text, whitespace=source.whitespace, loose=source.loose)
            self._cache.put(self._key(source), grammar, max(grown, grammar.size_bytes + len(source.text)))
        except TooSlow as error:
            failure = error if lane is not self._quick else self._try_slowly(compilation, client)
            if failure is None:
                return
        except BaseException as error:
            failure = error
        with self._lock:
            del self._waiting[source]
        for future in compilation.futures:
            _finish(future, grammar, failure)

    def _try_slowly(self, compilation: "_Compilation", client: Client) -> BaseException | None:
        """Let ``compilation`` wait for a slow trial if a request waits for it. Return why that is not possible."""
        assert self._slow is not None
        if self._abandoned(compilation):
            return None
        try:
            with self._lock:
                self._submit(compilation, client, self._slow)
        except BaseException as error:
            return error
        compilation.task.add_done_callback(partial(self._on_refused, compilation))
        return None

    def _abandoned(self, compilation: "_Compilation") -> bool:
        """Return whether all requests have left. A grammar that was too slow is still compiled: it may come again."""
        with self._lock:
            abandoned = not compilation.futures and not compilation.timed_out
            if abandoned:
                del self._waiting[compilation.source]
            return abandoned

    def _try(self, source: "Source", client: Client, lane: "_Lane") -> int:
        """Compile ``source`` in a process of ``lane``; return its memory in bytes. Raises BadRequest, see trial.py."""
        from tandemrt.runtime.grammars.trial import try_source

        if lane.trials is None:
            return 0
        what = f"structured_outputs.{source.kind}: compiling it"
        work = (source.kind, source.text, source.whitespace, source.loose)
        return int(lane.trials.submit(client, what, lane.limit_s, try_source, *work).result())

    def _lane(self, workers: int, name: str, trials: ProcessPool | None, limit_s: float) -> "_Lane":
        stop = WeakMethod(self.close)
        pool = FairExecutor(workers, name, most_waiting=MAX_WAITING, initializer=_join_at_exit, initargs=(stop,))
        return _Lane(pool, trials, limit_s)

    def _trial_processes(self, workers: int, slowest_row_s: float) -> ProcessPool:
        """Return a pool of its own: other tasks do not wait for a trial, and each process has a compiler."""
        from tandemrt.runtime.grammars.trial import open_compiler

        vocabulary = replace(self._vocabulary, encode=None)  # which no compilation calls, and no process can receive
        return ProcessPool(processes=workers, opening=(open_compiler, (vocabulary, self._stop_ids, slowest_row_s)))

    def _key(self, source: "Source") -> tuple[Any, ...]:
        return self._vocabulary.digest, self._stop_ids, source


@dataclass(frozen=True)
class _Lane:
    """Workers for compilations. ``trials``: processes that try a source before, for at most ``limit_s``."""

    pool: FairExecutor
    trials: ProcessPool | None
    limit_s: float


@dataclass(eq=False)
class _Compilation:
    """A source that is compiled, the futures that wait for it, and the task of the pool that compiles it."""

    source: "Source"
    futures: "list[Future[CompiledGrammar]]" = field(default_factory=list)
    begun: bool = False
    timed_out: bool = False  # whether a request waited for it too long
    task: "Future[None]" = field(default_factory=Future)


def _finish(future: "Future[CompiledGrammar]", grammar: CompiledGrammar | None, failure: BaseException | None) -> None:
    """Set the result or the exception of ``future``, unless it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    if grammar is not None:
        future.set_result(grammar)
    else:
        future.set_exception(failure)


def _join_at_exit(close: "WeakMethod[Callable[[], None]]") -> None:
    """Initialize a thread of the pool: the interpreter waits for its running compilation before it exits."""

    def stop() -> None:
        if (bound := close()) is not None:
            bound()

    shutdown.join_at_exit(threading.current_thread(), stop)
