"""Sampling parameters of a request, with the names of vLLM and OpenAI, validated before anything runs."""

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    ValidationError,
    model_validator,
)

from tandemrt.engines.contract.draft_sampling import GreedyBelow, TemperatureScale
from tandemrt.engines.contract.sampling_parameters import FILTERS
from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.engines.validation.records import Record, Section, explain, reject


def _number(value: Any) -> Any:
    if isinstance(value, str | bytes | bool):
        raise reject(f"must be a number; got {quoted(value)}")
    return value


def _zero_or_normal(value: float) -> float:
    if 0 < value < 2.0**-126:
        raise reject(f"must be 0, which means off, or at least 2^-126; got {quoted(value)}. Use 0 or a larger number")
    return value


Token = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Number = Annotated[float, BeforeValidator(_number)]
Bias = Annotated[Number, Field(ge=-100.0, le=100.0)]
Text = Annotated[str, Field(strict=True, min_length=1)]  # rejects bytes
Whitespace = Literal["compact", "bounded", "any"]
MOST_BIASES = 1024  # tokens in logit_bias
MOST_STOPS = 256  # stop strings, and bad words, of one request
MOST_STOP_CHARACTERS = 8192  # in all of them
MOST_TOKEN_IDS = 1 << 18  # in one list: more than any vocabulary has
MOST_OUTPUTS = 128  # of one prompt


def _by_token(value: Any) -> Any:
    """Convert token ids to integers: the keys of a JSON object are strings."""
    if not isinstance(value, dict):
        return value
    if len(value) > MOST_BIASES:
        raise reject(f"must have at most {MOST_BIASES} tokens; got {len(value)}. Leave some out")
    pairs = [(int(k) if isinstance(k, str) and k.isascii() and k.isdigit() else k, bias) for k, bias in value.items()]
    twice = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]
    if twice:
        raise reject(f"must have one bias per token; got several for {twice[0]}. Keep one")
    return dict(pairs)


def _few(value: Any) -> Any:
    if isinstance(value, list | tuple) and len(value) > MOST_TOKEN_IDS:
        raise reject(f"must have at most {MOST_TOKEN_IDS} token ids; got {len(value)}. Leave some out")
    return value


TokenIds = Annotated[tuple[Token, ...], BeforeValidator(_few)]


def _texts(value: Any) -> Any:
    listed = (value,) if isinstance(value, str) else value
    if isinstance(listed, list | tuple):
        if len(listed) > MOST_STOPS:
            raise reject(f"must have at most {MOST_STOPS} strings; got {len(listed)}. Leave some out")
        characters = sum(len(each) for each in listed if isinstance(each, str))
        if characters > MOST_STOP_CHARACTERS:
            raise reject(f"must have at most {MOST_STOP_CHARACTERS} characters in all; got {characters}. Shorten it")
    return listed


def _bad_words(value: Any) -> Any:
    return () if value == "" else _texts(value)


def _false_is_none(value: Any) -> Any:
    return None if value is False else value  # OpenAI's clients send False for none


def _validated_anew(value: Any) -> Any:
    return value.model_copy() if isinstance(value, StructuredOutputs) else value


