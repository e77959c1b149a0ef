"""Request fields of the OpenAI API that are not sampling parameters. All other fields are those of SamplingParams."""

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictStr, model_validator

from tandemrt.engines.text.chat import ChatOptions
from tandemrt.engines.validation.records import Record, Section
from tandemrt.runtime.workers.clients import MAX_USER_LENGTH

FunctionName = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Text = Annotated[str, Field(strict=True)]
Verbosity = Literal["low", "medium", "high"]
MAX_REQUEST_ID = 256  # characters; every chunk of a stream repeats the id


class RequestObject(Section):
    """An object in the body of a request. A null field counts as absent, because clients send all that they know."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(RequestObject):
    """What a stream contains besides text.

    Attributes:
        include_usage: send the usage of the whole request in a last chunk.
        continuous_usage_stats: send the usage so far in every chunk (vLLM).
        include_token_sources: send where each token came from, as in a trace.
    """

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False
    include_token_sources: StrictBool = False


class JsonSchemaFormat(Record):
    """JSON schema of a response format. The answer always obeys the schema, whatever ``strict`` is."""

    name: Text
    description: Text | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(RequestObject):
    """OpenAI's form of ``structured_outputs``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class Function(RequestObject):
    """A function that the model may call. Its arguments are an object that obeys ``parameters``, a JSON schema."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(RequestObject):
    type: Literal["function"]
    function: Function


class FunctionChoice(RequestObject):
    name: FunctionName


class NamedToolChoice(RequestObject):
    type: Literal["function"]
    function: FunctionChoice


class RequestFields(Section):
    """Fields of all of OpenAI's endpoints.

    ``user`` shares what its address gets (Client.user). ``request_id`` is vLLM's: the response has it as its id.
    ``store`` and ``metadata`` have no effect: nothing is stored. Nor have ``prompt_cache_key``,
    ``prompt_cache_retention`` and ``safety_identifier``: ``cache_salt`` decides which requests share cached prefixes.
    """

    model: StrictStr | None = None
    stream: StrictBool = False
    user: Annotated[StrictStr, Field(max_length=MAX_USER_LENGTH)] | None = None
    store: StrictBool = False
    metadata: dict[Text, Text] = Field(default_factory=dict)
    request_id: Annotated[StrictStr, Field(min_length=1, max_length=MAX_REQUEST_ID)] | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None
    safety_identifier: Text | None = None


class CommonFields(RequestFields):
    """Fields of chats and completions. ``return_token_ids`` is vLLM's.

    ``vllm-router`` and ``sglang-router`` add the defaults of SGLang's fields to every request: ``no_stop_trim`` and
    ``return_hidden_states`` here, ``separate_reasoning`` and ``stream_reasoning`` to chats. The defaults are what this
    server does.
    """

    stream_options: StreamOptions | None = None
    return_token_ids: StrictBool = False
    no_stop_trim: Literal[False] = False
    return_hidden_states: Literal[False] = False


class ChatFields(CommonFields, ChatOptions):
    """Fields of /v1/chat/completions, including those of ChatOptions.

    ``max_completion_tokens`` is an alias of ``max_tokens``. ``reasoning_effort`` and ``documents`` are chat template
    variables. ``include_reasoning`` false leaves the reasoning out of the response. ``verbosity`` has no effect: models
    have no such setting.
    """

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(strict=True)] | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Text | None = None
    documents: list[dict[str, Any]] | None = None
    include_reasoning: StrictBool = True
    verbosity: Verbosity | None = None
    separate_reasoning: Literal[True] = True
    stream_reasoning: Literal[True] = True
    tools: list[Tool] | None = None  # type: ignore[assignment]  # OpenAI's tools instead of any object
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: StrictBool = True


class CompletionFields(CommonFields):
    """Fields of /v1/completions. ``echo``: the text of a choice begins with the prompt."""

    prompt: StrictStr | list[Any]
    echo: StrictBool = False
