"""DFlash drafts with random weights, and a reference implementation of such a draft in plain torch.

"DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv 2602.06036), and the package ``speculators``.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.heads import Draw, Layers, Weights, layer_config, save_head


@dataclass(frozen=True)
class BlockHead:
    """The shape of a draft. ``sliding``: layers with a sliding window, which see no later token of their draft block.

    ``sample_from_anchor``: each token of the draft block predicts the next one, the newest too.
    """

    vocab: int
    hidden: int
    draft_vocab: int
    block: int
    mask_token: int
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    features: tuple[int, ...] = (1, 0)
    sliding: tuple[bool, ...] = (False, False)
    sample_from_anchor: bool = False
    flat: bool = False  # the format of z-lab
    max_length: int = 256

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        layer = layer_config(self, "qwen3")
        if self.flat:
            ids = [each - 1 for each in self.features]  # z-lab counts layers by their outputs
            how = {"mask_token_id": self.mask_token, "target_layer_ids": ids}
            return {"architectures": ["DFlashDraftModel"], **layer, "block_size": self.block, "dflash_config": how}
        slides = {"layer_types": ["sliding_attention" if each else "full_attention" for each in self.sliding]}
        return {
            "architectures": ["DFlashDraftModel"],
            "speculators_model_type": "dflash",
            "draft_vocab_size": self.draft_vocab,
            "aux_hidden_state_layer_ids": list(self.features),
            "block_size": self.block,
            "mask_token_id": self.mask_token,
            "sample_from_anchor": self.sample_from_anchor,
            "transformer_layer_config": layer | slides | {"sliding_window": self.max_length},
        }

    def weights(self, seed: int = 0) -> Weights:
        """Random weights, without an embedding, and with an own lm_head for a reduced vocabulary."""
        draw, hidden = Draw(seed), self.hidden
        tensors = {"fc.weight": draw.matrix(hidden, len(self.features) * hidden)}
        tensors |= {f"{name}.weight": draw.norm(hidden) for name in ("hidden_norm", "norm")}
        if self.draft_vocab < self.vocab:
            tensors["lm_head.weight"] = 3 * draw.matrix(self.draft_vocab, hidden)
        sizes = {"hidden": hidden, "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        for layer in range(self.layers):
            tensors |= draw.layer(f"layers.{layer}", **sizes, family="qwen3")
        return tensors | draw.vocabulary(self.vocab, self.draft_vocab)

    def save(self, folder: Path, weights: Weights | None = None, **changes: object) -> Path:
        """Write the checkpoint; ``changes`` replace fields of its config. Return the folder."""
        return save_head(folder, self.weights() if weights is None else weights, self.config() | changes)


class Definition(Layers):
    """Reference draft in float32 with the context of one text."""

    def __init__(self, head: BlockHead, weights: Weights, embedding: torch.Tensor, lm_head: torch.Tensor) -> None:
        super().__init__(weights, head.head_dim)
        self.head = head
        self._embedding = embedding
        self._lm_head = weights.get("lm_head.weight", lm_head)

    def context(self, features: torch.Tensor) -> None:
        """Append the target's ``features`` [tokens, …] of the tokens after those in the cache."""
        state, begin = self.norm(features @ self.weights["fc.weight"].T, "hidden_norm"), self.held
        for layer in range(self.head.layers):
            self.write(f"layers.{layer}", state, begin)

    def draft(self, newest: int, window: int) -> torch.Tensor:
        """Logits [window, draft vocabulary] of the tokens after ``newest``. The cache does not change."""
        return self.score(self.states(newest, window))

    def states(self, newest: int, window: int) -> torch.Tensor:
        """[window, hidden]: the states from which the tokens after ``newest`` are scored."""
        begin = self.held
        x = self._embedding[torch.tensor([newest, *[self.head.mask_token] * (self.head.block - 1)])]
        for layer in range(self.head.layers):
            name = f"layers.{layer}"
            x = self.block(name, x, self.norm(x, f"{name}.input_layernorm"), begin, causal=self.head.sliding[layer])
        self.keep(begin)
        first = 0 if self.head.sample_from_anchor else 1
        return self.norm(x, "norm")[first : first + window]

    def score(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [tokens, draft vocabulary] of ``states`` [tokens, hidden]."""
        return states @ self._lm_head.T
