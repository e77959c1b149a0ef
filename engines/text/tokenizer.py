"""The tokenizer of a bundle: tokens and prompts as transformers makes them, without that library.

A prompt must always give the same tokens, so tokenizers with randomness are rejected.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tandemrt.engines.text.chat import OWN
from tandemrt.engines.text.chat_template import ChatTemplate, randomness_in_template
from tandemrt.engines.text.control_tokens import ControlText, control_tokens
from tandemrt.engines.text.expansion import is_quick, require_bounded
from tandemrt.engines.text.vocabulary import Vocabulary, token_decoder, vocabulary_from_tokenizer
from tandemrt.engines.validation.errors import BadBundle, BadRequest, TandemError, clipped, quoted
from tandemrt.engines.validation.records import nearest

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Converts texts and chat messages to token ids, and back. Thread-safe.

    ``backend`` is the tokenizer of the library ``tokenizers``; ``special_tokens`` are the named ones
    (``eos_token`` ...); ``chat_templates`` are the sources of the chat templates by name, of which ``default`` is used.
    ``folder`` is the folder that it was read from, or None.
    """

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
        folder: Path | None = None,
        delimiters: Sequence[str] = (),
    ) -> None:
        self.backend = backend
        self.folder = folder
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(templates or {})
        self.writers = (*self.chat_templates.values(), *delimiters)  # added tokens in them are control tokens
        self._chat = {name: ChatTemplate(source, self.special_tokens) for name, source in self.chat_templates.items()}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``, with its begin and end tokens if ``add_special_tokens``."""
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ``ids``."""
        return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token in the middle of a text. A control token has none."""
        return b"" if token in self._control else self._token_decoder(self.backend.id_to_token(token) or "")

    @cached_property
    def _token_decoder(self) -> Callable[[str], bytes]:
        return token_decoder(self.backend)

    @cached_property
    def _control(self) -> frozenset[int]:
        return frozenset(control_tokens(self.backend, self.writers))

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, or None if there is no such token."""
        token_id: int | None = self.backend.token_to_id(token)
        return token_id

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Return the prompt for an answer to ``messages``. Raises BadRequest, or what the template raises.

        ``tools`` describe functions to call; with tools, a template named tool_use is preferred.
        """
        template = self.chat_template(messages, tools)
        return template.render(template.values(messages, tools=tools))

    def chat_template(
        self, messages: Sequence[Any], tools: Sequence[Any], variables: Mapping[str, Any] | None = None
    ) -> ChatTemplate:
        """Return the template for messages and tools. Raises BadRequest, also for a variable that it does not read."""
        if not messages:
            raise BadRequest("prompt: must have at least one message, received []; add one")
        if "default" not in self._chat:
            raise BadRequest(
                f"prompt: messages need a chat template named default, the tokenizer has {quoted(sorted(self._chat))}"
            )
        for name in self.unread_variables(variables or {}, tools):
            raise BadRequest(f"{self.unread_problem(name, tools)}; leave it out")
        return self._template(tools)

    def unread_variables(self, variables: Mapping[str, Any], tools: Sequence[Any]) -> list[str]:
        """Return the names of variables that the template of a chat with ``tools`` does not read."""
        if not variables or "default" not in self._chat:
            return []
        read = self._template(tools).variables
        return [name for name in variables if name not in read]

    def unread_problem(self, name: str, tools: Sequence[Any]) -> str:
        """Return the message about a variable that the template of a chat with ``tools`` does not read."""
        known = sorted(self._template(tools).variables - {*OWN, *self.special_tokens})
        read = ", ".join(known) or "no variables"
        return f"chat_template_kwargs: the chat template reads {read}, received {quoted(name)}{nearest(name, known)}"

    @cached_property
    def quick(self) -> bool:
        """Whether a short text may be tokenized without a time limit; see ``is_quick``."""
        return is_quick(self.backend)

    @cached_property
    def control_text(self) -> ControlText:
        """Keeps text of users from becoming control tokens."""
        return ControlText(self.backend, control_tokens(self.backend, self.writers))

    def _template(self, tools: Sequence[Any]) -> ChatTemplate:
        return self._chat["tool_use" if tools and "tool_use" in self._chat else "default"]


def open_tokenizer(folder: Path, vocab_size: int, *, delimiters: Sequence[str] = ()) -> tuple[Tokenizer, Vocabulary]:
    """Return the tokenizer in ``folder`` and its vocabulary, as ``load_tokenizer`` and ``vocabulary_of`` do."""
    tokenizer = load_tokenizer(folder, delimiters=delimiters)
    return tokenizer, vocabulary_of(tokenizer, folder, vocab_size)


def vocabulary_of(tokenizer: Tokenizer, folder: Path, vocab_size: int) -> Vocabulary:
    """Return the vocabulary of the ``tokenizer`` in ``folder``.

    Raises BadBundle for a tokenizer that does not fit logits of width ``vocab_size``.
    """
    with _usable(folder):
        return vocabulary_from_tokenizer(tokenizer.backend, vocab_size, tokenizer.writers)


def load_tokenizer(
    folder: Path,
    *,
    chat_template: str | None = None,
    delimiters: Sequence[str] = (),
    read: Callable[[], Tokenizer] | None = None,
) -> Tokenizer:
    """Return the tokenizer in ``folder``.

    An added token that occurs in one of the ``delimiters`` is a control token, special or not. ``chat_template`` is the
    path of a template that replaces the tokenizer's own. ``read`` does what ``read_tokenizer`` does, begun before.

    Raises:
        BadBundle: the tokenizer cannot be opened or does not work.
        BadRequest: the file ``chat_template`` cannot be read.
    """
    template = None if chat_template is None else _template_file(chat_template)
    with _usable(folder):
        files = read_tokenizer(folder) if read is None else read()
        templates = files.chat_templates if template is None else {"default": template}
        tokenizer = Tokenizer(files.backend, files.special_tokens, templates, folder, delimiters)
        require_deterministic(tokenizer)
        tokenizer.decode(tokenizer.encode("a b"), skip_special_tokens=True)
        return tokenizer


@contextmanager
def _usable(folder: Path) -> Iterator[None]:
    """Raise BadBundle for whatever the tokenizer in ``folder`` raises."""
    try:
        yield
    except (TandemError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # invalid values raise any exception; a panic of tokenizers is not an Exception
        raise BadBundle(
            f"{folder}: must hold a usable tokenizer, got {type(error).__name__}: {clipped(error)}; "
            "save it again with save_pretrained of transformers"
        ) from error


@lru_cache(maxsize=2)
def reopened(folder: Path, writers: tuple[str, ...]) -> Tokenizer:
    """Return the tokenizer in ``folder`` in a worker process, which caches it. Another process has checked it."""
    return Tokenizer(read_tokenizer(folder).backend, delimiters=writers)


def require_deterministic(tokenizer: Tokenizer) -> None:
    """Raise BadBundle if a text could give different tokens in different calls."""
    model = tokenizer.backend.model
    dropout, alpha = getattr(model, "dropout", None), getattr(model, "alpha", None)
    if dropout or alpha is not None:
        name, value = ("dropout", dropout) if dropout else ("alpha", alpha)
        raise BadBundle(
            f"tokenizer.json: model.{name} must be null, got {value}: it splits the same text in a different way "
            "each time, for training; set it to null"
        )
    for template in tokenizer.chat_templates.values():
        if chance := randomness_in_template(template):
            raise BadBundle(
                f"tokenizer: its chat template must give the same prompt for the same messages, got one with {chance}; "
                "remove it"
            )


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the files in ``folder``. Raises BadBundle, or any exception that an unexpected value causes."""
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    config = _object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # the format of older versions of transformers
        config |= _object(folder / "special_tokens_map.json")
    # tokenizer.json defines the begin and end tokens; add_bos_token of the configuration adds nothing.
    backend.no_truncation()
    backend.no_padding()
    require_bounded(backend)
    backend.encode_special_tokens = _flag(config, "split_special_tokens")
    named = {name: _added(name, config[name]) for name in _NAMED if config.get(name) is not None}
    _add_missing(backend, config, list(named.values()))
    special_tokens = {name: token.content for name, token in named.items()}
    return Tokenizer(backend, special_tokens, _templates(folder, config), folder)


