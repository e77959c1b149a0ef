"""Measure the host time of a round per request, without a model or a GPU: ``python -m tools.bench.host``.

The slots hold requests of one kind. Every round fills the masks for four drafted tokens and commits the first three
tokens, as after two accepted drafts; recorded texts take the place of a target. The time is CPU time of this thread, so
other load on the machine matters little. Compare versions on one machine.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from tandemrt import SamplingParams, StructuredOutputs
from tandemrt.engines.contract.contract import mask_words
from tandemrt.engines.text.tokenizer import open_tokenizer
from tandemrt.runtime.caches.linear import LinearCacheManager
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.rows import MaskRows
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tandemrt.runtime.device.buffers import RoundBuffers
from tandemrt.runtime.device.streams import HostCopy, Streams
from tandemrt.runtime.engine_loop.commit import Committer
from tandemrt.runtime.engine_loop.draft_windows import DraftWindowPlanner
from tandemrt.runtime.engine_loop.planner import plan_round
from tandemrt.runtime.engine_loop.verify_inputs import VerifyInputWriter
from tandemrt.runtime.grammars.grammar import Grammar
from tandemrt.runtime.grammars.library import Compiled, GrammarLibrary
from tandemrt.runtime.grammars.time_limit import GrammarTimeLimit
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.penalties import Penalties
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.round import VerifiedRound
from tandemrt.runtime.requests.running import QueuedRequest, RequestConstraints
from tandemrt.runtime.requests.slots import PendingValidations, Slots
from tandemrt.runtime.requests.text import TextStream
from tools.bench.gpu.requests import SCHEMA
from tools.bench.report import Json, Report, Row
from tools.models.filler_tokenizer import END, START, STOP, write_tokenizer

WINDOW, EMITTED = 4, 3
CPU = torch.device("cpu")
WARM = 8  # unmeasured rounds at the start
COLUMNS = {"requests with": ""} | dict.fromkeys(("round", "fill", "commit", "commit per token"), ".1f")


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
        library = GrammarLibrary(self._vocabulary, stop_ids=[self._stop])
        self._compiled: Compiled = library.compile(library.read(StructuredOutputs(json=SCHEMA))).result()
        library.close()
        self._length = (WARM + rounds + 4) * EMITTED

    def run(self, kind: Kind) -> tuple[float, float, float, float]:
        """Return the median microseconds of this thread per round and request, as ``COLUMNS`` names them."""
        text = self._json_text() if kind.grammar else self._plain_text()
        windows = DraftWindowPlanner(kind.window, WINDOW)
        buffers = RoundBuffers(
            slots=self._batch,
            window=WINDOW,
            vocab=self._vocab,
            length=2 * self._length,
            chunk=8,
            dtype=torch.float32,
            device=CPU,
        )
        slots = Slots(self._batch, LinearCacheManager(0), [], num_draft_tokens=WINDOW)
        metrics = Metrics(accepted=[0] * WINDOW)
        committer = Committer(buffers, slots, PendingValidations(lambda: None), windows, metrics)
        writer = VerifyInputWriter(buffers, Streams(CPU), committer.end, metrics)
        for _ in range(self._batch):
            running = slots.join(self._waiting(kind))
            assert running is not None
            running.prefilled = running.prefill_end
        emitted = EMITTED if kind.window else 1
        logits = {}
        if kind.asked and "logprobs" in kind.asked:
            copied = HostCopy(torch.randn(kind.window + 1, self._vocab))
            copied.copy_out()
            logits = dict.fromkeys(range(self._batch), copied)
        microseconds: dict[str, list[float]] = {"round": [], "fill": [], "commit": []}
        for at in range(0, emitted * (WARM + self._rounds), emitted):
            seconds: dict[str, float] = {}
            with _timed(seconds, "round"):
                plan = plan_round(slots, windows, slots.count)
            drafts = torch.tensor([text[at : at + kind.window]] * self._batch, dtype=torch.int64)
            buffers.draft_tokens.host_view(self._batch, kind.window).copy_(drafts)
            with _timed(seconds, "fill"):
                drafts_of = writer.write(plan)
            decided = torch.tensor([text[at : at + kind.window + 1]] * self._batch, dtype=torch.int64)
            buffers.tokens.host_view(self._batch, kind.window + 1).copy_(decided)
            buffers.count.host_view(self._batch).fill_(emitted)
            verified = {slot: len(draft.tokens) for slot, draft in drafts_of.items()}
            from_drafter = {slot: draft.num_from_drafter for slot, draft in drafts_of.items()}
            with _timed(seconds, "commit"):
                committer.commit(VerifiedRound(plan, verified, from_drafter, logits))
            for name, value in seconds.items():
                microseconds[name].append(1e6 * value / self._batch)
        if len(slots) != self._batch:
            raise RuntimeError(f"no request may end during the measurement: {len(slots)} of {self._batch} are left")
        fill, commit, whole = (statistics.median(microseconds[name][WARM:]) for name in ("fill", "commit", "round"))
        return whole, fill, commit, commit / emitted

    def _waiting(self, kind: Kind) -> QueuedRequest:
        prompt = [0, self._start] if kind.thinks else [0]
        params = SamplingParams.model_validate({"temperature": 0.7, "ignore_eos": True, **(kind.asked or {})})
        request = Request(
            prompt, params, seed=1, max_tokens=self._length, num_draft_tokens=kind.window, listener=lambda _: None
        )
        constraints: Future[RequestConstraints] = Future()
        share = GrammarTimeLimit(10.0) if kind.grammar else None
        constraints.set_result(RequestConstraints(self._constraint(kind, prompt), None, share))
        penalties = Penalties(prompt, params) if params.adjusts_logits else None
        return QueuedRequest(request, constraints, TextStream(self._tokenizer.backend), penalties)

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


class _timed:  # noqa: N801  # used like a function
    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._begun = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] = time.thread_time() - self._begun


def main(
    batch: Annotated[int, typer.Option(help="Concurrent requests.", min=1)] = 64,
    vocab: Annotated[int, typer.Option(help="Width of the logits.", min=1000)] = 128_256,
    rounds: Annotated[int, typer.Option(help="Measured rounds of each kind.", min=3)] = 40,
    only: Annotated[str, typer.Option(help="Prefix of the kinds to measure; empty: all.")] = "",
    out: Json = None,
) -> None:
    """Print microseconds of CPU time per request, by kind of request."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), vocab, batch, rounds)
        rows: list[Row] = [(name, *bench.run(kind)) for name, kind in KINDS.items() if name.startswith(only)]
    Report(out).add("microseconds of CPU time per request", COLUMNS, rows)


if __name__ == "__main__":
    typer.run(main)
