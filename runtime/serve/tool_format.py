"""How models write calls of functions between their text, as their chat templates show it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandemrt.runtime.serve.arguments import Brackets

_NAME = "NAME"


@dataclass(frozen=True)
class ToolFormat:
    """One way. A call is ``begin``, the name in it, then its arguments, an object, then ``end``.

    Attributes:
        trigger: what ``begin`` begins with, and text does not hold.
        several: whether an answer may hold more than one.
        shown: what a template holds whose model was taught this.
        unless: what it holds if that was another way.
    """

    trigger: str
    begin: str
    end: str
    several: bool
    shown: tuple[str, ...]
    unless: tuple[str, ...] = ()

    def begins(self, name: str) -> str:
        """What a call of ``name`` begins with."""
        return self.begin.replace(_NAME, name)

    def structural_tag(self, parameters: Mapping[str, Any], *, parallel: bool) -> dict[str, Any]:
        """Text with calls of the functions in it, whose ``parameters`` are schemas by name."""
        tags = [
            {
                "begin": self.begins(name),
                "content": {"type": "json_schema", "json_schema": schema},
                "end": self.end,
            }
            for name, schema in parameters.items()
        ]
        once = not (parallel and self.several)
        form = {"type": "triggered_tags", "triggers": [self.trigger], "tags": tags, "stop_after_first": once}
        return {"type": "structural_tag", "format": form}


FORMATS = (
    # Hermes, Qwen 2.5 and 3, SmolLM3
    ToolFormat(
        trigger="<tool_call>",
        begin=f'<tool_call>\n{{"name": "{_NAME}", "arguments": ',
        end="}\n</tool_call>",
        several=True,
        shown=("<tool_call>", "</tool_call>", "arguments"),
        unless=("<function=", "<arg_key>", "<parameter", "<tool_sep>"),
    ),
    # Llama 3.1 to 3.3
    ToolFormat(
        trigger='{"name": "',
        begin=f'{{"name": "{_NAME}", "parameters": ',
        end="}",
        several=False,
        shown=("dictionary of argument name and its value", "parameters"),
        unless=("<tool_call>", "<function="),
    ),
)


def format_of(templates: Mapping[str, str]) -> ToolFormat | None:
    """The way that a tokenizer's chat templates show; None where it is none of those known."""
    template = templates.get("tool_use", templates.get("default", ""))
    for each in FORMATS:
        if all(mark in template for mark in each.shown) and not any(mark in template for mark in each.unless):
            return each
    return None


class TaggedReader:
    """Tells text from calls as an answer comes. The answer obeys the format, or is the beginning of one that does."""

    def __init__(self, form: ToolFormat, names: Sequence[str]) -> None:
        self._format = form
        self._begins = {form.begins(name): name for name in names}
        self._held = ""  # what is not told yet, from where a call may begin on
        self._inside: Brackets | None = None  # of the arguments, while they are read
        self._skip = 0  # characters of the end of a call that are to come
        self._index = -1

    def read(self, text: str) -> Iterator[str | tuple[int, str | None, str]]:
        """Yield what ``text`` adds: text, or the index of a call, its name where it begins, and arguments."""
        self._held += text
        while self._held:
            skipped = min(self._skip, len(self._held))
            self._held, self._skip = self._held[skipped:], self._skip - skipped
            if self._inside is not None:
                yield self._index, None, self._arguments(self._inside)
                continue
            at = self._held.find(self._format.trigger)
            if at < 0:
                at = len(self._held) - self._beginning()
            if at:
                yield self._held[:at]
                self._held = self._held[at:]
            begin = next((begin for begin in self._begins if self._held.startswith(begin)), None)
            if begin is None:
                return
            self._held, self._inside, self._index = self._held[len(begin) :], Brackets(), self._index + 1
            yield self._index, self._begins[begin], ""

    def end(self) -> str:
        """What was held and is text after all, at the end of the answer."""
        return "" if self._held.startswith(self._format.trigger) else self._held

    def _arguments(self, brackets: Brackets) -> str:
        """Take arguments out of what is held."""
        end = 0
        while end < len(self._held):
            brackets.step(self._held[end])
            end += 1
            if brackets.depth == 0 and not brackets.in_string:
                self._inside, self._skip = None, len(self._format.end)
                break
        told, self._held = self._held[:end], self._held[end:]
        return told

    def _beginning(self) -> int:
        """How many characters at the end of what is held may be the beginning of a call."""
        sizes = range(min(len(self._format.trigger), len(self._held)), 0, -1)
        return next((size for size in sizes if self._format.trigger.startswith(self._held[-size:])), 0)
