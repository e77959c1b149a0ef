"""Train heads that read their own states: several steps after each position of a text, for all positions at once.

A row stands for a position. Its first step sees the target's states up to the position; each further step also sees the
states of the steps before at the same position, as in drafting (the "training-time test" of EAGLE-3, arXiv 2503.01840).
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tools.drafts.layers import Attend
from tools.drafts.teacher import score, teach
from tools.drafts.texts import Batch


class FeedbackHead(nn.Module):
    """A head of ``target`` that reads its states ``features`` (the inputs of these layers), and then its own.

    It drafts the tokens ``vocabulary`` (ascending ids of the target; None for all), and is trained for ``ahead`` tokens
    after each position.
    """

    vocabulary: torch.Tensor | None

    def __init__(self, target: Any, vocabulary: torch.Tensor | None, features: Sequence[int], ahead: int) -> None:
        super().__init__()
        self.features, self.ahead = tuple(features), ahead
        self._target = [target]  # in a list, so that it is not a submodule
        self.register_buffer("vocabulary", vocabulary, persistent=False)

    @abstractmethod
    def begin(self, features: torch.Tensor) -> torch.Tensor:
        """Return the states [batch, length, hidden] that the first step reads."""

    @abstractmethod
    def step(
        self, embedded: torch.Tensor, state: torch.Tensor, places: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits, and the states for the next step, from embeddings and states [batch, length, hidden]."""

    def parameters_to_learn(self) -> list[nn.Parameter]:
        """As Draft.parameters_to_learn."""
        return list(self.parameters())

    def losses(self, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """As Draft.losses: the divergence of each step from the target's distribution over the draft's vocabulary."""
        tokens = batch.ids.clamp(min=0)
        lesson = teach(self._target[0], tokens, self.features, self.vocabulary)
        answers = torch.arange(tokens.shape[1], device=tokens.device) >= batch.begins[:, None] - 1
        matters = ((batch.ids >= 0) & answers).float()
        total, right = tokens.new_zeros((), dtype=torch.float32), []
        for step, logits in enumerate(self(tokens, lesson.features, self.ahead)):
            places = (slice(None), slice(1 + step, None))  # positions whose distribution this step predicts
            loss, right_of_step = score(
                logits, lesson.probabilities[places], lesson.best[places], matters[places], self.vocabulary
            )
            total = total + loss * 0.8**step
            right.append(right_of_step)
        return total, right

    def forward(self, ids: torch.Tensor, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Return logits [batch, length - 1 - step, drafted tokens] of each step.

        ``ids`` [batch, length], ``features`` [batch, length, layers * hidden]. Row j of step s predicts the token at
        j + 2 + s: it has the state of token j and the tokens up to j + 1 + s.
        """
        state, attend, logits_of_steps = self.begin(features[:, :-1]), _Unrolled(), []
        for step in range(steps):
            rows = ids.shape[1] - 1 - step
            places = torch.arange(rows, device=ids.device) + step
            with torch.no_grad():
                embedded = self._target[0].model.embed_tokens(ids[:, 1 + step :])
            logits, state = self.step(embedded, state[:, :rows], places, attend)
            logits_of_steps.append(logits)
        return logits_of_steps


class _Unrolled:
    """Attention of one layer, step by step: a row sees the first step up to its position, and its own later steps."""

    def __init__(self) -> None:
        self._made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        length = query.shape[2]
        self._made.append((key, value))
        (first_key, first_value), *further = [(key[:, :, :length], value[:, :, :length]) for key, value in self._made]
        later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        scores = (query @ first_key.transpose(2, 3)).masked_fill(later, float("-inf"))
        own = [(query * key).sum(-1, keepdim=True) for key, _ in further]
        weights = (torch.cat([scores, *own], -1) / query.shape[-1] ** 0.5).softmax(-1)
        mixed: torch.Tensor = weights[..., :length] @ first_value
        for at, (_, value) in enumerate(further):
            mixed = mixed + weights[..., length + at, None] * value
        return mixed
