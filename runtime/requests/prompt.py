"""Prompts: turn a text, token ids or chat messages into token ids, within size and time limits."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tandemrt.engines.options.options import BYTES_PER_TOKEN
from tandemrt.engines.parallel.threads import SharedWork, map_ahead
from tandemrt.engines.text.chat import ChatOptions
from tandemrt.engines.text.chat_template import ChatTemplate, call_without_object, rendered
from tandemrt.engines.text.control_tokens import MARKS, texts
from tandemrt.engines.text.tokenizer import Tokenizer, reopened
from tandemrt.engines.validation.errors import BadRequest, ContextLengthExceeded, clipped, quoted
from tandemrt.engines.validation.sizes import exceeds
from tandemrt.runtime.requests.image_pixels import load_decoders
from tandemrt.runtime.requests.images import IMAGE_PART, Image, ImageReader, PromptImages, expanded
from tandemrt.runtime.workers.clients import UNNAMED, Client
from tandemrt.runtime.workers.fair import released_worker
from tandemrt.runtime.workers.sandbox.lanes import ProcessLanes
from tandemrt.runtime.workers.sandbox.pool import wait_for

Message = Mapping[str, Any]
CHAT_FACTOR = 4  # messages may be this much larger than a text, since templates drop parts such as old reasoning
QUICK_BYTES = 256 << 10  # longer texts, and all of a tokenizer that is not quick, are tokenized in a worker process
_IMAGES_IDLE_S = 600.0
_IMAGES_AT_ONCE = 4  # of a prompt
_END_MARK = MARKS[-2] * 2  # marks the end of the last message for continue_final_message

InWorker = Callable[..., Any]  # takes a description, a function and its arguments; returns the function's result


class Chat(ChatOptions):
    """Chat messages, objects with role and content, and the options of their chat template. Raises BadRequest."""

    messages: Any

    def __init__(self, messages: Sequence[Message], **options: Any) -> None:
        super().__init__(messages=messages, **options)


Prompt = str | Sequence[int] | Sequence[Message] | Chat


def is_batch(prompts: Any) -> bool:
    """Return whether ``prompts`` is a list of prompts, as opposed to a text, token ids or messages of one chat."""
    return (
        isinstance(prompts, Sequence)
        and len(prompts) > 0
        and not isinstance(prompts, str)
        and isinstance(prompts[0], str | list | tuple | Chat)
    )


def prompt_processes(tokenizer: Tokenizer, **options: Any) -> ProcessLanes:
    """Return the worker processes of a PromptReader. ``options``: of each ProcessPool.

    Each process opens the tokenizer before its first task, because that may take longer than a quick task.
    """
    opened = None if tokenizer.folder is None else (_open_in_worker, (tokenizer.folder, tokenizer.writers))
    return ProcessLanes(opening=opened, **options)


def image_processes() -> ProcessLanes:
    """Return the worker processes that decode images: half of the cores, because rounds and clients need some, too.

    They open no tokenizer, which takes longer than to decode an image, and wait long for the next one.
    """
    processes = min(8, max(2, (os.cpu_count() or 1) // 2))
    return ProcessLanes(processes=processes, opening=(load_decoders, ()), idle_s=_IMAGES_IDLE_S)


class PromptReader:
    """Turns prompts into token ids. Chat messages go through the tokenizer's chat template first.

    Args:
        valid_tokens: token ids must be below it.
        limit: largest number of tokens of a prompt.
        max_bytes: largest number of bytes of a text. The values of a chat may have ``CHAT_FACTOR`` times as many
            characters together. Both are checked before any other work.
        processes: ``prompt_processes``, which render slow templates and tokenize long texts.
        timeout_s: time limit of each such task, of its wait for a process, and of reading all images of a prompt but
            the last ones, which are read at once.
        images: reads the images in messages; None: the model supports text only.
        image_processes: decode images.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        valid_tokens: int,
        limit: int,
        max_bytes: int,
        processes: ProcessLanes,
        timeout_s: float,
        images: ImageReader | None = None,
        image_processes: ProcessLanes | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._valid_tokens = valid_tokens
        self._limit = limit
        self._max_bytes = max_bytes
        self._processes = processes
        self._timeout_s = timeout_s
        self._images = images
        self._image_processes = image_processes or processes

    def read(
        self,
        prompt: Prompt,
        deadline: float | None = None,
        client: Client = UNNAMED,
        *,
        last: int | None = None,
        salt: str | None = None,
    ) -> tuple[list[int], PromptImages | None]:
        """Return the prompt's token ids, or its ``last`` ones, and its images.

        ``deadline`` is in seconds of ``time.monotonic``; ``client`` shares the worker processes fairly; ``salt``: see
        ImageReader.read. Raises BadRequest for an empty prompt, one that is too large or takes too long, and token ids
        out of range; QueueFull for one that waits too long for a process.
        """
        if last is not None and isinstance(prompt, list | tuple):
            chat = prompt and isinstance(prompt[0], Mapping)
            prompt = prompt if chat else prompt[-last:]
        ids, images = self._encode(prompt, partial(self._in_worker, client, deadline), salt=salt)
        if last is not None and images is not None:
            raise BadRequest("truncate_prompt_tokens: a prompt with images cannot be cut; leave it out")
        if last is not None:
            ids = ids[-last:]
        if not ids:
            raise BadRequest(f"prompt: must hold at least one token, received {quoted(prompt)}")
        if len(ids) > self._limit:
            raise self._too_long(len(ids))
        if min(ids) < 0 or max(ids) >= self._valid_tokens:
            outside = next(i for i in ids if not 0 <= i < self._valid_tokens)
            raise BadRequest(f"prompt: token ids must be in 0..{self._valid_tokens - 1}, received {quoted(outside)}")
        return ids, images

    def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, client: Client = UNNAMED, salt: str | None = None
    ) -> list[int]:
        """Return the token ids of a prompt with any number of tokens, otherwise as ``read``.

        ``add_special_tokens``: whether a text gets its begin and end tokens.
        """
        return self._encode(prompt, partial(self._in_worker, client, None), add_special_tokens, salt=salt)[0]

    def _encode(
        self, prompt: Prompt, in_worker: InWorker, add_special_tokens: bool = True, *, salt: str | None = None
    ) -> tuple[list[int], PromptImages | None]:
        if isinstance(prompt, str):
            return self._encode_text(prompt, in_worker, add_special_tokens=add_special_tokens), None
        if isinstance(prompt, Chat):
            return self._encode_chat(prompt, in_worker, salt)
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
            if prompt and isinstance(prompt[0], Mapping):
                return self._encode_chat(Chat(prompt), in_worker, salt)  # type: ignore[arg-type]
            if len(prompt) > self._limit:
                raise self._too_long(len(prompt))
            kinds = set(map(type, prompt))
            if kinds == {int}:
                return list(prompt), None  # type: ignore[arg-type]
            if all(issubclass(kind, int) and kind is not bool for kind in kinds):
                return list(map(int, prompt)), None  # type: ignore[arg-type]
        raise BadRequest(
            f"prompt: must be a text, a list of token ids or a list of chat messages, received {quoted(prompt)}"
        )

    def _encode_chat(self, chat: Chat, in_worker: InWorker, salt: str | None) -> tuple[list[int], PromptImages | None]:
        """Images are decoded last, so that a prompt that is rejected anyway costs no decoding."""
        if self._images is None or isinstance(chat.messages, str) or not isinstance(chat.messages, Sequence):
            return self._encode_messages(chat, chat.messages, in_worker), None
        messages, sources = self._images.take(chat.messages)
        ids = self._encode_messages(chat, messages, in_worker)
        if not sources:
            return ids, None
        images: list[list[Image]] = []
        tokens, until = len(ids), time.monotonic() + self._timeout_s
        worker = partial(in_worker, processes=self._image_processes)
        read = partial(self._images.read, in_worker=worker, salt=salt)
        once = {source.key: SharedWork(partial(read, source)) for source in sources}
        with released_worker():
            works = (once[source.key] for source in sources)
            for image in map_ahead(SharedWork.result, works, _IMAGES_AT_ONCE, ahead=_IMAGES_AT_ONCE):
                images.append(image)
                tokens += sum(len(part.before) + len(part.prompt_tokens) for part in image) - 1
                if tokens > self._limit:  # before further images need memory
                    raise self._too_long(tokens)
                if len(images) < len(sources) and time.monotonic() > until:
                    raise BadRequest(
                        f"messages: reading images may take {self._timeout_s:g} s together (prompt_timeout_s), after "
                        f"which {len(images)} of {len(sources)} were read; send fewer or smaller ones"
                    )
        return expanded(ids, images, self._images.entry)

    def _encode_messages(self, chat: Chat, messages: Any, in_worker: InWorker) -> list[int]:
        tools, variables = chat.tools, chat.chat_template_kwargs
        if exceeds((messages, tools, variables), CHAT_FACTOR * self._max_bytes):
            most = CHAT_FACTOR * self._max_bytes
            raise self._too_long(
                most // BYTES_PER_TOKEN,
                f"messages and tools hold more than {most} characters ({CHAT_FACTOR} times max_prompt_bytes) with "
                f"{quoted(messages)}; shorten them",
            )
        messages = list(messages)
        if not all(isinstance(message, Mapping) for message in messages):
            raise BadRequest(f"prompt: every message must be an object, received {quoted(messages)}")
        if not self._tokenizer.chat_templates:
            raise BadRequest(
                "prompt: the bundle's tokenizer must have a chat template to take messages, and has none; "
                f"send a text instead (tandemrt run: --raw), received {quoted(messages)}"
            )
        template = self._tokenizer.chat_template(messages, tools, variables)
        messages = join_text_parts(messages, images=self._images is not None)
        for each in texts([messages, tools, variables]):
            _require_utf8(each)
        control = self._tokenizer.control_text
        mark = None if chat.allow_control_tokens else control.mark_for(messages, tools, variables)
        if mark is not None:
            # Templates look for the tags that the model itself wrote into its earlier answers.
            messages = [control.mark(each, mark, tags=each.get("role") == "assistant") for each in messages]
            tools, variables = control.mark(tools, mark), control.mark(variables, mark)
        if chat.continue_final_message:
            messages = mark_end_of_last(messages)
        text = self._render(template, messages, in_worker, tools=tools, variables=variables, chat=chat)
        if self._images is not None:
            text = self._images.with_image_tokens(text)
        if chat.continue_final_message:
            text = cut_at_end_mark(text, messages)
        return self._encode_text(text, in_worker, add_special_tokens=False, mark=mark)

    def _render(
        self, template: ChatTemplate, messages: list[Message], in_worker: InWorker, *, chat: Chat, **inputs: Any
    ) -> str:
        try:
            values = template.values(messages, add_generation_prompt=chat.generation_prompt, **inputs)
            text = template.render_quickly(values)
        except Exception as error:  # a template may raise any exception
            raise _template_error(error, messages) from error
        if text is None:
            text, problem = in_worker("the chat template", _render, template.source, values)
            if problem is not None:
                raise _template_error(problem, messages)
        return text

    def _encode_text(
        self, text: str, in_worker: InWorker, *, add_special_tokens: bool, mark: str | None = None
    ) -> list[int]:
        """Tokenize. ``mark`` splits control tokens that occur as text (engines/text/control_tokens.py)."""
        if len(text) <= self._max_bytes:
            _require_utf8(text)
        size = len(text) if len(text) > self._max_bytes else len(text.encode())
        if size > self._max_bytes:
            raise self._too_long(
                size // BYTES_PER_TOKEN,
                f"at most {self._max_bytes} bytes of text may become tokens (max_prompt_bytes), and at least {size} "
                f"that begin {quoted(text)} were received; shorten it",
            )
        tokenizer = self._tokenizer
        if tokenizer.folder is None or (size <= QUICK_BYTES and tokenizer.quick):
            return _tokens(tokenizer, text, add_special_tokens, mark)
        arguments = (tokenizer.folder, tokenizer.writers, text, add_special_tokens, mark)
        ids: list[int] = in_worker("tokenizing the text", _tokens_in_worker, *arguments)
        return ids

    def _in_worker(
        self, client: Client, deadline: float | None, what: str, *work: Any, processes: ProcessLanes | None = None
    ) -> Any:
        what, limit_s, lanes = f"prompt: {what}", self._timeout_s, processes or self._processes
        return wait_for(lanes.submit(client, what, limit_s, *work, deadline=deadline, wait_s=limit_s), what, deadline)

    def _too_long(self, tokens: int, problem: str = "") -> ContextLengthExceeded:
        """Return the error for a prompt of so many tokens. Without ``problem`` their number is the problem."""
        problem = problem or (
            f"at most {self._limit} tokens leave room for an output, and {tokens} were received; shorten the prompt or "
            "build the bundle with a larger limits.length"
        )
        return ContextLengthExceeded.of(
            "prompt", problem, length=self._limit + 1, prompt_tokens=max(tokens, self._limit + 1)
        )


