"""Parse a request body into a prompt and ``SamplingParams``, or reject it with the name of the wrong field.

A field is either one of OpenAI's (protocol.py) or a sampling parameter of the same name. A new field of
``SamplingParams`` is a new field here, without a second list.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import ValidationError

from tandemrt.engines.parameters import server_tensors
from tandemrt.engines.parameters.sampling import MOST_OUTPUTS, SamplingParams, StructuredOutputs
from tandemrt.engines.text.chat import ChatOptions
from tandemrt.engines.validation.errors import BadRequest, clipped, quoted
from tandemrt.engines.validation.records import Section, explain, nearest
from tandemrt.engines.validation.sizes import text_bytes
from tandemrt.runtime.requests.prompt import Chat, Prompt
from tandemrt.runtime.servers.json_text import is_encodable, lone_surrogate, parse_json_text
from tandemrt.runtime.servers.openai.field_names import VARIABLES, chat_field_names, client_names
from tandemrt.runtime.servers.openai.messages import parse_messages
from tandemrt.runtime.servers.openai.protocol import (
    ChatFields,
    CommonFields,
    CompletionFields,
    ResponseFormat,
    StreamOptions,
)
from tandemrt.runtime.servers.openai.tools import ToolCallSpec, parse_tools
from tandemrt.runtime.servers.request import ServerRequest
from tandemrt.runtime.workers.clients import Client

NO_OP_VALUES: Mapping[str, tuple[Any, ...]] = {
    **server_tensors.OFF,
    "suffix": ("",),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}
"""Unsupported fields that clients send by default, with the values that change nothing. Other values are rejected."""

REPLACED_FIELDS: Mapping[str, str] = {
    **{
        f"guided_{kind}": f'structured_outputs {{"{kind}": ...}}'
        for kind in ("json", "json_object", "regex", "choice", "grammar")
    },
    "guided_decoding_backend": 'structured_outputs {..., "engine": ...}',
    "guided_whitespace_pattern": 'structured_outputs {..., "whitespace": "compact"}',
    "functions": "tools",
    "function_call": "tool_choice",
    "enable_thinking": 'chat_template_kwargs {"enable_thinking": ...}',
    "thinking": 'chat_template_kwargs {"enable_thinking": ...} or thinking_token_budget',
    "thinking_budget": "thinking_token_budget",
}
"""Fields of OpenAI, vLLM and hosted models that have no alias here, with what to send instead."""

Fields = TypeVar("Fields", bound=Section)


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(ServerRequest):
    """A request of any protocol.

    Attributes:
        more_prompts: prompts after the first one, each with outputs of its own.
        model: name of a served model; None: the only one.
        stream_options: what a stream contains besides text.
        tool_calls: functions and format of tool calls in the answer; None: it contains none.
        return_token_ids: whether choices contain the token ids of prompt and output.
        echo: whether texts begin with the prompt.
        prompt_only: whether the response contains nothing of the output, a token that was not asked for.
        request_id: the id of the response; None: a new one.
        include_reasoning: whether the response contains the reasoning.
        field_names: the client's names of fields, by the names in errors of the runtime.
        warnings: the ignored fields, one text each, for the response.
        repeated: fields of the request that its response repeats.
    """

    more_prompts: Sequence[Prompt] = ()
    model: str | None
    stream_options: StreamOptions = field(default_factory=StreamOptions)
    tool_calls: ToolCallSpec | None = None
    return_token_ids: bool = False
    echo: bool = False
    prompt_only: bool = False
    request_id: str | None = None
    include_reasoning: bool = True
    field_names: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    repeated: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompts(self) -> Sequence[Prompt]:
        """All prompts, in order."""
        return (self.prompt, *self.more_prompts)

    @property
    def prompt_bytes(self) -> int:
        """Bytes of the body that only the prompts need, at least: a response may repeat parts of them."""
        if self.echo:
            return 0
        texts = [prompt.messages if isinstance(prompt, Chat) else prompt for prompt in self.prompts]
        return max(0, text_bytes(texts) - text_bytes(self.repeated))

    def without_prompts(self) -> "CompletionRequest":
        """Return the request with nothing in place of its prompts."""
        return replace(self, prompt=(), more_prompts=())

    def by_prompt(self) -> "list[CompletionRequest]":
        """Return a request for each prompt. Only the first is traced, unless the stream has token sources."""
        every = self.stream_options.include_token_sources
        return [
            replace(self, prompt=prompt, more_prompts=(), traced=every or (self.traced and at == 0))
            for at, prompt in enumerate(self.prompts)
        ]


def parse_json(body: bytes, name: str = "the body") -> dict[str, Any]:
    """Return the JSON object in ``body``, which errors call ``name``. Raises BadRequest."""
    try:
        text = body.decode()
        value = parse_json_text(text)
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"{name} must be UTF-8, received {body[error.start : error.start + 1]!r} at byte {error.start}"
        ) from None
    except ValueError as error:
        raise BadRequest(f"{name} must be JSON, received {quoted(body)}: {clipped(error)}") from None
    except RecursionError:
        raise BadRequest(f"{name} must be JSON of a sensible depth, received {len(body)} bytes") from None
    if not isinstance(value, dict):
        raise BadRequest(f"{name} must be a JSON object, received {quoted(value)}")
    if lone_surrogate(text):
        key, member = next((key, member) for key, member in value.items() if not is_encodable({key: member}))
        raise BadRequest(
            f"{clipped(key)}: must be text that UTF-8 can encode, received {quoted(member)}; join or drop lone "
            "surrogates"
        )
    return value


def parse_chat(body: Mapping[str, Any], templates: Mapping[str, str]) -> CompletionRequest:
    """Parse a request to /v1/chat/completions. ``templates``: the model's chat templates by name. Raises BadRequest."""
    fields, sampling = split(_merge_logprobs(body), ChatFields)
    if fields.max_completion_tokens is not None:
        if sampling.get("max_tokens", fields.max_completion_tokens) != fields.max_completion_tokens:
            raise BadRequest(
                f"max_completion_tokens: is an alias of max_tokens, received {fields.max_completion_tokens} and "
                f"{quoted(sampling['max_tokens'])}; send one"
            )
        sampling["max_tokens"] = fields.max_completion_tokens
    tools = parse_tools(fields.tools, fields.tool_choice, templates, parallel=fields.parallel_tool_calls)
    names = chat_field_names(body)
    with client_names(names):
        chat = Chat(parse_messages(fields.messages), **_chat_options(fields) | {"tools": tools.template_tools})
        params = SamplingParams(**sampling)
        constraint, calls = _constraint(fields.response_format, params.structured_outputs), tools.calls
        changed: dict[str, Any] = {}
        if calls is not None:
            calls = _with_answer(calls, constraint)
            constraint = calls.constraint()
            if calls.format is not None:  # a call may begin with a special token; the constraint allows no others
                changed["skip_special_tokens"] = False
        params = params.model_copy(update={**changed, "structured_outputs": constraint})
    request = _request(fields, chat, params, calls)
    return replace(request, include_reasoning=fields.include_reasoning, field_names=names)


