"""What a request may ask for, named as vLLM and OpenAI users know it, validated before anything runs."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, StrictBool, ValidationError, model_validator

from tandemrt.engines.errors import BadRequest
from tandemrt.engines.validation import Section, explain, refuse
from tandemrt.runtime.structured import StructuredOutputs

Token = Annotated[int, Field(strict=True, ge=0)]
Count = Annotated[int, Field(strict=True, ge=0)]


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class SamplingParams(Section):
    """How one request is sampled and constrained. Unknown names and values out of range raise BadRequest.

    The law of each token is the target's, after ``temperature``, then ``top_k``, ``top_p`` over what is left, then
    ``min_p`` relative to the largest probability; temperature 0 takes the largest logit. The same seed gives the same
    text whatever is drafted under ``rule="coupled"``; ``"rejection"`` keeps the law, not the text per seed.
    """

    model_config = ConfigDict(strict=False)  # lists for tuples; numbers are strict where it matters

    temperature: float = Field(1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: Annotated[int, Field(strict=True, ge=-1)] = 0  # 0 and -1: off
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**64)] | None = None  # None: drawn, reported in the output

    max_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None  # None: up to the engine's length
    min_tokens: Count = 0
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_listed)] = ()
    include_stop_str_in_output: StrictBool = False
    stop_token_ids: tuple[Token, ...] = ()
    ignore_eos: StrictBool = False
    allowed_token_ids: tuple[Token, ...] | None = None
    banned_token_ids: tuple[Token, ...] = ()

    thinking_token_budget: Annotated[int, Field(strict=True, ge=-1)] | None = None  # -1 and None: no budget
    structured_outputs: StructuredOutputs | None = None

    rule: Literal["coupled", "rejection"] = "coupled"
    window: Count | None = None  # drafted tokens per round, at most the engine's; 0 switches speculation off
    timeout_s: float | None = Field(None, gt=0.0, allow_inf_nan=False)  # from admission to the last token

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise BadRequest(explain(error)) from error

    @model_validator(mode="after")
    def _consistent(self) -> "SamplingParams":
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refuse(f"min_tokens must be at most max_tokens ({self.max_tokens}); got {self.min_tokens}")
        if self.allowed_token_ids is not None and not set(self.allowed_token_ids) - set(self.banned_token_ids):
            raise refuse("allowed_token_ids must leave a token that banned_token_ids does not ban")
        return self
