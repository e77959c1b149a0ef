"""A language small enough to enumerate: both models look at the last two tokens, and so does the mask.

``speculate`` runs rounds of drafting and verification for many requests at once, ``exact_distribution`` multiplies the
autoregressive distribution out over every sequence, and ``surprise`` says how badly counts fit a distribution.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tandemrt.plugins.reference import adjust_logits, sample_draft, token_bitmask, verify_draft

# (logits [requests, vocab], request arguments) -> tokens [requests], probs [requests, vocab] or None for one-hot
Drafter = Callable[[np.ndarray, dict], tuple[np.ndarray, np.ndarray | None]]


@dataclass(frozen=True)
class Language:
    target: np.ndarray  # logits by the last two tokens, float32 [vocab, vocab, vocab]
    draft: np.ndarray
    mask: np.ndarray  # int32 [vocab, vocab, 1]
    filters: dict = field(default_factory=dict)
    penalties: dict = field(default_factory=dict)  # arguments of ``penalized``, which the target's logits go through

    @classmethod
    def random(cls, vocab: int, *, masked: bool, seed: int = 0, **filters: float) -> "Language":
        """Overlapping but different distributions; the mask forbids one token of five per state, never the same
        everywhere."""
        rng = np.random.default_rng(seed)
        target = 1.2 * rng.normal(size=(vocab, vocab, vocab)).astype(np.float32)
        draft = (target + rng.normal(size=target.shape)).astype(np.float32)
        forbidden = 1 << rng.integers(0, vocab, (vocab, vocab, 1)) if masked else np.int64(0)
        mask = np.broadcast_to((1 << vocab) - 1 - forbidden, (vocab, vocab, 1)).astype(np.int32)
        return cls(target, draft, mask, filters)

    @property
    def vocab(self) -> int:
        return self.target.shape[-1]

    @property
    def request(self) -> dict:
        return {"temperature": 0.9} | self.filters

    def distributions(self, logits: np.ndarray) -> np.ndarray:
        """The masked or unmasked rows as distributions, filtered by transformers, float64."""
        scores = torch.from_numpy(logits.reshape(-1, self.vocab)).double()
        request = self.request
        scores = TemperatureLogitsWarper(request["temperature"])(None, scores)
        if "top_n_sigma" in request:
            scores = below_sigma(scores, request["top_n_sigma"])
        scores = TopKLogitsWarper(request["top_k"])(None, scores) if "top_k" in request else scores
        scores = TopPLogitsWarper(request["top_p"])(None, scores) if "top_p" in request else scores
        scores = MinPLogitsWarper(request["min_p"])(None, scores) if "min_p" in request else scores
        return scores.softmax(-1).numpy().reshape(logits.shape)

    def penalized(self, logits: np.ndarray, text: np.ndarray, draft: np.ndarray) -> np.ndarray:
        """``logits`` [requests, rows, vocab] after outputs ``text`` [requests, tokens] (-1: none) and ``draft``."""
        if not self.penalties:
            return logits
        requests, shape = len(logits), (len(logits), self.vocab)
        return adjust_logits(
            logits,
            draft,
            entry_tokens=np.broadcast_to(np.arange(self.vocab), shape),
            entry_counts=(text[..., None] == np.arange(self.vocab)).sum(axis=1),
            entry_in_prompt=np.broadcast_to(np.arange(self.vocab) == 0, shape),  # the prompt is 0, 0
            entry_bias=np.broadcast_to(self.penalties["bias"], shape),
            entry_len=np.full(requests, self.vocab),
            **{name: np.full(requests, self.penalties[name]) for name in ("presence", "frequency", "repetition")},
        )

    def target_probs(self) -> np.ndarray:
        return self.distributions(token_bitmask(self.target, self.mask))

    def exact_distribution(self, length: int) -> np.ndarray:
        """The probability of every sequence of ``length`` tokens, in the order of ``index``."""
        sequences = np.array(list(product(range(self.vocab), repeat=length)))
        context = np.pad(sequences, ((0, 0), (2, 0)))
        result = np.ones(len(sequences))
        for i in range(length):
            states = context[:, i], context[:, i + 1]
            none = np.zeros((len(sequences), 0), np.int64)
            logits = self.penalized(self.target[states][:, None], sequences[:, :i], none)[:, 0]
            distributions = self.distributions(token_bitmask(logits, self.mask[states]))
            result *= distributions[np.arange(len(sequences)), sequences[:, i]]
        return result

    def index(self, text: np.ndarray) -> np.ndarray:
        return text @ self.vocab ** np.arange(text.shape[1])[::-1]


def below_sigma(scores: torch.Tensor, n: float) -> torch.Tensor:
    """Rows without the tokens that are more than ``n`` standard deviations of the finite scores below the largest."""
    deviations = [row[torch.isfinite(row)].std(correction=0) for row in scores]
    lowest = scores.max(dim=-1).values - n * torch.stack(deviations)
    return scores.masked_fill(scores < lowest[:, None], -torch.inf)


@dataclass
class Outcome:
    text: np.ndarray  # [requests, length]
    counts: list[np.ndarray]  # per round: tokens emitted by each request that ran
    drafts: int = 0  # first drafts of a round that were verified
    accepted: int = 0  # and how many of them stood


def speculate(
    language: Language,
    *,
    rule: str,
    window: int,
    length: int,
    requests: int,
    drafter: Drafter = sample_draft,
    usable: Callable[[np.ndarray], np.ndarray] | None = None,
    first_seed: int = 0,
) -> Outcome:
    """Emit ``length`` tokens per request; a round starts where the last one ended, as the runtime's rounds do.

    ``usable`` maps "was this drafted token allowed by its mask row" [requests, window] to draft lengths.
    """
    vocab = language.vocab
    text = np.zeros((requests, 2 + length + window + 1), np.int64)  # two tokens of prompt, room for the last round
    emitted = np.zeros(requests, np.int64)
    outcome = Outcome(text[:, 2 : 2 + length], [])
    while (running := np.flatnonzero(emitted < length)).size:
        every, start = np.arange(running.size), emitted[running] + 2
        recent = np.zeros((running.size, window + 2), np.int64)
        recent[:, 0], recent[:, 1] = text[running, start - 2], text[running, start - 1]
        request = language.request | {"seed": first_seed + running, "rule": rule}
        probs = np.zeros((running.size, window, vocab), np.float32)
        for i in range(window):
            logits = language.draft[recent[:, i], recent[:, i + 1]]
            recent[:, i + 2], distributions = drafter(logits, **request, position=start + i)
            probs[:, i] = 0 if distributions is None else distributions
        states = recent[:, :-1], recent[:, 1:]
        mask = language.mask[states]
        draft = recent[:, 2:]
        output = np.where(np.arange(text.shape[1]) < start[:, None], text[running], -1)[:, 2:]
        logits = token_bitmask(language.penalized(language.target[states], output, draft), mask)
        allowed = np.isfinite(np.take_along_axis(logits[:, :window], draft[..., None], axis=-1))[..., 0]
        draft_len = usable(allowed) if usable else np.full(running.size, window)
        tokens, count = verify_draft(logits, draft, draft_len, **request, position=start, draft_probs=probs)
        for i in range(window + 1):
            writes = i < count
            text[running[writes], start[writes] + i] = tokens[writes, i]
        assert (tokens[every, count - 1] >= 0).all()
        emitted[running] += count
        outcome.counts.append(count)
        outcome.drafts += int((draft_len > 0).sum())
        outcome.accepted += int(((count > 1) & (draft_len > 0)).sum())
    return outcome


def surprise(observed: np.ndarray, probabilities: np.ndarray) -> float:
    """How many standard deviations Pearson's chi-square lies above its mean; rare outcomes share one cell.

    Infinite if something was seen that the distribution excludes.
    """
    if (observed[probabilities == 0] > 0).any():
        return float("inf")
    expected = probabilities * observed.sum()
    rare = expected < 5
    cells = np.append(expected[~rare], expected[rare].sum())
    counts = np.append(observed[~rare], observed[rare].sum())
    used = cells > 0
    freedom = used.sum() - 1
    square = ((counts[used] - cells[used]) ** 2 / cells[used]).sum()
    return float((square - freedom) / np.sqrt(2 * freedom))