def parse_completion(body: Mapping[str, Any], _templates: Mapping[str, str]) -> CompletionRequest:
    """Parse a request to /v1/completions. Raises BadRequest."""
    fields, sampling = split(body, CompletionFields)
    prompt, more = fields.prompt, list[Prompt]()
    if isinstance(prompt, list) and prompt and all(isinstance(each, str | list) for each in prompt):
        prompt, *more = prompt
    most = sampling.get("max_tokens")
    prompt_only = fields.echo and type(most) is int and most == 0
    if prompt_only:
        sampling["max_tokens"] = 1
    params = SamplingParams(**sampling)
    if (1 + len(more)) * params.n > MOST_OUTPUTS:
        raise BadRequest(
            f"prompt: at most {MOST_OUTPUTS} choices per request, received {1 + len(more)} prompts with n "
            f"{params.n}; send several requests"
        )
    if fields.echo and params.logprobs is not None:
        params = params.model_copy(update={"prompt_logprobs": params.logprobs})
    request = _request(fields, prompt, params)
    return replace(request, more_prompts=more, echo=fields.echo, prompt_only=prompt_only)


def parse_as_chat(body: Mapping[str, Any], names: Mapping[str, str], templates: Mapping[str, str]) -> CompletionRequest:
    """Parse a request of another protocol that was written as a chat.

    ``names`` are the client's names of fields by those of a chat. Raises BadRequest with the client's names.
    """
    with client_names(names):
        parsed = parse_chat(body, templates)
    own = {name: names.get(of_chat, of_chat) for name, of_chat in parsed.field_names.items()}
    return replace(parsed, field_names={**names, **own})


