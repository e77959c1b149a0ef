"""Compare the runtime's counters with the answers."""

from collections import Counter
from dataclasses import dataclass, field

from tandemrt.runtime.metrics.metrics import Metrics
from tools.quality.soak.answers import Answer

Rules = dict[str, bool]
"""A description of each rule, with its figures, and whether the rule holds."""


@dataclass
class Tally:
    """Sums over the answers of a wave.

    Attributes:
        ended: answers by finish reason, without abandoned streams.
        abandoned: streams that their client closed. Their finish reason is unknown.
        refused: answers without an output for want of a thread. The runtime may not have admitted the request.
        unseen: answers without an output, and abandoned streams.
        tokens: tokens of all outputs.
        error_tokens: tokens of outputs that ended with an error. The runtime may not have counted the last ones.
        steps: verification steps of all outputs.
        accepted: accepted draft tokens of all outputs.
    """

    ended: Counter[str] = field(default_factory=Counter)
    abandoned: int = 0
    refused: int = 0
    unseen: int = 0
    tokens: int = 0
    error_tokens: int = 0
    steps: int = 0
    accepted: int = 0

    def add(self, answer: Answer) -> None:
        """Count an answer."""
        if answer.abandoned:
            self.abandoned += 1
        elif answer.refused:
            self.refused += 1
        else:
            self.ended[answer.reason] += 1
        if answer.abandoned or answer.output is None:
            self.unseen += 1
            return
        self.tokens += len(answer.output.token_ids)
        self.error_tokens += len(answer.output.token_ids) if answer.reason == "error" else 0
        self.steps += answer.output.speculation.num_spec_steps
        self.accepted += answer.output.speculation.num_accepted_draft_tokens

    def rules(self, counted: Metrics) -> Rules:
        """Return the rules for the metrics ``counted`` in the wave: within themselves, and against the answers."""
        rules = self._finish_reasons(counted.finished) | _sums(counted)
        if self.unseen:
            return rules
        ours, theirs = (self.steps, self.accepted), (counted.steps, sum(counted.accepted))
        return rules | {
            f"kept {counted.kept}, answers hold {self.tokens}, {self.error_tokens} of them with errors": 0
            <= self.tokens - counted.kept
            <= self.error_tokens,
            f"steps and accepted drafts {theirs}, answers {ours}": ours == theirs,
        }

    def _finish_reasons(self, finished: dict[str, int]) -> Rules:
        """Every request is counted once, with the finish reason of its answer."""
        more = Counter(finished)
        more.subtract(self.ended)
        return {
            f"finished {finished}, answered {dict(self.ended)}, {self.abandoned} abandoned, {self.refused} refused": (
                self.abandoned <= more.total() <= self.abandoned + self.refused
            )
            and all(count >= 0 for count in more.values())
        }


def _sums(metrics: Metrics) -> Rules:
    return {
        f"drafted {metrics.drafted} = {metrics.evaluated} + {metrics.constraint_rejected_drafts}": metrics.drafted
        == metrics.evaluated + metrics.constraint_rejected_drafts,
        f"emitted {metrics.emitted} >= kept {metrics.kept}": metrics.emitted >= metrics.kept,
        "every step is in the histogram": metrics.accepted_per_step.count == metrics.steps,
        "no request had two slots": metrics.queue_seconds.count <= sum(metrics.finished.values()),
    }
