"""Tool calling: the constraint that makes calls valid, and the parser that finds them in the generated text.

- A named function: the answer is its arguments.
- ``required``: the answer is a JSON list of ``{"name": ..., "arguments": ...}``.
- ``auto``: the answer is text with calls in the format that the model was trained on. With an output schema it is a
  JSON value that obeys the schema, or calls without text.

All three are enforced token by token, so arguments always obey the function's schema.
"""

import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.runtime.servers.openai.json_calls import JsonCallParser
from tandemrt.runtime.servers.openai.protocol import Function, NamedToolChoice, Tool
from tandemrt.runtime.servers.openai.tool_call_format import ToolCallFormat
from tandemrt.runtime.servers.openai.tool_call_parser import TaggedCallParser
from tandemrt.runtime.servers.openai.tool_call_probe import detect_format

MAX_TOOLS = 128
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ABOUT_NAMES = {"$ref", "additionalProperties", "allOf", "anyOf", "oneOf", "patternProperties"}


@dataclass(frozen=True)
class ToolCallDelta:
    """New text of the call at ``index``. ``id`` and ``name`` come with the first delta of a call."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class ToolCallSpec:
    """Functions and format of the tool calls in an answer.

    Attributes:
        functions: functions that the answer may call.
        named: name of the only function; the answer is its arguments.
        parallel: whether several calls are allowed.
        format: the model's own format, with text around the calls. None and no ``named``: a JSON list of calls.
        answer_schema: the JSON schema of an answer without calls; None: such an answer is any text. Only with
            ``format``.
    """

    functions: Sequence[Function]
    named: str | None = None
    parallel: bool = True
    format: ToolCallFormat | None = None
    answer_schema: dict[str, Any] | bool | None = None

    def constraint(self) -> StructuredOutputs:
        """Return the constraint on the answer. Raises BadRequest."""
        if self.named is not None:
            return StructuredOutputs(structural_tag=_structural_tag(_arguments(self.functions[0])))
        if self.format is not None:
            if self.answer_schema is None:
                tag = self.format.structural_tag(self.parameters(), parallel=self.parallel)
            else:
                tag = self.format.answer_or_calls(self.answer_schema, self.parameters(), parallel=self.parallel)
            return StructuredOutputs(structural_tag=tag)
        # The frame is fixed, because models rarely saw such a list.
        tags = [
            {
                "begin": f'{{"name": "{each.name}", "arguments": ',
                "content": _arguments(each),
                "end": "}",
            }
            for each in self.functions
        ]
        calls = {"type": "tags_with_separator", "tags": tags, "separator": ", ", "at_least_one": True}
        elements = [_text("["), calls | {"stop_after_first": not self.parallel}, _text("]")]
        return StructuredOutputs(structural_tag=_structural_tag({"type": "sequence", "elements": elements}))

    def begins_call(self, character: str) -> bool:
        """Whether an answer that begins with ``character`` is calls. No value of ``answer_schema`` begins like one."""
        assert self.format is not None
        forms = (self.format, *self.format.variants)
        return any(trigger[0] == character for form in forms for trigger in form.triggers(self.parameters()))

    def parameters(self) -> dict[str, dict[str, Any]]:
        """Return the JSON schemas of the arguments by function name. Raises BadRequest."""
        return {each.name: _parameters(each) for each in self.functions}


@dataclass(frozen=True)
class ParsedTools:
    """Tools of a request: what the chat template receives, and how the answer writes calls (None: no calls)."""

    template_tools: Sequence[Mapping[str, Any]] = ()
    calls: ToolCallSpec | None = None


def parse_tools(
    tools: Sequence[Tool] | None,
    choice: Literal["none", "auto", "required"] | NamedToolChoice | None,
    templates: Mapping[str, str],
    *,
    parallel: bool,
) -> ParsedTools:
    """Parse ``tools`` and ``tool_choice`` of a request. Raises BadRequest.

    ``templates`` are the model's chat templates by name; ``auto`` takes the call format from them.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise BadRequest(f"tool_choice: must come with tools, received {_quoted_choice(choice)}")
        return ParsedTools()
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"tools: at most {MAX_TOOLS}, received {len(tools)}")
    functions = [tool.function for tool in tools]
    names = [function.name for function in functions]
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise BadRequest(f"tools: every function must have a name of its own, received {quoted(duplicate)} twice")
    template_tools = [tool.model_dump(exclude_none=True) for tool in tools]
    if choice == "none":
        return ParsedTools()
    if choice == "required":
        return ParsedTools(template_tools, ToolCallSpec(functions, parallel=parallel))
    if isinstance(choice, NamedToolChoice):
        chosen = [function for function in functions if function.name == choice.function.name]
        if not chosen:
            raise BadRequest(
                f"tool_choice: must name one of the tools, {', '.join(names[:10])}, received "
                f"{quoted(choice.function.name)}"
            )
        return ParsedTools(template_tools, ToolCallSpec(chosen, named=chosen[0].name))
    tool_format = detect_format(templates)
    if tool_format is None:
        raise BadRequest(
            "tool_choice: auto (the default with tools) needs a supported tool call format, and this model's chat "
            "template shows none; send required, none or the name of a function"
        )
    return ParsedTools(template_tools, ToolCallSpec(functions, parallel=parallel, format=tool_format))


