"""DSpark drafts with random weights, and a reference implementation of such a draft in plain torch.

"DSpark" (arXiv 2607.05147), and the packages DeepSpec and ``speculators``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests import dflash
from tests.dflash import BlockHead
from tests.heads import Draw, Weights


@dataclass(frozen=True)
class DSparkHead(BlockHead):
    """The shape of a draft. ``nested``: with ``flat``, the form of SpecForge; without it, that of DeepSpec."""

    sample_from_anchor: bool = True
    markov: str = "vanilla"
    rank: int = 6
    nested: bool = False

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        base = super().config()
        own = {"markov_rank": self.rank, "markov_head_type": self.markov}
        own |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
        if not self.flat:
            return base | own | {"architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark"}
        if self.nested:
            within = base["dflash_config"] | own | {"projector_type": "dspark", "attention_mode": "gqa"}
            return base | {"architectures": ["DSparkDraftModel"], "dflash_config": within}
        own |= base.pop("dflash_config")
        return base | own | {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}

    def weights(self, seed: int = 0) -> Weights:
        """Random weights, including those of a confidence head."""
        draw, rank, hidden = Draw(seed + 1), self.rank, self.hidden
        tensors = super().weights(seed) | {
            "markov_head.markov_w1.weight": 3 * draw.matrix(self.vocab, rank),
            "markov_head.markov_w2.weight": 3 * draw.matrix(self.draft_vocab, rank),
            "confidence_head.proj.weight": draw.matrix(1, hidden + rank),
            "confidence_head.proj.bias": draw.norm(1),
        }
        sizes = {"gated": ("gate_proj", rank, hidden + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + hidden)}
        if self.markov in sizes:
            name, width, inner = sizes[self.markov]
            tensors[f"markov_head.{name}.weight"] = 2 * draw.matrix(width, inner)
            tensors[f"markov_head.{name}.bias"] = draw.norm(width)
        return tensors


class Definition(dflash.Definition):
    """Reference draft in float32 with the context of one text."""

    def chain(self, newest: int, window: int, choose: Callable[[torch.Tensor], int]) -> tuple[torch.Tensor, list[int]]:
        """Logits [window, draft vocabulary] of the tokens after ``newest``, and the tokens that ``choose`` picks."""
        head, scores, tokens = self.head, [], [newest]
        assert isinstance(head, DSparkHead)
        memory = torch.zeros(head.rank)
        for state in self.states(newest, window):
            word = self.weights["markov_head.markov_w1.weight"][tokens[-1]]
            if head.markov == "gated":
                word = self._matmul("gate_proj", state, word).sigmoid() * word
            elif head.markov == "rnn":
                kept, candidate, output = self._matmul("joint_proj", memory, word, state).chunk(3)
                memory = kept.sigmoid() * memory + (1 - kept.sigmoid()) * candidate.tanh()
                word = output.tanh()
            scores.append(self.score(state[None])[0] + self.weights["markov_head.markov_w2.weight"] @ word)
            tokens.append(choose(scores[-1]))
        return torch.stack(scores), tokens[1:]

    def _matmul(self, name: str, *parts: torch.Tensor) -> torch.Tensor:
        weight, bias = (self.weights[f"markov_head.{name}.{kind}"] for kind in ("weight", "bias"))
        return weight @ torch.cat(parts) + bias
