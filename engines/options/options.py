"""The options of ``LLM``.

``LLM``, the commands that open a bundle (engines/options/command_options.py) and the parameters of a served model
(engines/options/deployment.py) derive from ``RuntimeOptions``: an option added here reaches all of them. Type checkers
need a second list, ``OpeningOptions``; a test compares both.
"""

import re
from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from typing import Annotated, Any, Protocol, TypedDict, cast

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from tandemrt.engines.bundle.manifest import Limits
from tandemrt.engines.contract.calls import capacity
from tandemrt.engines.contract.contract import BLOCK_SIZE, blocks_of
from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.engines.validation.records import Section, explain, reject

NumDraftTokens = int | Mapping[int, int]
MAX_THREADS = 1024
BYTES_PER_TOKEN = 16  # upper estimate: English has 4 or 5, indented JSON about 10


def draft_tokens_problem(number: object, limit: int | None = None) -> str:
    """Return why ``number``, drafted tokens per round or a table of them, is invalid; "" if it is valid.

    ``limit``: the bundle's ``num_draft_tokens``; None if it is unknown.
    """
    table: dict[Any, Any] = dict(number) if isinstance(number, Mapping) else {1: number}
    for each in table.values():
        if not _is_count(each) or (limit is not None and each > limit):
            bound = "must be 0 or more" if limit is None else f"the bundle was built for 0..{limit}"
            return f"{bound} drafted tokens per round, received {quoted(each)}"
    if any(not _is_count(live) or live < 1 for live in table) or 1 not in table:
        most = 4 if limit is None else limit
        return (
            f"a table must map numbers of requests, 1 among them, to drafted tokens per round, received "
            f"{quoted(table)}; for example {{1: {most}, 33: {most // 2}}}"
        )
    return ""


def draft_tokens_from_text(text: str) -> NumDraftTokens:
    """Parse ``4``, or ``1:4,33:2`` as a table from numbers of requests to drafted tokens. Raises BadRequest."""
    try:
        if ":" not in text:
            return int(text)
        pairs = [(int(live), int(number)) for live, _, number in (part.partition(":") for part in text.split(","))]
    except ValueError:
        pairs = []
    if not pairs or len(dict(pairs)) < len(pairs):
        raise BadRequest(f"num_draft_tokens: must be a number, or a table such as 1:4,33:2, received {quoted(text)}")
    return dict(pairs)


def draft_tokens_to_text(number: NumDraftTokens) -> str:
    """Format ``number`` so that ``draft_tokens_from_text`` parses it."""
    return ",".join(f"{live}:{each}" for live, each in number.items()) if isinstance(number, Mapping) else str(number)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _device(value: Any) -> str:
    kind, index = getattr(value, "type", None), getattr(value, "index", None)
    if isinstance(kind, str):  # a torch.device
        value = kind if index is None else f"{kind}:{index}"
    if not isinstance(value, str) or not re.fullmatch(r"cpu|cpu:0|cuda(:[0-9]{1,2})?", value):
        raise reject(f"must be 'cpu', 'cuda' or 'cuda:N', received {quoted(value)}; choose one of them")
    return value


def _draft_tokens(value: Any) -> Any:
    if problem := draft_tokens_problem(value):
        raise reject(problem)
    return dict(value) if isinstance(value, Mapping) else value


def _threads(value: int) -> int:
    if value < 1:
        raise reject(f"must be at least 1, received {quoted(value)}; None gives one thread per core")
    if value > MAX_THREADS:
        raise reject(f"must be at most {MAX_THREADS}, received {quoted(value)}; None gives one thread per core")
    return value


def _at_least_one(unit: str) -> AfterValidator:
    def positive(value: int) -> int:
        if value < 1:
            raise reject(f"must be at least 1 {unit}, received {quoted(value)}; raise it")
        return value

    return AfterValidator(positive)


def _integer(value: Any) -> Any:
    if isinstance(value, float | bool):
        raise reject(f"must be an integer, received {quoted(value)}; give a number, or None")
    return value


