"""tools.lint, which ``make check`` runs, rejects the example of each rule, and accepts its neighbour."""

import ast
from pathlib import Path

import pytest

from tools.lint import MAX_BRANCHES, MAX_LINES, violations


def lint(**sources: str) -> list[str]:
    """Lint sources, each in a file of its own; an argument is named folder_file."""
    files = {Path(name.replace("_", "/", 1) + ".py"): source for name, source in sources.items()}
    return list(violations({file: ast.parse(source) for file, source in files.items()}))


def function(lines: int) -> str:
    """Return a function whose signature and docstring do not count."""
    return "\n".join(["def f(\n    a,\n    b,\n):", '    """Return.\n\n    Nothing."""', *["    a = b"] * lines])


BRANCHES = "\n".join(["def f(a):", *["    if a:\n        a = 0 if a else 1"] * (MAX_BRANCHES // 2)])


@pytest.mark.parametrize(
    ("rejected", "accepted", "rule"),
    [
        ("found = load()", "tensors = load()", "found says nothing about its value"),
        ("for held in slots: pass", "for slot in slots: pass", "held says nothing about its value"),
        ("[given for given in rows]", "[given.row for row in rows]", "given says nothing about its value"),
        ("def f(*, made): pass", "def f(*, bundle): pass", "made says nothing about its value"),
        ("lambda this: 1", "options.this = 1", "this says nothing about its value"),
        ("def found(self): pass", "def is_seen(self): pass", "found says nothing about its result"),
        ("f(*(a, b), c)", "f(a, b, c)", "write the arguments out instead of a starred literal"),
        ("f(a, *[b, *c])", "f(a, *(b for b in c))", "write the arguments out instead of a starred literal"),
        (function(MAX_LINES + 1), function(MAX_LINES), f"f has {MAX_LINES + 1} lines, more than {MAX_LINES}"),
        (
            f"{BRANCHES}\n    while a: a()",
            f"{BRANCHES}\n    return [b for b in a if b and a or b]",
            f"f has {MAX_BRANCHES + 1} branches, more than {MAX_BRANCHES}",
        ),
    ],
)
def test_a_rule_rejects_its_example_and_accepts_the_neighbour(rejected: str, accepted: str, rule: str) -> None:
    (line,) = lint(engines_a=rejected)
    assert line.startswith("engines/a.py:1: ")
    assert line.endswith(rule)
    assert lint(engines_a=accepted) == []


def test_a_test_is_named_after_what_holds_and_may_be_long() -> None:
    assert lint(tests_a="def test_what_is_kept(): pass") == ["tests/a.py:1: test_what_is_kept should state what holds"]
    assert lint(tests_a="def test_a_draft_is_kept(): pass") == []
    assert lint(engines_a="def test_what_is_kept(): pass") == []
    assert lint(tests_a=function(MAX_LINES + 1)) == []


def test_a_public_class_of_the_product_has_a_name_of_its_own() -> None:
    (line,) = lint(engines_a="class Cache: pass", plugins_b="\nclass Cache: pass")
    assert line == "engines/a.py:1, plugins/b.py:2: class Cache has several meanings"
    assert lint(engines_a="class Cache: pass", plugins_b="class _Cache: pass", tools_c="class Cache: pass") == []
