"""A request from the caller's side: its parameters, its end and its outputs."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.engines.validation.errors import named
from tandemrt.plugins.operators.constants import Rule
from tandemrt.runtime.device.slot_state import SlotParams
from tandemrt.runtime.grammars.engine_choice import choose_engine
from tandemrt.runtime.requests.images import PromptImages
from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tandemrt.runtime.requests.text import TextDelta
from tandemrt.runtime.requests.trace import RequestTrace
from tandemrt.runtime.workers.clients import UNNAMED, Client

log = logging.getLogger(__name__)

OutputListener = Callable[["StreamOutput"], None]


@dataclass(frozen=True)
class Finish:
    """Why a request ends.

    Attributes:
        reason: RequestOutput.finish_reason.
        failure: the exception that ended the request, or None.
        stop_reason: RequestOutput.stop_reason.
        error: RequestOutput.error. None: the kind and the message of ``failure``, if there is one.
    """

    reason: str
    failure: BaseException | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    @property
    def message(self) -> str | None:
        """``error``, or else the kind and the message of ``failure``."""
        return named(self.failure) if self.error is None and self.failure is not None else self.error


class Request:
    """A request of a caller, from admission to its end.

    QueuedRequest and RunningRequest refer to this object while the request is in the queue and in a slot. ``cancel``
    may be called from any thread; ``finish`` and ``notify`` are called by the engine loop's thread only. ``finish``
    sets the output and ``notify`` passes it to the listener. The loop frees the slot and updates the metrics between
    the two, so that a listener may read them or submit the next request.

    Args:
        prompt: token ids.
        num_draft_tokens: largest number of draft tokens per round.
        draft_temperature: temperature of the draft model; 0: greedy. None: the temperature of ``params``.
        client: the sender, for FairQueue.
        listener: called with every StreamOutput, in the engine loop's thread.
        arrival_time: when the caller sent the request, in seconds of ``time.monotonic``; its timeout starts then. None:
            now.
        index: which output of the prompt it is.
        scores_prompt: whether the output replays another request's prompt for ``prompt_logprobs``.
        streams: whether the listener wants each part of the output; if not, it gets all of it at the end.
        images: those of the prompt.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        max_tokens: int,
        num_draft_tokens: int,
        draft_temperature: float | None = None,
        client: Client = UNNAMED,
        listener: OutputListener,
        arrival_time: float | None = None,
        index: int = 0,
        scores_prompt: bool = False,
        streams: bool = True,
        images: PromptImages | None = None,
    ) -> None:
        self.prompt = list(prompt)
        self.images = images
        self.params = params
        self.seed = seed
        self.max_tokens = max_tokens
        self.num_draft_tokens = num_draft_tokens
        self.draft_temperature = params.temperature if draft_temperature is None else draft_temperature
        self.client = client
        self.trace: RequestTrace | None = None  # None: the request is not traced
        self.index = index
        self.scores_prompt = scores_prompt
        self.streams = streams
        self.others: Sequence[Request] = ()  # only on the first output of a prompt: the prompt's other requests
        self.prompt_cached = False  # whether the caches hold all of the prompt that other requests can reuse
        self.synthetic = params.synthetic_acceptance_length  # an argument of verification, which has no such rule
        self.rule = Rule.REJECTION if params.rule == "rejection" else Rule.COUPLED
        self.needs_probs = params.temperature > 0 and (params.filters or self.rule is Rule.REJECTION)  # see Engine.bind
        structured = params.structured_outputs
        self.grammar_engine = None if structured is None else choose_engine(structured)
        self.submitted = time.monotonic()
        self.joined: float | None = None  # when it first joined a slot
        self.first_token_time: float | None = None  # when its first token became text
        self.ended: float | None = None
        arrival_time = self.submitted if arrival_time is None else arrival_time
        self.deadline = arrival_time + params.timeout_s if params.timeout_s is not None else None
        self.output: RequestOutput | None = None  # None until the request has finished
        self.failure: BaseException | None = None
        self._listener = listener
        self._end_notified = False
        self._cancelled = False

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and output together."""
        return len(self.prompt) + self.max_tokens

    @property
    def finished(self) -> bool:
        return self.output is not None

    @property
    def finish_reason(self) -> str | None:
        return self.output.finish_reason if self.output else None

    def slot_params(self) -> SlotParams:
        """See SlotOccupant."""
        return {
            "temperature": self.params.temperature,
            **self.params.filter_values(),
            "seed": self.seed - 2**64 if self.seed >= 2**63 else self.seed,
            "rule": int(self.rule),
            "draft_temperature": self.draft_temperature,
        }

    def new_speculation(self) -> "Speculation":
        """Return a record that has counted nothing yet."""
        return Speculation(self.num_draft_tokens, synthetic=self.synthetic is not None)

    def cancel(self) -> None:
        """Ask the engine loop to end the request, which it does within a round. Safe from any thread."""
        self._cancelled = True

    def interrupted(self, now: float) -> Finish | None:
        """Return how the request must end at ``now`` (seconds of ``time.monotonic``), or None if it may go on."""
        if self._cancelled:
            return Finish("cancelled")
        return Finish("timeout") if self.deadline is not None and now >= self.deadline else None

    def empty_output(self, finish: Finish) -> "RequestOutput":
        """Return the output of a request that ends without text."""
        return RequestOutput(
            text="",
            reasoning="",
            token_ids=[],
            prompt_token_ids=self.prompt,
            finish_reason=finish.reason,
            stop_reason=finish.stop_reason,
            seed=self.seed,
            speculation=self.new_speculation(),
            error=finish.message,
            grammar_engine=self.grammar_engine,
            index=self.index,
            logprobs=None if self.params.logprobs is None else [],
        )

    def finish(self, finish: Finish, output: "RequestOutput | None" = None) -> None:
        """Set the output (None: without text) and the failure. Only the first call has an effect."""
        if self.finished:
            return
        self.ended = time.monotonic()
        self.failure = finish.failure
        self.output = self.empty_output(finish) if output is None else output

    def notify(self, item: "StreamOutput") -> None:
        """Pass ``item`` to the listener: the end of the request once, and nothing after it.

        If the listener raises anything, SystemExit included, the request is cancelled. Other requests go on.
        """
        if self._end_notified:
            return
        self._end_notified = item.output is not None
        try:
            self._listener(item)
        except BaseException:
            log.exception("the listener of a request failed; the request is cancelled")
            self.cancel()


@dataclass(frozen=True)
class RequestOutput:
    """The output of a finished request.

    Attributes:
        finish_reason: "stop" (a stop token, a stop string, or the end of the grammar), "length" (``max_tokens`` or the
            engine's length), "constraint" (no token was allowed any more, or the finished text failed the validation
            that ``validate_output`` asked for; ``error`` has the problem), "cancelled", "timeout" or "error".
        stop_reason: the stop string or stop token that ended the text.
        reasoning_tokens: number of reasoning tokens in ``token_ids``, without delimiters.
        forced_ends: number of times that a thinking budget ended the reasoning.
        num_cached_tokens: prompt tokens that the caches held when the request joined a slot.
        error: kind and message of the failure ("BadRequest: ...").
        grammar_engine: the grammar library that constrained a structured output.
        logprobs: of ``token_ids``; None if the request asked for none.
        prompt_logprobs: of ``prompt_token_ids[1:]``; None if the request asked for none.
        index: which output of the prompt this is.
        others: only on the first output of a prompt: the other outputs, if ``n`` asked for several.
    """

    text: str
    reasoning: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    seed: int
    speculation: "Speculation"
    reasoning_tokens: int = 0
    forced_ends: int = 0
    num_cached_tokens: int = 0
    error: str | None = None
    grammar_engine: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    index: int = 0
    others: "tuple[RequestOutput, ...]" = ()

    @property
    def outputs(self) -> "tuple[RequestOutput, ...]":
        """All outputs of the prompt, by index."""
        return (self, *self.others)


@dataclass(frozen=True)
class StreamOutput:
    """A part of a stream: text and tokens that became final.

    Attributes:
        output: the whole output; set on the last part of each output only.
        logprobs: of ``token_ids``; None if the request asked for none.
        index: which output of the prompt this part belongs to.
    """

    delta: TextDelta
    token_ids: list[int]
    output: RequestOutput | None = None
    logprobs: list[TokenLogprobs] | None = None
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


@dataclass
class Speculation:
    """Speculation statistics of one request, with the field names that load generators read.

    Attributes:
        num_spec_tokens: largest number of draft tokens per step.
        num_spec_steps: number of verified draft windows.
        num_draft_tokens: drafted tokens that were verified.
        num_accepted_draft_tokens: drafted tokens that were accepted and stayed in the output.
        acceptance_histogram: element n counts the steps that accepted n drafted tokens. The token that verification
            adds is not counted.
        synthetic: whether acceptance was synthetic, independent of the target.
    """

    num_spec_tokens: int
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    synthetic: bool = False

    def __post_init__(self) -> None:
        self.acceptance_histogram = self.acceptance_histogram or [0] * (self.num_spec_tokens + 1)

    @classmethod
    def total(cls, records: "Sequence[Speculation]") -> "Speculation":
        """Return the sum over the outputs of one prompt."""
        return cls(
            records[0].num_spec_tokens,
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
        """Tokens per step: 1 + accepted / steps. A step without drafts emits one token."""
        return 1 + self.num_accepted_draft_tokens / max(1, self.num_spec_steps)

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def record(self, *, drafted: int, kept: int, emitted: int) -> int:
        """Count one step and return the number of drafted tokens that were accepted.

        ``drafted`` tokens were verified, verification emitted ``emitted`` tokens, and ``kept`` of those stay in the
        output. Tokens cut off by the end of the request do not count as accepted, so that 1 + accepted / steps is the
        number of tokens per step.
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
            "num_spec_tokens": self.num_spec_tokens,
            **({"synthetic": True} if self.synthetic else {}),
        }
