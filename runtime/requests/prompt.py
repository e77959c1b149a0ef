"""What may be given as a prompt, and the token ids it comes to."""

from collections.abc import Mapping, Sequence
from typing import Any

from tandemrt.engines.chat import ChatOptions
from tandemrt.engines.control_tokens import texts
from tandemrt.engines.errors import BadRequest, clipped, quoted
from tandemrt.engines.tokenizer import Tokenizer
from tandemrt.runtime.requests.messages import Message, joined


class Chat(ChatOptions):
    """Chat messages, objects with role and content, and how they become a prompt. Raises BadRequest."""

    messages: Any

    def __init__(self, messages: Sequence[Message], **options: Any) -> None:
        super().__init__(messages=messages, **options)


Prompt = str | Sequence[int] | Sequence[Message] | Chat


def is_batch(prompts: Any) -> bool:
    """Whether ``prompts`` is a list of prompts: not a text, not token ids, not the messages of one chat."""
    return (
        isinstance(prompts, Sequence)
        and len(prompts) > 0
        and not isinstance(prompts, str)
        and isinstance(prompts[0], str | list | tuple | Chat)
    )


def token_ids(prompt: Prompt, tokenizer: Tokenizer, *, valid_tokens: int, limit: int) -> list[int]:
    """Return the prompt's token ids: a text is encoded, chat messages go through the tokenizer's template.

    Raises BadRequest for an empty prompt, ids outside [0, valid_tokens), or more than ``limit`` tokens.
    """
    ids = _encode(prompt, tokenizer)
    if not ids:
        raise BadRequest(f"prompt: must hold at least one token, received {quoted(prompt)}")
    outside = [i for i in ids if not 0 <= i < valid_tokens]
    if outside:
        raise BadRequest(f"prompt: token ids must be in 0..{valid_tokens - 1}, received {quoted(outside[0])}")
    if len(ids) > limit:
        raise BadRequest(
            f"prompt: at most {limit} tokens leave room for an output, received {len(ids)}; "
            "shorten it or build the bundle with a larger limits.length"
        )
    return ids


def _encode(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, str):
        return _encode_text(prompt, tokenizer)
    if isinstance(prompt, Chat):
        return _encode_chat(prompt, tokenizer)
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        items: list[Any] = list(prompt)
        if items and all(isinstance(item, Mapping) for item in items):
            return _encode_chat(Chat(items), tokenizer)
        if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            return [int(item) for item in items]
    raise BadRequest(
        f"prompt: must be a text, a list of token ids or a list of chat messages, received {quoted(prompt)}"
    )


def _encode_chat(chat: Chat, tokenizer: Tokenizer) -> list[int]:
    messages = joined(list(chat.messages))
    if not tokenizer.chat_templates:
        raise BadRequest(
            "prompt: the bundle's tokenizer must have a chat template to take messages, and has none; "
            f"send a text instead (tandemrt run: --raw), received {quoted(messages)}"
        )
    tools, variables, control = chat.tools, chat.chat_template_kwargs, tokenizer.control_text
    for each in texts([messages, tools, variables]):
        _require_utf8(each)
    mark = None if chat.allow_control_tokens else control.mark_for(messages, tools, variables)
    if mark is not None:
        # An answer that is sent back may hold the tags that the model wrote itself: templates look for them.
        messages = [control.mark(each, mark, tags=each.get("role") == "assistant") for each in messages]
        tools, variables = control.mark(tools, mark), control.mark(variables, mark)
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=chat.generation_prompt,
            continue_final_message=chat.continue_final_message,
            variables=variables,
        )
    except BadRequest:
        raise
    except Exception as error:  # templates raise whatever their author wrote
        raise BadRequest(
            f"prompt: the chat template refused the messages: {clipped(error)}; received {quoted(messages)}"
        ) from error
    if mark is not None:
        return control.encode(text, mark)
    return _encode_text(text, tokenizer, add_special_tokens=False)


def _encode_text(text: str, tokenizer: Tokenizer, *, add_special_tokens: bool = True) -> list[int]:
    _require_utf8(text)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _require_utf8(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"prompt: must be text that UTF-8 can spell, received {text[error.start]!r} at character {error.start}; "
            "join or drop lone surrogates"
        ) from None