class SamplingParams(Section):
    """How one request is sampled and constrained. Unknown names and values out of range raise BadRequest.

    A parameter that is not set has the value of the checkpoint's generation_config.json (LLM option
    ``generation_config``), else the default below.

    The sampling distribution of a token is the target's, processed in this order: ``logit_bias``,
    ``repetition_penalty`` (tokens of prompt and output), ``frequency_penalty`` and ``presence_penalty`` (tokens of the
    output), constraints, ``temperature``, ``top_n_sigma`` (logits at most n standard deviations below the largest),
    ``top_k``, ``top_p`` over the remaining tokens, ``min_p`` relative to the largest probability. Temperature 0 takes
    the largest logit. Under ``rule="coupled"`` a seed gives the same text whatever is drafted; ``"rejection"`` keeps
    the distribution, but not the text of a seed.

    ``draft_sampling`` sets how a draft model samples. ``"coupled"`` uses the target's random noise.
    ``"probabilistic"``, the default under ``"rejection"``, uses noise of its own and keeps the draft's probabilities.
    ``"greedy"`` takes the most likely token under either rule, as any request below the temperature
    ``draft_greedy_below`` does. The draft's temperature is ``draft_temperature_scale`` times the request's: a scale
    below 1 sharpens the draft's distribution, which helps a draft that is less certain than its target.

    ``rule="synthetic"`` is for benchmarks: it accepts drafted tokens regardless of the target, as far as constraints
    allow them, so that a round of ``num_draft_tokens`` emits ``synthetic_acceptance_length`` tokens on average. It
    needs the runtime's option ``synthetic_rule``.

    With ``n`` outputs, output i is the output of a request with the seed ``seed`` + i (modulo 2^64).
    """

    model_config = ConfigDict(strict=False)  # lists for tuples; numbers are strict where it matters

    temperature: Number = Field(1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_p: Number = Field(1.0, ge=2.0**-126, le=1.0)  # smaller values may round to 0 in float32, which means off
    top_k: Annotated[int, Field(strict=True, ge=-1, lt=2**63)] = 0  # 0 and -1: off
    min_p: Number = Field(0.0, ge=0.0, le=1.0)
    top_n_sigma: Annotated[Number, AfterValidator(_zero_or_normal)] = Field(0.0, ge=0.0, le=100.0)
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**64)] | None = (
        None  # None: random, reported in the output
    )

    presence_penalty: Number = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: Number = Field(0.0, ge=-2.0, le=2.0)
    repetition_penalty: Number = Field(1.0, ge=2.0**-126, le=2.0**126)  # above 0, within the range of float32
    logit_bias: Annotated[dict[Token, Bias], BeforeValidator(_by_token)] | None = None

    max_tokens: Annotated[int, Field(strict=True, ge=1, lt=2**63)] | None = None  # None: up to the engine's length
    min_tokens: Count = 0
    stop: Annotated[tuple[Text, ...], BeforeValidator(_texts)] = ()
    include_stop_str_in_output: StrictBool = False
    skip_special_tokens: StrictBool = True  # False: they appear in the text, except those that end it
    stop_token_ids: TokenIds = ()
    ignore_eos: StrictBool = False
    allowed_token_ids: TokenIds | None = None
    banned_token_ids: TokenIds = ()
    bad_words: Annotated[tuple[Text, ...], BeforeValidator(_bad_words)] = ()

    thinking_token_budget: Annotated[int, Field(strict=True, ge=-1, lt=2**63)] | None = None  # -1 and None: no budget
    structured_outputs: Annotated["StructuredOutputs | None", BeforeValidator(_validated_anew)] = None

    # Logprobs of each output token and of this many most likely tokens; None: no logprobs.
    logprobs: Annotated[Annotated[int, Field(strict=True, ge=0, le=20)] | None, BeforeValidator(_false_is_none)] = None
    logprobs_mode: Literal["processed", "raw"] = "processed"

    # The same for each prompt token except the first.
    prompt_logprobs: Annotated[
        Annotated[int, Field(strict=True, ge=0, le=20)] | None, BeforeValidator(_false_is_none)
    ] = None

    n: Annotated[int, Field(strict=True, ge=1, le=MOST_OUTPUTS)] = 1  # outputs per prompt

    # Only the last tokens of a longer prompt are used; -1: as many as leave room for max_tokens.
    truncate_prompt_tokens: Annotated[int, Field(strict=True, ge=-1, lt=2**63)] | None = None

    priority: Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)] = 0  # in the queue; lower comes first

    cache_salt: Text | None = None  # requests share cached prefixes only with requests of the same salt

    rule: Literal["coupled", "rejection", "synthetic"] = "coupled"
    synthetic_acceptance_length: Number | None = Field(None, ge=1.0, le=17.0)  # tokens per round
    draft_sampling: Literal["greedy", "probabilistic", "coupled"] | None = None  # None: the bundle's
    draft_greedy_below: Annotated[GreedyBelow, BeforeValidator(_number)] | None = None  # None: the bundle's
    draft_temperature_scale: Annotated[TemperatureScale, BeforeValidator(_number)] | None = None
    num_draft_tokens: Count | None = None  # drafted tokens per round, at most the engine's; 0: no speculation
    timeout_s: Number | None = Field(None, gt=0.0, allow_inf_nan=False)  # from the call to the last token

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise BadRequest(explain(error)) from error

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> "SamplingParams":
        """Return a validated copy with the values of ``update``. Raises BadRequest."""
        return SamplingParams(**{**_given(self, deep), **(update or {})})

    @property
    def adjusts_logits(self) -> bool:
        """Whether a penalty or a bias changes logits."""
        penalizes = self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1
        return penalizes or bool(self.logit_bias)

    @property
    def filters(self) -> bool:
        """Whether a filter can remove tokens of a sampled row."""
        return any(value != FILTERS[name].off for name, value in self.filter_values().items())

    def filter_values(self) -> dict[str, float]:
        """Return the value of each filter by its name, in the form of the operators."""
        return {name: max(0, getattr(self, name)) for name in FILTERS}

    def checked(self) -> "SamplingParams":
        """Return a validated copy, in case the object was changed. Raises BadRequest."""
        return self.model_copy()

    def over(self, defaults: Mapping[str, Any]) -> "SamplingParams":
        """Return a validated copy with ``defaults`` for parameters that were not set. Raises BadRequest.

        A default ``max_tokens`` is raised to a ``min_tokens`` that was set.
        """
        values = {**defaults, **_given(self, False)}
        if "max_tokens" not in self.model_fields_set and self.min_tokens > values.get("max_tokens", self.min_tokens):
            values["max_tokens"] = self.min_tokens
        return SamplingParams(**values)

    @model_validator(mode="after")
    def _consistent(self) -> "SamplingParams":
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            most, least = quoted(self.max_tokens), quoted(self.min_tokens)
            raise reject(f"min_tokens must be at most max_tokens ({most}); got {least}. Lower it")
        if self.truncate_prompt_tokens == 0:
            raise reject("truncate_prompt_tokens must be -1 or at least 1; got 0. Leave it out to keep the prompt")
        sampled = "probabilistic" if self.rule == "rejection" else "coupled"
        if self.draft_sampling not in (None, "greedy", sampled):
            raise reject(
                f"draft_sampling must be greedy or {sampled} under the rule {self.rule}; got {self.draft_sampling}. "
                "Leave it out, or choose the other rule"
            )
        if self.draft_sampling == "greedy" and self.draft_temperature_scale is not None:
            raise reject(
                "draft_temperature_scale must not be set with draft_sampling greedy, which has no temperature; got "
                f"{quoted(self.draft_temperature_scale)}. Leave one of them out"
            )
        if (self.rule == "synthetic") != (self.synthetic_acceptance_length is not None):
            raise reject(
                "synthetic_acceptance_length must come with the rule synthetic and the rule with it; got rule "
                f"{self.rule} and {quoted(self.synthetic_acceptance_length)}. Set both or neither"
            )
        if self.rule == "synthetic" and self.logprobs is not None:
            raise reject("logprobs must not be set under the rule synthetic, which has no sampling distribution")
        if self.allowed_token_ids is not None and not set(self.allowed_token_ids) - set(self.banned_token_ids):
            raise reject("allowed_token_ids must have a token that is not in banned_token_ids; add one")
        return self


