"""Reads the format of tool calls from a chat template: renders calls of probe functions and compares the prompts."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tandemrt.engines.text.chat_template import ChatTemplate
from tandemrt.engines.text.common_prefix import common_prefix_length
from tandemrt.runtime.grammars.notation import NOTATIONS, Style
from tandemrt.runtime.servers.openai.described_formats import described_format
from tandemrt.runtime.servers.openai.tool_call_fields import FieldTags
from tandemrt.runtime.servers.openai.tool_call_format import TAG, CallId, ToolCallFormat
from tandemrt.runtime.servers.openai.tool_call_parser import TaggedCallParser

_USER, _ANSWER = "Probe question.", "Probe answer."
_NAMES = ("probe_alpha", "probe_beta")
_IDS = ("pr0be1dA1", "pr0be1dB2")  # Mistral requires 9 letters and digits
_TEXT, _NUMBER, _LIST = ("probe_text", 'a <b> & "c"'), ("probe_number", 12), ("probe_list", [34])
_ARGUMENTS: dict[str, Any] = dict([_TEXT, _NUMBER, _LIST])
_OTHER_ARGUMENTS: dict[str, Any] = {
    _TEXT[0]: "it's: {é},\n</b>\\",
    _NUMBER[0]: -5,
    _LIST[0]: ["it's </b>", {"b": None, "c": [True, 0.5]}],
}
_GEMMA = NOTATIONS["gemma_arguments"]
_PYTHON_PAIRS = (  # some templates write values without the quotes or escapes of strings
    rf"{key}=(?:[\"']?{re.escape(str(value))}[\"']?|{re.escape(json.dumps(value))})"
    for key, value in _ARGUMENTS.items()
)
_PYTHON_CALL = re.compile(rf"\(({', ?'.join(_PYTHON_PAIRS)})\)")
_SPECIAL = {"bos_token": "<|probe_bos|>", "eos_token": "<|probe_eos|>"}
_UNCLOSED = re.compile(r"<[^<>\s]*\Z")
_NAME_CHARACTER = re.compile(r"[A-Za-z0-9_-]")
_ID_PATTERN, _INDEX_PATTERN = "[a-zA-Z0-9]{9}", "[0-9]{1,3}"


def detect_format(templates: Mapping[str, str]) -> ToolCallFormat | None:
    """Return the format that the chat templates (by name) write calls in, or None if it is not one of ours."""
    source = templates.get("tool_use", templates.get("default"))
    return None if source is None else _format_of(source)


@lru_cache(maxsize=32)
def _format_of(source: str) -> ToolCallFormat | None:
    probe = _Probe(ChatTemplate(source, _SPECIAL))
    for named_ids in (False, True):
        one = probe.answer(_call(0, _ARGUMENTS, named_id=named_ids))
        if one is not None and _NAMES[0] in one:
            call_format = _Comparison(probe, one, named_ids=named_ids).format()
            ways = [call_format] if call_format is not None else []
            if call_format is not None and call_format.fields is not None:
                # Seed-OSS writes other values as Python does
                ways.append(replace(call_format, style="python"))
            return next((each for each in ways if _reads_back(probe, each)), None) or described_format(
                probe.answer() or ""
            )
    return described_format(probe.answer() or "")


def _reads_back(probe: "_Probe", call_format: ToolCallFormat) -> bool:
    """Return whether the parser finds the calls that the template writes, with any kind of argument or none.

    Templates write Python's calls without its quotes and escapes, so those are only read without arguments.
    """
    several = call_format.groups or call_format.between is not None
    loose = call_format.style == "python_arguments"
    for arguments in [[{}, {}]] if loose else [[_OTHER_ARGUMENTS, {}], [{}, _ARGUMENTS]]:
        calls = list(zip(_NAMES, arguments, strict=True))[: None if several else 1]
        asked = [_call(at, each, named_id=call_format.named_ids) for at, (_, each) in enumerate(calls)]
        text = (probe.answer(*asked) or "").rpartition(_USER)[2]
        try:
            read = [(name, json.loads(arguments)) for name, arguments in _read(call_format, text)]
        except ValueError:
            return False
        if read != calls:
            return False
    return True


def _read(call_format: ToolCallFormat, text: str) -> list[tuple[str, str]]:
    """Return names and arguments of the calls in ``text``."""
    calls: list[tuple[str, str]] = []
    for step in TaggedCallParser(call_format, dict.fromkeys(_NAMES, _PARAMETERS)).feed(text):
        if not isinstance(step, str):
            _, name, arguments = step
            last, before = (name, "") if name is not None else calls.pop()
            calls.append((last, before + arguments))
    return calls


class _Probe:
    """Renders a chat with an answer that calls functions."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def answer(self, *calls: Mapping[str, Any], content: str = "") -> str | None:
        """Return the prompt, or None if the template refuses the chat or takes long."""
        called = {"tool_calls": list(calls)} if calls else {}
        return self._render([{"role": "assistant", "content": content, **called}])

    def question(self) -> str | None:
        """Return the prompt for an answer."""
        return self._render([])

    def _render(self, answers: Sequence[Mapping[str, Any]]) -> str | None:
        messages = [{"role": "user", "content": _USER}, *answers]
        try:
            values = self._template.values(messages, tools=_TOOLS, add_generation_prompt=not answers)
            return self._template.render_quickly(values)
        except Exception:  # a template may raise any exception
            return None


