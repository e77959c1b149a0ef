"""Chat templates: Jinja in a sandbox, with the names and filters that templates of the hub are written for."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

_REASONING = ("reasoning_content", "thinking", "reasoning")  # what its name may be, the usual one first


class ChatTemplate:
    """One template, compiled when it is first rendered. ``names`` are the special tokens that it may name."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        self._source = source
        self._names = dict(names)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of ``messages``, with ``tools`` to call and other ``variables``. Raises what the template raises.

        The arguments of a call may be an object or the JSON text of one; a template may use either as both.
        """
        return self._compiled.render(
            **{"documents": None, **self._names, **{name: _plain(value) for name, value in (variables or {}).items()}},
            messages=[_message(each) for each in messages],
            tools=[_plain(each) for each in tools] or None,
            add_generation_prompt=add_generation_prompt,
        )

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads and does not set itself."""
        from jinja2 import meta

        environment = self._compiled.environment
        return frozenset(meta.find_undeclared_variables(environment.parse(self._source))) - set(environment.globals)

    @cached_property
    def _compiled(self) -> "jinja2.Template":
        from tandemrt.engines.template_sandbox import environment  # imports jinja2, which only chats need

        return environment().from_string(self._source)


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
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and "arguments" in function:
            function["arguments"] = _arguments(function["arguments"])
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