def _template_error(problem: Exception | str, messages: list[Any]) -> BadRequest:
    if isinstance(problem, BadRequest):
        return problem
    call = call_without_object(messages)
    if call is not None:
        function = call.get("function", call)
        return BadRequest(
            f"prompt: the arguments of a call must be a JSON object for this model's chat template, received "
            f"{quoted(function['arguments'])} in the call {quoted(call.get('id'))} of {quoted(function.get('name'))} "
            f"({clipped(problem)}); complete them, or send {{}}"
        )
    return BadRequest(
        f"prompt: the chat template refused the messages: {clipped(problem)}; received {quoted(messages)}"
    )


def _render(source: str, values: Mapping[str, Any]) -> list[str | None]:
    """Render in a worker process: return the text and None, or None and the message of the template's exception."""
    try:
        return [rendered(source, values), None]
    except (MemoryError, BadRequest):
        raise
    except Exception as error:
        return [None, str(error)]


def _open_in_worker(folder: Path, writers: Sequence[str]) -> None:
    reopened(folder, tuple(writers))


def _tokens_in_worker(
    folder: Path, writers: Sequence[str], text: str, add_special_tokens: bool, mark: str | None
) -> list[int]:
    """Tokenize in a worker process."""
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
            f"prompt: must be text that UTF-8 can encode, received {text[error.start]!r} at character {error.start}; "
            "join or drop lone surrogates"
        ) from None


