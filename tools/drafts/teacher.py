"""Outputs of a target for a text: the states that heads read, and the distributions that drafts learn."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional


class Lesson(NamedTuple):
    """Outputs for texts [texts, length].

    Attributes:
        features: states [texts, length, layers * hidden].
        probabilities: the distribution of the next token over the drafted tokens [texts, length, drafted].
        best: the most likely next token [texts, length].
    """

    features: torch.Tensor
    probabilities: torch.Tensor
    best: torch.Tensor


@torch.no_grad()
def teach(target: Any, tokens: torch.Tensor, layers: Sequence[int], drafted: torch.Tensor | None) -> Lesson:
    """Run the target. ``layers``: layers whose inputs are read. ``drafted``: ids of the target, None for all."""
    output = target(input_ids=tokens, use_cache=False, output_hidden_states=bool(layers))
    states = [output.hidden_states[layer] for layer in layers]
    features = torch.cat(states, -1) if states else output.logits[..., :0]
    probabilities = output.logits.softmax(-1)
    return Lesson(features, probabilities if drafted is None else probabilities[..., drafted], output.logits.argmax(-1))


def score(
    logits: torch.Tensor,
    probabilities: torch.Tensor,
    best: torch.Tensor,
    matters: torch.Tensor,
    drafted: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean divergence from ``probabilities`` [..., drafted], and the share of predicted best tokens.

    ``matters`` [...] are weights. The loss is forward KL (Hinton et al., 2015, at temperature 1). Probabilities over a
    part of the tokens sum to less than 1.
    """
    divergence = functional.kl_div(logits.log_softmax(-1), probabilities, reduction="none").sum(-1)
    foreseen = logits.detach().argmax(-1)
    right = (foreseen if drafted is None else drafted[foreseen]) == best
    whole = matters.sum().clamp(min=1e-9)
    return (divergence * matters).sum() / whole, (right * matters).sum() / whole
