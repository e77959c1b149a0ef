"""How a bundle is opened: every option of ``LLM``, defined once.

``LLM``, the commands that open a bundle (engines/command_options.py) and the parameters of a served model
(engines/deployment.py) derive from ``RuntimeOptions``: an option added here reaches all of them. What a type checker
must see is written out once more, in ``OpeningOptions``; a test holds both together.
"""

import re
from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from typing import Annotated, Any, Protocol, TypedDict, cast

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from tandemrt.engines.calls import capacity
from tandemrt.engines.contract import BLOCK_SIZE, blocks_of
from tandemrt.engines.errors import BadRequest, quoted
from tandemrt.engines.manifest import Limits
from tandemrt.engines.validation import Section, explain, refuse

Window = int | Mapping[int, int]
MOST_THREADS = 1024
BYTES_PER_TOKEN = 16  # of a text: English has four or five, pretty-printed JSON some ten


def window_problem(window: object, limit: int | None = None) -> str:
    """Say what is wrong with ``window``, drafted tokens per round or a table of them; "" if nothing is.

    ``limit`` is the bundle's window; None if it is not known.
    """
    table: dict[Any, Any] = dict(window) if isinstance(window, Mapping) else {1: window}
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


def window_from_text(text: str) -> Window:
    """Read ``4``, or ``1:4,33:2`` as a table from numbers of requests to windows. Raises BadRequest."""
    try:
        if ":" not in text:
            return int(text)
        pairs = [(int(live), int(window)) for live, _, window in (part.partition(":") for part in text.split(","))]
    except ValueError:
        pairs = []
    if not pairs or len(dict(pairs)) < len(pairs):
        raise BadRequest(f"window: must be a number, or a table such as 1:4,33:2, received {quoted(text)}")
    return dict(pairs)


def window_to_text(window: Window) -> str:
    """Write a window the way ``window_from_text`` reads it."""
    return ",".join(f"{live}:{each}" for live, each in window.items()) if isinstance(window, Mapping) else str(window)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _device(value: Any) -> str:
    kind, index = getattr(value, "type", None), getattr(value, "index", None)
    if isinstance(kind, str):  # as a torch.device has it
        value = kind if index is None else f"{kind}:{index}"
    if not isinstance(value, str) or not re.fullmatch(r"cpu|cpu:0|cuda(:[0-9]{1,2})?", value):
        raise refuse(f"must be 'cpu', 'cuda' or 'cuda:N', received {quoted(value)}; choose one of them")
    return value


def _window(value: Any) -> Any:
    if problem := window_problem(value):
        raise refuse(problem)
    return dict(value) if isinstance(value, Mapping) else value


def _threads(value: int) -> int:
    if value < 1:
        raise refuse(f"at least one is needed, received {quoted(value)}; None gives one per core")
    if value > MOST_THREADS:
        raise refuse(f"at most {MOST_THREADS} can be started, received {quoted(value)}; None gives one per core")
    return value


def _queue_limit(value: int) -> int:
    if value < 1:
        raise refuse(f"at least one request must be able to wait, received {quoted(value)}")
    return value


def _whole(value: Any) -> Any:
    if isinstance(value, float | bool):
        raise refuse(f"must be an integer, received {quoted(value)}; give a number, or None")
    return value


def _prefill_chunk(value: int) -> int:
    if value < 1:
        raise refuse(f"at least one prompt token must go in per round, received {quoted(value)}")
    return value


def _bytes(value: int) -> int:
    if value < 1:
        raise refuse(f"at least one byte must be allowed, received {quoted(value)}")
    return value


def _cache_tokens(value: int) -> int:
    if value < 1:
        raise refuse(f"a cache must hold at least one token, received {quoted(value)}")
    return value


