"""The fields of a request that are no sampling parameters: OpenAI's own. All others are those of SamplingParams."""

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictStr

from tandemrt.engines.chat import ChatOptions
from tandemrt.engines.validation import Record, Section

FunctionName = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Text = Annotated[str, Field(strict=True)]


class StreamOptions(Section):
    """What a stream tells beside the text.

    Attributes:
        include_usage: a last chunk with the usage of the whole request.
        continuous_usage_stats: the usage so far in every chunk (vLLM).
    """

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class NamedSchema(Record):
    """OpenAI's wrapping of a JSON schema. A schema is always held to the letter, whatever ``strict`` says."""

    name: Text
    description: Text | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Section):
    """Another way to structured_outputs."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class Function(Section):
    """A function the model may call: its arguments are an object that obeys ``parameters``, a JSON schema."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(Section):
    type: Literal["function"]
    function: Function


class FunctionChoice(Section):
    name: FunctionName


class NamedChoice(Section):
    type: Literal["function"]
    function: FunctionChoice


class CommonFields(Section):
    """Fields of both endpoints. ``user`` names whose request it is, for fair turns; ``return_token_ids`` is vLLM's."""

    model: StrictStr | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    user: StrictStr | None = None
    return_token_ids: StrictBool = False


class ChatFields(CommonFields, ChatOptions):
    """Fields of /v1/chat/completions, those of ChatOptions among them.

    ``max_completion_tokens`` is another name of ``max_tokens``; ``reasoning_effort`` is a variable of the template.
    """

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(strict=True)] | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Text | None = None
    tools: list[Tool] | None = None  # type: ignore[assignment]  # as OpenAI has them, in place of any object
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: StrictBool = True


class CompletionFields(CommonFields):
    """Fields of /v1/completions."""

    prompt: StrictStr | list[Any]
