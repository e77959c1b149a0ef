"""The Jinja sandbox of chat templates."""

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.compiler import CodeGenerator, Frame
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
        namespace, *mappings = args
        values = dict(*mappings, **named)
        for name in values:
            _require_open(name)
        Namespace.__init__(namespace, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_open(name)
        super().__setitem__(name, value)


class _Dict:
    """``dict(...)`` and ``dict.fromkeys(...)`` without the type's other attributes."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _NoConstants(CodeGenerator):
    """Computes no expression while it compiles: a constant one may take gigabytes, also where it is never rendered."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.optimizer = None

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_EvalContextModifier(self, node: nodes.EvalContextModifier, frame: Frame) -> None:  # noqa: N802
        for keyword in node.options:
            self.writeline(f"context.eval_ctx.{keyword.key} = ")
            self.visit(keyword.value, frame)
            frame.eval_ctx.volatile = True


class _Names(_NoConstants, meta.TrackingCodeGenerator):
    """Finds the names that a template reads."""


class Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox whose templates compile in time and memory proportional to their text."""

    code_generator_class = _NoConstants


def environment() -> jinja2.Environment:
    """Return a sandbox with the filters and names that templates on the hub use."""
    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    sandbox.filters["tojson"] = _tojson
    sandbox.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return sandbox


def undeclared_names(source: str) -> frozenset[str]:
    """Return the names that a template reads and does not set, without those of the sandbox."""
    sandbox = environment()
    names = _Names(sandbox)
    names.visit(sandbox.parse(source))
    return frozenset(names.undeclared_identifiers) - set(sandbox.globals)


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
