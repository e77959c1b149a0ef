"""Chat templates: Jinja in a sandbox, with the names and filters that templates of the hub are written for."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tandemrt.engines.errors import NotQuick

if TYPE_CHECKING:
    import jinja2

    from tandemrt.engines.template_meter import MeteredTemplate

_REASONING = ("reasoning_content", "thinking", "reasoning")  # what its name may be, the usual one first


class ChatTemplate:
    """One template, compiled when it is first rendered. ``names`` are the special tokens that it may name.

    A rendering may run for ever: ``render_quickly`` gives up where it is not sure to be quick, and ``render`` does not.
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
        """What the template sees of ``messages``, with ``tools`` to call and other ``variables``: plain values."""
        return {
            "documents": None,
            **self._names,
            **{name: _plain(value) for name, value in (variables or {}).items()},
            "messages": [_message(each) for each in messages],
            "tools": [_plain(each) for each in tools] or None,
            "add_generation_prompt": add_generation_prompt,
        }

    def render(self, values: Mapping[str, Any]) -> str:
        """The prompt. Raises what the template raises."""
        return rendered(self.source, values)

    def render_quickly(self, values: Mapping[str, Any]) -> str | None:
        """The prompt; None where making it may take long. Raises what the template raises."""
        if self._metered is None:
            return None
        try:
            return self._metered.render(_with_arguments(values))
        except NotQuick:
            return None

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads and does not set itself."""
        from jinja2 import meta

        environment = _compiled(self.source).environment
        return frozenset(meta.find_undeclared_variables(environment.parse(self.source))) - set(environment.globals)

    @cached_property
    def _metered(self) -> "MeteredTemplate | None":
        from tandemrt.engines.template_meter import MeteredTemplate
        from tandemrt.engines.template_sandbox import environment  # imports jinja2, which only chats need

        try:
            return MeteredTemplate(self.source, environment())
        except NotQuick:
            return None


def rendered(source: str, values: Mapping[str, Any]) -> str:
    """Render a template, however long it takes. Raises what it raises.

    The arguments of a call may be an object or the JSON text of one; a template may use either as both.
    """
    return _compiled(source).render(_with_arguments(values))


@lru_cache(maxsize=8)
def _compiled(source: str) -> "jinja2.Template":
    from tandemrt.engines.template_sandbox import environment  # imports jinja2, which only chats need

    return environment().from_string(source)


def chance_in_template(template: str) -> str | None:
    """Return what draws lots in a chat template, or None. A template that is no Jinja is left to fail by itself."""
    if "random" not in template and "lipsum" not in template:
        return None
    import jinja2  # slow to import, and hardly a template gets here

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


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a template may see of a message: plain values, no key without one, its reasoning under the usual name."""
    message = {key: _plain(value) for key, value in given.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    # An object's methods are nothing that a template, which comes with a checkpoint, may call.
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
    return {**call, "arguments": _arguments(call["arguments"])} if "arguments" in call else call


class _Arguments(dict[Any, Any]):
    """The arguments of a call: some templates walk through an object, others want to join it to a text."""

    def __init__(self, value: Mapping[Any, Any], text: str) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def _arguments(given: Any) -> Any:
    if isinstance(given, dict):
        return _Arguments(given, json.dumps(given, ensure_ascii=False))
    try:
        value = json.loads(given)
    except (TypeError, ValueError, RecursionError):  # a model may have written no JSON: it stays what it wrote
        return given
    return _Arguments(value, given) if isinstance(value, dict) else given