def split(
    body: Mapping[str, Any],
    kind: type[Fields],
    no_op: Mapping[str, tuple[Any, ...]] = NO_OP_VALUES,
    replaced: Mapping[str, str] = REPLACED_FIELDS,
) -> tuple[Fields, dict[str, Any]]:
    """Split ``body`` into the fields of ``kind`` and sampling parameters. A null field counts as absent.

    A field of ``no_op`` is accepted with these values only, and one of ``replaced`` is rejected with its replacement.
    """
    sampled = [name for name in SamplingParams.model_fields if name not in no_op and name not in replaced]
    known = [*kind.model_fields, *sampled]
    for name, value in body.items():
        if value is None or name in known or (name in no_op and value in no_op[name]):
            continue
        if name in no_op:
            raise BadRequest(f"{name}: is not supported, received {quoted(value)}; leave it out")
        if name in replaced:
            raise BadRequest(f"{name}: is no field of this endpoint, received {quoted(value)}; send {replaced[name]}")
        raise BadRequest(
            f"{clipped(name)}: is no field of this endpoint{nearest(name, known)}, received {quoted(value)}; "
            "leave it out"
        )
    fields = {name: value for name, value in body.items() if name in known and value is not None}
    sampling = {name: fields.pop(name) for name in [*fields] if name in sampled}
    try:
        return kind(**fields), sampling
    except ValidationError as error:
        raise BadRequest(explain(error)) from error


def _merge_logprobs(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Turn a chat's ``logprobs`` (bool) and ``top_logprobs`` into the sampling parameter ``logprobs`` (a number)."""
    asked, top = body.get("logprobs"), body.get("top_logprobs")
    if asked is not None and not isinstance(asked, bool):
        raise BadRequest(f"logprobs: must be true or false in a chat, received {quoted(asked)}; see top_logprobs")
    if not asked and top:
        raise BadRequest(f"top_logprobs: must come with logprobs true, received {quoted(top)}; add it")
    return {**body, "logprobs": (0 if top is None else top) if asked else None, "top_logprobs": None}


def _request(
    fields: CommonFields, prompt: Prompt, params: SamplingParams, tool_calls: ToolCallSpec | None = None
) -> CompletionRequest:
    if fields.stream_options is not None and not fields.stream:
        raise BadRequest("stream_options: must come with stream true; leave it out")
    return CompletionRequest(
        model=fields.model,
        prompt=prompt,
        params=params,
        stream=fields.stream,
        stream_options=fields.stream_options or StreamOptions(),
        tool_calls=tool_calls,
        return_token_ids=fields.return_token_ids,
        request_id=fields.request_id,
        client=Client(user=fields.user or ""),
    )


def _chat_options(fields: ChatFields) -> dict[str, Any]:
    options = {name: getattr(fields, name) for name in ChatOptions.model_fields}
    variables = dict(options["chat_template_kwargs"])
    for name in VARIABLES:
        value = getattr(fields, name)
        if value is None:
            continue
        if variables.setdefault(name, value) != value:
            raise BadRequest(
                f"{name}: given twice, received {quoted(value)} and {quoted(variables[name])} in chat_template_kwargs; "
                "send it once"
            )
    return options | {"chat_template_kwargs": variables}


def _constraint(wanted: ResponseFormat | None, structured: StructuredOutputs | None) -> StructuredOutputs | None:
    """Return the constraint on the text of an answer, which comes in one of two fields."""
    if wanted is None:
        return structured
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        raise BadRequest(f"response_format.json_schema: must come with type json_schema alone, received {wanted.type}")
    if wanted.type == "text":
        return structured
    if structured is not None:
        raise BadRequest(
            f"structured_outputs: only one constraint per answer is possible, received {structured.kind} and a format "
            f"of type {wanted.type}; send one"
        )
    if wanted.json_schema is not None:
        return StructuredOutputs(json=wanted.json_schema.json_schema)
    return StructuredOutputs(json_object=True)


def _with_answer(calls: ToolCallSpec, constraint: StructuredOutputs | None) -> ToolCallSpec:
    """Return ``calls`` with the schema in ``constraint`` for an answer without calls. Raises BadRequest for others.

    An answer that must be calls has no such schema.
    """
    if constraint is None:
        return calls
    schema = {"type": "object", "additionalProperties": True} if constraint.json_object else constraint.json_schema
    if schema is None or constraint not in (StructuredOutputs(json_object=True), StructuredOutputs(json=schema)):
        raise BadRequest(
            f"structured_outputs: with tools must be json or json_object without options, received "
            f"{quoted(constraint)}; leave the options out, or send tool_choice none"
        )
    if isinstance(schema, str):
        try:
            schema = parse_json_text(schema)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"structured_outputs.json: the schema is not JSON: {clipped(error)}") from None
    return calls if calls.format is None else replace(calls, answer_schema=schema)