class RuntimeOptions(Section):
    """How a bundle is opened and run. Unknown names and values out of range raise BadRequest.

    Each field's description is its help on the command line and in docs/guide.md. None leaves the choice to the
    bundle or the machine.
    """

    device: Annotated[str, BeforeValidator(_device)] | None = Field(
        default=None, description="where to run: cpu, cuda or cuda:N; default: what the bundle was built for"
    )
    window: Annotated[Window, BeforeValidator(_window)] | None = Field(
        default=None,
        description="drafted tokens per round, at most the bundle's (the default), 0: no speculation; or a table, "
        "1:4,33:2: from so many running requests on, so many tokens",
    )
    adaptive_window: bool = Field(
        default=False,
        description="let the window follow what is accepted and what a drafted token costs, from 0 to what window "
        "says; no text changes",
    )
    overlap: bool | None = Field(
        default=None,
        description="run the target while the host commits and fills, the tokens are the same where forced_drafts is; "
        "default: on a GPU",
    )
    forced_drafts: bool | None = Field(
        default=None,
        description="draft, without a model, what a grammar, a marker or a forced end leaves no choice about; rounds "
        "that may have such tokens run without overlap, and under the rejection rule a text depends on it; default: "
        "where nothing overlaps",
    )
    draft_masks: bool = Field(
        default=False,
        description="mask what a draft model or head draws by a request's grammar: more is accepted, and rounds with "
        "such requests run without overlap and wait for every drafted token; no text changes",
    )
    threads: Annotated[int, AfterValidator(_threads)] | None = Field(
        default=None, description="CPU threads per engine; default: one per core"
    )
    queue_limit: Annotated[int, AfterValidator(_queue_limit)] = Field(
        default=256, description="requests that may wait for a slot"
    )
    grammar_timeout_s: float = Field(
        default=10.0,
        gt=0.0,
        description="the longest a grammar may take to compile, or a finished text to be checked, in seconds",
    )
    fill_timeout_s: float = Field(
        default=0.1,
        gt=0.0,
        description="how far a request's grammar may be beyond its share of the loop, 10 ms of the processor a round, "
        "in seconds; then the request ends with an error",
    )
    max_grammar_bytes: Annotated[int, BeforeValidator(_whole), AfterValidator(_bytes)] = Field(
        default=1 << 18,
        description="the largest schema, grammar or list of choices that a request may ask for, in bytes",
    )
    max_prompt_bytes: Annotated[int, BeforeValidator(_whole), AfterValidator(_bytes)] | None = Field(
        default=None,
        description="the largest text that may become a prompt's tokens, in bytes; messages may hold four times as "
        "much; default: 16 for each token of the bundle's length",
    )
    prompt_timeout_s: float = Field(
        default=10.0,
        gt=0.0,
        description="the longest a chat template may take for a chat, and a long text to become tokens, in seconds",
    )
    chat_template: str | None = Field(
        default=None,
        description="a file with a chat template in place of the checkpoint's; default: the bundle's own",
    )
    generation_config: bool = Field(
        default=True,
        description="sampling parameters that a request does not give are those of the checkpoint's "
        "generation_config.json (temperature, top_p and so on)",
    )
    cache_tokens: Annotated[int, BeforeValidator(_whole), AfterValidator(_cache_tokens)] | None = Field(
        default=None,
        description="tokens that a paged cache holds for all requests together, at least one of the bundle's length; "
        "where they run out, the youngest request waits and goes on later; default: the bundle's",
    )
    prefix_caching: bool = Field(
        default=True,
        description="reuse what the caches hold of texts that begin alike, in blocks of 64 tokens",
    )
    prefill_chunk: Annotated[int, BeforeValidator(_whole), AfterValidator(_prefill_chunk)] | None = Field(
        default=None,
        description="prompt tokens per round while requests decode, at most the bundle's (the default): fewer shorten "
        "the gaps between their tokens, and new requests wait longer for their first",
    )
    synthetic_rule: bool = Field(
        default=False,
        description="let requests ask for the rule synthetic, which accepts drafts whatever the target says: for "
        "benchmarks",
    )
    cuda_graphs: bool = Field(
        default=True,
        description="replay the pieces of a round as CUDA graphs, captured when the bundle opens; off is for finding "
        "faults",
    )
    profile: bool = Field(default=False, description="measure the device's time by piece (metrics.device_ms_per_round)")

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise BadRequest(explain(error)) from error

    def given(self) -> "OpeningOptions":
        """Return the options that were given, as arguments of ``LLM``."""
        return cast("OpeningOptions", self._set())

    def served(self) -> "ServedOptions":
        """Return the options that were given but the device, which in a server is each instance's."""
        return cast("ServedOptions", {name: value for name, value in self._set().items() if name != "device"})

    def require_fit(self, limits: Limits) -> None:
        """Raise BadRequest unless a bundle of these ``limits`` can be opened so; its engines need not be there."""
        if self.window is not None and (problem := window_problem(self.window, limits.window)):
            raise BadRequest(f"window: {problem}")
        if self.prefill_chunk is not None and self.prefill_chunk > limits.prefill_chunk:
            raise BadRequest(
                f"prefill_chunk: the bundle was built for at most {limits.prefill_chunk} prompt tokens per round, "
                f"received {quoted(self.prefill_chunk)}; ask for fewer or build it with a larger limits.prefill_chunk"
            )
        if self.cache_tokens is not None and limits.cache_blocks is None:
            raise BadRequest(
                f"cache_tokens: this bundle's cache is linear, a row of {limits.capacity} tokens for each of "
                f"{limits.batch} slots, received {quoted(self.cache_tokens)}; leave it out"
            )
        beyond = limits.capacity - capacity(limits.length, limits.window)  # what a draft may write beyond its window
        needed = beyond + capacity(limits.length, limits.window if self.largest_window is None else self.largest_window)
        if self.cache_tokens is not None and blocks_of(self.cache_tokens) < blocks_of(needed):
            raise BadRequest(
                f"cache_tokens: must hold one request of the bundle's length {limits.length} and its last window, "
                f"{needed} tokens in blocks of {BLOCK_SIZE}, received {quoted(self.cache_tokens)}; give at least "
                f"{blocks_of(needed) * BLOCK_SIZE}, or build the bundle with a smaller limits.length"
            )

    def prompt_bytes(self, limits: Limits) -> int:
        """The largest text that may become tokens, in bytes."""
        return BYTES_PER_TOKEN * limits.length if self.max_prompt_bytes is None else self.max_prompt_bytes

    @property
    def largest_window(self) -> int | None:
        """The most drafted tokens of a round; None: the bundle's."""
        return max(self.window.values()) if isinstance(self.window, Mapping) else self.window

    def _set(self) -> dict[str, Any]:
        known = {name: getattr(self, name) for name in RuntimeOptions.model_fields if name in self.model_fields_set}
        return {name: value for name, value in known.items() if value is not None}


