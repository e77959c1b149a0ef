"""What the runtime counted, held against what the answers say."""

from collections import Counter
from dataclasses import dataclass, field

from tandemrt.runtime.metrics import Metrics
from tools.soak.answers import Answer

Rules = dict[str, bool]
"""A sentence for each, with the figures in it, and whether it holds."""


@dataclass
class Tally:
    """What the answers of a wave come to. What became of a stream that was left, its client never heard."""

    ended: Counter[str] = field(default_factory=Counter)
    left: int = 0
    unseen: int = 0  # answers without an output: an exception in its place, or nobody who heard it
    tokens: int = 0
    of_errors: int = 0  # of those, in answers that ended with an error: what broke may not have been counted
    steps: int = 0
    accepted: int = 0

    def add(self, answer: Answer) -> None:
        """Note how one turn ended."""
        if answer.left:
            self.left += 1
        else:
            self.ended[answer.reason] += 1
        if answer.left or answer.output is None:
            self.unseen += 1
            return
        self.tokens += len(answer.output.token_ids)
        self.of_errors += len(answer.output.token_ids) if answer.reason == "error" else 0
        self.steps += answer.output.speculation.num_spec_steps
        self.accepted += answer.output.speculation.num_accepted_draft_tokens

    def rules(self, counted: Metrics) -> Rules:
        """What must hold of what was ``counted`` in the wave: by itself, and beside the answers."""
        rules = self.ends(counted.finished) | _sums(counted)
        if self.unseen:
            return rules
        mine, theirs = (self.steps, self.accepted), (counted.steps, sum(counted.accepted))
        return rules | {
            f"kept {counted.kept}, answers hold {self.tokens}, {self.of_errors} of them with errors": 0
            <= self.tokens - counted.kept
            <= self.of_errors,
            f"steps and accepted drafts {theirs}, answers {mine}": mine == theirs,
        }

    def ends(self, finished: dict[str, int]) -> Rules:
        """Every turn was counted once, for the reason that it was told."""
        more = Counter(finished)
        more.subtract(self.ended)
        return {
            f"finished {finished}, answered {dict(self.ended)}, {self.left} left": more.total() == self.left
            and all(count >= 0 for count in more.values())
        }


def _sums(metrics: Metrics) -> Rules:
    return {
        f"drafted {metrics.drafted} = {metrics.evaluated} + {metrics.cut_drafts}": metrics.drafted
        == metrics.evaluated + metrics.cut_drafts,
        f"emitted {metrics.emitted} >= kept {metrics.kept}": metrics.emitted >= metrics.kept,
        "every step is in the histogram": metrics.accepted_per_step.count == metrics.steps,
        "no request had two slots": metrics.queue_seconds.count <= sum(metrics.finished.values()),
    }
