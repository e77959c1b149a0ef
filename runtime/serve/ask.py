"""From a request's body to a prompt, ``SamplingParams`` and what the answer is to look like, or a refusal by name.

A field is either one of OpenAI's own (protocol.py) or a sampling parameter of the same name: a parameter added to
``SamplingParams`` is a field here, with no second list.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from tandemrt.engines import serving
from tandemrt.engines.chat import ChatOptions
from tandemrt.engines.errors import BadRequest, clipped, quoted
from tandemrt.engines.params import SamplingParams, StructuredOutputs
from tandemrt.engines.validation import explain, nearest
from tandemrt.runtime.requests.prompt import Chat, Prompt
from tandemrt.runtime.serve import messages, tools
from tandemrt.runtime.serve.protocol import ChatFields, CommonFields, CompletionFields, ResponseFormat, StreamOptions

OFF: Mapping[str, tuple[Any, ...]] = {
    **serving.OFF,
    "echo": (False,),
    "suffix": ("",),
    "store": (False,),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "metadata": ({},),
}
"""What clients send without meaning it: accepted at the value that asks for nothing, else refused."""

Fields = TypeVar("Fields", bound=CommonFields)


@dataclass(frozen=True)
class Ask:
    """What one request asks for.

    Attributes:
        model: the name of a served model; None: the only one.
        calls: how the answer's text spells calls of functions; None: it is text.
        usage: what a stream tells of the usage.
        token_ids: whether choices tell the tokens of prompt and output.
        user: whose request it is, "" if nobody said.
    """

    model: str | None
    prompt: Prompt
    params: SamplingParams
    stream: bool
    usage: StreamOptions
    calls: tools.Spelling | None = None
    token_ids: bool = False
    user: str = ""


def read_json(body: bytes) -> dict[str, Any]:
    """Return the object that ``body`` holds. Raises BadRequest."""
    try:
        value = json.loads(body.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"the body must be UTF-8, received {body[error.start : error.start + 1]!r} at byte {error.start}"
        ) from None
    except ValueError as error:
        raise BadRequest(f"the body must be JSON, received {quoted(body)}: {clipped(error)}") from None
    except RecursionError:
        raise BadRequest(f"the body must be JSON of a sensible depth, received {len(body)} bytes") from None
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, received {quoted(value)}")
    return value


def read_chat(body: Mapping[str, Any], templates: Mapping[str, str]) -> Ask:
    """Read a request to /v1/chat/completions; ``templates`` are the model's chat templates. Raises BadRequest."""
    fields, sampling = _split(_with_logprobs(body), ChatFields)
    if fields.max_completion_tokens is not None:
        if sampling.get("max_tokens", fields.max_completion_tokens) != fields.max_completion_tokens:
            raise BadRequest(
                f"max_completion_tokens: is another name of max_tokens, received {fields.max_completion_tokens} and "
                f"{quoted(sampling['max_tokens'])}; send one"
            )
        sampling["max_tokens"] = fields.max_completion_tokens
    offered = tools.read(fields.tools, fields.tool_choice, templates, parallel=fields.parallel_tool_calls)
    shapes = {
        "response_format": _shape(fields.response_format),
        "structured_outputs": sampling.pop("structured_outputs", None),
        "tool_choice": None if offered.spelling is None else offered.spelling.shape(),
    }
    given = {name: shape for name, shape in shapes.items() if shape is not None}
    if len(given) > 1:
        raise BadRequest(f"{[*given][-1]}: an answer has one shape, received {' and '.join(given)}; send one of them")
    if offered.spelling is not None and offered.spelling.form is not None:
        sampling["skip_special_tokens"] = False  # which may be how a call begins; its grammar allows no others
    chat = Chat(messages.read(fields.messages), **_chat_options(fields) | {"tools": offered.described})
    params = SamplingParams(**sampling, structured_outputs=next(iter(given.values()), None))
    return _ask(fields, chat, params, offered.spelling)


def read_completion(body: Mapping[str, Any], _templates: Mapping[str, str]) -> Ask:
    """Read a request to /v1/completions. Raises BadRequest."""
    fields, sampling = _split(body, CompletionFields)
    prompt = fields.prompt
    if isinstance(prompt, list) and prompt and all(isinstance(each, str | list) for each in prompt):
        if len(prompt) > 1:
            raise BadRequest(f"prompt: one prompt a request, received {len(prompt)}; send a request for each")
        prompt = prompt[0]
    return _ask(fields, prompt, SamplingParams(**sampling))


def _with_logprobs(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A chat's logprobs and top_logprobs as the sampling parameter, which says both."""
    asked, top = body.get("logprobs"), body.get("top_logprobs")
    if asked is not None and not isinstance(asked, bool):
        raise BadRequest(f"logprobs: must be true or false in a chat, received {quoted(asked)}; see top_logprobs")
    if not asked and top:
        raise BadRequest(f"top_logprobs: must come with logprobs true, received {quoted(top)}; add it")
    return {**body, "logprobs": (0 if top is None else top) if asked else None, "top_logprobs": None}


def _ask(fields: CommonFields, prompt: Prompt, params: SamplingParams, calls: tools.Spelling | None = None) -> Ask:
    if fields.stream_options is not None and not fields.stream:
        raise BadRequest("stream_options: must come with stream true; leave it out")
    return Ask(
        model=fields.model,
        prompt=prompt,
        params=params,
        stream=fields.stream,
        usage=fields.stream_options or StreamOptions(),
        calls=calls,
        token_ids=fields.return_token_ids,
        user=fields.user or "",
    )


def _split(body: Mapping[str, Any], kind: type[Fields]) -> tuple[Fields, dict[str, Any]]:
    """OpenAI's own fields, and the sampling parameters. A field that is null was not given."""
    known = [*kind.model_fields, *SamplingParams.model_fields]
    for name, value in body.items():
        if name in known or (name in OFF and (value is None or value in OFF[name])):
            continue
        if name in OFF:
            raise BadRequest(f"{name}: is not supported, received {quoted(value)}; leave it out")
        raise BadRequest(
            f"{clipped(name)}: is no field of this endpoint{nearest(name, known)}, received {quoted(value)}; "
            "leave it out"
        )
    given = {name: value for name, value in body.items() if name in known and value is not None}
    sampling = {name: given.pop(name) for name in [*given] if name in SamplingParams.model_fields}
    try:
        return kind(**given), sampling
    except ValidationError as error:
        raise BadRequest(explain(error)) from error


def _chat_options(fields: ChatFields) -> dict[str, Any]:
    options = {name: getattr(fields, name) for name in ChatOptions.model_fields}
    variables, effort = options["chat_template_kwargs"], fields.reasoning_effort
    if effort is None:
        return options
    if variables.get("reasoning_effort", effort) != effort:
        raise BadRequest(
            f"reasoning_effort: given twice, received {quoted(effort)} and "
            f"{quoted(variables['reasoning_effort'])} in chat_template_kwargs; send it once"
        )
    return options | {"chat_template_kwargs": {**variables, "reasoning_effort": effort}}


def _shape(wanted: ResponseFormat | None) -> StructuredOutputs | None:
    if wanted is None:
        return None
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        raise BadRequest(f"response_format.json_schema: must come with type json_schema alone, received {wanted.type}")
    if wanted.json_schema is not None:
        return StructuredOutputs(json=wanted.json_schema.json_schema)
    return StructuredOutputs(json_object=True) if wanted.type == "json_object" else None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
