"""Parse a request to /v1/responses: its input items become the messages of a chat.

The server stores nothing, so a request holds the whole conversation.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool

from tandemrt.engines.text.chat import ChatOptions
from tandemrt.runtime.servers.openai.protocol import (
    FunctionName,
    JsonSchemaFormat,
    RequestFields,
    RequestObject,
    Text,
    Verbosity,
)
from tandemrt.runtime.servers.openai.request_body import (
    NO_OP_VALUES,
    REPLACED_FIELDS,
    CompletionRequest,
    parse_as_chat,
    split,
)
from tandemrt.runtime.servers.openai.responses_items import as_messages

_NO_OP_VALUES: Mapping[str, tuple[Any, ...]] = {
    **NO_OP_VALUES,
    "background": (False,),
    "conversation": (),
    "logprobs": (False,),
    "max_tool_calls": (),
    "n": (1,),
    "prompt": (),
    "prompt_logprobs": (),
    "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
    "truncation": ("disabled",),
}
_REPLACED_FIELDS = {
    **REPLACED_FIELDS,
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "previous_response_id": "all items of the conversation in input, because the server stores no responses",
    "reasoning_effort": 'reasoning {"effort": ...}',
    "response_format": 'text {"format": ...}',
}
_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


class ResponsesTool(RequestObject):
    """A function that the model may call. Its arguments always obey ``parameters``, whatever ``strict`` is."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None

    def of_chat(self) -> dict[str, Any]:
        """Return the tool in the form of a chat."""
        return {"type": "function", "function": self.model_dump(exclude_none=True, exclude={"type"})}


class FunctionToolChoice(RequestObject):
    type: Literal["function"]
    name: FunctionName


class PlainFormat(RequestObject):
    type: Literal["text", "json_object"]


class SchemaFormat(JsonSchemaFormat):
    """A JSON schema: the fields of a chat's ``json_schema``, with the type."""

    type: Literal["json_schema"]


class TextOptions(RequestObject):
    """``verbosity`` has no effect: models have no such setting."""

    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Verbosity | None = None


class ReasoningOptions(RequestObject):
    """``summary`` has no effect: the answer contains the whole reasoning."""

    effort: Text | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesFields(RequestFields, ChatOptions):
    """Fields of /v1/responses.

    ``include`` may ask for encrypted reasoning, which has no effect: reasoning items hold their text. Nor has
    ``client_metadata``, which Codex sends.
    """

    input: Any
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(strict=True)] | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    include: list[Literal["reasoning.encrypted_content"]] = Field(default_factory=list)
    tools: list[ResponsesTool] = Field(default_factory=list)  # type: ignore[assignment]  # another form
    tool_choice: Literal["none", "auto", "required"] | FunctionToolChoice = "auto"
    parallel_tool_calls: StrictBool = True
    client_metadata: dict[str, Any] | None = None


def parse_responses(body: Mapping[str, Any], templates: Mapping[str, str]) -> CompletionRequest:
    """Parse a request to /v1/responses. ``templates``: the model's chat templates by name. Raises BadRequest."""
    fields, sampling = split(body, ResponsesFields, _NO_OP_VALUES, _REPLACED_FIELDS)
    choice = fields.tool_choice
    chat = {
        **sampling,
        **{name: body.get(name) for name in ChatOptions.model_fields if name != "tools"},
        "model": fields.model,
        "stream": fields.stream,
        "user": fields.user,
        "request_id": fields.request_id,
        "messages": as_messages(fields.input, fields.instructions),
        "max_tokens": fields.max_output_tokens,
        "response_format": _response_format(fields.text.format),
        "reasoning_effort": fields.reasoning.effort,
        "tools": [tool.of_chat() for tool in fields.tools] or None,
        "tool_choice": choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice.name}},
        "parallel_tool_calls": fields.parallel_tool_calls,
    }
    return replace(parse_as_chat(chat, _NAMES, templates), repeated=_repeated(fields, sampling))


def _response_format(wanted: PlainFormat | SchemaFormat | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    if isinstance(wanted, PlainFormat):
        return {"type": wanted.type}
    fields = wanted.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
    return {"type": "json_schema", "json_schema": fields}


def _repeated(fields: ResponsesFields, sampling: Mapping[str, Any]) -> dict[str, Any]:
    choice = fields.tool_choice
    text_format = fields.text.format or PlainFormat(type="text")
    return {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata,
        "parallel_tool_calls": fields.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": fields.reasoning.effort, "summary": None},
        "store": False,
        "temperature": sampling.get("temperature"),
        "text": {"format": text_format.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [{"parameters": None, "strict": None} | tool.model_dump() for tool in fields.tools],
        "top_p": sampling.get("top_p"),
        "truncation": "disabled",
        "user": fields.user,
    }