def join_text_parts(messages: Sequence[Message], *, images: bool) -> list[Message]:
    """Join the text parts of every message without images. Raises BadRequest for a part that is neither.

    ImageReader.take leaves ``{"type": "image"}`` of an image, for templates of models that read ``images``.

    Most templates print a list of parts as a Python literal, or drop it.
    """
    return [_message(f"messages.{at}.content", message, images) for at, message in enumerate(messages)]


def mark_end_of_last(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with an end mark after the last one's text. Raises BadRequest if it has no text."""
    message = messages[-1]
    content = message.get("content")
    if not isinstance(content, str) or not content:
        raise BadRequest(
            f"continue_final_message: the last message must have a text to continue, received {quoted(content)}; "
            "leave it out, or send the beginning of the answer as the last message"
        )
    return [*messages[:-1], {**message, "content": f"{content}{_END_MARK} "}]


def cut_at_end_mark(text: str, messages: Sequence[Message]) -> str:
    """Return a prompt of marked messages up to the mark. Raises BadRequest if the template dropped the message."""
    text, mark, following = text.rpartition(_END_MARK)
    if not mark:
        raise BadRequest(
            f"continue_final_message: the chat template leaves out the last message, received {quoted(messages[-1])}; "
            "leave it out"
        )
    return text if following.startswith(" ") else text.rstrip()  # strip if the template stripped the mark's space


def _message(place: str, message: Message, images: bool) -> Message:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list | tuple):
        raise BadRequest(f"{place}: must be a text or a list of parts, received {quoted(content)}")
    has_images = False
    for at, part in enumerate(content):
        if part is IMAGE_PART:  # no part of a client is this object
            has_images = True
        elif not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(
                f"{place}.{at}: must be a part of type text, received {quoted(part)}; this model supports text "
                f"{'and images, no audio and no video' if images else 'only'}"
            )
    if has_images:
        return message
    return {**message, "content": "".join(part["text"] for part in content)}
