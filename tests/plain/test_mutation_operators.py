"""What bugs ``python -m tools.quality.mutate sample`` can plant, and where it plants none."""

from pathlib import Path

import pytest

from tools.quality.mutate.mutants import ROOT
from tools.quality.mutate.operators import changed, edits, is_bug
from tools.quality.mutate.sampling import FOLDERS, drawn


def bugs(source: str) -> set[tuple[str, str]]:
    """The operators and the changed modules."""
    return {(edit.operator, changed(source, edit)) for edit in edits(source) if is_bug(source, edit)}


@pytest.mark.parametrize(
    ("source", "operator", "becomes"),
    [
        ("f = a < b\n", "boundary", "f = a <= b\n"),
        ("f = a < b\n", "comparison", "f = a >= b\n"),
        ("f = a < b <= c\n", "boundary", "f = a < b < c\n"),
        ("f = (a) is not (b)\n", "comparison", "f = (a) is (b)\n"),
        ("f = kind == 'x'\n", "constant", 'f = kind == ""\n'),
        ("while a:\n    g()\n", "negated condition", "while (not (a)):\n    g()\n"),
        ("f = [x for x in y if x]\n", "negated condition", "f = [x for x in y if (not (x))]\n"),
        ("f = not a\n", "dropped sign", "f = (a)\n"),
        ("f = a and b or c\n", "connective", "f = ((a and b) and (c))\n"),
        ("f = a and b and c\n", "dropped operand", "f = ((a) and (c))\n"),
        ("f = 7\n", "constant", "f = 8\n"),
        ("f = True\n", "constant", "f = False\n"),
        ("f = 0.5\n", "constant", "f = 1.0\n"),
        ("f = 'é' * n + m // 2\n", "arithmetic", "f = 'é' * n + m * 2\n"),
        ("a.n += 1\n", "arithmetic", "a.n -= 1\n"),
        ("a.n += 1\n", "dropped statement", "pass\n"),
        ("if a:\n    g(\n        1,\n    )\n", "dropped statement", "if a:\n    pass\n"),
        ("def f():\n    if a:\n        raise E(1)\n", "dropped statement", "def f():\n    if a:\n        pass\n"),
        ("for a in b:\n    if a:\n        continue\n", "dropped statement", "for a in b:\n    if a:\n        break\n"),
        ("f = g(a, b, c)\n", "swapped arguments", "f = g(a, c, b)\n"),
        ("f = g(a, key=1, other=2)\n", "dropped argument", "f = g(a, other=2)\n"),
        ("f = g(a, key=1)\n", "dropped argument", "f = g(a)\n"),
        ("f = a[:n]\n", "dropped bound", "f = a[:]\n"),
        ("f = min(a, b)\n", "swapped function", "f = max(a, b)\n"),
        ("def f(a=1):\n    return a\n", "constant", "def f(a=2):\n    return a\n"),
    ],
)
def test_an_operator_changes_what_it_says(source: str, operator: str, becomes: str) -> None:
    assert (operator, becomes) in bugs(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring with 1 < 2."""\n',
        'def f():\n    """1 < 2."""\n',
        "def f(a: Literal[1]) -> Annotated[int, 2]: ...\n",
        "A = Literal[1, 2]\nB = int | Callable[[int], None]\n",
        "__all__ = [f(1)]\n",
        "if TYPE_CHECKING:\n    f(1)\n",
        'if __name__ == "__main__":\n    f(1)\n',
        "log.warning('x', 1)\n",
        "warnings.warn('x', stacklevel=2)\n",
        "error = BadRequest(f(1), 2)\n",
        "def f() -> BadRequest:\n    return BadRequest(1 + 2)\n",
        "a = f'{1 + 2}'\n",
        "assert a < 1\n",
        "class A(Protocol):\n    a: int = 1\n",
        "class A:\n    def __init__(self, a):\n        self.a = a\n",
        "class A:\n    def __repr__(self):\n        return g(1)\n",
        "@dataclass(frozen=True)\nclass A: ...\n",
        "a = g(help='1')\n",
        "a = isinstance(b, c)\n",
    ],
)
def test_code_whose_change_no_test_should_notice_has_no_bugs(source: str) -> None:
    assert bugs(source) == set()


def test_an_error_can_be_dropped_and_its_text_stays() -> None:
    source = "if a:\n    raise BadRequest('x', 1 < 2)\n"
    assert bugs(source) == {
        ("negated condition", "if (not (a)):\n    raise BadRequest('x', 1 < 2)\n"),
        ("dropped statement", "if a:\n    pass\n"),
    }


def test_a_bug_names_the_lines_that_a_test_must_run() -> None:
    body = "        return g(\n            a,\n            6,\n        )\n"
    source = f"LIMIT = 3\n\n\nclass A:\n    size: int = 4\n\n    def f(self, a=5):\n{body}"
    places = {
        edit.text: (edit.line, edit.runs, edit.imported, edit.names) for edit in edits(source) if edit.text in "3456"
    }
    assert places == {
        "3": (1, (1, 1), True, ("LIMIT",)),
        "4": (5, (5, 5), True, ("size",)),
        "5": (7, (8, 11), False, ()),
        "6": (10, (8, 11), False, ()),
    }


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "a.py").write_text("".join(f"a{n} = b < {n}\n" for n in range(50)))
    (tmp_path / "engines" / "b.py").write_text("def f(x):\n    return x and x > 1\n")
    return tmp_path


def test_a_seed_draws_the_same_bugs_and_every_line_once(tree: Path) -> None:
    first = list(drawn(tree, ["engines"], 1))
    assert list(drawn(tree, ["engines"], 1)) == first
    assert list(drawn(tree, ["engines"], 2)) != first
    assert sorted((file, edit.line) for file, edit in first) == [
        *(("engines/a.py", n) for n in range(1, 51)),
        ("engines/b.py", 2),
    ]
    assert {edit.operator for _, edit in first} >= {"boundary", "comparison", "constant"}


def test_every_bug_of_the_packages_is_a_replacement_in_its_line() -> None:
    total = 0
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text()
            for edit in edits(source):
                assert source[edit.start : edit.start + len(edit.text)] == edit.text
                assert edit.runs[0] <= edit.runs[1]
                total += 1
    assert total > 10_000
