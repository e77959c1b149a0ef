"""Multi-token prediction (MTP) layers with random weights, and a reference implementation in plain torch.

DeepSeek-AI, "DeepSeek-V3" (arXiv 2412.19437), in the three published forms. The state after the
layer's last norm is fed back.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.heads import Draw, Layers, Weights

# Where a form stores the layer, and its tensor names. MiMo reads the state first.
FORMS = {
    "deepseek": ("model.layers.{index}", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "mimo": ("model.mtp_layers.{at}", ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")),
    "speculators": ("mtp_layers.{at}", ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")),
}


@dataclass(frozen=True)
class MtpLayer:
    """The shape and form of a layer after ``target_layers`` others.

    With ``experts``, a token takes two of them instead of an MLP. ``at``: the number of MTP layers before it.
    """

    hidden: int
    target_layers: int
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    form: str = "deepseek"
    experts: int = 0
    at: int = 0

    @property
    def prefix(self) -> str:
        return FORMS[self.form][0].format(index=self.target_layers + self.at, at=self.at)

    def named(self, part: int) -> str:
        return f"{self.prefix}.{FORMS[self.form][1][part]}"

    def weights(self, seed: int = 0) -> Weights:
        """Random weights. One number of the last norm is large, so that few tokens are likely."""
        draw, hidden = Draw(seed), self.hidden
        sizes = {"hidden": hidden, "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        tensors = draw.layer(self.prefix, **sizes, family="qwen3")
        tensors |= {f"{self.named(part)}.weight": draw.norm(hidden) for part in (0, 1, 3)}
        tensors[f"{self.named(3)}.weight"][3] = 40
        mlp = f"{self.prefix}.mlp"
        if self.experts:
            shapes = {kind: tensors.pop(f"{mlp}.{kind}_proj.weight").shape for kind in ("gate", "up", "down")}
            tensors[f"{mlp}.gate.weight"] = draw.matrix(self.experts, hidden)
            for index, (kind, shape) in product(range(self.experts), shapes.items()):
                tensors[f"{mlp}.experts.{index}.{kind}_proj.weight"] = draw.matrix(*shape)
        return tensors | {f"{self.named(2)}.weight": draw.matrix(hidden, 2 * hidden)}


class Definition(Layers):
    """Reference layer in float32 with its own cache, for one text."""

    def __init__(
        self, layer: MtpLayer, weights: Weights, embedding: torch.Tensor, lm_head: torch.Tensor, *, eps: float = 1e-6
    ) -> None:
        super().__init__(weights, layer.head_dim, eps)
        self._layer, self._embedding, self._lm_head = layer, embedding, lm_head

    def __call__(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed pairs after those in the cache; return logits [tokens, vocab] and the states to feed back."""
        layer, name, begin = self._layer, self._layer.prefix, self.held
        pair = [self.norm(self._embedding[tokens], layer.named(0)), self.norm(states, layer.named(1))]
        both = torch.cat(pair[::-1] if layer.form == "mimo" else pair, -1)
        stream = both @ self.weights[f"{layer.named(2)}.weight"].T
        stream = self.block(name, stream, self.norm(stream, f"{name}.input_layernorm"), begin)
        last = self.norm(stream, layer.named(3))
        return last @ self._lm_head.T, last

    def mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The two experts with the highest router scores of each token, weighted by the softmax of these two scores."""
        if not self._layer.experts:
            return super().mlp(name, x)
        best, chosen = (x @ self.weights[f"{name}.gate.weight"].T).topk(2)
        outputs = torch.stack(
            [super(Definition, self).mlp(f"{name}.experts.{i}", x) for i in range(self._layer.experts)]
        )
        return torch.einsum("tk,tkh->th", best.softmax(-1), outputs[chosen, torch.arange(len(x))[:, None]])


def add_layers(folder: Path, layers: Sequence[MtpLayer], seed: int = 0) -> list[tuple[MtpLayer, Weights]]:
    """Write random ``layers`` into the checkpoint of their target in ``folder``; return them."""
    weights_of_layers = [(each, each.weights(seed + each.at)) for each in layers]
    weights = load_file(folder / "model.safetensors")
    for _, own in weights_of_layers:
        weights |= own
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": len(layers)}))
    return weights_of_layers


def several(layer: MtpLayer, count: int, seed: int = 0) -> list[tuple[MtpLayer, Weights]]:
    """``count`` consecutive layers like ``layer``, with random weights."""
    return [(each, each.weights(seed + each.at)) for each in (replace(layer, at=at) for at in range(count))]


def drafted(
    layers: Sequence[tuple[MtpLayer, Weights]],
    tables: tuple[torch.Tensor, torch.Tensor],
    text: torch.Tensor,
    states: torch.Tensor,
    window: int,
) -> tuple[torch.Tensor, list[int]]:
    """Logits [window, vocab] of the tokens after ``text``, and the most likely token of each.

    ``states`` [tokens, hidden] are the target's of all tokens but the last. Layer k drafts the k-th token, over all
    positions. The last layer also drafts later tokens, from its own states.
    """
    logits_of_steps: list[torch.Tensor] = []
    tokens = text[1:]
    for at in range(window):
        if at < len(layers):
            defined = Definition(*layers[at], *tables)
            logits, states = defined(tokens, states)
        else:
            logits, states = defined(tokens[-1:], states[-1:])
        logits_of_steps.append(logits[-1])
        tokens = torch.cat([tokens[1:], logits_of_steps[-1].argmax()[None]])
    return torch.stack(logits_of_steps), [int(logits.argmax()) for logits in logits_of_steps]
