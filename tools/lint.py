"""Rules of this project that ruff does not have: ``python -m tools.lint`` prints each violation and exits with 1.

A local name says what the value is, an argument is written out, a test's name states what holds, a function fits on a
screen, and a class of the product has a name of its own (CONTRIBUTING.md).
"""

import ast
import gc
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("engines", "plugins", "export", "runtime")
FOLDERS = ("engines", "plugins", "export", "runtime", "tools", "tests")
SAYS_NOTHING = {"found", "given", "made", "held", "this"}
MAX_LINES, MAX_BRANCHES = 80, 20  # of a function
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)


def main() -> None:
    """Print the violations of all rules in all folders."""
    gc.disable()  # it would search the trees of all files for garbage again and again
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    places = [file.relative_to(ROOT) for file in files]
    trees = {place: ast.parse((ROOT / place).read_text()) for place in places if "built" not in place.parts}
    lines = list(violations(trees))
    print("\n".join(lines) or "no violations")
    sys.exit(bool(lines))


def violations(trees: Mapping[Path, ast.Module]) -> Iterator[str]:
    """Yield one line for each violation in ``trees``, file to syntax tree. Files in tests/ have the rules of tests."""
    classes: dict[str, list[str]] = defaultdict(list)
    for file, tree in trees.items():
        tests = file.parts[0] == "tests"
        yield from (f"{file}:{line}: {text}" for line, text in _of_nodes(ast.walk(tree), tests=tests))
        for node in tree.body if file.parts[0] in PRODUCT else []:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(f"{file}:{node.lineno}")
    for name, places in classes.items():
        if len(places) > 1:
            yield f"{', '.join(places)}: class {name} has several meanings"


def _of_nodes(nodes: Iterable[ast.AST], *, tests: bool) -> Iterator[tuple[int, str]]:
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if name in SAYS_NOTHING:
                yield node.lineno, f"{name} says nothing about its value"
            case ast.Call(args=arguments):
                for argument in arguments:
                    if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple | ast.List):
                        yield argument.lineno, "write the arguments out instead of a starred literal"
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if tests:
                if name.startswith("test_what_"):
                    yield node.lineno, f"{name} should state what holds"
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if name in SAYS_NOTHING:
                    yield node.lineno, f"{name} says nothing about its result"
                yield from _too_long(node)


def _too_long(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[int, str]]:
    lines = (function.end_lineno or function.lineno) - _first_statement(function).lineno + 1
    branches = sum(isinstance(node, _BRANCHES) for node in ast.walk(function))
    if lines > MAX_LINES:
        yield function.lineno, f"{function.name} has {lines} lines, more than {MAX_LINES}"
    if branches > MAX_BRANCHES:
        yield function.lineno, f"{function.name} has {branches} branches, more than {MAX_BRANCHES}"


def _first_statement(function: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt:
    """Return the statement after the signature and docstring, which do not count: options of a command are data."""
    body = function.body
    return body[1] if ast.get_docstring(function) and body[1:] else body[0]


if __name__ == "__main__":
    main()
