"""What a target says of a text: the states that heads read, and the laws that drafts learn."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional


class Lesson(NamedTuple):
    """Of texts [texts, length]: ``features`` [texts, length, layers * hidden], the law [texts, length, drafted] of the
    token behind each place, over the tokens that are drafted, and the likeliest token there [texts, length]."""

    features: torch.Tensor
    laws: torch.Tensor
    best: torch.Tensor


@torch.no_grad()
def teach(target: Any, tokens: torch.Tensor, layers: Sequence[int], drafted: torch.Tensor | None) -> Lesson:
    """``layers`` are read by their inputs; ``drafted`` are ids of the target, None for all."""
    output = target(input_ids=tokens, use_cache=False, output_hidden_states=bool(layers))
    states = [output.hidden_states[layer] for layer in layers]
    features = torch.cat(states, -1) if states else output.logits[..., :0]
    laws = output.logits.softmax(-1)
    return Lesson(features, laws if drafted is None else laws[..., drafted], output.logits.argmax(-1))


def score(
    logits: torch.Tensor, laws: torch.Tensor, best: torch.Tensor, matters: torch.Tensor, drafted: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean divergence of drafts from laws [..., drafted], weighed by ``matters`` [...], and which part of the likeliest
    tokens is foreseen.

    Forward KL (Hinton et al., 2015, at temperature 1). A law whose other tokens cannot be drafted sums to less than 1.
    """
    divergence = functional.kl_div(logits.log_softmax(-1), laws, reduction="none").sum(-1)
    foreseen = logits.detach().argmax(-1)
    right = (foreseen if drafted is None else drafted[foreseen]) == best
    whole = matters.sum().clamp(min=1e-9)
    return (divergence * matters).sum() / whole, (right * matters).sum() / whole
