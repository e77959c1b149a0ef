"""What a request may ask for, named as vLLM and OpenAI users know it, validated before anything runs."""

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, StrictBool, StrictStr, ValidationError, model_validator

from tandemrt.engines.errors import BadRequest, quoted
from tandemrt.engines.validation import Record, Section, explain, refuse


def _no_text_or_truth(value: Any) -> Any:
    if isinstance(value, str | bytes | bool):
        raise refuse(f"must be a number; got {quoted(value)}")
    return value


Token = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Number = Annotated[float, BeforeValidator(_no_text_or_truth)]
Bias = Annotated[Number, Field(ge=-100.0, le=100.0)]
Text = Annotated[str, Field(strict=True, min_length=1)]  # bytes are no text
MOST_BIASES = 1024  # tokens that one request may bias
MOST_STOPS = 256  # stop strings of one request, and its bad words
MOST_STOP_CHARACTERS = 8192  # of all of them together
MOST_TOKEN_IDS = 1 << 18  # in one list: no vocabulary has more
MOST_OUTPUTS = 128  # of one prompt


def _by_token(value: Any) -> Any:
    """Token ids as numbers: the keys of a JSON object are texts."""
    if not isinstance(value, dict):
        return value
    pairs = [(int(k) if isinstance(k, str) and k.isascii() and k.isdigit() else k, bias) for k, bias in value.items()]
    twice = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]
    if len(pairs) > MOST_BIASES:
        raise refuse(f"at most {MOST_BIASES} tokens may have a bias; got {len(pairs)}")
    if twice:
        raise refuse(f"a token must have one bias; got several for {twice[0]}")
    return dict(pairs)


def _few(value: Any) -> Any:
    if isinstance(value, list | tuple) and len(value) > MOST_TOKEN_IDS:
        raise refuse(f"at most {MOST_TOKEN_IDS} token ids may be listed; got {len(value)}")
    return value


TokenIds = Annotated[tuple[Token, ...], BeforeValidator(_few)]


def _texts(value: Any, what: str) -> Any:
    listed = (value,) if isinstance(value, str) else value
    if isinstance(listed, list | tuple):
        if len(listed) > MOST_STOPS:
            raise refuse(f"at most {MOST_STOPS} strings may {what}; got {len(listed)}")
        characters = sum(len(each) for each in listed if isinstance(each, str))
        if characters > MOST_STOP_CHARACTERS:
            raise refuse(f"at most {MOST_STOP_CHARACTERS} characters may {what} in all; got {characters}")
    return listed


def _listed(value: Any) -> Any:
    return _texts(value, "stop a text")


def _bad_words(value: Any) -> Any:
    return () if value == "" else _texts(value, "be kept out of a text")


def _not_asked(value: Any) -> Any:
    return None if value is False else value  # as OpenAI's clients say that they want none


def _validated_anew(value: Any) -> Any:
    return value.model_copy() if isinstance(value, StructuredOutputs) else value


