"""Mutation operators: the small bugs that can be planted in a Python module.

An operator replaces one expression or statement. Code whose change no test should notice has no mutants: docstrings,
annotations, error and log messages, ``__all__``, ``if TYPE_CHECKING``, assertions, ``__repr__``.
"""

import ast
import builtins
from collections.abc import Iterable
from dataclasses import dataclass

from tandemrt.engines.validation import errors

_COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
}
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_EXCEPTIONS = {
    name for module in (errors, builtins) for name, value in vars(module).items() if isinstance(value, type)
    and issubclass(value, BaseException)
} | {"PydanticCustomError", "ValidationError"}  # fmt: skip
_TEXTS = {
    "quoted",
    "clipped",
    "named",
    "nearest",
    "explain",
    "reject",
    "mismatch",
    "refused",
    "print",
    "cast",
    "TypeVar",
}
_LOGGERS = {"log", "logger", "logging", "warnings", "console"}
_MESSAGES = {"help", "description", "title", "name", "message", "metavar"}  # keyword arguments
_TYPES = {"Annotated", "Callable", "Literal", "Union", "Optional", "dict", "list", "tuple", "type"}


@dataclass(frozen=True)
class Edit:
    """A replacement in a module.

    Attributes:
        operator: its kind.
        start: offset of the replaced text, in characters.
        text, becomes: the replaced text and its replacement.
        line: of ``start``.
        runs: the first and the last line that a test must run to notice the bug.
        imported: importing the module runs it.
        names: what that defines; tests that run lines with the name may notice the bug.
    """

    operator: str
    start: int
    text: str
    becomes: str
    line: int
    runs: tuple[int, int]
    imported: bool
    names: tuple[str, ...]


