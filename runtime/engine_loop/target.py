"""The target of a round, with its verification."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from tandemrt.engines.contract.calls import NO_PROMPTS
from tandemrt.engines.contract.contract import logits_width
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.caches.call_layout import CallLayout, cache_calls
from tandemrt.runtime.caches.kv_cache import Cache
from tandemrt.runtime.caches.prompt_calls import linear_prefill_call, packed_prefill_call
from tandemrt.runtime.device.backends.base import AdvancingEngine, Call, CheckedEngine, Engine
from tandemrt.runtime.device.buffers import Buffer, RoundBuffers
from tandemrt.runtime.device.graphs import Graphs
from tandemrt.runtime.device.prompt_plan import Chunk
from tandemrt.runtime.device.round_shape import RoundShape
from tandemrt.runtime.device.slot_state import SlotState
from tandemrt.runtime.engine_loop.image_inputs import ImageInputs
from tandemrt.runtime.requests.round import Round


class TargetRunner:
    """Enqueues the work of the target and of verification. Bound calls are cached by shape.

    ``engines`` has "target", "adjust", "verify" and, for drafters with probabilities, "verify_probs". ``layout``: where
    the target's calls have draft windows and prompts. ``images``: further inputs of a target that reads images.
    """

    def __init__(
        self,
        engines: dict[str, Engine],
        buffers: RoundBuffers,
        state: SlotState,
        kv: Cache,
        graphs: Graphs,
        layout: CallLayout,
        images: ImageInputs | None = None,
    ) -> None:
        self.engines = engines
        self.buffers = buffers
        self.state = state
        self.device = engines["target"].device
        self.vocab = logits_width(engines["target"].contract)
        self.cache = kv
        self.layout = layout
        self.images = images
        self._graphs = graphs
        self._score_call = cache_calls(self._bind_score)
        self._adjust_call = cache(self._bind_adjust)
        self._verify_call = cache(self._bind_verify)
        self._score_outputs = cache(self._written_by_score)
        self._verify_outputs = cache(self._written_by_verify)
        target = engines["target"]
        self._checked = target if isinstance(target, CheckedEngine) else None

    def prefill(self, chunks: Sequence[Chunk], tokens: torch.Tensor) -> None:
        """Process the prompt ``tokens`` [slots, tokens] of ``chunks``, of adjacent slots, over a linear cache.

        The ``length`` of each slot must be the position of its first token here.
        """
        slot = chunks[0].slot
        length = self.state.view("length", slot + len(tokens))[slot:]
        others = self._features(self.buffers.prompt_features, tuple(tokens.shape))
        if self.images is not None:
            others |= self.images.of_prompts(chunks)
        linear_prefill_call(self.engines["target"], self.cache, slot, tokens, length, self.buffers.logits, others).run()

    def score(self, round_: Round) -> None:
        """Run the target over the newest and the drafted tokens of every row, and over the round's prompts."""
        shape = round_.shape.size
        if shape.prompts != NO_PROMPTS:
            self._score_with_prompts(shape)
            return

        def work() -> None:
            self._write_windows(shape)
            self._score_call(shape).run()

        self._graphs.run(
            ("target", shape),
            work,
            outputs=self._score_outputs(shape),
            capturable=self.engines["target"].capturable,
        )

    def on_failure(self, call: Callable[[BaseException], None]) -> None:
        """Let ``call`` be called in any thread, with the error, once the target cannot run any more."""
        if self._checked is not None:
            self._checked.on_failure(call)

    def end_waits(self, overdue: Callable[[], bool]) -> None:
        """See CheckedEngine."""
        if self._checked is not None:
            self._checked.end_waits(overdue)

    @property
    def problem(self) -> str | None:
        """What keeps the target from its end, if that is known. May be read from any thread."""
        return None if self._checked is None else self._checked.problem

    def check(self) -> None:
        """Raise if results that the host has waited for may be wrong."""
        if self._checked is not None:
            self._checked.check()

    def adjust(self, round_: Round) -> None:
        """Apply biases and penalties to the logits, if a request has any. Their entries must be uploaded."""
        shape, columns = round_.shape.size.without_prompts, self.buffers.entries.columns
        if not columns:
            return
        self._graphs.run(
            ("adjust", shape, columns),
            lambda: self._adjust_call(shape, columns).run(),
            outputs=[],
            state=[self._logits(shape)],  # changed in place: a second run would change them again
            capturable=self.engines["adjust"].capturable,
        )

    def verify(self, round_: Round, draft_probs: Buffer | None) -> None:
        """Decide the emitted tokens and advance the slots by them. Masks and draft lengths must be uploaded.

        ``draft_probs``: the result of Drafter.propose.
        """
        shape = round_.shape.without_prompts._replace(keep_probs=draft_probs is not None)
        outputs, state = self._verify_outputs(shape)
        self._graphs.run(
            ("verify", shape),
            lambda: self._verify_call(shape, draft_probs).run(),
            outputs=outputs,
            state=state,
            capturable=self.engines["verify_probs" if shape.keep_probs else "verify"].capturable,
        )

    def write_prompts(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]], shape: RoundShape) -> None:
        """Upload the prompts of a round over paged caches. ``texts``: tokens by slot."""
        self.layout.write(chunks, texts, shape.prompts)
        if self.images is not None:
            self.images.write_prompts(chunks, shape.batch * shape.query, shape.prompts)

    def _write_windows(self, shape: RoundShape) -> None:
        """Write the newest and the drafted tokens of the first slots, and their positions."""
        batch, window = shape.batch, shape.window
        ids = self.layout.windows(self.buffers.token_ids.view(batch, shape.query), shape.prompts)
        ids[:, 0].copy_(self.state.newest[:batch, 1])
        if window:  # positions without a draft hold -1, which is no token id
            torch.clamp(self.buffers.draft_tokens.view(batch, window), min=0, out=ids[:, 1:])
        if self.images is not None:
            self.images.write_windows(shape)

    def _score_with_prompts(self, shape: RoundShape) -> None:
        call = self._score_call(shape)

        def work() -> None:
            if shape.batch:
                self._write_windows(shape)
            call.run()

        capturable = self.engines["target"].capturable
        self._graphs.run_with_prompts(("target", shape), work, call, capturable=capturable)

    def _bind_score(self, shape: RoundShape) -> Call:
        target, layout, prompts = self.engines["target"], self.layout, shape.prompts
        batch, rows = shape.batch, shape.query
        tokens = self._token_shape(shape)
        others = self._features(self.buffers.features, tokens)
        if self.images is not None:
            others |= self.images.bindings(tokens, prompts)
        if not batch:
            return packed_prefill_call(target, self.cache, layout, prompts, self.buffers.logits, others)
        score_rows = layout.row_starts(batch, rows) + torch.arange(rows, device=self.device)
        return self.cache.bind(
            target,
            0,
            {
                "token_ids": layout.token_ids(self.buffers.token_ids.view(batch, rows), prompts),
                "write_index": self.state.view("length", batch),
                "score_rows": score_rows,
                "logits": self._logits(shape),
                **others,
                **layout.bindings(prompts),
            },
            prompt_slots=layout.slots(prompts),
        )

    def _logits(self, shape: RoundShape) -> torch.Tensor:
        """float [batch, window + 1, vocab]."""
        return self.buffers.logits.view(shape.batch, shape.query, self.vocab)

    def _token_shape(self, shape: RoundShape) -> tuple[int, ...]:
        return self.layout.token_shape(shape.batch, shape.query, shape.prompts)

    def _features(self, buffer: Buffer | None, shape: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the binding of the features for a draft head, if the target outputs any; ``shape``: of the tokens."""
        if buffer is None:
            return {}
        return {"features": buffer.view(*shape, int(self.engines["target"].contract["features"].shape[-1]))}

    def _bind_adjust(self, shape: RoundShape, columns: int) -> Call:
        return self.engines["adjust"].bind(
            {
                "logits": self._logits(shape),
                "draft_tokens": self.buffers.draft_tokens.view(shape.batch, shape.window),
                **self.buffers.entries.view(shape.batch, columns),
            }
        )

    def _written_by_score(self, shape: RoundShape) -> list[torch.Tensor]:
        return [self._logits(shape), *self._features(self.buffers.features, self._token_shape(shape)).values()]

    def _written_by_verify(self, shape: RoundShape) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors that verification overwrites, and those that it updates."""
        outputs = [self.buffers.tokens.view(shape.batch, shape.query), self.buffers.count.view(shape.batch)]
        return outputs, list(self.state.advance_tensors(shape.batch).values())

    def _bind_verify(self, shape: RoundShape, draft_probs: Buffer | None) -> Call:
        batch, rows = shape.batch, shape.query
        engine = self.engines["verify" if draft_probs is None else "verify_probs"]
        tensors = {
            "logits": self._logits(shape),
            "bitmask": self.buffers.bitmask.view(batch, rows, self.buffers.words),
            "draft_tokens": self.buffers.draft_tokens.view(batch, shape.window),
            "draft_len": self.buffers.draft_len.view(batch),
            "tokens": self.buffers.tokens.view(batch, rows),
            "count": self.buffers.count.view(batch),
            **self.state.sampling(batch),
        }
        if draft_probs is not None:
            tensors["draft_probs"] = draft_probs.view(batch, shape.window, self.vocab)
        if isinstance(engine, AdvancingEngine):
            return engine.bind_advancing(tensors, self.state.advance_tensors(batch), needs_probs=shape.needs_probs)
        call = engine.bind(tensors, needs_probs=shape.needs_probs)
        return _AdvancingCall(call, self.state, tensors["tokens"], tensors["count"])


@dataclass(frozen=True)
class _AdvancingCall:
    """Verification by an engine that does not advance the slots, followed by that advance."""

    verify: Call
    state: SlotState
    tokens: torch.Tensor
    count: torch.Tensor

    def run(self) -> None:
        self.verify.run()
        self.state.advance(self.tokens, self.count)
