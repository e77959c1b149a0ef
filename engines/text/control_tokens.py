"""Control tokens, and the separation of user text from them."""

import json
import secrets
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # Unicode noncharacters: never part of text


def control_tokens(backend: Backend, writers: Iterable[str]) -> dict[int, AddedToken]:
    """Return the control tokens of a tokenizer by id: its special tokens, and added tokens that occur in ``writers``.

    ``writers`` are chat templates and reasoning delimiters. Tool-call and reasoning tags are often not special tokens.
    Line breaks, runs of spaces and HTML tags are added tokens of some tokenizers, but text.
    """
    written = list(writers)
    return {
        index: token
        for index, token in backend.get_added_tokens_decoder().items()
        if token.special or (not _is_word(token.content) and any(token.content in text for text in written))
    }


class ControlText:
    """Separates text of users from the control tokens of a chat template.

    ``mark`` splits every control token in a text with a mark, so that a prompt has only the template's control tokens.
    ``encode`` tokenizes the prompt, and the marked texts as ordinary text.
    """

    def __init__(self, backend: Backend, tokens: Mapping[int, AddedToken]) -> None:
        self._backend = backend
        self._tokens = dict(tokens)
        self._all = _finder(tokens.values())
        self._beginnings = sorted({token.content[:2] for token in tokens.values()})
        self._special = _finder(token for token in tokens.values() if token.special)
        self._secret = secrets.token_hex(8)

    def mark_for(self, *values: Any) -> str | None:
        """Return a mark for all texts in these values; None if they contain no control token."""
        contents = list(texts(values))
        if not any(self._may_contain(text) and _found(self._all, text) for text in contents):
            return None
        return next((mark for mark in MARKS if not any(mark in text for text in contents)), MARKS[0])

    def mark(self, value: Any, mark: str, *, tags: bool = False) -> Any:
        """Return ``value`` with a mark in every control token of its texts; with ``tags``, in special tokens only."""
        if isinstance(value, str):
            for begin, _ in reversed(_found(self._special if tags else self._all, value)):
                value = f"{value[: begin + 1]}{mark}{value[begin + 1 :]}"
            return value
        if isinstance(value, Mapping):
            return {self.mark(key, mark, tags=tags): self.mark(item, mark, tags=tags) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, mark, tags=tags) for item in value]
        return value

    def encode(self, text: str, mark: str) -> list[int]:
        """Tokenize a prompt with marks: a control token with a mark is text."""
        backend, names = self._renamed
        parts, at = [], 0
        for begin, end in _found(self._all, text):
            parts += [text[at:begin], names[text[begin:end]]]
            at = end
        prompt = "".join([*parts, text[at:]]).replace(mark, "")
        return list(backend.encode(prompt, add_special_tokens=False).ids)

    def _may_contain(self, text: str) -> bool:
        """Whether ``text`` has the first two characters of a control token: a search that most texts end here."""
        return any(beginning in text for beginning in self._beginnings)

    @cached_property
    def _renamed(self) -> tuple[Backend, dict[str, str]]:
        """The tokenizer with its control tokens renamed to secret names, and these names by the old ones."""
        names = {token.content: f"{MARKS[-1]}{self._secret}{index}{MARKS[-1]}" for index, token in self._tokens.items()}
        data = json.loads(self._backend.to_str())
        for token in data["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        vocabulary = data["model"].get("vocab")
        if isinstance(vocabulary, dict):
            data["model"]["vocab"] = {names.get(text, text): index for text, index in vocabulary.items()}
        elif vocabulary is not None:
            data["model"]["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
        data["post_processor"] = None  # the template writes the beginning and end of a prompt
        return Backend.from_str(json.dumps(data)), names


def _finder(tokens: Iterable[AddedToken]) -> Backend:
    # A tokenizer of these tokens alone, because the library searches for all of them at once.
    finder = Backend(models.WordLevel({"": 0}, unk_token=""))
    finder.add_special_tokens([AddedToken(token.content, normalized=False) for token in tokens])
    return finder


def _found(finder: Backend, text: str) -> list[tuple[int, int]]:
    """Return the spans of control tokens in ``text``: [begin, end) in characters."""
    encoded = finder.encode(text, add_special_tokens=False)
    return [place for index, place in zip(encoded.ids, encoded.offsets, strict=True) if index]


def texts(value: Any) -> Iterable[str]:
    """Yield every text in a value, nested in lists and objects at any depth, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts(key)
            yield from texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts(item)


def _is_word(text: str) -> bool:
    return all(character.isalnum() or character.isspace() for character in text)
