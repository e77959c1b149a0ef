"""What may be given as a prompt, and the token ids it comes to, within sizes and a time."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tandemrt.engines.chat import ChatOptions
from tandemrt.engines.chat_template import ChatTemplate, rendered
from tandemrt.engines.control_tokens import texts
from tandemrt.engines.errors import BadRequest, clipped, quoted
from tandemrt.engines.sizes import exceeds
from tandemrt.engines.tokenizer import Tokenizer, reopened
from tandemrt.runtime.processes.pool import ProcessPool
from tandemrt.runtime.requests.messages import Message, before_the_end, joined, to_be_continued

CHAT_FACTOR = 4  # how much larger than a text messages may be: templates leave things out, old reasoning above all
QUICK_BYTES = 256 << 10  # of a text that becomes tokens here; a second of work at worst

InProcess = Callable[..., Any]  # what it is, a function and its arguments; returns its result


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


class PromptReader:
    """Turns prompts into token ids: a text is encoded, chat messages go through the tokenizer's template.

    Args:
        valid_tokens: ids are below it.
        limit: of a prompt, in tokens.
        most_bytes: of a text; a chat may have ``CHAT_FACTOR`` times as many characters in all of its values. Checked
            before anything is done with it.
        processes: where a template is rendered that is not quick, and where a long text becomes tokens.
        timeout_s: for each of these.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        valid_tokens: int,
        limit: int,
        most_bytes: int,
        processes: ProcessPool,
        timeout_s: float,
    ) -> None:
        self._tokenizer = tokenizer
        self._valid_tokens = valid_tokens
        self._limit = limit
        self._most_bytes = most_bytes
        self._processes = processes
        self._timeout_s = timeout_s

    def read(self, prompt: Prompt, deadline: float | None = None, client: str = "") -> list[int]:
        """Return the prompt's token ids. ``deadline``: in seconds of ``time.monotonic``; ``client``: whose it is.

        Raises BadRequest for an empty prompt, one that is too large or takes too long, and ids out of range.
        """
        ids = self._encode(prompt, partial(self._in_process, client, deadline))
        if not ids:
            raise BadRequest(f"prompt: must hold at least one token, received {quoted(prompt)}")
        if len(ids) > self._limit:
            raise self._too_long(len(ids))
        if min(ids) < 0 or max(ids) >= self._valid_tokens:
            outside = next(i for i in ids if not 0 <= i < self._valid_tokens)
            raise BadRequest(f"prompt: token ids must be in 0..{self._valid_tokens - 1}, received {quoted(outside)}")
        return ids

    def _encode(self, prompt: Prompt, in_process: InProcess) -> list[int]:
        if isinstance(prompt, str):
            return self._encode_text(prompt, in_process)
        if isinstance(prompt, Chat):
            return self._encode_chat(prompt, in_process)
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
            if prompt and isinstance(prompt[0], Mapping):
                return self._encode_chat(Chat(prompt), in_process)  # type: ignore[arg-type]
            if len(prompt) > self._limit:
                raise self._too_long(len(prompt))
            if all(issubclass(kind, int) and kind is not bool for kind in set(map(type, prompt))):
                return list(map(int, prompt))  # type: ignore[arg-type]
        raise BadRequest(
            f"prompt: must be a text, a list of token ids or a list of chat messages, received {quoted(prompt)}"
        )

    def _encode_chat(self, chat: Chat, in_process: InProcess) -> list[int]:
        tools, variables = chat.tools, chat.chat_template_kwargs
        if exceeds((chat.messages, tools, variables), CHAT_FACTOR * self._most_bytes):
            raise BadRequest(
                f"prompt: messages and tools must hold at most {CHAT_FACTOR * self._most_bytes} characters, "
                f"{CHAT_FACTOR} times max_prompt_bytes, received {quoted(chat.messages)}; shorten them"
            )
        messages = list(chat.messages)
        if not all(isinstance(message, Mapping) for message in messages):
            raise BadRequest(f"prompt: every message must be an object, received {quoted(messages)}")
        if not self._tokenizer.chat_templates:
            raise BadRequest(
                "prompt: the bundle's tokenizer must have a chat template to take messages, and has none; "
                f"send a text instead (tandemrt run: --raw), received {quoted(messages)}"
            )
        template = self._tokenizer.chat_template(messages, tools, variables)
        messages = joined(messages)
        for each in texts([messages, tools, variables]):
            _require_utf8(each)
        control = self._tokenizer.control_text
        mark = None if chat.allow_control_tokens else control.mark_for(messages, tools, variables)
        if mark is not None:
            # An answer that is sent back may hold the tags that the model wrote itself: templates look for them.
            messages = [control.mark(each, mark, tags=each.get("role") == "assistant") for each in messages]
            tools, variables = control.mark(tools, mark), control.mark(variables, mark)
        if chat.continue_final_message:
            messages = to_be_continued(messages)
        text = self._render(template, messages, in_process, tools=tools, variables=variables, chat=chat)
        if chat.continue_final_message:
            text = before_the_end(text, messages)
        return self._encode_text(text, in_process, add_special_tokens=False, mark=mark)

    def _render(
        self, template: ChatTemplate, messages: list[Message], in_process: InProcess, *, chat: Chat, **told: Any
    ) -> str:
        try:
            values = template.values(messages, add_generation_prompt=chat.generation_prompt, **told)
            text = template.render_quickly(values)
        except Exception as error:  # templates raise whatever their author wrote
            raise _refused(error, messages) from error
        if text is None:
            text, problem = in_process("the chat template", _render, template.source, values)
            if problem is not None:
                raise _refused(problem, messages)
        return text

    def _encode_text(
        self, text: str, in_process: InProcess, *, add_special_tokens: bool = True, mark: str | None = None
    ) -> list[int]:
        """``mark``: what breaks control tokens that are text (engines/control_tokens.py)."""
        if len(text) <= self._most_bytes:
            _require_utf8(text)
        size = len(text) if len(text) > self._most_bytes else len(text.encode())
        if size > self._most_bytes:
            raise BadRequest(
                f"prompt: at most {self._most_bytes} bytes of text may become tokens (max_prompt_bytes), received at "
                f"least {size} that begin {quoted(text)}; shorten it"
            )
        tokenizer = self._tokenizer
        if size <= QUICK_BYTES or tokenizer.folder is None:
            return _tokens(tokenizer, text, add_special_tokens, mark)
        arguments = (tokenizer.folder, tokenizer.writers, text, add_special_tokens, mark)
        ids: list[int] = in_process("making tokens of the text", _tokens_there, *arguments)
        return ids

    def _in_process(self, client: str, deadline: float | None, what: str, *work: Any) -> Any:
        left = self._timeout_s if deadline is None else min(self._timeout_s, deadline - time.monotonic())
        return self._processes.submit(client, f"prompt: {what}", max(left, 0.0), *work).result()

    def _too_long(self, received: int) -> BadRequest:
        return BadRequest(
            f"prompt: at most {self._limit} tokens leave room for an output, received {received}; "
            "shorten it or build the bundle with a larger limits.length"
        )


def _refused(problem: Exception | str, messages: list[Any]) -> BadRequest:
    if isinstance(problem, BadRequest):
        return problem
    return BadRequest(
        f"prompt: the chat template refused the messages: {clipped(problem)}; received {quoted(messages)}"
    )


def _render(source: str, values: Mapping[str, Any]) -> list[str | None]:
    """In a process: the text, or what the template raised."""
    try:
        return [rendered(source, values), None]
    except (MemoryError, BadRequest):
        raise
    except Exception as error:
        return [None, str(error)]


def _tokens_there(
    folder: Path, writers: Sequence[str], text: str, add_special_tokens: bool, mark: str | None
) -> list[int]:
    """In a process."""
    return _tokens(reopened(folder, tuple(writers)), text, add_special_tokens, mark)


def _tokens(tokenizer: Tokenizer, text: str, add_special_tokens: bool, mark: str | None) -> list[int]:
    if mark is not None:
        return tokenizer.control_text.encode(text, mark)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _require_utf8(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"prompt: must be text that UTF-8 can spell, received {text[error.start]!r} at character {error.start}; "
            "join or drop lone surrogates"
        ) from None
