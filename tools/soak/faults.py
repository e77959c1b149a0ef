"""Faults, put in through seams that the runtime has anyway: an engine's call, a listener, a detokenizer, a grammar."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import patch

import torch

from tandemrt.runtime.llm import LLM
from tandemrt.runtime.requests import admission
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.text import Transcript
from tandemrt.runtime.requests.waiting import Waiting

# Each ends exactly its own request; those of an engine end the ones in the round.
KINDS = {
    "engine": "the next run of an engine raises",
    "listener": "the listener of a request raises",
    "detokenizer": "the detokenizer of a request raises once",
    "grammar": "the grammar of a request raises while a mask row is written",
    "compiler": "the compiler of a request's grammar raises",
    "engine-base": "the next run of an engine raises a BaseException, as a panic of an extension does",
    "listener-base": "the listener of a request raises a BaseException",
    "detokenizer-always": "the detokenizer of a request raises from some token on, also when the request ends",
    "nan": "the target's logits of a request are NaN from some call on",
    "draft-nan": "the draft's logits of a request are NaN from some call on, which changes no text",
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
        self._poisoned: dict[Request, _Poison] = {}
        self._lock = threading.Lock()
        self._here = threading.local()
        self._slots = llm.loop.slots
        for name, engine in llm.loop.tandem.engines.items():
            _wrap_engine(name, engine, self)
        submit = llm._scheduler.submit
        llm._scheduler.submit = lambda *given, **named: self._submitted(submit, *given, **named)  # type: ignore[method-assign]
        grammars = llm._admission._grammars
        compile_grammar = grammars.compile
        grammars.compile = lambda *given: self._compiled(compile_grammar(*given))  # type: ignore[method-assign]

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
        """An engine is about to run."""
        with self._lock:
            fault, self._next_run = self._next_run, None
            self.strikes += fault is not None
        if fault is not None:
            raise fault.error()

    def has_run(self, name: str, logits: torch.Tensor) -> None:
        """The engine ``name`` has written ``logits`` [batch, rows, vocab]; those of prefill are unread."""
        if not self._poisoned:
            return
        for running in self._slots:
            poison = self._poisoned.get(running.request)
            if poison is not None and poison.engine == name and running.slot < len(logits) and poison.works():
                logits[running.slot].fill_(math.nan)

    def settle(self) -> None:
        """Forget the faults of requests that have ended, and one that no engine met."""
        with self._lock:
            self._next_run = None
        self._poisoned.clear()

    def transcript(self, *arguments: Any, **named: Any) -> Transcript:
        """The transcript of a request: an ordinary one, unless it is to break."""
        fault = self.pending
        if fault is None or not fault.kind.startswith("detokenizer"):
            return Transcript(*arguments, **named)
        return _BreakingTranscript(fault, *arguments, **named)

    def _submitted(self, submit: Callable[..., None], waiting: Waiting, **named: Any) -> None:
        fault = self.pending
        if fault is not None and fault.kind in _Poison.ENGINES:
            self._poisoned[waiting.request] = _Poison(_Poison.ENGINES[fault.kind], fault.at)
        submit(waiting, **named)

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


@dataclass
class _Poison:
    """Spoils what ``engine`` gives a request, but for its first ``spared`` calls."""

    ENGINES: ClassVar = {"nan": "target", "draft-nan": "draft"}

    engine: str
    spared: int

    def works(self) -> bool:
        self.spared -= 1
        return self.spared < 0


class _Call:
    def __init__(self, call: Any, faults: Faults, name: str, logits: torch.Tensor | None) -> None:
        self._call, self._faults, self._name, self._logits = call, faults, name, logits

    def run(self) -> None:
        self._faults.run()
        self._call.run()
        if self._logits is not None:
            self._faults.has_run(self._name, self._logits)


def _wrap_engine(name: str, engine: Any, faults: Faults) -> None:
    bind = engine.bind

    def breaking(tensors: Mapping[str, Any], **options: Any) -> _Call:
        logits = tensors["logits"] if name in _Poison.ENGINES.values() else None
        return _Call(bind(tensors, **options), faults, name, logits)

    engine.bind = breaking
