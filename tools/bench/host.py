"""Measure the host's work in a round, without a model or a GPU: ``python -m tools.bench.host``.

The engine loop runs as on a GPU: overlap schedule, paged cache, adaptive windows. Recorded texts take the place of the
target and of a draft head. All slots hold requests of one kind; every round drafts four tokens and emits the first
three. The times are processor time of this thread per round, so other load on the machine matters little, and what the
device costs the host (launches, copies) is not in them. Compare versions on one machine, by turns.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from tandemrt import SamplingParams, StructuredOutputs
from tandemrt.engines.contract.contract import table_width
from tandemrt.engines.contract.masks import mask_words
from tandemrt.engines.text.tokenizer import open_tokenizer
from tandemrt.runtime.caches.hashes import BlockHashes
from tandemrt.runtime.caches.kv_cache import BlockTable
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.rows import MaskRows
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tandemrt.runtime.device.buffers import Buffer, RoundBuffers
from tandemrt.runtime.device.slot_state import SlotState
from tandemrt.runtime.device.streams import Streams
from tandemrt.runtime.device.timeline import Timeline
from tandemrt.runtime.drafters.none import NullHooks
from tandemrt.runtime.engine_loop.draft_windows import DraftWindowPlanner
from tandemrt.runtime.engine_loop.loop import EngineLoop
from tandemrt.runtime.grammars.grammar import Grammar
from tandemrt.runtime.grammars.library import Compiled, GrammarLibrary
from tandemrt.runtime.grammars.time_limit import GrammarTimeLimit
from tandemrt.runtime.metrics.metrics import PHASES as METRIC_PHASES
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.penalties import Penalties
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.requests.running import QueuedRequest, RequestConstraints, RunningRequest
from tandemrt.runtime.requests.scheduler import Scheduler
from tandemrt.runtime.requests.text import TextStream
from tools.bench.gpu.requests import SCHEMA
from tools.bench.report import Json, Report, Row
from tools.models.filler_tokenizer import END, START, STOP, write_tokenizer

WINDOW, EMITTED = 4, 3
CPU = torch.device("cpu")
WARM = 8  # unmeasured rounds at the start
PHASES = ("plan", "commit", "fill", "deliver")
_OF_DEVICE = ("propose", "target", "verify", "wait")  # enqueued by the host: nothing here
COLUMNS = {"requests with": ""} | dict.fromkeys((*PHASES, "all"), ".3f")


@dataclass(frozen=True)
class Kind:
    """Parameters of the requests of one line, next to a temperature."""

    window: int = WINDOW
    thinks: bool = False  # under a thinking budget that is never used up
    grammar: bool = False
    asked: Any = None


KINDS = {
    "nothing, no drafts": Kind(window=0),
    "nothing": Kind(),
    "a stop string": Kind(asked={"stop": ["no such text"]}),
    "synthetic": Kind(asked={"rule": "synthetic", "synthetic_acceptance_length": float(EMITTED)}),
    "budget": Kind(thinks=True),
    "JSON": Kind(grammar=True),
    "penalties": Kind(asked={"frequency_penalty": 0.5}),
    "logprobs": Kind(asked={"logprobs": 5}),
}


class Bench:
    """Measures rounds of ``batch`` requests over a filler vocabulary of ``vocab`` ids with reasoning delimiters."""

    def __init__(self, folder: Path, vocab: int, batch: int, rounds: int) -> None:
        self._vocab, self._batch, self._rounds = vocab, batch, rounds
        self._tokenizer, self._vocabulary = open_tokenizer(write_tokenizer(folder, vocab), vocab)
        self._stop, self._start, end = (self._vocabulary.control[text] for text in (STOP, START, END))
        marked = (self._start,), ((end,),), (end,)
        self._thinking = {
            thinks: ThinkingRule(*marked, budget=10**6 if thinks else None, vocabulary=self._vocabulary)
            for thinks in (False, True)
        }
        self._length = (WARM + rounds + 4) * EMITTED

    def run(self, kind: Kind) -> tuple[float, ...]:
        """Return the median milliseconds of this thread per round, as ``COLUMNS`` names them."""
        clock = ThreadClock(accepted=[0] * WINDOW)
        loop = self._loop(kind, clock)
        for _ in range(self._batch):
            loop.scheduler.submit(self._queued(kind), block=False)
        rounds: list[dict[str, float]] = []
        for _ in range(WARM + self._rounds):
            clock.seconds = dict.fromkeys((*METRIC_PHASES, "all", *PHASES), 0.0)
            with clock.timed("all"):
                loop.step()
            rounds.append({name: 1e3 * seconds for name, seconds in clock.seconds.items()})
        if len(loop.slots) != self._batch:
            raise RuntimeError(
                f"no request may end during the measurement: {len(loop.slots)} of {self._batch} are left"
            )
        loop.close()
        for each in rounds:
            each["plan"] = each["all"] - sum(each[name] for name in (*PHASES[1:], *_OF_DEVICE))
            each["all"] = sum(each[name] for name in PHASES)
        return tuple(statistics.median(each[name] for each in rounds[WARM:]) for name in (*PHASES, "all"))

    @cached_property
    def _compiled(self) -> Compiled:
        library = GrammarLibrary(self._vocabulary, stop_ids=[self._stop])
        try:
            compiled: Compiled = library.compile(library.read(StructuredOutputs(json=SCHEMA))).result()
        finally:
            library.close()
        return compiled

    def _loop(self, kind: Kind, clock: "ThreadClock") -> EngineLoop:
        """Return a loop over recorded texts."""
        windows = DraftWindowPlanner(kind.window, WINDOW, fast_forward=False, adaptive=kind.window > 0)
        for window in range(WINDOW + 1):
            windows.costs.calibrate(self._batch, window, 0.01 - 0.001 * window)  # so that rounds draft all tokens
        buffers = RoundBuffers(
            slots=self._batch,
            window=WINDOW,
            vocab=self._vocab,
            length=2 * self._length,
            chunk=8,
            dtype=torch.float32,
            device=CPU,
        )
        text = self._json_text() if kind.grammar else self._plain_text()
        state = SlotState(self._batch, CPU)
        target = RecordedTarget(buffers, state, self._vocab, text, EMITTED if kind.window else 1)
        blocks = table_width(2 * self._length)
        scripted: Any = target
        return EngineLoop(
            scripted,
            RecordedDrafter(target, kind.window),
            None,
            Scheduler(self._batch, queue_limit=0),
            Streams(CPU),
            BlockTable(self._batch, blocks, 1 + self._batch * blocks, CPU, caches_outputs=False),
            clock,
            Timeline(CPU, clock, enabled=False),
            slots=self._batch,
            draft_windows=windows,
            slack=WINDOW,
            prefill_chunk=8,
            prefill_chunk_while_decoding=8,
            overlap=True,
        )

    def _queued(self, kind: Kind) -> QueuedRequest:
        prompt = [self._start if kind.thinks else 0]
        params = SamplingParams.model_validate({"temperature": 0.7, "ignore_eos": True, **(kind.asked or {})})
        request = Request(
            prompt, params, seed=1, max_tokens=self._length, num_draft_tokens=kind.window, listener=lambda _: None
        )
        constraints: Future[RequestConstraints] = Future()
        share = GrammarTimeLimit(10.0) if kind.grammar else None
        constraints.set_result(RequestConstraints(self._constraint(kind, prompt), None, share))
        penalties = Penalties(prompt, params) if params.adjusts_logits else None
        text = TextStream(self._tokenizer.backend, params.stop or ())
        return QueuedRequest(request, constraints, text, penalties, BlockHashes(""))

    def _constraint(self, kind: Kind, prompt: Sequence[int]) -> Constraint:
        grammar: Grammar | None = self._compiled.matcher([self._stop]) if kind.grammar else None
        return Constraint(
            self._vocab,
            [self._stop] if kind.grammar else [],
            prompt=prompt,
            thinking=self._thinking[kind.thinks],
            grammar=grammar,
            max_tokens=self._length,
            valid_tokens=self._vocabulary.valid_tokens,
        )

    def _plain_text(self) -> list[int]:
        draw = random.Random(0)
        return [draw.randrange(300, self._stop - 1) for _ in range(self._length)]

    def _json_text(self) -> list[int]:
        """Return random tokens that the grammar allows."""
        constraint, draw = self._constraint(Kind(grammar=True), [0]), random.Random(0)
        row = np.empty((1, mask_words(self._vocab)), np.int32)
        text: list[int] = []
        while len(text) < self._length:
            constraint.fill_rows([], MaskRows(row), 0)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8)[0], bitorder="little"))
            text.append(int(draw.choice(allowed[allowed != self._start])))
            constraint.commit(text[-1:])
        return text


class ThreadClock(Metrics):
    """Metrics whose ``seconds`` are processor time of the calling thread."""

    def timed(self, phase: str) -> Any:
        """See Metrics.timed."""
        return self._adding(phase)

    @contextmanager
    def _adding(self, phase: str) -> Iterator[None]:
        begun = time.thread_time()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.thread_time() - begun


class RecordedTarget:
    """Takes the place of the target: verification emits the next ``emitted`` tokens of ``text`` in every row."""

    images = None

    def __init__(self, buffers: RoundBuffers, state: SlotState, vocab: int, text: Sequence[int], emitted: int) -> None:
        self.buffers, self.state, self.vocab = buffers, state, vocab
        self._text, self._emitted, self._at = text, emitted, 0

    def propose(self, round_: Round) -> None:
        """Draft the next tokens of the text."""
        if round_.window:
            self._write(self.buffers.draft_tokens, round_.batch, round_.window)

    def verify(self, round_: Round, _: Any) -> None:
        """Write what the round emits, and go on in the text."""
        self._write(self.buffers.tokens, round_.batch, round_.window + 1)
        self.buffers.count.host_view(round_.batch).fill_(self._emitted)
        self._at += self._emitted

    def score(self, *_: Any) -> None:
        """Do nothing."""

    adjust = check = on_failure = end_waits = score

    def _write(self, buffer: Buffer, batch: int, tokens: int) -> None:
        buffer.host_view(batch, tokens).copy_(torch.tensor([self._text[self._at : self._at + tokens]] * batch))


class RecordedDrafter(NullHooks):
    """Takes the place of a draft head."""

    max_length: int | None = None
    caches = ()

    def __init__(self, target: RecordedTarget, window: int) -> None:
        self.window, self.propose = window, target.propose

    def cached_tokens(self, running: RunningRequest) -> int:
        """See Drafter.cached_tokens."""
        return len(running.tokens) - 1


def main(
    batch: Annotated[int, typer.Option(help="Concurrent requests.", min=1)] = 64,
    vocab: Annotated[int, typer.Option(help="Width of the logits.", min=1000)] = 128_256,
    rounds: Annotated[int, typer.Option(help="Measured rounds of each kind.", min=3)] = 40,
    only: Annotated[str, typer.Option(help="Prefix of the kinds to measure; empty: all.")] = "",
    out: Json = None,
) -> None:
    """Print milliseconds of processor time per round, by kind of request."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), vocab, batch, rounds)
        rows: list[Row] = [(name, *bench.run(kind)) for name, kind in KINDS.items() if name.startswith(only)]
    Report(out).add("milliseconds of processor time per round", COLUMNS, rows)


if __name__ == "__main__":
    typer.run(main)
