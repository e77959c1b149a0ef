"""Incremental translation to JSON of a value in another notation (runtime/grammars/notation.py)."""

import json
import re

from tandemrt.runtime.grammars.notation import Notation

_WORD = re.compile(r"[A-Za-z0-9_.+-]+")


class NotationReader:
    """Translates one value. The text must be a prefix of a valid value and of what follows it.

    ``done``: whether the value is complete.
    """

    def __init__(self, notation: Notation) -> None:
        self._notation = notation
        self._words = {word: json.dumps(value) for value, words in notation.words.items() for word in words}
        self._bare = not notation.outer.begin  # the outermost object has no brackets
        self._depth = 0
        self._quote = ""  # the quote of the open string
        self._started = False
        self.done = False

    def read(self, text: str) -> tuple[str, int]:
        """Return the JSON of what is certain in ``text``, and how many of its characters that is."""
        written, at = [] if self._started or not self._bare else ["{"], 0
        self._started = True
        while at < len(text) and not self.done:
            size, new = self._in_string(text, at) if self._quote else self._outside(text, at)
            if size == 0 and not self.done:
                break
            at += size
            written.append(new)
        return "".join(written), at

    def _in_string(self, text: str, at: int) -> tuple[int, str]:
        """Return the size and the JSON of the next part of a string; size 0: more text is needed."""
        if self._notation.escapes and text[at] == "\\":
            pair = text[at : at + 2]
            return (2, "'" if pair == "\\'" else pair) if len(pair) == 2 else (0, "")
        if text.startswith(self._quote, at):
            size, self._quote = len(self._quote), ""
            self.done = self._depth == 0 and not self._bare
            return size, '"'
        if self._quote.startswith(text[at:]):
            return 0, ""
        return 1, json.dumps(text[at], ensure_ascii=False)[1:-1]

    def _outside(self, text: str, at: int) -> tuple[int, str]:
        """Return the size and the JSON of the next part outside strings; size 0: more text is needed, or the end."""
        if word := _WORD.match(text, at):
            return self._word(text, word)
        character, quotes = text[at], self._notation.quotes
        if quote := next((each for each in quotes if text.startswith(each, at)), None):
            self._quote = quote
            return len(quote), '"'
        if any(each.startswith(text[at:]) for each in quotes):
            return 0, ""
        if character in "[{":
            self._depth += 1
        elif character in "]}" and self._depth:
            self._depth -= 1
            self.done = self._depth == 0 and not self._bare
        elif character not in ",: ":
            self.done = True
            return 0, "}" if self._bare else ""
        return 1, {",": ", ", ":": ": ", " ": ""}.get(character, character)

    def _word(self, text: str, word: re.Match[str]) -> tuple[int, str]:
        if word.end() == len(text):
            return 0, ""
        size = word.end() - word.start()
        form = self._notation.objects if self._depth else self._notation.outer
        if not form.quoted_names and text[word.end()] == form.after_name:
            return size + 1, f"{json.dumps(word[0])}: "
        self.done = self._depth == 0 and not self._bare
        return size, self._words.get(word[0], word[0])