class RuntimeOptions(Section):
    """Options for opening and running a bundle. Unknown names and values out of range raise BadRequest.

    A field's description is its help on the command line and in docs/guide.md. None takes the default of the bundle
    or the machine.
    """

    device: Annotated[str, BeforeValidator(_device)] | None = Field(
        default=None, description="device, as cpu, cuda or cuda:N; default: the one that the bundle was built for"
    )
    num_draft_tokens: Annotated[NumDraftTokens, BeforeValidator(_draft_tokens)] | None = Field(
        default=None,
        description="drafted tokens per round, at most the bundle's (the default); 0: no speculation; or a table by "
        "number of running requests: 1:4,33:2 drafts 4 tokens, and 2 from 33 requests on",
    )
    adaptive_draft_tokens: bool | None = Field(
        default=None,
        description="choose the draft length of each round, from 0 to num_draft_tokens, from the acceptance rate and "
        "the measured cost of a round; no text changes; default, unless num_draft_tokens is given: on for "
        "batch-invariant engines of a GPU, and on a CPU with AVX2 and without VNNI for targets of more than 32 MB",
    )
    lookup: bool | None = Field(
        default=None,
        description="copy drafts from a request's own text where this promises more accepted tokens than the draft "
        "model, or more per time; no text changes; default: on for a CPU, but not for requests under the rejection "
        "rule, whose texts depend on drafts",
    )
    overlap: bool | None = Field(
        default=None,
        description="overlap schedule: run the target while the host commits tokens and fills masks; default: enabled "
        "on a GPU",
    )
    fast_forward_drafts: bool | None = Field(
        default=None,
        description="draft fast-forward tokens without a model: tokens without an alternative under a grammar, in a "
        "reasoning delimiter or in a forced end; rounds that may have such tokens run without overlap, and under "
        "the rejection rule the text depends on this option; default: enabled without overlap",
    )
    draft_masks: bool = Field(
        default=False,
        description="apply a request's grammar to the draft model's sampling: the target accepts more drafts, but "
        "rounds with such requests run without overlap and wait for every drafted token; no text changes",
    )
    threads: Annotated[int, AfterValidator(_threads)] | None = Field(
        default=None, description="CPU threads per engine; default: one per core"
    )
    queue_limit: Annotated[int, _at_least_one("waiting request")] = Field(
        default=256, description="the most requests that may wait for a slot"
    )
    grammar_timeout_s: float = Field(
        default=10.0,
        gt=0.0,
        description="time limit for compiling a grammar or checking a finished text, in seconds",
    )
    fill_timeout_s: float = Field(
        default=0.1,
        gt=0.0,
        description="time by which a request's grammar may exceed its share of the loop (10 ms of CPU time per round), "
        "in seconds; beyond it the request ends with an error",
    )
    max_grammar_bytes: Annotated[int, BeforeValidator(_integer), _at_least_one("byte")] = Field(
        default=1 << 18,
        description="largest schema, grammar or list of choices of a request, in bytes",
    )
    max_prompt_bytes: Annotated[int, BeforeValidator(_integer), _at_least_one("byte")] | None = Field(
        default=None,
        description="largest text of a prompt, in bytes; messages may hold four times as much; default: 16 for each "
        "token of the bundle's length",
    )
    prompt_timeout_s: float = Field(
        default=10.0,
        gt=0.0,
        description="time limit for rendering a chat template, tokenizing a long text, and reading images, in seconds",
    )
    max_images: Annotated[int, BeforeValidator(_integer)] = Field(
        default=16, ge=1, description="the most images of a request"
    )
    max_image_bytes: Annotated[int, BeforeValidator(_integer), _at_least_one("byte")] = Field(
        default=20 << 20, description="largest file of an image, in bytes; max_body bounds whole requests"
    )
    max_image_pixels: Annotated[int, BeforeValidator(_integer)] = Field(
        default=50_000_000, ge=1, description="largest image, in pixels before it is resized"
    )
    max_image_memory: Annotated[int, BeforeValidator(_integer), _at_least_one("byte")] = Field(
        default=2 << 30,
        description="memory of the images of all requests of a server until they end, in bytes: pixels, and what the "
        "model makes of them; further requests are told to come later",
    )
    allowed_media_domains: str | None = Field(
        default=None,
        description="domains from which web addresses of images are fetched, with commas between them; subdomains are "
        "included, private addresses never; default: none",
    )
    chat_template: str | None = Field(
        default=None,
        description="file with a chat template that replaces the checkpoint's; default: the bundle's own",
    )
    generation_config: bool = Field(
        default=True,
        description="take sampling parameters that a request does not set from the checkpoint's "
        "generation_config.json (temperature, top_p and so on)",
    )
    cache_tokens: Annotated[int, BeforeValidator(_integer), _at_least_one("token")] | None = Field(
        default=None,
        description="tokens that a paged cache holds for all requests, at least one request of the bundle's length; "
        "when the cache is full, the youngest request is preempted and resumes later; default: the bundle's",
    )
    prefix_caching: bool = Field(
        default=True,
        description="reuse cached keys and values of prompts with a common prefix, in blocks of 64 tokens",
    )
    prefill_chunk: Annotated[int, BeforeValidator(_integer), _at_least_one("prompt token per round")] | None = Field(
        default=None,
        description="prompt tokens per round while requests decode, at most the bundle's: fewer tokens shorten the "
        "time between tokens and lengthen the time to first token; default: the bundle's, at most 2048, or 4096 with "
        "experts",
    )
    synthetic_rule: bool = Field(
        default=False,
        description="allow the rule synthetic, which accepts drafts regardless of the target: for benchmarks",
    )
    cuda_graphs: bool = Field(
        default=True,
        description="replay the calls of a round as CUDA graphs, captured when the bundle opens; disable it for "
        "debugging only",
    )
    profile: bool = Field(
        default=False, description="measure the device time of each part of a round (metrics.device_ms_per_round)"
    )

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise BadRequest(explain(error)) from error

    def arguments(self) -> "OpeningOptions":
        """Return the options that were set as arguments of ``LLM``."""
        return cast("OpeningOptions", self._set())

    def served(self) -> "ServedOptions":
        """Return the options that were set without the device, which a server sets for each instance."""
        return cast("ServedOptions", {name: value for name, value in self._set().items() if name != "device"})

    def require_fit(self, limits: Limits) -> None:
        """Raise BadRequest unless a bundle with ``limits`` can be opened with these options. Needs no engine."""
        if self.num_draft_tokens is not None and (
            problem := draft_tokens_problem(self.num_draft_tokens, limits.num_draft_tokens)
        ):
            raise BadRequest(f"num_draft_tokens: {problem}")
        if not (limits.num_draft_tokens if self.max_draft_tokens is None else self.max_draft_tokens):
            for name in ("adaptive_draft_tokens", "draft_masks", "lookup"):
                if getattr(self, name):
                    raise BadRequest(
                        f"{name}: needs drafts, received True with num_draft_tokens 0; leave one of them out"
                    )
        if self.prefill_chunk is not None and self.prefill_chunk > limits.prefill_chunk:
            raise BadRequest(
                f"prefill_chunk: the bundle was built for at most {limits.prefill_chunk} prompt tokens per round, "
                f"received {quoted(self.prefill_chunk)}; lower it or build with a larger limits.prefill_chunk"
            )
        if self.cache_tokens is not None and limits.cache_blocks is None:
            raise BadRequest(
                f"cache_tokens: this bundle's cache is linear, a row of {limits.capacity} tokens for each of "
                f"{limits.batch} slots, received {quoted(self.cache_tokens)}; leave it out"
            )
        beyond = limits.capacity - capacity(limits.length, limits.num_draft_tokens)  # slack beyond the draft window
        needed = beyond + capacity(
            limits.length, limits.num_draft_tokens if self.max_draft_tokens is None else self.max_draft_tokens
        )
        if self.cache_tokens is not None and blocks_of(self.cache_tokens) < blocks_of(needed):
            raise BadRequest(
                f"cache_tokens: must hold one request of the bundle's length {limits.length} and its last drafts, "
                f"{needed} tokens in blocks of {BLOCK_SIZE}, received {quoted(self.cache_tokens)}; give at least "
                f"{blocks_of(needed) * BLOCK_SIZE}, or build the bundle with a smaller limits.length"
            )

    def prompt_bytes(self, limits: Limits) -> int:
        """Return the largest text of a prompt, in bytes."""
        return BYTES_PER_TOKEN * limits.length if self.max_prompt_bytes is None else self.max_prompt_bytes

    @property
    def max_draft_tokens(self) -> int | None:
        """The largest draft length of a round; None: the bundle's."""
        return (
            max(self.num_draft_tokens.values()) if isinstance(self.num_draft_tokens, Mapping) else self.num_draft_tokens
        )

    def _set(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in RuntimeOptions.model_fields if name in self.model_fields_set}
        return {name: value for name, value in fields.items() if value is not None}