def read_chat_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates by name of the tokenizer in ``folder``, whose vocabulary is not read."""
    return _templates(folder, _object(folder / "tokenizer_config.json"))


def _add_missing(backend: Backend, config: Mapping[str, Any], named: list[AddedToken]) -> None:
    """Add tokens of the configuration that tokenizer.json lacks, those with an id first."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    tokens = [_added(at, listed[at]) for at in sorted(listed, key=int)] + named
    tokens += [_added("extra_special_tokens", each) for each in (extra.values() if isinstance(extra, dict) else extra)]
    for token in tokens:
        if token.content not in known:
            backend.add_tokens([token])
            known.add(token.content)


def _added(name: str, token: Any) -> AddedToken:
    if isinstance(token, str) and token:
        return AddedToken(token, special=True, normalized=False)
    if isinstance(token, dict) and isinstance(token.get("content"), str) and token["content"]:
        fields = ("single_word", "lstrip", "rstrip", "normalized", "special")
        flags = {key: bool(token[key]) for key in fields if key in token}
        return AddedToken(token["content"], **({"special": True} | flags))
    raise BadBundle(f"tokenizer_config.json: {name} must be a token, got {quoted(token)}; save the tokenizer again")


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadBundle(f"tokenizer_config.json: {name} must be true or false, got {quoted(value)}; set it to one")
    return bool(value)


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name. Files take precedence over the configuration, as in transformers."""
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (single := folder / "chat_template.jinja").is_file():
        files = {"default": single, **files}
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    templates = config.get("chat_template")
    if templates is None:
        return {}
    if isinstance(templates, str):
        return {"default": templates}
    if isinstance(templates, list) and all(isinstance(each, dict) for each in templates):
        templates = {each.get("name"): each.get("template") for each in templates}
    if not isinstance(templates, dict) or not all(isinstance(text, str) for pair in templates.items() for text in pair):
        raise BadBundle(
            f"tokenizer_config.json: chat_template must be a template, got {quoted(templates)}; write it again"
        )
    return templates


def _template_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadRequest(
            f"chat_template: must be a file with a template, in UTF-8, received {quoted(path)}: {clipped(error)}; "
            "give another file"
        ) from error


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadBundle(f"{path}: must be JSON: {clipped(error)}; save the tokenizer again") from error
    if not isinstance(content, dict):
        raise BadBundle(f"{path}: must hold a JSON object, got {quoted(content)}; save the tokenizer again")
    return content
