"""Formats in which models write tool calls into text: the text around names and arguments, and its grammar.

tool_call_probe.py reads the format from a chat template, tool_call_parser.py finds the calls in a text.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.grammars.notation import Style
from tandemrt.runtime.grammars.structural_tag import first_characters
from tandemrt.runtime.servers.openai.tool_call_fields import FieldTags, field_parts

TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")


@dataclass(frozen=True)
class CallId:
    """The id of a call, which the model writes: a match of ``pattern``, then ``end``."""

    pattern: str
    end: str


@dataclass(frozen=True)
class ToolCallFormat:
    """One or several calls are ``first``, the calls with ``between`` between them, then ``last``.

    A call is the function's name, ``opening``, an id if ``opening_id``, the arguments, and an id after ``closing`` if
    ``closing_id``. Text and further groups of calls may follow ``last``.

    Attributes:
        first: text up to the first name.
        last: text after the last call; "" if nothing ends a call.
        between: text between two calls of a group; None: a group has one call.
        groups: whether one answer may contain several groups.
        gap: the white space between two groups.
        fields: how every argument is written on its own; None: the arguments are one object.
        style: the notation of that object, or of the values in ``fields`` that are not texts.
        named_ids: whether the template writes the id of a call in place of its name, as ``functions.NAME:INDEX``.
        variants: formats that the model may use instead.
    """

    first: str
    opening: str
    last: str
    between: str | None = None
    groups: bool = True
    gap: str = ""
    opening_id: CallId | None = None
    closing: str = ""
    closing_id: CallId | None = None
    fields: FieldTags | None = None
    style: Style = "json"
    named_ids: bool = False
    variants: tuple["ToolCallFormat", ...] = ()

    def triggers(self, names: Iterable[str]) -> list[str]:
        """Return the texts that ordinary text never contains: a tag, ``first``, or ``first`` with each of ``names``."""
        tag = TAG.match(self.first)
        if tag or not self._begins_with_name:
            return [tag[0] if tag else self.first]
        return [self.first + name + self.opening for name in names]

    @property
    def after_field(self) -> list[str]:
        """What may come after an argument: the begin of the next one, or an end of the call."""
        begin = [self.fields.before] if self.fields is not None else []
        return [*begin, self.last, *([self.between] if self.between else [])]

    @property
    def _begins_with_name(self) -> bool:
        """Whether only the name makes ``first`` the beginning of a call."""
        return len(self.first) == 1

    def structural_tag(self, parameters: Mapping[str, Any], *, parallel: bool) -> dict[str, Any]:
        """Return the structural tag for text with calls in it. ``parameters`` are JSON schemas by function name.

        Raises BadRequest for a schema that the format cannot enforce.
        """
        formats = (self, *self.variants)
        triggers = [each for form in formats for each in form.triggers(parameters)]
        content = {
            "type": "triggered_tags",
            "triggers": list(dict.fromkeys(triggers)),
            "tags": [tag for form in formats for tag in form._tags(parameters, parallel)],
            "stop_after_first": not (parallel and self.groups),
        }
        return {"type": "structural_tag", "format": content}

    def answer_or_calls(
        self, schema: Mapping[str, Any] | bool, parameters: Mapping[str, Any], *, parallel: bool
    ) -> dict[str, Any]:
        """Return the structural tag for an answer that obeys ``schema``, or for calls without text around them.

        Raises BadRequest for a schema that the format cannot enforce, and for calls that begin like JSON.
        """
        begins = "".join(trigger[0] for form in (self, *self.variants) for trigger in form.triggers(parameters))
        if shared := next((character for character in first_characters(schema) if character in begins), None):
            raise BadRequest(
                "structured_outputs.structural_tag: a schema and tools in one request need an answer whose first "
                "character differs from that of a call, "
                f"but this model writes calls that begin with {shared}, as the schema allows; send one of the two, or "
                "set tool_choice to none, required or a tool"
            )
        calls = {
            "type": "tags_with_separator",
            "tags": [tag for form in (self, *self.variants) for tag in form._tags(parameters, parallel)],
            "separator": self.gap,
            "at_least_one": True,
            "stop_after_first": not (parallel and self.groups),
        }
        answer = {"type": "json_schema", "json_schema": schema}
        return {"type": "structural_tag", "format": {"type": "or", "elements": [answer, calls]}}

    def _tags(self, parameters: Mapping[str, Any], parallel: bool) -> list[dict[str, Any]]:
        """Return the tags of one or several calls."""
        calls = [self._call(name, schema) for name, schema in parameters.items()]
        last = [_text(self.last)] if self.last else []
        several = parallel and self.between is not None
        group: dict[str, Any] = {"type": "or", "elements": calls}
        if several:
            group = {"type": "tags_with_separator", "tags": calls, "separator": self.between, "at_least_one": True}
        if not self._begins_with_name:
            return [_tag(self.first, [group, *last])]
        more = {"type": "or", "elements": [*last, _tag(self.between or "", [group, *last])]}
        ending = [more] if several else last
        return [_tag(self.first + call["begin"], [*call["content"]["elements"], *ending]) for call in calls]

    def _call(self, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        if self.fields is None:
            arguments = [{"type": "json_schema", "json_schema": schema, "style": self.style}]
        else:
            arguments = field_parts(self.fields, self.after_field, name, schema, self.style)
        parts = [*_id("", self.opening_id), *arguments, *_id(self.closing, self.closing_id)]
        if not parts:
            return _tag("", [{"type": "const_string", "value": name + self.opening}])
        return _tag(name + self.opening, parts)


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _tag(begin: str, elements: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": {"type": "sequence", "elements": elements}, "end": ""}


def _id(begin: str, call_id: CallId | None) -> list[dict[str, Any]]:
    if call_id is None:
        return []
    return [
        {"type": "tag", "begin": begin, "content": {"type": "regex", "pattern": call_id.pattern}, "end": call_id.end}
    ]