class TorchDevice(Protocol):
    """The attributes of a torch.device, for code that does not import torch."""

    @property
    def type(self) -> str: ...

    @property
    def index(self) -> int | None: ...


class ServedOptions(TypedDict, total=False):
    """Keyword arguments of RuntimeOptions for a served model: all but the device, which the server sets."""

    num_draft_tokens: NumDraftTokens | None
    adaptive_draft_tokens: bool | None
    lookup: bool | None
    overlap: bool | None
    fast_forward_drafts: bool | None
    draft_masks: bool
    threads: int | None
    queue_limit: int
    grammar_timeout_s: float
    fill_timeout_s: float
    max_grammar_bytes: int
    max_prompt_bytes: int | None
    prompt_timeout_s: float
    max_images: int
    max_image_bytes: int
    max_image_pixels: int
    max_image_memory: int
    allowed_media_domains: str | None
    chat_template: str | None
    generation_config: bool
    cache_tokens: int | None
    prefix_caching: bool
    prefill_chunk: int | None
    synthetic_rule: bool
    cuda_graphs: bool
    profile: bool


class OpeningOptions(ServedOptions, total=False):
    """Keyword arguments of RuntimeOptions, for type checkers."""

    device: str | TorchDevice | None


def signature(own: Sequence[Parameter]) -> Signature:
    """Return the signature of a callable with its ``own`` parameters, followed by every option as a keyword."""
    options = (
        Parameter(name, Parameter.KEYWORD_ONLY, default=field.default, annotation=OpeningOptions.__annotations__[name])
        for name, field in RuntimeOptions.model_fields.items()
    )
    return Signature([*own, *options])
