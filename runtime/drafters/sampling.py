"""Sample drafts: one token at a time, or the whole window at once."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from tandemrt.engines.contract.calls import NO_PROMPTS
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.runtime.device.backends.base import Call
from tandemrt.runtime.device.buffers import Buffer
from tandemrt.runtime.device.round_shape import RoundShape
from tandemrt.runtime.device.slot_state import SlotState
from tandemrt.runtime.drafters.confidence import Confidence
from tandemrt.runtime.drafters.masks import DraftMasks
from tandemrt.runtime.drafters.resources import DraftResources
from tandemrt.runtime.requests.round import Round


class Sampler(ABC):
    """Samples the draft window from the draft's logits with the engines "propose" and "propose_probs".

    Attributes:
        logits: [slots, rows, width], where the draft's calls write.
    """

    logits: Buffer

    def __init__(self, draft: DraftResources) -> None:
        self._draft = draft
        self._draft_tokens = draft.buffers.draft_tokens
        self._draft_probs = Buffer((draft.slots, draft.window, draft.vocab), torch.float32, draft.device)
        self._masked: Round | None = None  # the round in progress, if its drafts are masked
        if draft.target_ids is not None:
            self._target_ids = torch.tensor(draft.target_ids, dtype=torch.int32, device=draft.device)
            self._columns = torch.tensor(draft.target_ids, dtype=torch.int64, device=draft.device)

    @abstractmethod
    def sample(self, shape: RoundShape, run: Callable[[int], None]) -> None:
        """Sample the window; ``run(step)`` runs the draft, which writes ``logits``."""

    def propose(self, round_: Round, shape: RoundShape, work: Callable[[], None]) -> Buffer | None:
        """Run ``work``, which calls ``sample``; return the draft probabilities if a verification rule reads them.

        Without prompts the work is captured as a CUDA graph, unless masks make it wait for the host.
        """
        self._masked = round_ if round_.mask_drafts else None
        graphs, key, capturable = self._draft.graphs, ("propose", shape), self._draft.capturable
        outputs = [self._draft_tokens.view(shape.batch, shape.window)]
        if shape.keep_probs:
            outputs.append(self._draft_probs.view(shape.batch, shape.window, self._draft.vocab))
        if shape.prompts != NO_PROMPTS:
            graphs.run_eagerly(work, "prompts")
        elif self._masked is not None:
            graphs.run_eagerly(work, "masks")
        else:
            graphs.run(key, work, outputs=outputs, capturable=capturable)
        return self._draft_probs if shape.keep_probs else None

    @cached_property
    def _masks(self) -> DraftMasks:
        """Allocated on first use, because they are as wide as the vocabulary."""
        draft = self._draft
        return DraftMasks(draft.slots, draft.vocab, draft.device, draft.target_ids)

    @contextmanager
    def _masking(self) -> Iterator[DraftMasks | None]:
        """Yield the masks of the drafts that are sampled in the block; None if the round has no masks."""
        round_, self._masked = self._masked, None
        if round_ is None:
            yield None
        else:
            with self._masks.following(round_):
                yield self._masks

    def _bind_sample(self, tensors: dict[str, torch.Tensor], probs: torch.Tensor | None, *, needs_probs: bool) -> Call:
        """Bind the call that samples; ``probs`` [rows, width]: where its probabilities go."""
        others = {} if probs is None else {"draft_probs": probs}
        if self._draft.target_ids is not None:
            others["target_ids"] = self._target_ids
        engine = self._draft.engines["propose" if probs is None else "propose_probs"]
        return engine.bind(tensors | others, needs_probs=needs_probs)

    def _store_probs(self, stored: torch.Tensor, probs: torch.Tensor) -> None:
        """Write ``probs`` [rows, width] into ``stored`` [rows, vocab]; other target tokens get probability 0."""
        if self._draft.target_ids is None:
            stored.copy_(probs)
        else:
            stored.zero_()
            stored.index_copy_(1, self._columns, probs)


class StepSampler(Sampler):
    """Samples one token at a time from the logits [batch, 1, width] that the same step of the draft wrote.

    Attributes:
        tokens: [window, slots], the token of each step.
        index: [window + 2, slots]; row r holds ``length`` + r - 1. Step s samples the token at position row s + 2.
    """

    def __init__(self, draft: DraftResources) -> None:
        super().__init__(draft)
        slots, window, device = draft.slots, draft.window, draft.device
        self.logits = Buffer((slots, 1, draft.width), draft.dtype, device)
        self.tokens = torch.zeros(window, slots, dtype=torch.int64, device=device)
        self.index = torch.zeros(window + 2, slots, dtype=torch.int64, device=device)
        self._offsets = torch.arange(-1, window + 1, device=device)[:, None]
        self._step_probs = Buffer((slots, draft.width), torch.float32, device)
        self._sample_call = cache(self._bind_step)
        self._stops: Round | None = None  # the round in progress, if it may stop before the end of its window

    def propose(self, round_: Round, shape: RoundShape, work: Callable[[], None]) -> Buffer | None:
        """See Sampler.propose. On a GPU the whole window is one graph."""
        self._stops = round_ if round_.least_gain and device_of(self._draft.device).on_host else None
        return super().propose(round_, shape, work)

    @cached_property
    def _column_of(self) -> npt.NDArray[np.int64] | None:
        """The draft's column of each token of the target, 0 for those that it lacks; None if it has all."""
        if self._draft.target_ids is None:
            return None
        column_of = np.zeros(self._draft.vocab, np.int64)
        column_of[self._draft.target_ids] = np.arange(len(self._draft.target_ids))
        return column_of

    def sample(self, shape: RoundShape, run: Callable[[int], None]) -> None:
        """See Sampler.sample. Run and sample each step, on a CPU as long as a further token promises enough."""
        batch, window, width = shape.batch, shape.window, self._draft.width
        torch.add(self._draft.state.view("length", batch), self._offsets, out=self.index[:, :batch])
        one_token = shape.without_prompts._replace(window=1)
        round_, self._stops = self._stops, None
        confidence = None if round_ is None else Confidence(sorted(round_.rows), self._column_of)
        drafted = 0
        with self._masking() as masks:
            for step in range(window):
                run(step)
                if masks is not None:
                    masks.apply(self.logits.view(batch, width))
                self._sample_call(one_token, step).run()
                if masks is not None:
                    masks.follow(self.tokens[step, :batch].tolist())
                if shape.keep_probs:
                    stored = self._draft_probs.view(batch, window, self._draft.vocab)[:, step]
                    self._store_probs(stored, self._step_probs.view(batch, width))
                drafted = step + 1
                if round_ is not None and confidence is not None and drafted < window:
                    logits, tokens = self.logits.view(batch, width).numpy(), self.tokens[step, :batch].numpy()
                    if confidence.follow(logits, tokens) < round_.least_gain:
                        break
        self._draft.buffers.num_drafted = drafted
        self._draft_tokens.view(batch, drafted).copy_(self.tokens[:drafted, :batch].T)

    def _bind_step(self, shape: RoundShape, step: int) -> Call:
        batch, width = shape.batch, self._draft.width
        tensors = self._draft.state.drafting(batch) | {
            "logits": self.logits.view(batch, 1, width),
            "position": self.index[step + 2, :batch],
            "token": self.tokens[step, :batch],
        }
        probs = self._step_probs.view(batch, width) if shape.keep_probs else None
        return self._bind_sample(tensors, probs, needs_probs=shape.needs_probs)


