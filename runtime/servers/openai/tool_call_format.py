"""Formats in which models write tool calls into text, detected from their chat templates."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandemrt.runtime.servers.openai.json_calls import JsonNesting

_NAME = "NAME"


@dataclass(frozen=True)
class ToolCallFormat:
    """A call is ``begin`` with the function's name in it, the arguments as a JSON object, then ``end``.

    Attributes:
        trigger: prefix of ``begin`` that ordinary text never contains.
        parallel: whether one answer may contain several calls.
        template_has: strings that all occur in the chat template of a model trained on this format.
        template_lacks: strings of other formats; a template with one of them does not match.
    """

    trigger: str
    begin: str
    end: str
    parallel: bool
    template_has: tuple[str, ...]
    template_lacks: tuple[str, ...] = ()

    def begin_of(self, name: str) -> str:
        """Return ``begin`` for the function ``name``."""
        return self.begin.replace(_NAME, name)

    def structural_tag(self, parameters: Mapping[str, Any], *, parallel: bool) -> dict[str, Any]:
        """Return the structural tag for text with calls in it. ``parameters`` are JSON schemas by function name."""
        tags = [
            {
                "begin": self.begin_of(name),
                "content": {"type": "json_schema", "json_schema": schema},
                "end": self.end,
            }
            for name, schema in parameters.items()
        ]
        once = not (parallel and self.parallel)
        content = {"type": "triggered_tags", "triggers": [self.trigger], "tags": tags, "stop_after_first": once}
        return {"type": "structural_tag", "format": content}


FORMATS = (
    # Hermes, Qwen 2.5 and 3, SmolLM3
    ToolCallFormat(
        trigger="<tool_call>",
        begin=f'<tool_call>\n{{"name": "{_NAME}", "arguments": ',
        end="}\n</tool_call>",
        parallel=True,
        template_has=("<tool_call>", "</tool_call>", "arguments"),
        template_lacks=("<function=", "<arg_key>", "<parameter", "<tool_sep>"),
    ),
    # Llama 3.1 to 3.3
    ToolCallFormat(
        trigger='{"name": "',
        begin=f'{{"name": "{_NAME}", "parameters": ',
        end="}",
        parallel=False,
        template_has=("dictionary of argument name and its value", "parameters"),
        template_lacks=("<tool_call>", "<function="),
    ),
)


def detect_format(templates: Mapping[str, str]) -> ToolCallFormat | None:
    """Return the format that the chat templates (by name) show, or None if it is not in FORMATS."""
    template = templates.get("tool_use", templates.get("default", ""))
    for each in FORMATS:
        if all(s in template for s in each.template_has) and not any(s in template for s in each.template_lacks):
            return each
    return None


class TaggedCallParser:
    """Incremental parser of text with calls in it. The text must follow the format or be a prefix of such a text."""

    def __init__(self, tool_format: ToolCallFormat, names: Sequence[str]) -> None:
        self._format = tool_format
        self._begins = {tool_format.begin_of(name): name for name in names}
        self._held = ""  # text that may be the beginning of a call
        self._nesting: JsonNesting | None = None  # inside arguments
        self._skip = 0  # characters of ``end`` that are still to come
        self._index = -1

    def feed(self, text: str) -> Iterator[str | tuple[int, str | None, str]]:
        """Yield what ``text`` adds: plain text, or a call's index, its name where it begins, and argument text."""
        self._held += text
        while self._held:
            skipped = min(self._skip, len(self._held))
            self._held, self._skip = self._held[skipped:], self._skip - skipped
            if self._nesting is not None:
                yield self._index, None, self._take_arguments(self._nesting)
                continue
            at = self._held.find(self._format.trigger)
            if at < 0:
                at = len(self._held) - self._partial_trigger()
            if at:
                yield self._held[:at]
                self._held = self._held[at:]
            begin = next((begin for begin in self._begins if self._held.startswith(begin)), None)
            if begin is None:
                return
            self._held, self._nesting, self._index = self._held[len(begin) :], JsonNesting(), self._index + 1
            yield self._index, self._begins[begin], ""

    def finish(self) -> str:
        """Return held text that is not part of a call, at the end of the answer."""
        return "" if self._held.startswith(self._format.trigger) else self._held

    def _take_arguments(self, nesting: JsonNesting) -> str:
        end = 0
        while end < len(self._held):
            nesting.feed(self._held[end])
            end += 1
            if nesting.depth == 0 and not nesting.in_string:
                self._nesting, self._skip = None, len(self._format.end)
                break
        arguments, self._held = self._held[:end], self._held[end:]
        return arguments

    def _partial_trigger(self) -> int:
        """Return how many characters at the end of the held text may begin the trigger."""
        sizes = range(min(len(self._format.trigger), len(self._held)), 0, -1)
        return next((size for size in sizes if self._format.trigger.startswith(self._held[-size:])), 0)
