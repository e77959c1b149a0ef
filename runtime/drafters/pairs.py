"""What drafters share whose head is fed pairs: a token, and the target's state of the token before it."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache

from tandemrt.engines.calls import NO_PROMPTS, Packed, beside
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.backends.base import Call, prompt_rows
from tandemrt.runtime.device import upload
from tandemrt.runtime.drafters.backlog import Backlog
from tandemrt.runtime.drafters.drawing import DrawingDrafter
from tandemrt.runtime.drafters.resources import DraftResources
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.round.buffers import Buffer
from tandemrt.runtime.round.planner import Chunk
from tandemrt.runtime.round.prompt_calls import MOST_PACKED, prompts_call
from tandemrt.runtime.round.round import Round


class PairDrafter(DrawingDrafter):
    """Keeps the pairs that are in no cache yet, and feeds those of prompts.

    Token j + 1 of a text goes with the target's state of token j, at place j of the head's cache. Verification makes as
    many pairs certain as it emits tokens; they are fed when the next round begins (``_feed``), or when several rounds
    that draft nothing have made as many as a window makes, because no more states are kept. So the cache holds what the
    target's states make of a text, and nothing else is read. A text of one token has no pair yet: nothing sensible is
    drafted behind it.

    Over a paged cache, prompts are fed behind the target's call of the round, which gives their states; one that ends
    in a round is drafted for from the next one on.

    Its engine "fuse" makes states of features. The prompts of its resources are its own. ``query``: the most tokens per
    row of a run; ``chunk``: the most prompt tokens of a call over a linear cache; ``kept``: pairs that are fed again
    in front of those that a round has made certain.
    """

    def __init__(self, resources: DraftResources, *, query: int, chunk: int, kept: int = 0) -> None:
        super().__init__(resources)
        self.late = resources.runs is not None
        device, dtype, slots, window = self._device, self._dtype, resources.slots, resources.window
        self._hidden = int(self._engines["draft"].contract["states"].shape[-1])
        self._features = int(self._engines["fuse"].contract["features"].shape[-1])
        self._most_pairs = window + 1 + kept
        self._backlog = Backlog(self._most_pairs)
        # Pairs of each slot, `_counts` of them behind `length` - `_counts`; behind them stands -1 as a token.
        self._pair_tokens = torch.zeros(slots, query, dtype=torch.int64, device=device).fill_(-1)
        self._pair_states = torch.zeros(slots, self._most_pairs, self._hidden, dtype=dtype, device=device)
        self._counts = torch.zeros(slots, dtype=torch.int64, device=device)
        self._has_pairs = torch.zeros(slots, dtype=torch.int64, device=device)
        self._slot_ids = torch.arange(slots, device=device)
        self._first_index = torch.zeros(slots, dtype=torch.int64, device=device)
        self._first_tokens = Buffer((slots, query), torch.int64, device)
        self._first_states = Buffer((slots, query, self._hidden), dtype, device)
        features = self._buffers.features
        assert features is not None
        self._fused = Buffer((max(features.device.numel() // self._features, chunk), self._hidden), dtype, device)
        self._chunk_tokens = Buffer((chunk,), torch.int64, device)
        self._following = Buffer((slots,), torch.int64, device)
        self._fuse_call = lru_cache(MOST_PACKED)(self._bind_fuse)
        self._prompts_call = lru_cache(MOST_PACKED)(self._bind_prompts)

    @abstractmethod
    def _feed(self, batch: int, window: int) -> None:
        """Run the head over the pairs that are in no cache yet; ``window`` tokens are drafted behind them."""

    def _made(self, *shape: int) -> dict[str, torch.Tensor]:  # noqa: ARG002
        """The bindings of what the head makes beside logits, for ``shape`` [batch, rows]."""
        return {}

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""
        self._pair_tokens[slot] = -1
        self._counts[slot] = 0

    def held(self, running: Running) -> int:
        """See Drafter.held."""
        return self._backlog.held(running)

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[Sequence[int]]) -> None:
        """See Drafter.prefill. Token by token behind the one that it is paired with."""
        (slots, count), head = tokens.shape, self._engines["draft"]
        features = self._buffers.prompt_features
        assert features is not None
        last = self._following.view(slots)
        upload([behind[0] for behind in following], last)
        shifted = self._chunk_tokens.view(slots, count)
        shifted[:, : count - 1] = tokens[:, 1:]
        shifted[:, count - 1] = last
        states = self._fused.view(slots, count, self._hidden)
        self._engines["fuse"].bind(
            {
                "features": features.view(slots * count, self._features),
                "states": self._fused.view(slots * count, self._hidden),
            }
        ).run()
        rows = prompt_rows(head)
        head.bind(
            {
                "token_ids": shifted,
                "states": states,
                "write_index": self._state.view("length", slot + slots)[slot:],
                "score_rows": torch.zeros(slots, rows, dtype=torch.int64, device=head.device),
                "logits": self._logits.view(slots, rows, self._width),
                **self._made(slots, rows),
                **self._cache.rows(slot, slots),
            }
        ).run()
        # The newest pair decides the first drafted token, so it is fed once more.
        self._pair_tokens[slot : slot + slots] = -1
        self._pair_tokens[slot : slot + slots, 0] = last
        self._pair_states[slot : slot + slots, 0] = states[:, count - 1]
        self._counts[slot : slot + slots] = 1
        self._backlog.join()

    def skip(self, this: Round) -> None:
        """See Drafter.skip. The pairs of its rows are fed where no more may wait."""
        if this.batch and not self._backlog.may_wait(this):
            self._run(("feed", this.batch), lambda: self._feed(this.batch, 0), [])

    def reads(self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]], sizes: Packed) -> None:
        """See Drafter.reads. Token by token behind the one that it is paired with."""
        assert self._runs is not None
        self._runs.write(chunks, texts, sizes, ahead=1)

    def scored(self, this: Round) -> None:
        """See Drafter.scored. States are made of all features, those of prompts are fed."""
        tokens, prompts = this.windows if this.batch else 0, this.prompts
        self._fuse_call(tokens + prompts.prompt_tokens).run()
        if prompts != NO_PROMPTS:
            sizes = beside(0, prompts)
            call = self._prompts_call(tokens, sizes)
            self._graphs.run_with_prompts(
                ("draft", tokens, sizes), call.run, call, tokens=sizes.prompt_tokens, capturable=self._capturable
            )

    def verified(self, this: Round) -> None:
        """See Drafter.verified. What was emitted is paired with the states that the target computed for the window."""
        batch, query, counts = this.batch, this.window + 1, self._counts[: this.batch]
        states, tokens = self._fused.view(batch, query, self._hidden), self._buffers.tokens.view(batch, query)
        if self._backlog.emitted(this):
            self._pair_states[:batch, :query] = states
            self._pair_tokens[:batch, :query] = tokens
            self._pair_tokens[:batch, query:] = -1
            counts.copy_(self._buffers.count.view(batch))
            return
        one_behind = (self._slot_ids[:batch], counts)  # a round that others wait behind emits a token at most
        self._pair_states[one_behind] = states[:, 0]
        self._pair_tokens[one_behind] = tokens[:, 0]
        counts.add_(self._buffers.count.view(batch))

    def _begin_first(self, batch: int, query: int) -> None:
        """Say where the pairs of [0, batch) begin, and their states in the first run, ``query`` wide.

        A slot without any writes behind its text, with states of zeros: free slots share a scratch block, so all of
        them must write the same (SlotState.leave).
        """
        counts, pairs = self._counts[:batch], self._most_pairs
        torch.sub(self._state.view("length", batch), counts, out=self._first_index[:batch])
        torch.clamp(counts, max=1, out=self._has_pairs[:batch])
        states = self._first_states.view(batch, query, self._hidden)[:, :pairs]
        torch.mul(self._pair_states[:batch], self._has_pairs[:batch, None, None], out=states)

    def _fed(self, states: Buffer, tokens: torch.Tensor) -> torch.Tensor:
        """The states that ``tokens`` [batch, query] are fed with, in the form of the cache."""
        return states.view(*(tokens.shape if self._runs is None else (tokens.numel(),)), self._hidden)

    def _bind_fuse(self, tokens: int) -> Call:
        features = self._buffers.features
        assert features is not None
        return self._engines["fuse"].bind(
            {"features": features.view(tokens, self._features), "states": self._fused.view(tokens, self._hidden)}
        )

    def _bind_prompts(self, behind: int, prompts: Packed) -> Call:
        """The call of a round's prompts, whose states stand behind those of ``behind`` tokens of windows."""
        assert self._runs is not None
        states = self._fused.view(behind + prompts.prompt_tokens, self._hidden)[behind:]
        others = {"states": states, **self._made(1, 1)}
        return prompts_call(self._engines["draft"], self._cache, self._runs, prompts, self._logits, others)
