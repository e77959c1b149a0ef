"""The Jinja sandbox of chat templates."""

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; it does not change a prompt."""

    tags = {"generation"}  # noqa: RUF012  # as Extension declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """A namespace that rejects names with a leading underscore, which reach Python internals."""

    def __init__(*args: Any, **named: Any) -> None:  # "self" is a valid name in a template
        made, *given = args
        values = dict(*given, **named)
        for name in values:
            _require_open(name)
        Namespace.__init__(made, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_open(name)
        super().__setitem__(name, value)


class _Dict:
    """``dict(...)`` and ``dict.fromkeys(...)`` without the type's other attributes."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def environment() -> jinja2.Environment:
    """Return a sandbox with the filters and names that templates on the hub use."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _tojson
    made.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return made


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _require_open(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace must not have a name that starts with an underscore, got {name}"
        )
