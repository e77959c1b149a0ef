"""Chat templates: Jinja in a sandbox, with the names and filters that templates of the hub are written for."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # what a message's reasoning is called, the usual name first


class ChatTemplate:
    """One template, compiled when it is first rendered. ``variables`` are the special tokens that it may name."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self._source = source
        self._variables = dict(variables)
        self._compiled: jinja2.Template | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt of ``messages``. Raises what the template raises."""
        if self._compiled is None:
            self._compiled = _environment().from_string(self._source)
        return self._compiled.render(
            messages=[_message(each) for each in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._variables,
        )


def chance_in_template(template: str) -> str | None:
    """Return what draws lots in a chat template, or None. A template that is no Jinja is left to fail by itself."""
    try:
        words = [text for _, kind, text in _LEXER.lex(template) if kind in ("operator", "name", "string")]
    except jinja2.TemplateSyntaxError:
        return None
    if "lipsum" in words:
        return "lipsum"
    for before, word in pairwise(words):
        if (before, word) == ("|", "random") or (before == "(" and word in ("'random'", '"random"')):
            return "the filter random"
    return None


_LEXER = jinja2.Environment(autoescape=False)  # only reads


class _Generation(Extension):
    """``{% generation %}`` marks what an assistant wrote, for training; a prompt is the same with it and without."""

    tags = {"generation"}  # noqa: RUF012  # as Extension declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Without names that lead to what Python keeps behind underscores."""

    def __init__(*args: Any, **named: Any) -> None:  # so that a name may be "self"
        made, *given = args
        values = dict(*given, **named)
        for name in values:
            _require_open(name)
        Namespace.__init__(made, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_open(name)
        super().__setitem__(name, value)


class _Dict:
    """``dict(...)`` and ``dict.fromkeys(...)``, and nothing else of the type."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own is made for web pages and escapes what they may not hold.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _require_open(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not hold a name with an underscore first, got {name}")


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