class SamplingParams(Section):
    """How one request is sampled and constrained. Unknown names and values out of range raise BadRequest.

    What is not given is what the checkpoint recommends (LLM, ``generation_config``), else the default named here.

    The law of each token is the target's, after ``logit_bias``, ``repetition_penalty`` (of what is in prompt or
    output), ``frequency_penalty`` and ``presence_penalty`` (of what is in the output), after what constraints forbid,
    after ``temperature``, then ``top_k``, ``top_p`` over what is left, then ``min_p`` relative to the largest
    probability; temperature 0 takes the largest logit. The same seed gives the same text whatever is drafted under
    ``rule="coupled"``; ``"rejection"`` keeps the law, not the text per seed.

    A draft model draws its tokens as the rule has it (``draft_sampling``): ``"coupled"`` to the target's own noise, or
    ``"probabilistic"``, with noise of its own and its probabilities kept, under ``"rejection"``. With ``"greedy"``, and
    below the temperature ``draft_greedy_below``, it takes its likeliest token, under either rule. Where it draws, its
    temperature is ``draft_temperature_scale`` times the request's: below 1 its law is sharper, which helps a draft that
    is less sure than its target.

    ``rule="synthetic"`` is for benchmarks alone: of the drafted tokens it accepts as many as make
    ``synthetic_acceptance_length`` tokens per round in the mean, whatever the target says, as far as constraints allow
    them. It needs the option ``synthetic_rule`` of the runtime.

    Of ``n`` outputs the one at index i is that of a request of its own with the seed ``seed`` + i (modulo 2^64).
    """

    model_config = ConfigDict(strict=False)  # lists for tuples; numbers are strict where it matters

    temperature: Number = Field(1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_p: Number = Field(1.0, ge=2.0**-126, le=1.0)  # below, float32 might make it 0, which is off
    top_k: Annotated[int, Field(strict=True, ge=-1, lt=2**63)] = 0  # 0 and -1: off
    min_p: Number = Field(0.0, ge=0.0, le=1.0)
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**64)] | None = None  # None: drawn, reported in the output

    presence_penalty: Number = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: Number = Field(0.0, ge=-2.0, le=2.0)
    repetition_penalty: Number = Field(1.0, ge=2.0**-126, le=2.0**126)  # above 0, in what float32 holds
    logit_bias: Annotated[dict[Token, Bias], BeforeValidator(_by_token)] | None = None

    max_tokens: Annotated[int, Field(strict=True, ge=1, lt=2**63)] | None = None  # None: up to the engine's length
    min_tokens: Count = 0
    stop: Annotated[tuple[Text, ...], BeforeValidator(_listed)] = ()
    include_stop_str_in_output: StrictBool = False
    skip_special_tokens: StrictBool = True  # False: they are in the text, but those that end it
    stop_token_ids: TokenIds = ()
    ignore_eos: StrictBool = False
    allowed_token_ids: TokenIds | None = None
    banned_token_ids: TokenIds = ()
    bad_words: Annotated[tuple[Text, ...], BeforeValidator(_bad_words)] = ()

    thinking_token_budget: Annotated[int, Field(strict=True, ge=-1, lt=2**63)] | None = None  # -1 and None: no budget
    structured_outputs: Annotated["StructuredOutputs | None", BeforeValidator(_validated_anew)] = None

    # Of each token of the output, and of so many likeliest ones beside it; None: of none.
    logprobs: Annotated[Annotated[int, Field(strict=True, ge=0, le=20)] | None, BeforeValidator(_not_asked)] = None
    logprobs_law: Literal["sampled", "raw"] = "sampled"

    # Of each token of the prompt but the first, likewise; None: of none.
    prompt_logprobs: Annotated[Annotated[int, Field(strict=True, ge=0, le=20)] | None, BeforeValidator(_not_asked)] = (
        None
    )

    n: Annotated[int, Field(strict=True, ge=1, le=MOST_OUTPUTS)] = 1  # outputs of the prompt, see below

    priority: Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)] = 0  # in the queue; lower comes first

    cache_salt: Text | None = None  # only requests with the same salt reuse each other's keys and values

    rule: Literal["coupled", "rejection", "synthetic"] = "coupled"
    synthetic_acceptance_length: Number | None = Field(None, ge=1.0, le=17.0)  # tokens per round, see below
    draft_sampling: Literal["greedy", "probabilistic", "coupled"] | None = None  # None: the bundle's
    draft_greedy_below: Number | None = Field(None, ge=0.0, le=100.0, allow_inf_nan=False)  # a temperature
    draft_temperature_scale: Number | None = Field(None, ge=0.01, le=10.0, allow_inf_nan=False)  # None: the bundle's
    window: Count | None = None  # drafted tokens per round, at most the engine's; 0 switches speculation off
    timeout_s: Number | None = Field(None, gt=0.0, allow_inf_nan=False)  # from the call to the last token

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise BadRequest(explain(error)) from error

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> "SamplingParams":
        """Return a copy in which ``update`` takes the place of values. Raises BadRequest as the constructor does."""
        return SamplingParams(**{**_given(self, deep), **(update or {})})

    def checked(self) -> "SamplingParams":
        """Return these parameters validated anew, whatever was done to the object. Raises BadRequest."""
        return self.model_copy()

    def over(self, defaults: Mapping[str, Any]) -> "SamplingParams":
        """Return these parameters validated anew, with ``defaults`` for those that were not given. Raises BadRequest.

        A default length gives way to a ``min_tokens`` that was given.
        """
        values = {**defaults, **_given(self, False)}
        if "max_tokens" not in self.model_fields_set and self.min_tokens > values.get("max_tokens", self.min_tokens):
            values["max_tokens"] = self.min_tokens
        return SamplingParams(**values)

    @model_validator(mode="after")
    def _consistent(self) -> "SamplingParams":
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            most, least = quoted(self.max_tokens), quoted(self.min_tokens)
            raise refuse(f"min_tokens must be at most max_tokens ({most}); got {least}")
        drawn = "probabilistic" if self.rule == "rejection" else "coupled"
        if self.draft_sampling not in (None, "greedy", drawn):
            raise refuse(
                f"draft_sampling must be greedy or {drawn} under the rule {self.rule}; got {self.draft_sampling}. "
                "Leave it out, or choose the other rule"
            )
        if (self.rule == "synthetic") != (self.synthetic_acceptance_length is not None):
            raise refuse(
                "synthetic_acceptance_length must come with the rule synthetic and the rule with it; got rule "
                f"{self.rule} and {quoted(self.synthetic_acceptance_length)}"
            )
        if self.rule == "synthetic" and self.logprobs is not None:
            raise refuse("logprobs must not be asked for under the rule synthetic, whose tokens have no law")
        if self.allowed_token_ids is not None and not set(self.allowed_token_ids) - set(self.banned_token_ids):
            raise refuse("allowed_token_ids must leave a token that banned_token_ids does not ban")
        return self