def edits(source: str) -> list[Edit]:
    """Return all edits of a module, in the order of their places. Some may not be valid Python (``is_bug``)."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda edit: (edit.start, edit.operator, edit.becomes))


def changed(source: str, edit: Edit) -> str:
    return source[: edit.start] + edit.becomes + source[edit.start + len(edit.text) :]


def is_bug(source: str, edit: Edit) -> bool:
    """Return whether the changed module is valid and differs from ``source`` in more than its spelling."""
    try:
        return ast.dump(ast.parse(changed(source, edit))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


class _Finder(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self.found: list[Edit] = []
        self._source = source
        lines = source.encode().splitlines(keepends=True)
        self._lines = lines
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line.decode()))
        self._runs = (1, 1)
        self._imported = True
        self._creating = False  # in __init__: an object without an attribute fails wherever it is used
        self._names: tuple[str, ...] = ()

    # Places

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1][:column].decode())

    def _span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _text(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        start, end = self._span(node)
        return self._source[start:end]

    def _add(self, operator: str, start: int, end: int, becomes: str) -> None:
        line = self._source.count("\n", 0, start) + 1
        text = self._source[start:end]
        self.found.append(Edit(operator, start, text, becomes, line, self._runs, self._imported, self._names))

    def _replace(self, operator: str, node: ast.expr | ast.stmt, becomes: str) -> None:
        self._add(operator, *self._span(node), becomes)

    def _between(self, operator: str, left: ast.expr, right: ast.expr, symbol: str, becomes: str) -> None:
        """Replace the ``symbol`` between two expressions."""
        start, end = self._span(left)[1], self._span(right)[0]
        at = self._source.find(symbol, start, end)
        if at >= 0 and "#" not in self._source[start:end]:
            self._add(operator, at, at + len(symbol), becomes)

    # Statements

    def visit(self, node: ast.AST) -> None:
        outer = self._runs
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if isinstance(body, list) else node.end_lineno
            self._runs = (node.lineno, max(node.lineno, last or node.lineno))
        super().visit(node)
        self._runs = outer

    def visit_Module(self, node: ast.Module) -> None:
        self._visit_all(node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if not any(_name(base).endswith("Protocol") for base in node.bases):
            self._visit_all(node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        decorators = {_name(each) for each in node.decorator_list}
        if decorators & {"overload", "abstractmethod"} or node.name in ("__repr__", "__str__"):
            return
        if node.returns is not None and _name(node.returns) in _EXCEPTIONS:
            return
        self._runs = (node.body[0].lineno, node.end_lineno or node.lineno)
        outer = self._imported, self._creating
        self._imported, self._creating = False, node.name == "__init__"
        self._visit_all([*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body])
        self._imported, self._creating = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in (text := self._text(node.test)) or "__name__" in text:
            return
        self._condition(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call) and not _is_message(call):
            self._replace("dropped statement", node, "pass")
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace("dropped statement", node, "pass")

    def visit_Delete(self, node: ast.Delete) -> None:
        self._replace("dropped statement", node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace("dropped statement", node, "break")

    def visit_Break(self, node: ast.Break) -> None:
        self._replace("dropped statement", node, "continue")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
                self._constant(node.value)
                return
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if isinstance(target, ast.Attribute | ast.Subscript) and not self._creating:
            self._replace("dropped statement", node, "pass")
        names = tuple(_name(each) for each in node.targets)
        if "__all__" not in names and not _is_type(node.value):
            self._defining(names, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and "TypeAlias" not in _name(node.annotation):
            if isinstance(node.target, ast.Attribute) and not self._creating:
                self._replace("dropped statement", node, "pass")
            self._defining((_name(node.target),), node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace("dropped statement", node, "pass")
        if type(node.op) in _ARITHMETIC:
            symbol, becomes = _ARITHMETIC[type(node.op)]
            self._between("arithmetic", node.target, node.value, symbol + "=", becomes + "=")
        self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    # Expressions

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._condition(test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operation, right in zip(operands, node.ops, node.comparators, strict=False):
            symbol, replacements = _COMPARISONS[type(operation)]
            for becomes in replacements:
                near = {symbol, becomes} in ({"<", "<="}, {">", ">="})
                self._between("boundary" if near else "comparison", left, right, symbol, becomes)
        for operand in operands:
            if isinstance(operand, ast.Constant) and isinstance(operand.value, str) and operand.value:
                self._replace("constant", operand, '""')
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word, becomes = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        texts = [f"({self._text(value)})" for value in node.values]
        self._replace("connective", node, f"({f' {becomes} '.join(texts)})")
        for index in range(len(texts)):
            self._replace("dropped operand", node, f"({f' {word} '.join(texts[:index] + texts[index + 1 :])})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._replace("dropped sign", node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in _ARITHMETIC and not any(_is_text(side) for side in (node.left, node.right)):
            symbol, becomes = _ARITHMETIC[type(node.op)]
            self._between("arithmetic", node.left, node.right, symbol, becomes)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        self._constant(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None:
                self._replace("dropped bound", bound, "")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _is_message(node):
            return
        if isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            self._replace("swapped function", node.func, _FUNCTIONS[node.func.id])
        for first, second in zip(node.args, node.args[1:], strict=False):
            if _alike(first, second) and _name(node.func) not in ("isinstance", "getattr", "setattr", "hasattr"):
                start, end = self._span(first)[0], self._span(second)[1]
                between = self._source[self._span(first)[1] : self._span(second)[0]]
                self._add("swapped arguments", start, end, self._text(second) + between + self._text(first))
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in _MESSAGES:
                self._drop_keyword(keyword)
                self.visit(keyword.value)
        self._visit_all([node.func, *node.args])

    # Parts

    def _condition(self, node: ast.expr) -> None:
        if not isinstance(node, ast.Compare) and not (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
            self._replace("negated condition", node, f"(not ({self._text(node)}))")

    def _constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace("constant", node, str(not node.value))
        elif isinstance(node.value, int):
            self._replace("constant", node, str(node.value + 1))
        elif isinstance(node.value, float):
            self._replace("constant", node, repr(node.value * 2 if node.value else 1.0))

    def _drop_keyword(self, keyword: ast.keyword) -> None:
        start, end = self._span(keyword)
        if self._source[end:].lstrip().startswith(","):
            end = self._source.index(",", end) + 1
            end += len(self._source[end:]) - len(self._source[end:].lstrip(" "))
        elif self._source[:start].rstrip().endswith(","):
            start = self._source.rindex(",", 0, start)
        self._add("dropped argument", start, end, "")

    def _defining(self, names: Iterable[str], value: ast.expr) -> None:
        self._names = tuple(filter(None, names)) if self._imported else ()
        self.visit(value)
        self._names = ()

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)


def _name(node: ast.AST) -> str:
    """The last name of an expression: ``f`` of ``a.f``, ``a.f[...]`` and ``a.f(...)``."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return node.attr
        case ast.Subscript():
            return _name(node.value)
        case ast.Call():
            return _name(node.func)
        case ast.Constant(value=str()):
            return str(node.value)
        case _:
            return ""


def _is_message(call: ast.Call) -> bool:
    """Whether a call logs, prints, or makes a text or an error for people."""
    name = _name(call.func)
    logs = isinstance(call.func, ast.Attribute) and _name(call.func.value) in _LOGGERS
    return logs or name in _EXCEPTIONS or name in _TEXTS or name.lower().endswith("error")


def _alike(first: ast.expr, second: ast.expr) -> bool:
    """Whether two arguments may have the same type, so that an exchange is no TypeError at once."""
    places = (ast.Name, ast.Attribute, ast.Subscript, ast.BinOp, ast.Call)
    if isinstance(first, ast.Constant) and isinstance(second, ast.Constant):
        return type(first.value) is type(second.value)
    return isinstance(first, places) and isinstance(second, places)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_type(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_type(node.left) or _is_type(node.right)
    return isinstance(node, ast.Subscript) and _name(node.value) in _TYPES