class Device(Protocol):
    """What a torch.device is to code that does not import torch."""

    @property
    def type(self) -> str: ...

    @property
    def index(self) -> int | None: ...


class ServedOptions(TypedDict, total=False):
    """The keywords of RuntimeOptions for a model in a server, which says itself where an instance runs."""

    window: Window | None
    adaptive_window: bool
    overlap: bool | None
    forced_drafts: bool | None
    draft_masks: bool
    threads: int | None
    queue_limit: int
    grammar_timeout_s: float
    fill_timeout_s: float
    max_grammar_bytes: int
    max_prompt_bytes: int | None
    prompt_timeout_s: float
    chat_template: str | None
    generation_config: bool
    cache_tokens: int | None
    prefix_caching: bool
    prefill_chunk: int | None
    synthetic_rule: bool
    cuda_graphs: bool
    profile: bool


class OpeningOptions(ServedOptions, total=False):
    """The keywords of RuntimeOptions, for type checkers."""

    device: str | Device | None


def signature(own: Sequence[Parameter]) -> Signature:
    """Return the signature of a callable that takes ``own`` parameters, then every option by keyword."""
    options = (
        Parameter(name, Parameter.KEYWORD_ONLY, default=field.default, annotation=OpeningOptions.__annotations__[name])
        for name, field in RuntimeOptions.model_fields.items()
    )
    return Signature([*own, *options])
