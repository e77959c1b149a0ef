"""Inject faults at existing interfaces of the runtime: engine calls, listeners, detokenizers, grammars, threads."""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import patch

import torch

from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests import admission
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.running import QueuedRequest
from tandemrt.runtime.requests.text import TextStream

# Each fault ends its own request only. A fault of an engine ends all requests of the round. A refused thread may end
# the request that needs it, whichever that is.
KINDS = {
    "engine": "the next run of an engine raises",
    "listener": "the listener of a request raises",
    "detokenizer": "the detokenizer of a request raises once",
    "grammar": "the grammar of a request raises while a mask row is written",
    "compiler": "the compiler of a request's grammar raises",
    "engine-base": "the next run of an engine raises a BaseException, like a panic in a Rust extension",
    "listener-base": "the listener of a request raises a BaseException",
    "detokenizer-always": "the detokenizer of a request raises from some token on, and when the request ends",
    "nan": "the target's logits of a request are NaN from some call on",
    "draft-nan": "the draft's logits of a request are NaN from some call on; no text may change",
    "thread": "the operating system refuses the next thread that the runtime starts",
}


_RUNTIME_THREADS = ("tandemrt", "grammar", "asyncio")  # loop and pools; compilers; the admission of streams
THREAD_REFUSED = "a thread could not start"  # in the message of a request that needed it


class Injected(Exception):
    """A fault that is an ordinary exception."""


class InjectedBase(BaseException):
    """A fault that no ``except Exception`` catches."""


@dataclass(frozen=True)
class Fault:
    """A fault of ``kind`` at the call number ``at`` (from 0) of the faulty object."""

    kind: str
    at: int

    def error(self) -> BaseException:
        return (InjectedBase if self.kind.endswith("-base") else Injected)(f"injected: {self.kind}")


class Faults:
    """Wraps one LLM at a time (``attach``). A request that is submitted inside ``inject`` carries the fault.

    Attributes:
        engine_failures: number of failed engine runs. Each may end all requests of its round with an error.
        thread_refusals: number of refused threads. Each may end one request with an error.
    """

    def __init__(self) -> None:
        self.engine_failures = 0
        self.thread_refusals = 0
        self._threads_to_refuse = 0
        self._next_run: Fault | None = None
        self._nan_logits: dict[Request, _NanLogits] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    def attach(self, llm: LLM) -> None:
        """Wrap ``llm``, before its first request; the LLM before is closed."""
        self._slots = llm.loop.slots
        for name, engine in llm.loop.target.engines.items():
            _wrap_engine(name, engine, self)
        submit = llm._scheduler.submit
        llm._scheduler.submit = lambda *arguments, **named: self._submitted(submit, *arguments, **named)  # type: ignore[method-assign]
        grammars = llm._admission._grammar_library()
        compile_grammar = grammars.compile
        grammars.compile = lambda *arguments: self._compiled(compile_grammar(*arguments))  # type: ignore[method-assign]

    @contextmanager
    def inject(self, fault: Fault | None) -> Iterator[None]:
        """Let the request that this thread submits in the block carry ``fault``.

        An engine fault hits the next engine run after the block, a refused thread the next start of one.
        """
        if fault is not None and fault.kind == "thread":
            self.refuse_threads(1)
            yield
            return
        if fault is not None and fault.kind.startswith("engine"):
            yield
            with self._lock:
                self._next_run = fault
            return
        self._local.fault = fault
        try:
            yield
        finally:
            self._local.fault = None

    def refuse_threads(self, count: int) -> None:
        """Refuse the next ``count`` threads that the runtime starts."""
        with self._lock:
            self._threads_to_refuse += count

    def take_refusal(self) -> bool:
        """Whether the thread that starts now is refused."""
        with self._lock:
            refused = self._threads_to_refuse > 0
            self._threads_to_refuse -= refused
            self.thread_refusals += refused
        return refused

    @property
    def current(self) -> Fault | None:
        """The fault of the request that the calling thread submits."""
        return getattr(self._local, "fault", None)

    def before_run(self) -> None:
        """Raise the pending engine fault. Called before an engine runs."""
        with self._lock:
            fault, self._next_run = self._next_run, None
            self.engine_failures += fault is not None
        if fault is not None:
            raise fault.error()

    def after_run(self, name: str, logits: torch.Tensor) -> None:
        """Overwrite rows of ``logits`` [batch, rows, vocab] with NaN. Called after the engine ``name`` ran.

        The logits of prefill are not read.
        """
        if not self._nan_logits:
            return
        for running in self._slots:
            nan = self._nan_logits.get(running.request)
            if nan is not None and nan.engine == name and running.slot < len(logits) and nan.due():
                logits[running.slot].fill_(math.nan)

    def clear(self) -> None:
        """Drop the faults of requests that have ended, and those that no run and no thread has met."""
        with self._lock:
            self._next_run = None
            self._threads_to_refuse = 0
        self._nan_logits.clear()

    def text_stream(self, *arguments: Any, **named: Any) -> TextStream:
        """Return a text stream for the request being submitted, faulty if its fault says so."""
        fault = self.current
        if fault is None or not fault.kind.startswith("detokenizer"):
            return TextStream(*arguments, **named)
        return _FaultyTextStream(fault, *arguments, **named)

    def _submitted(self, submit: Callable[..., None], queued: QueuedRequest, **named: Any) -> None:
        fault = self.current
        if fault is not None and fault.kind in _NanLogits.ENGINES:
            self._nan_logits[queued.request] = _NanLogits(_NanLogits.ENGINES[fault.kind], fault.at)
        submit(queued, **named)

    def _compiled(self, ready: "Future[Any]") -> "Future[Any]":
        fault = self.current
        if fault is None or fault.kind not in ("grammar", "compiler"):
            return ready
        broken: Future[Any] = Future()

        def pass_on(done: "Future[Any]") -> None:
            failure = fault.error() if fault.kind == "compiler" else done.exception()  # a refused thread, for example
            if failure is not None:
                broken.set_exception(failure)
            else:
                broken.set_result(_FaultyCompiledGrammar(done.result(), fault))

        ready.add_done_callback(pass_on)
        return broken