class _Comparison:
    """Compares the prompts of one call, of two calls, and of a text, to find what is around names and arguments."""

    def __init__(self, probe: _Probe, one: str, *, named_ids: bool) -> None:
        self._probe = probe
        self._named_ids = named_ids
        self._plain = probe.answer(content=_ANSWER) or ""
        self._head, self._rest = self._split(one, _NAMES[0])

    def format(self) -> ToolCallFormat | None:
        """Return the format, or None if the prompts do not follow one."""
        first = self._first()
        written, style = self._written()
        named = style == "python_arguments" and first != ""  # the name and its bracket make it the beginning of a call
        if not named and (len(first) < 2 or first[0].isalnum()):
            return None  # an ordinary text may begin like this
        if _IDS[0] in first or _NAMES[0] in self._rest:
            return None  # no grammar can enforce the name or an id here
        if any(map(first.startswith, self._ends_of_turn())):
            return None  # an answer without calls ends like this
        if written is not None:
            return self._object_format(first, written, style)
        return self._field_format(first)

    def _written(self) -> tuple[str | None, Style]:
        """Return the arguments of the first call as one text, and its notation; None: they are not one text."""
        python = _PYTHON_CALL.match(self._rest)
        texts: list[tuple[str, Style]] = [(python[1], "python_arguments")] if python else []
        texts += [(json.dumps(_ARGUMENTS), "json"), (_GEMMA.spelled(_ARGUMENTS), "gemma_arguments")]
        return next(((text, style) for text, style in texts if self._rest.count(text) == 1), (None, "json"))

    def _first(self) -> str:
        """Return the text that begins a call: without the start of the answer, and without what follows a text."""
        starts = [self._probe.question() or "", self._plain.rpartition(_ANSWER)[0]]
        begin = max(common_prefix_length(start, self._head) for start in starts)
        after_text = self._probe.answer(self._call(0), content=_ANSWER)
        if after_text is not None and _ANSWER in after_text:
            between = self._split(after_text, _NAMES[0])[0].rpartition(_ANSWER)[2]
            begin = max(begin, len(self._head) - len(_common_suffix(self._head, between)))
        cut = _UNCLOSED.search(self._head, 0, begin)  # tags stay whole
        return self._head[cut.start() if cut else begin :].lstrip()

    def _object_format(self, first: str, written: str, style: Style) -> ToolCallFormat | None:
        opening, end = self._rest.split(written)
        last = self._without_end_of_turn(end)
        split = self._split_id(opening)
        if split is None or not split[0] or _NAME_CHARACTER.match(split[0]):
            return None
        opening, opening_id = split
        options: dict[str, Any] = {"opening_id": opening_id, "named_ids": self._named_ids, "style": style}
        between = self._between(written)
        if between is None:
            return ToolCallFormat(first, opening, last, groups=False, **options)
        if _IDS[0] in last or _IDS[0] in between:
            closing, _, after_last = last.partition(_IDS[0])
            before, _, after = between.partition(_IDS[0])
            end = after[: common_prefix_length(after_last, after)]
            if before != closing or not end:
                return None
            options |= {"closing": closing, "closing_id": CallId(_ID_PATTERN, end)}
            last, between = after_last[len(end) :], after[len(end) :]
        return _joined(first, opening, last, between, options)

    def _field_format(self, first: str) -> ToolCallFormat | None:
        rest, gaps = self._rest, list[str]()
        for key, value in (_TEXT, _NUMBER, _LIST):
            for part in (key, str(value)):
                gap, match, rest = rest.partition(part)
                if not match or (gaps and not gap):
                    return None
                gaps.append(gap)
        opened, text_value, separator, json_value, again, list_value = gaps
        end = self._without_end_of_turn(rest)
        if separator != again or json_value != list_value or _IDS[0] in opened or self._named_ids:
            return None
        before = _common_suffix(opened, separator)
        if before.partition("<")[0].count(">"):  # tags stay whole
            before = before.partition(">")[2]
        opening, after = opened[: len(opened) - len(before)], separator[: len(separator) - len(before)]
        if not before or not after or not end.startswith(after):
            return None
        last = end[len(after) :]
        if not last or not text_value or (opening and _NAME_CHARACTER.match(opening)):
            return None
        between = self._between(str(_LIST[1]) + after)
        more: dict[str, Any] = {"fields": FieldTags(before, text_value, json_value, after)}
        if between is None:
            return ToolCallFormat(first, opening, last, groups=False, **more)
        return _joined(first, opening, last, between, more)

    def _between(self, ending: str) -> str | None:
        """Return the text between the first call, which ends with ``ending``, and the second name; None: one call."""
        two = self._probe.answer(self._call(0), self._call(1))
        if two is None or _NAMES[1] not in two:
            return None
        first = self._split(two, _NAMES[1])[0].rpartition(_NAMES[0])[2]
        _, separator, between = first.rpartition(ending)
        return between if separator else None

    def _split_id(self, opening: str) -> tuple[str, CallId | None] | None:
        """Split the text between a name and its arguments at the id of the call; None if the id has no fixed end."""
        two = self._probe.answer(self._call(0), self._call(1)) or ""
        for first, second, pattern in ((*_IDS, _ID_PATTERN), ("0", "1", _INDEX_PATTERN)):
            before, separator, after = opening.partition(first)
            if separator and _NAMES[1] + before + second + after in two:
                return (before, CallId(pattern, after)) if after else None
        return None if _IDS[0] in opening else (opening, None)

    def _split(self, text: str, name: str) -> tuple[str, str]:
        """Return what is before and after the name of a call."""
        begin = text.rfind(_USER) + len(_USER)
        before, _, after = text[begin:].partition(name)
        return text[:begin] + before, after

    def _call(self, index: int) -> dict[str, Any]:
        return _call(index, _ARGUMENTS, named_id=self._named_ids)

    def _ends_of_turn(self) -> set[str]:
        """Return the tags at the end of an answer without calls, and all of that end."""
        end = self._plain.rpartition(_ANSWER)[2]
        return {_SPECIAL["eos_token"], *TAG.findall(end), end.strip()} - {""}

    def _without_end_of_turn(self, text: str) -> str:
        return text[: min((text.find(tag) for tag in self._ends_of_turn() if tag in text), default=len(text))].rstrip()


