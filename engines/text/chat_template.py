"""Chat templates: sandboxed Jinja with the names and filters that templates on the hub use."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tandemrt.engines.validation.errors import NotQuick

if TYPE_CHECKING:
    import jinja2

    from tandemrt.engines.text.template_meter import MeteredTemplate

LONGEST_QUICK = 1 << 17  # characters of a template that is compiled in process
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the reasoning field, the usual one first


class ChatTemplate:
    """One template, compiled at the first rendering. ``names`` are the special tokens that it may name.

    A rendering may run forever: ``render_quickly`` gives up beyond a budget, ``render`` does not.
    """

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        self.source = source
        self._names = dict(names)

    def values(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the template's variables for ``messages``, ``tools`` and other ``variables``, as plain values."""
        return {
            "documents": None,
            **self._names,
            **{name: _plain(value) for name, value in (variables or {}).items()},
            "messages": [_message(each) for each in messages],
            "tools": [_plain(each) for each in tools] or None,
            "add_generation_prompt": add_generation_prompt,
        }

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the prompt. Raises what the template raises."""
        return rendered(self.source, values)

    def render_quickly(self, values: Mapping[str, Any]) -> str | None:
        """Return the prompt, or None if rendering may take long. Raises what the template raises."""
        if self._metered is None:
            return None
        try:
            return self._metered.render(_with_arguments(values))
        except NotQuick:
            return None

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads and does not set."""
        from tandemrt.engines.text.template_sandbox import undeclared_names  # imports jinja2, which only chats need

        return undeclared_names(self.source)

    @cached_property
    def _metered(self) -> "MeteredTemplate | None":
        from tandemrt.engines.text.template_meter import MeteredTemplate
        from tandemrt.engines.text.template_sandbox import environment  # imports jinja2, which only chats need

        if len(self.source) > LONGEST_QUICK:
            return None
        try:
            return MeteredTemplate(self.source, environment())
        except NotQuick:
            return None


def rendered(source: str, values: Mapping[str, Any]) -> str:
    """Render a template without a time limit. Raises what it raises.

    The arguments of a tool call may be an object or its JSON text; a template may use either form.
    """
    return _compiled(source).render(_with_arguments(values))


@lru_cache(maxsize=8)
def _compiled(source: str) -> "jinja2.Template":
    from tandemrt.engines.text.template_sandbox import environment  # imports jinja2, which only chats need

    return environment().from_string(source)


def randomness_in_template(template: str) -> str | None:
    """Return the random function that a chat template uses, or None. Syntax errors are left to the rendering."""
    if "random" not in template and "lipsum" not in template:
        return None
    import jinja2  # slow to import, and few templates need it

    lexer = jinja2.Environment(autoescape=False)  # only reads
    try:
        words = [text for _, kind, text in lexer.lex(template) if kind in ("operator", "name", "string")]
    except jinja2.TemplateSyntaxError:
        return None
    if "lipsum" in words:
        return "lipsum"
    for before, word in pairwise(words):
        if (before, word) == ("|", "random") or (before == "(" and word in ("'random'", '"random"')):
            return "the filter random"
    return None


def _message(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message for the template: plain values, no None, the reasoning under its usual name."""
    message = {key: _plain(value) for key, value in fields.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    # A template comes with a checkpoint and must not call methods of objects.
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def _with_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    return {**values, "messages": [_with_calls(message) for message in values["messages"]]}


def _with_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_call(call) for call in calls]}


def _call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call(call["function"])}
    return {**call, "arguments": _arguments(call.get("arguments"))} if "name" in call else call


class _Arguments(dict[Any, Any]):
    """Arguments of a tool call: some templates iterate over the object, others concatenate its text."""

    def __init__(self, value: Mapping[Any, Any], text: str) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def _arguments(arguments: Any) -> Any:
    """Return arguments as an object. No arguments are ``{}``; those that are no object stay text."""
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    text = arguments if arguments.strip() else "{}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return _Arguments(value, text) if isinstance(value, dict) else text


def call_without_object(messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the first tool call whose arguments are no object, which some templates cannot render."""
    calls = [call for message in messages for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    functions = [(call, call.get("function", call)) for call in calls]
    return next(
        (
            call
            for call, function in functions
            if isinstance(function, Mapping) and isinstance(_arguments(function.get("arguments")), str)
        ),
        None,
    )
