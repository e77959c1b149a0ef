"""Parse a request to /v1/messages: it becomes a chat."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool

from tandemrt.engines.text.chat import ChatOptions
from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.engines.validation.records import Record
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.servers.anthropic.content import as_messages
from tandemrt.runtime.servers.openai.field_names import client_names
from tandemrt.runtime.servers.openai.protocol import FunctionName, RequestObject, Text
from tandemrt.runtime.servers.openai.request_body import (
    NO_OP_VALUES,
    REPLACED_FIELDS,
    CompletionRequest,
    parse_as_chat,
    split,
)
from tandemrt.runtime.servers.openai.template_variables import without_unread
from tandemrt.runtime.workers.clients import Client

_NO_OP_VALUES: Mapping[str, tuple[Any, ...]] = {
    **NO_OP_VALUES,
    "container": (),
    "context_management": ({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},),  # of Claude Code
    "logprobs": (False,),
    "mcp_servers": ([],),
    "n": (1,),
    "prompt_logprobs": (),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}
_REPLACED_FIELDS = {
    **REPLACED_FIELDS,
    "max_completion_tokens": "max_tokens",
    "output_format": 'output_config {"format": ...}',
    "reasoning_effort": 'output_config {"effort": ...}',
    "response_format": 'output_config {"format": ...}',
    "stop": "stop_sequences",
    "user": 'metadata {"user_id": ...}',
}
_NAMES = {
    "prompt": "messages",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "user": "metadata.user_id",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesTool(RequestObject):
    """A function that the model may call. Its input always obeys ``input_schema``, whatever ``strict`` is.

    ``cache_control``, ``eager_input_streaming`` and ``defer_loading`` have no effect: prefixes are always cached,
    inputs always streamed, and all tools described.
    """

    name: FunctionName
    input_schema: dict[str, Any]
    description: Text | None = None
    type: Literal["custom"] | None = None
    strict: StrictBool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: StrictBool | None = None
    defer_loading: StrictBool | None = None

    def of_chat(self) -> dict[str, Any]:
        """Return the tool in the form of a chat."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema}}


class ToolChoice(RequestObject):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: StrictBool = False


class Thinking(RequestObject):
    """``adaptive`` leaves it to the model; ``disabled`` is the template variable ``enable_thinking`` false."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(strict=True, ge=0)] | None = None
    display: Literal["summarized"] | None = None  # the answer contains the whole text


class JsonFormat(Record):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestObject):
    effort: Text | None = None
    format: JsonFormat | None = None


class Metadata(RequestObject):
    user_id: Text | None = None


class MessagesFields(ChatOptions):
    """Fields of /v1/messages. ``cache_control`` and ``diagnostics`` have no effect: prefixes are always cached."""

    messages: Any
    model: Text | None = None
    stream: StrictBool = False
    system: Any = None
    stop_sequences: list[Text] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    tools: list[MessagesTool] = Field(default_factory=list)  # type: ignore[assignment]  # another form
    tool_choice: ToolChoice | None = None
    metadata: Metadata = Metadata()
    cache_control: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None  # of Claude Code


def parse_messages_request(body: Mapping[str, Any], templates: Mapping[str, str]) -> CompletionRequest:
    """Parse a request to /v1/messages. ``templates``: the model's chat templates by name. Raises BadRequest."""
    fields, sampling = split(body, MessagesFields, _NO_OP_VALUES, _REPLACED_FIELDS)
    messages = as_messages(fields.messages, fields.system)
    options = {name: body.get(name) for name in ChatOptions.model_fields if name != "tools"}
    if options["add_generation_prompt"] is None and options["continue_final_message"] is None:
        options["continue_final_message"] = _is_prefill(messages[-1])
    choice, wanted = fields.tool_choice, fields.output_config.format
    schema = None if wanted is None else {"name": "answer", "schema": wanted.json_schema}
    chat = {
        **sampling,
        **options,
        **_thinking(fields.thinking, fields.chat_template_kwargs),
        "model": fields.model,
        "stream": fields.stream,
        "user": fields.metadata.user_id,
        "messages": messages,
        "stop": fields.stop_sequences,
        "reasoning_effort": fields.output_config.effort,
        "response_format": None if schema is None else {"type": "json_schema", "json_schema": schema},
        "tools": [tool.of_chat() for tool in fields.tools] or None,
        "tool_choice": None if choice is None else _tool_choice(choice),
        "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
    }
    return parse_as_chat(chat, _NAMES, templates)


def _is_prefill(message: Mapping[str, Any]) -> bool:
    """Whether the answer continues this last message, as Anthropic's models do."""
    return bool(message["role"] == "assistant" and message["content"] and "tool_calls" not in message)


def _thinking(thinking: Thinking | None, variables: Mapping[str, Any]) -> dict[str, Any]:
    if thinking is None:
        return {}
    if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
        received = f"{thinking.type} and {quoted(thinking.budget_tokens)}"
        raise BadRequest(f"thinking.budget_tokens: must come with type enabled alone, received {received}")
    if thinking.type == "disabled":
        return {"chat_template_kwargs": {"enable_thinking": False, **variables}}
    return {"thinking_token_budget": thinking.budget_tokens}


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if (choice.type == "tool") != (choice.name is not None):
        raise BadRequest(f"tool_choice.name: must come with type tool alone, received {quoted(choice.name)}")
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return _CHOICES[choice.type]


def count_tokens(body: Mapping[str, Any], llm: LLM, client: Client, salt: str | None) -> dict[str, Any]:
    """Return the number of tokens of a request's prompt. Raises BadRequest. ``salt``: see LLM.tokenize."""
    parsed = parse_messages_request(body, llm.tokenizer.chat_templates)
    prompt, _ = without_unread(parsed.prompt, llm.tokenizer, parsed.field_names)
    with client_names(parsed.field_names):
        return {"input_tokens": len(llm.tokenize(prompt, client=client, cache_salt=salt))}
