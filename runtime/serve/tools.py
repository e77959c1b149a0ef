"""Functions that a model may call: the shape that makes a call valid, and the calls that a text of that shape spells.

A named function's answer is its arguments; required, the answer is a list of objects ``{"name": ..., "arguments":
...}``. Where the model may choose, the answer is text with calls in it, in the way that the model was taught. All are
held token by token like any other shape, so arguments always obey the function's schema.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tandemrt.engines.errors import BadRequest, quoted
from tandemrt.engines.params import StructuredOutputs
from tandemrt.runtime.serve.arguments import CallReader
from tandemrt.runtime.serve.protocol import Function, NamedChoice, Tool
from tandemrt.runtime.serve.tool_format import TaggedReader, ToolFormat, format_of

MOST_TOOLS = 128
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # hold schemas by name
_ANY = {"type": "object", "additionalProperties": True}  # the arguments of a function that describes none


@dataclass(frozen=True)
class Delta:
    """What a piece of text adds to the call at ``index``; ``id`` and ``name`` come with the first piece of a call."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Spelling:
    """How an answer spells calls.

    ``named`` is the one function it is the arguments of; with a ``form`` it is text with calls in it; else it is a list
    of calls.
    """

    functions: Sequence[Function]
    named: str | None = None
    parallel: bool = True
    form: ToolFormat | None = None

    def shape(self) -> StructuredOutputs:
        """Return what the answer must be. Raises BadRequest."""
        if self.named is not None:
            return StructuredOutputs(json=_parameters(self.functions[0]))
        if self.form is not None:
            schemas = {each.name: _parameters(each) for each in self.functions}
            return StructuredOutputs(structural_tag=self.form.structural_tag(schemas, parallel=self.parallel))
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": each.name}, "arguments": {"$ref": f"#/$defs/{index}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for index, each in enumerate(self.functions)
        ]
        definitions = {
            str(index): _moved(_parameters(each), f"/$defs/{index}") for index, each in enumerate(self.functions)
        }
        most = {} if self.parallel else {"maxItems": 1}
        items = {"anyOf": calls} if len(calls) > 1 else calls[0]
        schema = {"type": "array", "items": items, "minItems": 1, **most, "$defs": definitions}
        # In one layout: a model that has not seen such a list may write white space between its tokens for ever.
        return StructuredOutputs(json=schema, disable_any_whitespace=True)


@dataclass(frozen=True)
class Offered:
    """The functions as a chat template describes them, and how the answer spells calls (None: it is text)."""

    described: Sequence[Mapping[str, Any]] = ()
    spelling: Spelling | None = None


def read(
    tools: Sequence[Tool] | None,
    choice: Literal["none", "auto", "required"] | NamedChoice | None,
    templates: Mapping[str, str],
    *,
    parallel: bool,
) -> Offered:
    """Read the functions of a request, and which of them must be called. Raises BadRequest.

    ``templates``: the model's chat templates by name, which show how it writes calls by itself.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise BadRequest(f"tool_choice: must come with tools, received {_spelled(choice)}")
        return Offered()
    if len(tools) > MOST_TOOLS:
        raise BadRequest(f"tools: at most {MOST_TOOLS}, received {len(tools)}")
    functions = [tool.function for tool in tools]
    names = [function.name for function in functions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadRequest(f"tools: every function must have a name of its own, received {quoted(twice)} twice")
    described = [tool.model_dump(exclude_none=True) for tool in tools]
    if choice == "none":
        return Offered()
    if choice == "required":
        return Offered(described, Spelling(functions, parallel=parallel))
    if isinstance(choice, NamedChoice):
        chosen = [function for function in functions if function.name == choice.function.name]
        if not chosen:
            raise BadRequest(
                f"tool_choice: must name one of the tools, {', '.join(names[:10])}, received "
                f"{quoted(choice.function.name)}"
            )
        return Offered(described, Spelling(chosen, named=chosen[0].name))
    form = format_of(templates)
    if form is None:
        raise BadRequest(
            "tool_choice: auto (the default with tools) needs a model whose way of writing calls is known, and this "
            "one's chat template shows none of those; send required, none or the name of a function"
        )
    return Offered(described, Spelling(functions, parallel=parallel, form=form))


@dataclass
class Calls:
    """The calls of one answer, as its text comes."""

    spelling: Spelling
    whole: list[Delta] = field(default_factory=list)  # every call so far, its arguments joined

    def __post_init__(self) -> None:
        form, names = self.spelling.form, [each.name for each in self.spelling.functions]
        self._tagged = None if form is None else TaggedReader(form, names)
        self._reader = self._tagged or CallReader()

    def add(self, text: str, *, last: bool) -> list[str | Delta]:
        """Return what ``text``, the next of the answer, adds: text between calls, and calls.

        With the ``last`` of it comes what might have become a call.
        """
        deltas = list(self._deltas(text))
        if last and self._tagged is not None and (held := self._tagged.end()):
            deltas.append(held)
        for delta in deltas:
            if isinstance(delta, str):
                continue
            if delta.name is not None:
                self.whole.append(delta)
            else:
                begun = self.whole[delta.index]
                self.whole[delta.index] = Delta(begun.index, begun.arguments + delta.arguments, begun.id, begun.name)
        return deltas

    def _deltas(self, text: str) -> Iterator[str | Delta]:
        if self.spelling.named is not None:
            if text and not self.whole:
                yield Delta(0, text, _new_id(), self.spelling.named)
            elif text:
                yield Delta(0, text)
            return
        for step in self._reader.read(text):
            if isinstance(step, str):
                yield step
                continue
            index, name, arguments = step
            yield Delta(index, arguments, None if name is None else _new_id(), name)


def _parameters(function: Function) -> dict[str, Any]:
    parameters = function.parameters or _ANY
    if parameters.get("type") != "object":
        raise BadRequest(
            f"tools: the parameters of {quoted(function.name)} must be a schema of type object, received "
            f"{quoted(parameters.get('type'))}"
        )
    return parameters


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references lead where they did, once it stands at ``place`` of another."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _moved(child, place) for name, child in value.items()}
        if key in _NAMED and isinstance(value, dict)
        else f"#{place}{value[1:]}"
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else value
        if key in ("const", "enum", "default", "examples")
        else _moved(value, place)
        for key, value in schema.items()
    }


def _spelled(choice: str | NamedChoice | None) -> str:
    return quoted(choice.function.name if isinstance(choice, NamedChoice) else choice)


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
