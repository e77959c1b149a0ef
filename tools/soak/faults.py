"""Faults, put in through seams that the runtime has anyway: an engine's call, a listener, a detokeniser, a grammar."""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from tandemrt.runtime.llm import LLM
from tandemrt.runtime.requests import admission
from tandemrt.runtime.requests.text import Transcript

# Each ends exactly its own request; those of an engine end the ones in the round.
KINDS = {
    "engine": "the next run of an engine raises",
    "listener": "the listener of a request raises",
    "detokeniser": "the detokeniser of a request raises once",
    "grammar": "the grammar of a request raises while a mask row is written",
    "compiler": "the compiler of a request's grammar raises",
    "engine-base": "the next run of an engine raises a BaseException, as a panic of an extension does",
    "listener-base": "the listener of a request raises a BaseException",
    "detokeniser-always": "the detokeniser of a request raises from some token on, also when the request ends",
}


class Injected(Exception):
    """A fault of an ordinary kind."""


class InjectedBase(BaseException):
    """A fault that no ``except Exception`` catches."""


@dataclass(frozen=True)
class Fault:
    kind: str
    at: int

    def error(self) -> BaseException:
        return (InjectedBase if self.kind.endswith("-base") else Injected)(f"injected: {self.kind}")


class Faults:
    """Wraps one LLM. A request that is submitted inside ``begun`` carries the fault.

    Attributes:
        strikes: how often an engine was made to fail. Whoever is in a round then may end with an error.
    """

    def __init__(self, llm: LLM) -> None:
        self.strikes = 0
        self._next_run: Fault | None = None
        self._lock = threading.Lock()
        self._here = threading.local()
        for engine in llm.loop.tandem.engines.values():
            _wrap_engine(engine, self)
        grammars = llm._admission._grammars
        compile_grammar = grammars.compile
        grammars.compile = lambda structured: self._compiled(compile_grammar(structured))  # type: ignore[method-assign]

    @contextmanager
    def begun(self, fault: Fault | None) -> Iterator[None]:
        """Let the request that this thread submits in the block carry ``fault``; one of an engine strikes the round."""
        if fault is not None and fault.kind.startswith("engine"):
            yield
            with self._lock:
                self._next_run = fault
            return
        self._here.fault = fault
        try:
            yield
        finally:
            self._here.fault = None

    @property
    def pending(self) -> Fault | None:
        """The fault of the request that the calling thread is submitting."""
        return getattr(self._here, "fault", None)

    def run(self) -> None:
        """An engine runs."""
        with self._lock:
            fault, self._next_run = self._next_run, None
            self.strikes += fault is not None
        if fault is not None:
            raise fault.error()

    def settle(self) -> None:
        """Forget a fault that no engine met."""
        with self._lock:
            self._next_run = None

    def transcript(self, *arguments: Any, **named: Any) -> Transcript:
        """The transcript of a request: an ordinary one, unless it is to break."""
        fault = self.pending
        if fault is None or not fault.kind.startswith("detokeniser"):
            return Transcript(*arguments, **named)
        return _BreakingTranscript(fault, *arguments, **named)

    def _compiled(self, ready: "Future[Any]") -> "Future[Any]":
        fault = self.pending
        if fault is None or fault.kind not in ("grammar", "compiler"):
            return ready
        broken: Future[Any] = Future()
        if fault.kind == "compiler":
            broken.set_exception(fault.error())
        else:
            ready.add_done_callback(lambda done: broken.set_result(_BreakingGrammars(done.result(), fault)))
        return broken


@contextmanager
def breaking_transcripts(faults: list[Faults]) -> Iterator[None]:
    """Let admission make the transcripts that ``faults`` ask for, for as long as the block lasts."""

    def make(*arguments: Any, **named: Any) -> Transcript:
        asking = next((each for each in faults if each.pending is not None), None)
        return Transcript(*arguments, **named) if asking is None else asking.transcript(*arguments, **named)

    with patch.object(admission, "Transcript", make):
        yield


class _BreakingTranscript(Transcript):
    def __init__(self, fault: Fault, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._fault, self._calls = fault, 0

    def add(self, kind: str, token_ids: Any) -> bool:
        self._calls += 1
        if self._calls == self._fault.at + 1:
            raise self._fault.error()
        return super().add(kind, token_ids)

    def finish(self) -> None:
        if self._fault.kind == "detokeniser-always" and self._calls > self._fault.at:
            raise self._fault.error()
        super().finish()


@dataclass(frozen=True)
class _BreakingGrammars:
    compiled: Any
    fault: Fault

    @property
    def check(self) -> Any:
        return self.compiled.check

    def matcher(self, stop_ids: Any = None) -> "_BreakingGrammar":
        return _BreakingGrammar(self.compiled.matcher(stop_ids), self.fault)


class _BreakingGrammar:
    def __init__(self, grammar: Any, fault: Fault) -> None:
        self._grammar, self._fault, self._calls = grammar, fault, 0

    def fill(self, row: Any) -> None:
        self._calls += 1
        if self._calls == self._fault.at + 1:
            raise self._fault.error()
        self._grammar.fill(row)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammar, name)


class _Call:
    def __init__(self, call: Any, faults: Faults) -> None:
        self._call, self._faults = call, faults

    def run(self) -> None:
        self._faults.run()
        self._call.run()


def _wrap_engine(engine: Any, faults: Faults) -> None:
    bind = engine.bind

    def breaking(tensors: Mapping[str, Any], **options: Any) -> _Call:
        return _Call(bind(tensors, **options), faults)

    engine.bind = breaking
