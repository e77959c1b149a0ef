"""Render chat templates in process, within a budget of work.

A template is a program that may run forever or produce unbounded text. This module counts its steps (a pass of a loop,
a call) and the characters that it handles, and rejects operations that may output far more than their input
(``'a' * 10**9``). A rendering that finishes was quick; any other raises NotQuick and runs in a worker process.

The alternative, rendering every chat in the worker processes, was measured on two shared cores and rejected. It adds
0.2 ms to a short chat and 0.8 s to the first chat after a minute without any. 64 clients rendered 713 short chats a
second instead of 2,849. The two processes also compile grammars: two slow grammars or templates delayed the next chat
for 6.9 s, with time limits of 3 s.
"""

from collections.abc import Mapping
from types import BuiltinMethodType, FunctionType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from tandemrt.engines.text import template_budget as budgets
from tandemrt.engines.text.template_budget import BUDGET, SHORT, STEP, is_word, size, spend
from tandemrt.engines.text.template_sandbox import Sandbox
from tandemrt.engines.validation.errors import NotQuick

_NODE = 8  # cost of each node of a body, in every pass

# Filters whose output is at most two or three times as long as their input.
_SHALLOW = frozenset(["count", "d", "default", "first", "items", "last", "length", "list", "reverse"])
_FILTERS = _SHALLOW | frozenset(
    """abs capitalize dictsort e escape float forceescape int join lower map max min reject rejectattr replace safe
    select selectattr sort string title tojson trim unique upper""".split()  # noqa: SIM905
)
_COMPARING = frozenset("in eq equalto == ne != lower upper gt greaterthan > lt lessthan < ge >= le <=".split())  # noqa: SIM905


class MeteredTemplate:
    """A template that counts its work. Raises NotQuick for a template with operations that have no bound."""

    def __init__(self, source: str, environment: jinja2.Environment) -> None:
        metered = _Metered(trim_blocks=True, lstrip_blocks=True, extensions=list(environment.extensions))
        metered.globals |= environment.globals
        metered.filters = environment.filters | {
            "_charge_value": budgets.charge_value,
            "_charge_length": budgets.charge_length,
            "_charge_step": budgets.charge_step,
        }
        self._template = metered.from_string(_Meter().visit(metered.parse(source)))

    def render(self, values: Mapping[str, Any], budget: int = BUDGET) -> str:
        """Render within ``budget``, in characters. Raises NotQuick, or what the template raises."""
        budgets.left.budget = budget
        return self._template.render(values)


class _Metered(Sandbox):
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def call(__self, __context: Context, __callee: Any, *args: Any, **named: Any) -> Any:  # noqa: N805
        spend(STEP + sum(map(size, args)) + sum(map(size, named.values())))
        if isinstance(__callee, BuiltinMethodType):
            budgets.require_linear(__callee, args)
        elif isinstance(__callee, FunctionType) and __callee not in __self.globals.values():  # for example str.format
            raise NotQuick
        return super().call(__context, __callee, *args, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:  # the common case
            budgets.left.budget -= len(left) + len(right)
            if budgets.left.budget < 0:
                raise NotQuick
            return left + right
        if operator == "+" and not (isinstance(left, int) and isinstance(right, int)):
            spend(size(left) + size(right))
        elif operator == "**" or not (is_word(left) and is_word(right)):
            raise NotQuick
        return super().call_binop(context, operator, left, right)


class _Meter(NodeTransformer):
    """Insert the counting into a template: a value is counted before an operation reads all of it."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        _weigh(node.body)
        if node.test is not None:  # evaluated more often than the body
            node.test = nodes.And(_counted(nodes.Const(STEP), "_charge_step"), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        _weigh(node.body)
        return node

    visit_CallBlock = visit_Block = visit_Macro  # noqa: N815

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [each if isinstance(each, nodes.TemplateData) else _counted(each) for each in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_counted(each) for each in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        constant = isinstance(node.expr, nodes.Const)
        for operand in node.ops:
            if operand.op in ("in", "notin") or not (constant or isinstance(operand.expr, nodes.Const)):
                operand.expr = operand.expr if _is_listed(operand.expr) else _counted(operand.expr)
            constant = isinstance(operand.expr, nodes.Const)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if node.name in _COMPARING:
            node.node, node.args = _counted(node.node), [_counted(each) for each in node.args]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _counted(node.node, "_charge_length")
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802
        if isinstance(node.node, nodes.Getattr) and node.node.attr == "format":
            joined = _joined(node.node.node, "{}", node)
            if joined is not None:
                return self.visit_Concat(joined)
        self.generic_visit(node)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802
        if node.name == "format" and (joined := _joined(node.node, "%s", node)) is not None:
            return self.visit_Concat(joined)
        arguments = [*node.args, *(each.value for each in node.kwargs), *filter(None, (node.dyn_args, node.dyn_kwargs))]
        if node.name not in _FILTERS or (node.name not in _SHALLOW and not all(map(_is_small, arguments))):
            raise NotQuick
        if node.name in ("map", "select", "reject") and not _names_known(node.args[:1]):
            raise NotQuick
        self.generic_visit(node)
        if node.node is not None:
            node.node = _counted(node.node, "_charge_length" if node.name in _SHALLOW else "_charge_value")
        return node

    def visit_Name(self, node: nodes.Name) -> nodes.Node:  # noqa: N802
        if node.name == "lipsum":
            raise NotQuick
        return node


def _weigh(body: list[nodes.Node]) -> None:
    """Make every pass of ``body`` cost its text and nodes."""
    text = sum(len(each.data) for part in body for each in part.find_all(nodes.TemplateData))
    parts = sum(1 for part in body for _ in part.find_all(nodes.Node))
    cost = nodes.Const(STEP + text + _NODE * parts)
    body.insert(0, nodes.ExprStmt(_counted(cost, "_charge_step")))


def _joined(text: nodes.Node | None, place: str, call: nodes.Call | nodes.Filter) -> nodes.Concat | None:
    """Return a constant text whose every ``place`` is an argument; None: the text has other places or uses."""
    if not isinstance(text, nodes.Const) or not isinstance(text.value, str):
        return None
    first, *others = text.value.split(place)
    if call.kwargs or call.dyn_args or call.dyn_kwargs or len(others) != len(call.args):
        return None
    if any(mark in part for part in (first, *others) for mark in "{}%"):
        return None
    filled = (each for pair in zip(call.args, map(nodes.Const, others), strict=True) for each in pair)
    return nodes.Concat([nodes.Const(first), *filled], lineno=call.lineno)


def _counted(value: nodes.Expr, how: str = "_charge_value") -> nodes.Expr:
    if isinstance(value, nodes.Const) and how == "_charge_value":
        return value
    return nodes.Filter(value, how, [], [], None, None)


def _is_listed(value: nodes.Node) -> bool:
    return isinstance(value, nodes.List | nodes.Tuple) and all(isinstance(each, nodes.Const) for each in value.items)


def _is_small(argument: nodes.Node) -> bool:
    if isinstance(argument, nodes.Tuple):
        return all(map(_is_small, argument.items))
    if not isinstance(argument, nodes.Const):
        return False
    value = argument.value
    return value is None or (isinstance(value, str) and len(value) <= SHORT) or (is_word(value) and value <= SHORT)


def _names_known(arguments: list[nodes.Expr]) -> bool:
    """Return whether ``map``, ``select`` or ``reject`` applies a filter or test of linear cost."""
    names = [each.value for each in arguments if isinstance(each, nodes.Const)]
    return all(name in _FILTERS or name in jinja2.tests.TESTS for name in names)