@dataclass
class ToolCallParser:
    """Incremental parser of the calls in one answer.

    Attributes:
        calls: all calls so far, each with its joined arguments.
    """

    spec: ToolCallSpec
    calls: list[ToolCallDelta] = field(default_factory=list)

    def __post_init__(self) -> None:
        tool_format = self.spec.format
        self._tagged = None if tool_format is None else TaggedCallParser(tool_format, self.spec.parameters())
        self._parser = self._tagged or JsonCallParser()
        self._is_answer: bool | None = None if self.spec.answer_schema is not None else False  # None: not known yet

    def feed(self, text: str, *, last: bool) -> list[str | ToolCallDelta]:
        """Return what ``text`` adds to the answer: text between calls, and call deltas.

        ``last`` also releases held text that might have become a call.
        """
        deltas = list(self._deltas(text))
        if last and self._tagged is not None and (rest := self._tagged.finish()):
            deltas.append(rest)
        for delta in deltas:
            if isinstance(delta, str):
                continue
            if delta.name is not None:
                self.calls.append(delta)
            else:
                begun = self.calls[delta.index]
                joined = begun.arguments + delta.arguments
                self.calls[delta.index] = ToolCallDelta(begun.index, joined, begun.id, begun.name)
        return deltas

    def _deltas(self, text: str) -> Iterator[str | ToolCallDelta]:
        if self.spec.named is not None:
            if text and not self.calls:
                yield ToolCallDelta(0, text, _new_id(), self.spec.named)
            elif text:
                yield ToolCallDelta(0, text)
            return
        if self._is_answer is None and text:
            self._is_answer = not self.spec.begins_call(text[0])
        if self._is_answer:  # a text in its JSON may be like a call
            yield from [text] if text else []
            return
        for step in self._parser.feed(text):
            if isinstance(step, str):
                yield step
                continue
            index, name, arguments = step
            yield ToolCallDelta(index, arguments, None if name is None else self._id(name), name)

    def _id(self, name: str) -> str:
        return (None if self._tagged is None else self._tagged.call_id(name)) or _new_id()


def _arguments(function: Function) -> dict[str, Any]:
    """Return the format of a function's arguments."""
    return {"type": "json_schema", "json_schema": _parameters(function)}


def _structural_tag(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def _parameters(function: Function) -> dict[str, Any]:
    """Return the JSON schema of the arguments: of ``{}`` alone if there are no parameters or no properties."""
    parameters = function.parameters or _NO_ARGUMENTS
    if parameters.get("type") != "object":
        raise BadRequest(
            f"tools: the parameters of {quoted(function.name)} must be a schema of type object, received "
            f"{quoted(parameters.get('type'))}"
        )
    if parameters.get("properties") == {} and not parameters.get("required") and not _ABOUT_NAMES & set(parameters):
        return {**parameters, "additionalProperties": False}
    return parameters


def _text(value: str) -> dict[str, str]:
    return {"type": "const_string", "value": value}


def _quoted_choice(choice: str | NamedToolChoice | None) -> str:
    return quoted(choice.function.name if isinstance(choice, NamedToolChoice) else choice)


def _new_id() -> str:
    # Mistral's templates accept only ids of 9 letters and digits when they come back.
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
