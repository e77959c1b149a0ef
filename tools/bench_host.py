"""The host's work in a round, per request: ``python -m tools.bench_host``, which needs neither a model nor a GPU.

Requests of each kind sit in slots. Every round, the masks of a window of four drafted tokens are filled and the first
three tokens are committed, as a round would that accepts two; what a target would have decided is a recorded text. The
time is the processor's of this thread, so it may be asked for on a busy machine; of two versions compare what one run
on one machine gives for each.
"""

import json
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
from rich.console import Console
from rich.table import Table

from tandemrt import SamplingParams, StructuredOutputs
from tandemrt.engines.contract import mask_words
from tandemrt.engines.tokenizer import open_tokenizer
from tandemrt.runtime.caches.linear import LinearRoom
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.grammar import Grammar
from tandemrt.runtime.constraints.masks import MaskRows
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tandemrt.runtime.device import Clock
from tandemrt.runtime.grammars.library import Compiled, GrammarLibrary
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.requests.checks import Checks
from tandemrt.runtime.requests.penalties import Penalties
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.share import GrammarShare
from tandemrt.runtime.requests.slots import Slots
from tandemrt.runtime.requests.text import Transcript
from tandemrt.runtime.requests.waiting import Enforcement, Waiting
from tandemrt.runtime.round.buffers import RoundBuffers
from tandemrt.runtime.round.commit import Committer
from tandemrt.runtime.round.fill import Filler
from tandemrt.runtime.round.round import Round, Verified
from tandemrt.runtime.round.windows import Windows
from tools.filler_tokenizer import END, START, STOP, write_tokenizer
from tools.gpu.requests import SCHEMA

WINDOW, EMITTED = 4, 3
CPU = torch.device("cpu")
WARM = 8  # rounds before anything is measured


@dataclass(frozen=True)
class Kind:
    """What requests of one line ask for beside a temperature."""

    window: int = WINDOW
    thinks: bool = False  # within a budget that is never spent
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
    """What a round costs for ``batch`` requests over a filler vocabulary of ``vocab`` ids, with markers."""

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
        self._compiled: Compiled = library.compile(StructuredOutputs(json=SCHEMA)).result()
        library.close()
        self._length = (WARM + rounds + 4) * EMITTED

    def run(self, kind: Kind) -> dict[str, float]:
        """Microseconds of this thread, the median over rounds: ``round``, ``fill`` and ``commit`` per request."""
        text = self._json_text() if kind.grammar else self._plain_text()
        windows = Windows(kind.window, WINDOW)
        buffers = RoundBuffers(
            slots=self._batch,
            window=WINDOW,
            vocab=self._vocab,
            length=2 * self._length,
            chunk=8,
            dtype=torch.float32,
            device=CPU,
        )
        slots = Slots(self._batch, LinearRoom(0), [], window=WINDOW)
        metrics = Metrics(accepted=[0] * WINDOW)
        committer = Committer(buffers, slots, Checks(lambda: None), metrics)
        filler = Filler(buffers, Clock(CPU), committer, metrics)
        for _ in range(self._batch):
            running = slots.join(self._waiting(kind))
            assert running is not None
            running.prefilled = running.prefill_end
        emitted = EMITTED if kind.window else 1
        logits = {}
        if kind.asked and "logprobs" in kind.asked:
            logits = dict.fromkeys(range(self._batch), torch.randn(kind.window + 1, self._vocab))
        found: dict[str, list[float]] = {"round": [], "fill": [], "commit": []}
        for at in range(0, emitted * (WARM + self._rounds), emitted):
            seconds: dict[str, float] = {}
            with _timed(seconds, "round"):
                this = Round.of(slots, windows, slots.count)
            drafts = torch.tensor([text[at : at + kind.window]] * self._batch, dtype=torch.int64)
            buffers.draft_tokens.host_view(self._batch, kind.window).copy_(drafts)
            with _timed(seconds, "fill"):
                filled = filler.fill(this)
            decided = torch.tensor([text[at : at + kind.window + 1]] * self._batch, dtype=torch.int64)
            buffers.tokens.host_view(self._batch, kind.window + 1).copy_(decided)
            buffers.count.host_view(self._batch).fill_(emitted)
            usable = {slot: len(window.tokens) for slot, window in filled.items()}
            kept = {slot: window.kept for slot, window in filled.items()}
            with _timed(seconds, "commit"):
                committer.commit(Verified(this, usable, kept, logits))
            for name, value in seconds.items():
                found[name].append(1e6 * value / self._batch)
        if len(slots) != self._batch:
            raise RuntimeError(f"a request ended while it was measured: {len(slots)} of {self._batch} are left")
        fill, commit, whole = (statistics.median(found[name][WARM:]) for name in ("fill", "commit", "round"))
        return {"round": whole, "fill": fill, "commit": commit, "commit per token": commit / emitted}

    def _waiting(self, kind: Kind) -> Waiting:
        prompt = [0, self._start] if kind.thinks else [0]
        params = SamplingParams.model_validate({"temperature": 0.7, "ignore_eos": True, **(kind.asked or {})})
        request = Request(prompt, params, seed=1, max_tokens=self._length, window=kind.window, listener=lambda _: None)
        enforcement: Future[Enforcement] = Future()
        share = GrammarShare(10.0) if kind.grammar else None
        enforcement.set_result(Enforcement(self._constraint(kind, prompt), None, share))
        return Waiting(request, enforcement, Transcript(self._tokenizer.backend), Penalties.of(prompt, params))

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
        """A text that the grammar allows, as a model would write it that knows nothing else."""
        constraint, draw = self._constraint(Kind(grammar=True), [0]), random.Random(0)
        row = np.empty((1, mask_words(self._vocab)), np.int32)
        text: list[int] = []
        while len(text) < self._length:
            constraint.fill([], MaskRows(row), 0)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8)[0], bitorder="little"))
            text.append(int(draw.choice(allowed[allowed != self._start])))
            constraint.commit(text[-1:])
        return text


class _timed:  # noqa: N801  # read as a verb
    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._begun = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] = time.thread_time() - self._begun


def main(
    batch: Annotated[int, typer.Option(help="Requests that run together.", min=1)] = 64,
    vocab: Annotated[int, typer.Option(help="Width of the logits.", min=1000)] = 128_256,
    rounds: Annotated[int, typer.Option(help="Measured rounds of each kind.", min=3)] = 40,
    only: Annotated[str, typer.Option(help="Kinds whose names begin so; empty: all.")] = "",
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Print microseconds of the loop's thread, by what requests ask for."""
    table = Table("requests that ask for", "round", "fill", "commit", "commit per token", show_edge=False)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), vocab, batch, rounds)
        for name, kind in KINDS.items():
            if name.startswith(only):
                results[name] = bench.run(kind)
                table.add_row(name, *(f"{value:.1f}" for value in results[name].values()))
    Console(width=120).print(table)
    if out is not None:
        out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
