"""What drafters share that run a model on the device and draw its tokens there."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from types import MappingProxyType

from tandemrt.engines.contract import logits_width
from tandemrt.plugins.operators import Rule
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.backends.base import Call
from tandemrt.runtime.caches.kv_cache import Cache
from tandemrt.runtime.drafters.base import Unmoved
from tandemrt.runtime.drafters.masks import DraftMasks
from tandemrt.runtime.drafters.resources import DraftResources
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.round.buffers import Buffer
from tandemrt.runtime.round.round import Round


class DrawingDrafter(Unmoved):
    """Runs the engine "draft" over a cache of its own and draws by "propose" or "propose_probs".

    Logits are ``width`` wide: of the target's vocabulary, or of the part of it that the draft knows.

    ``reach``: see Drafter. None for a head, because a bundle's texts are no longer than what its head reaches.
    """

    ahead = True

    _logits: Buffer  # [slots, rows, width] of a run

    def __init__(self, resources: DraftResources, *, reach: int | None = None) -> None:
        slots, window, engines = resources.slots, resources.window, resources.engines
        self.window = window
        self.reach = reach
        self.caches: Sequence[Cache] = (resources.cache,)
        self._engines = engines
        self._buffers = resources.buffers
        self._state = resources.state
        self._cache = resources.cache
        self._graphs = resources.graphs
        self._runs = resources.runs
        draft = engines["draft"]
        self._width, self._vocab = logits_width(draft.contract), logits_width(engines["target"].contract)
        self._device, self._dtype = draft.device, getattr(torch, draft.contract["logits"].dtype)
        self._capturable = all(engines[name].capturable for name in ("draft", "propose", "propose_probs"))
        self._draft_probs = Buffer((slots, window, self._vocab), torch.float32, self._device)
        self._known = resources.target_ids
        if self._known is not None:
            self._target_ids = torch.tensor(self._known, dtype=torch.int32, device=self._device)
            self._columns = torch.tensor(self._known, dtype=torch.int64, device=self._device)
        self._slots = slots
        self._starts = cache(self._first_of_rows)
        self._masked: Round | None = None  # the round that is being drafted, if its drafts are masked

    def held(self, running: Running) -> int:
        """See Drafter.held. What the last round emitted is fed when the next one begins, or was by the target."""
        return len(running.tokens) - 1

    @cached_property
    def _masks(self) -> DraftMasks:
        """Made when somebody asks for them: they are as wide as the vocabulary."""
        return DraftMasks(self._slots, self._vocab, self._device, self._known)

    def _proposal(self, this: Round) -> tuple[Buffer | None, list[torch.Tensor]]:
        """The probabilities that ``this`` round keeps, if a rule reads them, and all tensors that drafting writes."""
        self._masked = this if this.masked else None
        outputs = [self._buffers.draft_tokens.view(this.batch, this.window)]
        if Rule.REJECTION not in this.rules:
            return None, outputs
        return self._draft_probs, [*outputs, self._draft_probs.view(this.batch, this.window, self._vocab)]

    @contextmanager
    def _masking(self) -> Iterator[DraftMasks | None]:
        """The masks of the drafts that are drawn within the block, None if they are not masked."""
        this, self._masked = self._masked, None
        if this is None:
            yield None
        else:
            with self._masks.following(this):
                yield self._masks

    def _run(self, key: tuple[object, ...], work: Callable[[], None], outputs: list[torch.Tensor]) -> None:
        """Run ``work``, captured if all engines of a draft can be. Masked drafts wait for the host on the way."""
        if self._masked is not None:
            self._graphs.run_eagerly(work, "masks")
            return
        self._graphs.run(key, work, outputs=outputs, capturable=self._capturable)

    def _bind_windows(
        self,
        tokens: torch.Tensor,
        score_rows: torch.Tensor,
        write_index: torch.Tensor,
        others: Mapping[str, torch.Tensor] = MappingProxyType({}),
        *,
        logits: Buffer | None = None,
    ) -> Call:
        """The draft's call of windows ``tokens`` [batch, query], flat in one with prompts, in the form of its cache.

        ``score_rows`` [batch, rows] are counted from what ``_starts`` says; ``others`` are its other bindings.
        ``logits``: where they go that are not drawn from as they are.
        """
        batch, rows = score_rows.shape
        return self._engines["draft"].bind(
            {
                "token_ids": tokens if self._runs is None else tokens.reshape(-1),
                "score_rows": score_rows,
                "write_index": write_index,
                "logits": (logits or self._logits).view(batch, rows, self._width),
                **self._cache.rows(0, batch),
                **others,
            }
        )

    def _first_of_rows(self, batch: int, query: int) -> torch.Tensor:
        """int64 [batch, 1]: the place that rows of logits are counted from, in a call of ``query`` tokens a row.

        That is the first token of a row, and over a paged cache that of the call.
        """
        step = query if self._runs is not None else 0
        return torch.tensor([[step * row] for row in range(batch)], dtype=torch.int64, device=self._device)

    def _bind_law(self, tensors: dict[str, torch.Tensor], probs: torch.Tensor | None, *, filters: bool) -> Call:
        """The call that draws; ``probs`` [rows, width]: where the law goes that was drawn from."""
        others = {} if probs is None else {"draft_probs": probs}
        if self._known is not None:
            others["target_ids"] = self._target_ids
        return self._engines["propose" if probs is None else "propose_probs"].bind(tensors | others, filters=filters)

    def _keep_laws(self, kept: torch.Tensor, laws: torch.Tensor) -> None:
        """Write ``laws`` [rows, width] into ``kept`` [rows, vocab]."""
        if self._known is None:
            kept.copy_(laws)
        else:
            kept.zero_()
            kept.index_copy_(1, self._columns, laws)


class StepwiseDrafter(DrawingDrafter):
    """Draws one token at a time: step s from the logits that step s left, at the place in row s + 2 of ``_index``."""

    def __init__(self, resources: DraftResources, *, reach: int | None = None) -> None:
        super().__init__(resources, reach=reach)
        device, slots, window = self._device, resources.slots, resources.window
        self._index = torch.zeros(window + 2, slots, dtype=torch.int64, device=device)
        self._steps = torch.arange(-1, window + 1, device=device)[:, None]
        self._score_rows = Buffer((slots,), torch.int64, device)
        self._logits = Buffer((slots, 1, self._width), self._dtype, device)
        self._tokens = torch.zeros(window, slots, dtype=torch.int64, device=device)
        self._step_probs = Buffer((slots, self._width), torch.float32, device)
        self._draw_call = cache(self._bind_draw)

    def _draw(self, batch: int, window: int, run: Callable[[int], None], *, keep_probs: bool, filters: bool) -> None:
        """Let ``run`` make the logits of each step, and draw from them."""
        with self._masking() as masks:
            for step in range(window):
                run(step)
                if masks is not None:
                    masks.apply(self._logits.view(batch, self._width))
                self._draw_call(batch, step, keep_probs, filters).run()
                if masks is not None:
                    masks.follow(self._tokens[step, :batch].tolist())
                if keep_probs:
                    kept = self._draft_probs.view(batch, window, self._vocab)[:, step]
                    self._keep_laws(kept, self._step_probs.view(batch, self._width))
        self._buffers.draft_tokens.view(batch, window).copy_(self._tokens[:window, :batch].T)

    def _bind_draw(self, batch: int, step: int, keep_probs: bool, filters: bool) -> Call:
        tensors = self._state.drafting(batch) | {
            "logits": self._logits.view(batch, 1, self._width),
            "position": self._index[step + 2, :batch],
            "token": self._tokens[step, :batch],
        }
        probs = self._step_probs.view(batch, self._width) if keep_probs else None
        return self._bind_law(tensors, probs, filters=filters)
