"""How processes end and LLMs are dropped while requests run or grammars compile: without an abort, without remains."""

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from tandemrt import LLM, SamplingParams
from tandemrt.runtime.workers import shutdown
from tests.waiting import PATIENCE_S, eventually, receive_interrupts

ENDLESS = SamplingParams(ignore_eos=True)
BEGIN = """
import os, signal, sys, threading, time
from tandemrt import LLM, SamplingParams
llm = LLM(sys.argv[1], threads=1)
begun = threading.Event()
def slowly(score=llm.loop.target.score):
    def wait(this):
        begun.set()
        score(this)
    return wait
llm.loop.target.score = slowly()
endless = SamplingParams(ignore_eos=True)
def again(item):
    if item.output is not None:
        try:
            llm.submit("again", endless, again)
        except Exception:
            pass
for _ in range(3):
    llm.submit("going on", endless, again)
begun.wait()
"""
COMPILE = """
import signal, os, sys, threading
from tandemrt.runtime.grammars.compiler import GrammarCompiler
real, compiling = GrammarCompiler.compile, threading.Event()
def compile(self, *arguments, **options):
    compiling.set()
    return real(self, *arguments, **options)
GrammarCompiler.compile = compile
from tandemrt import LLM, SamplingParams
llm = LLM(sys.argv[1], threads=1)
many = {name: {"type": "string", "maxLength": 3000 + ord(name)} for name in "abc"}
asked = SamplingParams(structured_outputs={"json": {"type": "object", "properties": many}})
llm.submit("x", asked, lambda item: None)
compiling.wait()
"""
INTERRUPTED = """
def interrupt():
    begun.wait()
    for pause in (0.05, 0.05, 5, 5):  # twice; again if the interpreter lost one on its way into a lock
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
with llm:
    while True:
        llm.generate(["one", "two"], endless)
"""


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (BEGIN, 0),
        (BEGIN + "raise ValueError('dies')", 1),
        (BEGIN + "sys.exit(3)", 3),
        (BEGIN + INTERRUPTED, -signal.SIGINT),
        (COMPILE, 0),
        (COMPILE + "raise ValueError('dies')", 1),
        (COMPILE + "os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    ],
    ids=["ends", "dies", "exits", "is interrupted twice", "compiles", "dies compiling", "is interrupted compiling"],
)
def test_a_process_ends_without_an_abort(tiny_bundle: Path, script: str, code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tiny_bundle)],
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * PATIENCE_S,
        preexec_fn=receive_interrupts,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    # CPython forgets that it was interrupted if another thread runs code from a text meanwhile, as imports may.
    assert ended.returncode in ({code, 1} if code == -signal.SIGINT else {code}), ended.stderr
    assert "terminate called" not in ended.stderr


def test_a_thread_is_waited_for_though_waiting_for_it_was_interrupted() -> None:
    """CPython takes a thread for ended once a join was interrupted: then the interpreter ended under a running loop."""
    go, ended = threading.Event(), []
    thread = threading.Thread(target=lambda: (go.wait(), ended.append(True)))
    thread.start()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            shutdown.join(thread)
    finally:
        signal.signal(signal.SIGALRM, before)
    threading.Timer(0.2, go.set).start()
    shutdown.join(thread)
    assert ended == [True]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_stops_no_thread_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "_threads", {})
    go = threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    reading, writing = os.pipe()
    shutdown.join_at_exit(thread, lambda: os.write(writing, b"stopped"))
    if not (child := os.fork()):
        try:
            shutdown._at_exit()
            os.write(writing, b"exits")
        finally:
            os._exit(0)
    go.set()
    os.close(writing)
    with os.fdopen(reading) as said:
        assert said.read() == "exits"
    os.waitpid(child, 0)


def test_an_llm_that_is_dropped_gives_its_thread_and_its_memory_back(tiny_bundle: Path) -> None:
    before = set(threading.enumerate())
    llm = LLM(tiny_bundle, threads=1)
    llm.generate("used", SamplingParams(max_tokens=2, ignore_eos=True))
    llm.submit("runs on", ENDLESS, lambda _: None)
    engines = [weakref.ref(llm.loop), weakref.ref(llm.loop.target.buffers)]
    del llm

    def gone() -> bool:
        gc.collect()
        left = {thread for thread in set(threading.enumerate()) - before if thread.name == "tandemrt-loop"}
        return not left and all(each() is None for each in engines)

    assert eventually(gone)


def test_models_that_are_opened_and_closed_one_after_another_leave_nothing(tiny_bundle: Path) -> None:
    """Caches hold what the first ones made, and another thread may begin something; a leak goes on."""
    asked = {"max_tokens": 6, "seed": 1}
    requests = [
        SamplingParams(**asked, stop=["a"], bad_words=["b"], presence_penalty=0.5, logprobs=2),
        SamplingParams(**asked, structured_outputs={"json": {"type": "integer"}}),
        SamplingParams(**asked, thinking_token_budget=0),
    ]
    left = list[Counter[str]]()
    for _ in range(4):
        with LLM(tiny_bundle, threads=1) as llm:
            llm.generate(["the text"] * len(requests), requests)
        del llm
        gc.collect()
        kinds = map(type, gc.get_objects())
        left.append(Counter(kind.__qualname__ for kind in kinds if kind.__module__.startswith("tandemrt")))
    added = [later - earlier for earlier, later in pairwise(left)]
    assert not all(added), added[-1]