def _given(record: Record, deep: bool) -> dict[str, Any]:
    """Return the set values of a record, by the names that its constructor takes."""
    fields, named = type(record).model_fields, record.model_fields_set
    values = {
        fields[name].alias or name: value for name, value in record if name in named or value != fields[name].default
    }
    return deepcopy(values) if deep else values


class StructuredOutputs(Record):
    """The structure of an answer: exactly one of six kinds. Anything else raises BadRequest.

    Attributes:
        json: a JSON schema (draft 2020-12), as an object or a string.
        json_object: True for any JSON object.
        regex: a regular expression for the whole answer.
        choice: the answers to choose from.
        grammar: an EBNF grammar with a rule ``root``.
        structural_tag: free text with constrained tags, in either form of xgrammar, as an object or a string
            (docs/structured.md).
        whitespace: what may stand between two tokens of JSON. ``"compact"``: one layout, ``", "`` and ``": "``.
            ``"bounded"``: nothing, a space, or one or two line breaks with at most 32 spaces or tabs after them.
            ``"any"``: any whitespace. A model that does not know the schema may then write whitespace until the end.
        disable_additional_properties: objects whose schema has ``properties`` have no others unless the schema allows
            them; False: any others, as in JSON Schema.
        validate_output: accept schemas with keywords that a grammar cannot enforce, and check the finished text.
        engine: the grammar engine; None: the first one that enforces the kind exactly (docs/structured.md).
    """

    model_config = ConfigDict(strict=False)

    json_schema: dict[str, Any] | StrictBool | StrictStr | None = Field(None, alias="json")
    json_object: StrictBool | None = None
    regex: Text | None = None
    choice: tuple[Text, ...] | None = None
    grammar: Text | None = None
    structural_tag: dict[str, Any] | StrictStr | None = None
    whitespace: Whitespace = "bounded"
    disable_additional_properties: StrictBool = True
    validate_output: StrictBool = False
    engine: Literal["llguidance", "xgrammar"] | None = None

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise BadRequest("\n".join(f"structured_outputs: {line}" for line in explain(error).split("\n"))) from error

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> "StructuredOutputs":
        """Return a validated copy with the values of ``update``. Raises BadRequest."""
        return StructuredOutputs(**{**_given(self, deep), **(update or {})})

    @property
    def kind(self) -> str:
        """The name of the given kind."""
        return next(kind for kind, value in self._kinds().items() if value is not None)

    def _kinds(self) -> dict[str, Any]:
        return {
            "json": self.json_schema,
            "json_object": self.json_object,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "structural_tag": self.structural_tag,
        }

    @model_validator(mode="before")
    @classmethod
    def _reject_name_of_vllm(cls, data: Any) -> Any:
        if isinstance(data, dict) and "disable_any_whitespace" in data:
            received = quoted(data["disable_any_whitespace"])
            raise reject(
                f'disable_any_whitespace is not known, got {received}; instead of true, write whitespace "compact"'
            )
        return data

    @model_validator(mode="after")
    def _one_kind(self) -> "StructuredOutputs":
        kinds = self._kinds()
        named = [kind for kind, value in kinds.items() if value is not None]
        if len(named) != 1:
            raise reject(f"exactly one of {', '.join(kinds)} must be given, got {' and '.join(named) or 'none'}")
        if self.json_object is False:
            raise reject("json_object must be True, got False; leave it out for free text")
        if self.choice == ():
            raise reject("choice must be a non-empty list of texts, got []")
        if self.validate_output and self.json_schema is None:
            raise reject(f"validate_output must come with json, got {named[0]}, which is enforced without it")
        if self.whitespace != "bounded" and named[0] not in ("json", "json_object", "structural_tag"):
            raise reject(f"whitespace must come with json, json_object or structural_tag, got {named[0]}; leave it out")
        if not self.disable_additional_properties and self.json_schema is None:
            raise reject(f"disable_additional_properties=False must come with json, got {named[0]}")
        return self