@contextmanager
def faulty_threads(faults: Iterable[Faults]) -> Iterator[None]:
    """Let threads of the runtime start only where ``faults`` allow it while the block runs."""
    start, drawn = threading.Thread.start, tuple(faults)

    def start_or_refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(_RUNTIME_THREADS) and any(each.take_refusal() for each in drawn):
            raise RuntimeError("can't start new thread")  # as CPython says it
        start(thread)

    with patch.object(threading.Thread, "start", start_or_refuse):
        yield


@contextmanager
def faulty_text_streams(faults: list[Faults]) -> Iterator[None]:
    """Let admission create the text streams of ``faults`` while the block runs."""

    def make(*arguments: Any, **named: Any) -> TextStream:
        active = next((each for each in faults if each.current is not None), None)
        return TextStream(*arguments, **named) if active is None else active.text_stream(*arguments, **named)

    with patch.object(admission, "TextStream", make):
        yield


class _FaultyTextStream(TextStream):
    def __init__(self, fault: Fault, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._fault, self._calls = fault, 0

    def add(self, kind: str, token_ids: Any, inner: Any = ()) -> bool:
        self._calls += 1
        if self._calls == self._fault.at + 1:
            raise self._fault.error()
        return super().add(kind, token_ids, inner)

    def finish(self) -> None:
        if self._fault.kind == "detokenizer-always" and self._calls > self._fault.at:
            raise self._fault.error()
        super().finish()


@dataclass(frozen=True)
class _FaultyCompiledGrammar:
    compiled: Any
    fault: Fault

    @property
    def check(self) -> Any:
        return self.compiled.check

    def matcher(self, stop_ids: Any = None) -> "_FaultyGrammar":
        return _FaultyGrammar(self.compiled.matcher(stop_ids), self.fault)


class _FaultyGrammar:
    def __init__(self, grammar: Any, fault: Fault) -> None:
        self._grammar, self._fault, self._calls = grammar, fault, 0

    def fill_row(self, row: Any) -> None:
        self._calls += 1
        if self._calls == self._fault.at + 1:
            raise self._fault.error()
        self._grammar.fill_row(row)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammar, name)


@dataclass
class _NanLogits:
    """Replaces the logits of a request by NaN in ``engine``, after its first ``spared`` calls."""

    ENGINES: ClassVar = {"nan": "target", "draft-nan": "draft"}

    engine: str
    spared: int

    def due(self) -> bool:
        self.spared -= 1
        return self.spared < 0


class _Call:
    def __init__(self, call: Any, faults: Faults, name: str, logits: torch.Tensor | None) -> None:
        self._call, self._faults, self._name, self._logits = call, faults, name, logits

    def run(self) -> None:
        self._faults.before_run()
        self._call.run()
        if self._logits is not None:
            self._faults.after_run(self._name, self._logits)


def _wrap_engine(name: str, engine: Any, faults: Faults) -> None:
    bind = engine.bind

    def faulty_bind(tensors: Mapping[str, Any], **options: Any) -> _Call:
        logits = tensors["logits"] if name in _NanLogits.ENGINES.values() else None
        return _Call(bind(tensors, **options), faults, name, logits)

    engine.bind = faulty_bind