def _joined(first: str, opening: str, last: str, between: str, options: dict[str, Any]) -> ToolCallFormat:
    """Return the format of several calls: each on its own, or all in one group."""
    alone = between.removesuffix(first).rstrip()
    if between.endswith(first) and last.startswith(alone):
        gap = between.removesuffix(first)[len(alone) :]
        return ToolCallFormat(first, opening, alone, gap=gap, **options)
    numbered = len(_common_suffix(first, between.replace("1", "0"))) > len(_common_suffix(first, between))
    if numbered or between.startswith(last) or last.startswith(between):
        return ToolCallFormat(first, opening, last, groups=False, **options)
    return ToolCallFormat(first, opening, last, between=between, groups=False, **options)


def _common_suffix(one: str, other: str) -> str:
    return one[len(one) - common_prefix_length(one[::-1], other[::-1]) :]


def _call(index: int, arguments: Mapping[str, Any], *, named_id: bool = False) -> dict[str, Any]:
    call_id = f"functions.{_NAMES[index]}:{index}" if named_id else _IDS[index]
    function = {"name": "" if named_id else _NAMES[index], "arguments": dict(arguments)}
    return {"id": call_id, "type": "function", "function": function}


_PROPERTIES = {
    key: {"type": kind, "description": "It."}
    for (key, _), kind in ((_TEXT, "string"), (_NUMBER, "integer"), (_LIST, "array"))
}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": [_TEXT[0]]}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does it.",
            "parameters": _PARAMETERS,
        },
    }
    for name in ("tool_one", "tool_two")
]