def _given(record: Record, deep: bool) -> dict[str, Any]:
    """The values of a record that were given, under the names that its constructor takes."""
    fields, named = type(record).model_fields, record.model_fields_set
    given = {
        fields[name].alias or name: value for name, value in record if name in named or value != fields[name].default
    }
    return deepcopy(given) if deep else given


class StructuredOutputs(Record):
    """The shape an answer must have: exactly one of the six kinds. Anything else raises BadRequest.

    Attributes:
        json: a JSON schema (draft 2020-12), as an object or as text.
        json_object: True for any JSON object.
        regex: a regular expression for the whole answer.
        choice: the answers to choose from.
        grammar: an EBNF grammar with a rule ``root``.
        structural_tag: free text in which tags begin, and what each of them holds, as an object or as text; both forms
            of xgrammar (docs/structured.md).
        disable_any_whitespace: JSON in one fixed layout instead of with any whitespace.
        disable_additional_properties: objects whose schema describes properties have no others unless it says so;
            False: any others, as JSON Schema has it.
        validate_output: accept schemas with keywords that a grammar cannot enforce, and check the finished text.
        engine: the grammar engine; None: the first that holds the kind to the letter (docs/structured.md).
    """

    model_config = ConfigDict(strict=False)

    json_schema: dict[str, Any] | StrictBool | StrictStr | None = Field(None, alias="json")
    json_object: StrictBool | None = None
    regex: Text | None = None
    choice: tuple[Text, ...] | None = None
    grammar: Text | None = None
    structural_tag: dict[str, Any] | StrictStr | None = None
    disable_any_whitespace: StrictBool = False
    disable_additional_properties: StrictBool = True
    validate_output: StrictBool = False
    engine: Literal["llguidance", "xgrammar"] | None = None

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise BadRequest("\n".join(f"structured_outputs: {line}" for line in explain(error).split("\n"))) from error

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> "StructuredOutputs":
        """Return a copy in which ``update`` takes the place of values. Raises BadRequest as the constructor does."""
        return StructuredOutputs(**{**_given(self, deep), **(update or {})})

    @property
    def kind(self) -> str:
        """Which of the kinds it is."""
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

    @model_validator(mode="after")
    def _one_kind(self) -> "StructuredOutputs":
        kinds = self._kinds()
        named = [kind for kind, value in kinds.items() if value is not None]
        if len(named) != 1:
            raise refuse(f"exactly one of {', '.join(kinds)} must be given, got {' and '.join(named) or 'none'}")
        if self.json_object is False:
            raise refuse("json_object must be True, got False; leave it out for free text")
        if self.choice == ():
            raise refuse("choice must be a non-empty list of texts, got []")
        if self.validate_output and self.json_schema is None:
            raise refuse(f"validate_output must come with json, got {named[0]}, which is enforced without it")
        if self.disable_any_whitespace and named[0] not in ("json", "json_object"):
            raise refuse(f"disable_any_whitespace must come with json or json_object, got {named[0]}")
        if not self.disable_additional_properties and self.json_schema is None:
            raise refuse(f"disable_additional_properties=False must come with json, got {named[0]}")
        return self