class WindowSampler(Sampler):
    """Samples the whole window from the logits [batch, window, width] of one run of the draft."""

    def __init__(self, draft: DraftResources) -> None:
        super().__init__(draft)
        slots, window, device = draft.slots, draft.window, draft.device
        self.logits = Buffer((slots, window, draft.width), draft.dtype, device)
        self._steps = torch.arange(window, device=device)
        reduced = draft.width < draft.vocab
        self._probs = Buffer((slots, window, draft.width), torch.float32, device) if reduced else self._draft_probs
        self._sampling = {
            name: Buffer((slots, window), torch.float32 if name in SlotState.FLOATS else torch.int64, device)
            for name in draft.state.sampling(0)
        }
        self._sample_call = cache(self._bind_window)
        self._slot_of_row = cache(self._make_slot_of_row)

    def sample(self, shape: RoundShape, run: Callable[[int], None]) -> None:
        """See Sampler.sample. One run; one sampling call, or one per position if the drafts are masked."""
        run(0)
        batch, window, width = shape.batch, shape.window, self._draft.width
        for name, values in self._draft.state.drafting(batch).items():
            torch.index_select(values, 0, self._slot_of_row(batch, window), out=self._repeated(name, batch, window))
        position = self._sampling["position"].view(batch, window)
        torch.add(position, self._steps[:window], out=position)
        call = self._sample_call(shape.without_prompts)
        with self._masking() as masks:
            if masks is None:
                call.run()
            else:
                logits = self.logits.view(batch, window, width)
                for step in range(window):
                    masks.apply(logits[:, step])
                    call.run()
                    masks.follow(self._draft_tokens.view(batch, window)[:, step].tolist())
        if shape.keep_probs and self._probs is not self._draft_probs:
            rows = batch * window
            self._store_probs(self._draft_probs.view(rows, self._draft.vocab), self._probs.view(rows, width))

    def _repeated(self, name: str, batch: int, window: int) -> torch.Tensor:
        """A sampling parameter of each row of the window, [batch * window]."""
        return self._sampling[name].view(batch * window)

    def _make_slot_of_row(self, batch: int, window: int) -> torch.Tensor:
        """int64 [batch * window]: 0, 0, …, 1, 1, …"""
        slots = [slot for slot in range(batch) for _ in range(window)]
        return torch.tensor(slots, dtype=torch.int64, device=self._draft.device)

    def _bind_window(self, shape: RoundShape) -> Call:
        batch, window, width = shape.batch, shape.window, self._draft.width
        rows = batch * window
        tensors = {name: self._repeated(name, batch, window) for name in self._sampling} | {
            "logits": self.logits.view(rows, 1, width),
            "token": self._draft_tokens.view(rows),
        }
        probs = self._probs.view(rows, width) if shape.keep_probs else None
        return self._bind_sample(tensors, probs, needs_probs=shape.needs_probs)
