"""Answer /tokenize and /detokenize, in vLLM's forms: the tokens of a prompt, and the text of tokens."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import Field, StrictBool, StrictStr, ValidationError

from tandemrt.engines.text.chat import ChatOptions
from tandemrt.engines.validation.errors import BadRequest, ContextLengthExceeded, quoted
from tandemrt.engines.validation.records import Section, explain
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.prompt import Chat, Prompt
from tandemrt.runtime.servers.openai.field_names import client_names
from tandemrt.runtime.servers.openai.messages import parse_messages
from tandemrt.runtime.servers.openai.protocol import Tool
from tandemrt.runtime.servers.openai.template_variables import without_unread
from tandemrt.runtime.workers.clients import Client

Fields = TypeVar("Fields", bound=Section)


class TokenizeFields(ChatOptions):
    """Fields of /tokenize: a text, or messages with the options of a chat.

    ``add_special_tokens`` adds the begin and end tokens of a text. A chat template writes its own.
    """

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None  # type: ignore[assignment]  # OpenAI's tools instead of any object
    add_special_tokens: StrictBool | None = None
    return_token_strs: StrictBool = False


class DetokenizeFields(Section):
    """Fields of /detokenize."""

    model: StrictStr | None = None
    tokens: list[Annotated[int, Field(strict=True, ge=0)]]


def tokenize(body: Mapping[str, Any], llm: LLM, client: Client, salt: str | None) -> dict[str, Any]:
    """Return the tokens of a text or chat, as a completion with this ``cache_salt`` reads it. Raises BadRequest."""
    fields = _fields(TokenizeFields, body)
    prompt = _prompt(fields)
    names = {} if isinstance(prompt, str) else {"prompt": "messages"}
    prompt, warnings = without_unread(prompt, llm.tokenizer, names)
    with client_names(names):
        special = fields.add_special_tokens is not False
        ids = llm.tokenize(prompt, add_special_tokens=special, client=client, cache_salt=salt)
    return {
        "count": len(ids),
        "max_model_len": llm.bundle.limits.length,
        "tokens": ids,
        "token_strs": [llm.tokenizer.backend.id_to_token(each) for each in ids] if fields.return_token_strs else None,
        **({"warnings": warnings} if warnings else {}),
    }


def detokenize(body: Mapping[str, Any], llm: LLM, _client: Client, _salt: str | None) -> dict[str, Any]:
    """Return the text of token ids, special tokens included. Raises BadRequest."""
    tokens = _fields(DetokenizeFields, body).tokens
    if len(tokens) > llm.bundle.limits.length:
        raise ContextLengthExceeded(
            f"tokens: at most {llm.bundle.limits.length}, the engine's length, received {len(tokens)}; send fewer"
        )
    valid = llm.bundle.valid_tokens
    outside = next((each for each in tokens if each >= valid), None)
    if outside is not None:
        raise BadRequest(f"tokens: token ids must be in 0..{valid - 1}, received {quoted(outside)}")
    return {"prompt": llm.tokenizer.decode(tokens)}


def _prompt(fields: TokenizeFields) -> Prompt:
    if (fields.prompt is None) == (fields.messages is None):
        raise BadRequest("prompt: must come instead of messages; send one of the two")
    if fields.prompt is not None:
        for name in ChatOptions.model_fields:
            if name in fields.model_fields_set:
                raise BadRequest(f"{name}: must come with messages, received it with prompt; leave it out")
        return fields.prompt
    if fields.add_special_tokens:
        raise BadRequest(
            "add_special_tokens: must come with prompt, because a chat template writes its own tokens; leave it out"
        )
    assert fields.messages is not None
    options = {name: getattr(fields, name) for name in ChatOptions.model_fields}
    tools = [tool.model_dump(exclude_none=True) for tool in fields.tools or ()]
    return Chat(parse_messages(fields.messages), **options | {"tools": tools})


def _fields(kind: type[Fields], body: Mapping[str, Any]) -> Fields:
    try:
        return kind(**{name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        raise BadRequest(explain(error)) from error
