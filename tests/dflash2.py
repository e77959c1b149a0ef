"""DFlash2 drafts with random weights, and a reference implementation of such a draft in plain torch.

The definitions and names are those of z-lab's published model file and of the package ``speculators``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests import dflash
from tests.dflash import BlockHead
from tests.heads import Draw, Weights

SELECTOR = "candidate_selector"


@dataclass(frozen=True)
class DFlash2Head(BlockHead):
    """The shape of a draft, whose vocabulary is the target's."""

    taps: int = 2
    group: int = 8
    rank: int = 6
    candidates: int = 4

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        own = {"conv_kernel_size": self.taps, "conv_group_size": self.group}
        own |= {"selector_rank": self.rank, "selector_top_k": self.candidates}
        base = super().config() | {"architectures": ["DFlash2DraftModel"]}
        if self.flat:
            return base | {"dflash_config": base["dflash_config"] | own}
        return base | own | {"speculators_model_type": "dflash2", "sliding_window_non_causal": False}

    def weights(self, seed: int = 0) -> Weights:
        """Random weights. The stored taps are near those of a layer without convolutions."""
        draw, hidden = Draw(seed + 1), self.hidden
        tensors = super().weights(seed)
        for layer in range(self.layers):
            for sublayer in ("attention", "mlp"):
                name, width = f"layers.{layer}.{sublayer}_conv", 2 * self.taps * hidden // self.group
                base = draw.matrix(2 * self.taps, hidden).view(2, self.taps, hidden)
                base[:, 0] += 1
                tensors[f"{name}.base_kernel"] = base
                tensors[f"{name}.kernel_projection.weight"] = draw.matrix(width, hidden)
        for kind in ("predecessor", "successor"):
            tensors[f"{SELECTOR}.{kind}_codebook"] = 3 * draw.matrix(self.vocab, self.rank)
        return tensors | {f"{SELECTOR}.hidden_projection.weight": draw.matrix(self.rank, hidden)}


class Definition(dflash.Definition):
    """Reference draft in float32 with the context of one text."""

    def chain(self, newest: int, window: int, choose: Callable[[torch.Tensor], int]) -> tuple[torch.Tensor, list[int]]:
        """Logits [window, vocabulary] of the tokens after ``newest``, and the tokens that ``choose`` picks."""
        head, scores, tokens = self.head, [], [newest]
        assert isinstance(head, DFlash2Head)
        for state in self.states(newest, window):
            unary = self.score(state[None])[0]
            likely = unary.topk(head.candidates).indices
            pair = self.weights[f"{SELECTOR}.predecessor_codebook"][tokens[-1]]
            pair = pair * (self.weights[f"{SELECTOR}.hidden_projection.weight"] @ state)
            row = torch.full_like(unary, -torch.inf)
            row[likely] = unary[likely] + self.weights[f"{SELECTOR}.successor_codebook"][likely] @ pair
            scores.append(row)
            tokens.append(choose(row))
        return torch.stack(scores), tokens[1:]

    def before(self, name: str, sublayer: str, x: torch.Tensor) -> torch.Tensor:
        """See Layers.before: the convolution of the input, whose token-wise weights also serve the output."""
        assert isinstance(self.head, DFlash2Head)
        projection = self.weights[f"{name}.{sublayer}_conv.kernel_projection.weight"]
        self._kernels = (x @ projection.T).view(len(x), 2, self.head.taps, -1)
        return self._convolved(f"{name}.{sublayer}_conv", 0, x)

    def after(self, name: str, sublayer: str, y: torch.Tensor) -> torch.Tensor:
        """See Layers.after."""
        return self._convolved(f"{name}.{sublayer}_conv", 1, y)

    def _convolved(self, name: str, side: int, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.head, DFlash2Head)
        y = torch.zeros_like(x)
        for tap in range(self.head.taps):
            kernel = self._kernels[:, side, tap].repeat_interleave(self.head.group, -1)
            weight = self.weights[f"{name}.base_kernel"][side, tap] + kernel
            for token in range(tap, len(x)):
                y[token] += weight[token] * x[token - tap]
        return y
