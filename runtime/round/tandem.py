"""The target and verification engines around one cache: prefill a prompt, score a window, verify it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod

from tandemrt.engines.calls import NO_PROMPTS, Packed
from tandemrt.engines.contract import logits_width
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.backends.base import AdvancingEngine, Call, Engine
from tandemrt.runtime.caches.kv_cache import Cache, windows
from tandemrt.runtime.round.buffers import Buffer, RoundBuffers
from tandemrt.runtime.round.graphs import Graphs
from tandemrt.runtime.round.prompt_calls import MOST_PACKED, prefill_call, prompts_call
from tandemrt.runtime.round.round import Round
from tandemrt.runtime.round.runs import PromptRuns
from tandemrt.runtime.round.state import SlotState


class Tandem:
    """What the device does for the target. Calls are bound once per shape and kept, and their tensors with them.

    ``engines`` holds "target", "adjust", "verify" and, for drafters that keep their probabilities, "verify_probs".
    ``runs`` are the prompts of a round over a paged cache, None over a linear one.
    """

    def __init__(
        self,
        engines: dict[str, Engine],
        buffers: RoundBuffers,
        state: SlotState,
        kv: Cache,
        graphs: Graphs,
        runs: PromptRuns | None,
    ) -> None:
        self.engines = engines
        self.buffers = buffers
        self.state = state
        self.device = engines["target"].device
        self.vocab = logits_width(engines["target"].contract)
        self.cache = kv
        self.runs = runs
        self._graphs = graphs
        self._score_call = cache(self._bind_score)
        self._packed_call = lru_cache(MOST_PACKED)(self._bind_packed)
        self._adjust_call = cache(self._bind_adjust)
        self._verify_call = cache(self._bind_verify)

    def prefill(self, slot: int, tokens: torch.Tensor) -> None:
        """Put the next prompt tokens [slots, tokens] of slots from ``slot`` on into a linear cache.

        A slot's ``length`` must be where its tokens begin.
        """
        length = self.state.view("length", slot + len(tokens))[slot:]
        features = self._features(self.buffers.prompt_features, tokens.shape)
        prefill_call(self.engines["target"], self.cache, slot, tokens, length, self.buffers.logits, features).run()

    def score(self, this: Round) -> None:
        """Run the target over the newest token and the drafted ones of every row, and over the round's prompts."""
        batch, window, prompts = this.batch, this.window, this.prompts
        if prompts != NO_PROMPTS:
            self._score_packed(batch, window, prompts)
            return

        def work() -> None:
            self._write_windows(self.buffers.token_ids.view(batch, window + 1))
            self._score_call(batch, window).run()

        target = self.engines["target"]
        logits = self.buffers.logits.view(batch, window + 1, logits_width(target.contract))
        outputs = [logits, *self._features(self.buffers.features, (batch, window + 1)).values()]
        self._graphs.run(("target", batch, window), work, outputs=outputs, capturable=target.capturable)

    def adjust(self, this: Round) -> None:
        """Bias and penalize the logits of the window, where a request asks for it. Needs its entries in place."""
        batch, window = this.batch, this.window
        columns, engine = self.buffers.entries.columns, self.engines["adjust"]
        if not columns:
            return
        logits = self.buffers.logits.view(batch, window + 1, logits_width(engine.contract))
        self._graphs.run(
            ("adjust", batch, window, columns),
            lambda: self._adjust_call(batch, window, columns).run(),
            outputs=[],
            state=[logits],  # changed in place: a second run would change them twice
            capturable=engine.capturable,
        )

    def verify(self, this: Round, draft_probs: Buffer | None) -> None:
        """Decide the tokens of the window and advance the slots by them. Needs masks and draft lengths in place.

        ``draft_probs``: as Drafter.propose returned it.
        """
        batch, window, filters = this.batch, this.window, this.filters
        self._graphs.run(
            ("verify", batch, window, draft_probs is None, filters),
            lambda: self._verify_call(batch, window, draft_probs, filters).run(),
            outputs=[self.buffers.tokens.view(batch, window + 1), self.buffers.count.view(batch)],
            state=list(self.state.moving(batch).values()),
            capturable=self.engines["verify" if draft_probs is None else "verify_probs"].capturable,
        )

    def _write_windows(self, ids: torch.Tensor) -> None:
        """Write the windows of the first slots into ``ids`` [batch, window + 1]."""
        batch, window = len(ids), ids.shape[1] - 1
        ids[:, 0].copy_(self.state.newest[:batch, 1])
        if window:  # a position without a draft holds -1, which no embedding has
            torch.clamp(self.buffers.draft_tokens.view(batch, window), min=0, out=ids[:, 1:])

    def _score_packed(self, batch: int, window: int, prompts: Packed) -> None:
        runs, call = self.runs, self._packed_call(batch, window, prompts)
        assert runs is not None

        def work() -> None:
            if batch:
                self._write_windows(runs.windows(batch, window + 1, prompts))
            call.run()

        capturable = self.engines["target"].capturable
        tokens = batch * (window + 1) + prompts.prompt_tokens
        key = ("target", batch, window, prompts)
        self._graphs.run_with_prompts(key, work, call, tokens=tokens, capturable=capturable)

    def _bind_score(self, batch: int, window: int) -> Call:
        rows = window + 1
        target = self.engines["target"]
        ids = self.buffers.token_ids.view(batch, rows)
        return target.bind(
            {
                **windows(target.contract, ids, torch.arange(rows, device=self.device).repeat(batch, 1)),
                "write_index": self.state.view("length", batch),
                "logits": self.buffers.logits.view(batch, rows, logits_width(target.contract)),
                **self._features(self.buffers.features, (batch, rows)),
                **self.cache.rows(0, batch),
            }
        )

    def _features(self, buffer: Buffer | None, shape: Sequence[int]) -> dict[str, torch.Tensor]:
        """The binding of what the target gives for a draft head, if it gives anything; ``shape`` of the tokens."""
        if buffer is None:
            return {}
        *fed, width = self.engines["target"].contract["features"].shape
        return {"features": buffer.view(*(shape if len(fed) == len(shape) else (prod(shape),)), int(width))}

    def _bind_packed(self, batch: int, window: int, prompts: Packed) -> Call:
        target, runs, rows = self.engines["target"], self.runs, window + 1
        assert runs is not None
        if not batch:
            features = self._features(self.buffers.features, (prompts.prompt_tokens,))
            return prompts_call(target, self.cache, runs, prompts, self.buffers.logits, features)
        return target.bind(
            {
                "token_ids": runs.token_ids(batch * rows, prompts),
                "write_index": self.state.view("length", batch),
                "score_rows": torch.arange(batch * rows, device=self.device).view(batch, rows),
                "logits": self.buffers.logits.view(batch, rows, logits_width(target.contract)),
                **self._features(self.buffers.features, (batch * rows + prompts.prompt_tokens,)),
                **self.cache.rows(0, batch),
                **runs.bindings(prompts),
            }
        )

    def _bind_adjust(self, batch: int, window: int, columns: int) -> Call:
        engine = self.engines["adjust"]
        return engine.bind(
            {
                "logits": self.buffers.logits.view(batch, window + 1, logits_width(engine.contract)),
                "draft_tokens": self.buffers.draft_tokens.view(batch, window),
                **self.buffers.entries.view(batch, columns),
            }
        )

    def _bind_verify(self, batch: int, window: int, draft_probs: Buffer | None, filters: bool) -> Call:
        rows = window + 1
        engine = self.engines["verify" if draft_probs is None else "verify_probs"]
        vocab = logits_width(engine.contract)
        tensors = {
            "logits": self.buffers.logits.view(batch, rows, vocab),
            "bitmask": self.buffers.bitmask.view(batch, rows, self.buffers.words),
            "draft_tokens": self.buffers.draft_tokens.view(batch, window),
            "draft_len": self.buffers.draft_len.view(batch),
            "tokens": self.buffers.tokens.view(batch, rows),
            "count": self.buffers.count.view(batch),
            **self.state.sampling(batch),
        }
        if draft_probs is not None:
            tensors["draft_probs"] = draft_probs.view(batch, window, vocab)
        if isinstance(engine, AdvancingEngine):
            return engine.bind_advancing(tensors, self.state.moving(batch), filters=filters)
        return _AdvancingCall(engine.bind(tensors, filters=filters), self.state, tensors["tokens"], tensors["count"])


@dataclass(frozen=True)
class _AdvancingCall:
    """Verification by an engine that only verifies, then the advance of the slots."""

    verify: Call
    state: SlotState
    tokens: torch.Tensor
    count: torch.Tensor

    def run(self) -> None:
        self.verify.run()
        self.state.advance(self.tokens, self.count)
