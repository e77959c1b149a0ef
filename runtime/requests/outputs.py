"""What a request gives back: the whole output, and the deltas of a stream."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tandemrt.runtime.requests.text import Delta


@dataclass
class Speculation:
    """How drafting went for one request, in the shape load tools read.

    A step is one verified round. ``acceptance_histogram[n]`` counts the steps in which n drafted tokens were
    accepted and kept; the token that verification adds itself is not counted. ``synthetic``: whatever the target said.
    """

    window: int
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    synthetic: bool = False

    def __post_init__(self) -> None:
        self.acceptance_histogram = self.acceptance_histogram or [0] * (self.window + 1)

    @classmethod
    def total(cls, records: "Sequence[Speculation]") -> "Speculation":
        """What the outputs of one prompt come to together."""
        return cls(
            records[0].window,
            num_spec_steps=sum(each.num_spec_steps for each in records),
            num_draft_tokens=sum(each.num_draft_tokens for each in records),
            num_accepted_draft_tokens=sum(each.num_accepted_draft_tokens for each in records),
            acceptance_histogram=[
                sum(counts) for counts in zip(*(each.acceptance_histogram for each in records), strict=True)
            ],
            synthetic=records[0].synthetic,
        )

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per step: 1 + accepted / steps."""
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def record(self, *, drafted: int, kept: int, emitted: int) -> int:
        """Count one step: ``drafted`` tokens verified, ``emitted`` by verification, ``kept`` of those in the text.

        Returns the drafted tokens that were accepted. What the end of a request cuts off was not, so
        1 + accepted / steps stays the tokens per step.
        """
        accepted = max(0, min(kept, emitted) - 1)
        self.num_spec_steps += 1
        self.num_draft_tokens += drafted
        self.num_accepted_draft_tokens += accepted
        self.acceptance_histogram[accepted] += 1
        return accepted

    def to_json(self) -> dict[str, Any]:
        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": self.acceptance_histogram,
            "num_spec_steps": self.num_spec_steps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_draft_tokens": self.num_accepted_draft_tokens,
            "num_spec_tokens": self.window,
            **({"synthetic": True} if self.synthetic else {}),
        }


@dataclass(frozen=True)
class RequestOutput:
    """One finished request.

    ``finish_reason`` is "stop" (a stop token or string, or the end of the grammar), "length" (``max_tokens`` or the
    engine's length), "constraint" (nothing was allowed any more, or the finished text failed the check that
    ``validate_output`` asked for: ``error`` says how), "cancelled", "timeout" or "error" (``error`` begins with its
    kind: "BadRequest: ...").
    """

    text: str
    reasoning: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None  # the stop string or stop token that ended the text
    seed: int
    speculation: Speculation
    reasoning_tokens: int = 0  # of token_ids, markers not counted
    forced_ends: int = 0  # how often a thinking budget closed the reasoning
    num_cached_tokens: int = 0  # tokens of the prompt that were in the caches when it came, and were not computed again
    error: str | None = None
    grammar_engine: str | None = None  # what held a structured output
    logprobs: list[TokenLogprobs] | None = None  # of token_ids, if they were asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # of prompt_token_ids[1:], likewise
    index: int = 0  # which of the prompt's outputs it is
    others: "tuple[RequestOutput, ...]" = ()  # of the first: the prompt's other outputs, where n asked for them

    @property
    def outputs(self) -> "tuple[RequestOutput, ...]":
        """All outputs of the prompt, by index."""
        return (self, *self.others)


@dataclass(frozen=True)
class StreamOutput:
    """A part of a request's text as it became certain. ``output`` is set on the last one, and only there.

    ``index``: which of the prompt's outputs it is a part of; each has a last one.
    """

    delta: Delta
    token_ids: list[int]
    output: RequestOutput | None = None
    logprobs: list[TokenLogprobs] | None = None  # of token_ids, if they were asked for
    index: int = 0

    @property
    def text(self) -> str:
        return self.delta.text

    @property
    def reasoning(self) -> str:
        return self.delta.reasoning

    @property
    def finish_reason(self) -> str | None:
        return self.output.finish_reason if self.output else None
