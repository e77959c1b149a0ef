"""Notations of JSON values other than JSON: Python literals, and Gemma's form with keys and strings of its own."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Style = Literal["json", "python", "python_arguments", "gemma_arguments"]


@dataclass(frozen=True)
class ObjectForm:
    """The parts of an object: its ends, whether names are strings, and the text after a name."""

    begin: str
    end: str
    quoted_names: bool
    after_name: str


@dataclass(frozen=True)
class Notation:
    """How values are written. Numbers and lists are JSON's.

    Attributes:
        words: the spellings of true, false and null, each with the usual one first.
        quotes: the texts that may be around a string, the usual one first.
        escapes: whether strings have JSON's escapes; otherwise they contain no quote.
        space: whether a space may follow a comma, and a colon of an object.
        objects: the parts of an object.
        outer: the parts of the outermost object.
        sorted_names: whether the names of an object are sorted, ignoring case.
    """

    words: Mapping[Any, tuple[str, ...]]
    quotes: tuple[str, ...]
    escapes: bool
    space: bool
    objects: ObjectForm
    outer: ObjectForm
    sorted_names: bool

    @property
    def comma(self) -> str:
        """The usual text between two parts."""
        return ", " if self.space else ","

    def spelled(self, value: Any, *, outer: bool = True) -> str:
        """Return ``value`` as it is usually written."""
        if isinstance(value, str):
            return self._string(value)
        if isinstance(value, list):
            return f"[{self.comma.join(self.spelled(each, outer=False) for each in value)}]"
        if isinstance(value, dict):
            form = self.outer if outer else self.objects
            parts = (self.name(name, form) + self.spelled(each, outer=False) for name, each in self.ordered(value))
            return form.begin + self.comma.join(parts) + form.end
        return self.words[value][0] if value is None or isinstance(value, bool) else json.dumps(value)

    def name(self, name: str, form: ObjectForm) -> str:
        """Return the name of a property up to its value."""
        space = " " if self.space and form.quoted_names else ""
        return (self._string(name) if form.quoted_names else name) + form.after_name + space

    def ordered(self, properties: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return the properties of an object in the order in which they are written."""
        items = list(properties.items())
        return sorted(items, key=lambda item: item[0].lower()) if self.sorted_names else items

    def _string(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False) if self.escapes else self.quotes[0] + text + self.quotes[0]


# Arguments of a call have the brackets around them in the call.
_PYTHON = Notation(
    words={True: ("True",), False: ("False",), None: ("None",)},
    quotes=('"', "'"),
    escapes=True,
    space=True,
    objects=ObjectForm("{", "}", True, ":"),
    outer=ObjectForm("{", "}", True, ":"),
    sorted_names=False,
)
NOTATIONS: Mapping[str, Notation] = {
    "python": _PYTHON,
    "python_arguments": replace(_PYTHON, outer=ObjectForm("", "", False, "=")),
    "gemma_arguments": Notation(
        words={True: ("true",), False: ("false",), None: ("null", "None")},
        quotes=('<|"|>',),
        escapes=False,
        space=False,
        objects=ObjectForm("{", "}", False, ":"),
        outer=ObjectForm("", "", False, ":"),
        sorted_names=True,
    ),
}
