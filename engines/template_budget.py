"""What a rendering may cost here: steps and characters, counted by each thread while a template runs."""

import threading
from types import BuiltinMethodType
from typing import Any

from jinja2 import pass_context
from jinja2.runtime import Context

from tandemrt.engines.errors import NotQuick

BUDGET = 1 << 22  # characters: some ten milliseconds
STEP = 64  # what a step costs, in characters
VALUE = 32  # what each value within another one costs
SHORT = 64  # characters that may be put in many places
_WORD = 1 << 63

# Methods whose results are no longer than what they are given, up to a factor of two or three.
_METHODS = frozenset(
    """capitalize copy count endswith find get index isalnum isalpha isdecimal isdigit islower isnumeric isspace istitle
    isupper items join keys lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit
    rstrip split splitlines startswith strip swapcase title upper values""".split()  # noqa: SIM905
)


class _Left(threading.local):
    """What is left of this thread's budget."""

    budget = 0


left = _Left()


def require_linear(method: BuiltinMethodType, args: tuple[Any, ...]) -> None:
    """Spend what a call of ``method`` costs. Raises NotQuick for one that may give much more than it takes."""
    owner, name = method.__self__, method.__name__
    if not isinstance(owner, str | list | tuple | dict) or name not in _METHODS:
        raise NotQuick
    spend(size(owner))
    many = args[1:] if name == "replace" else (owner,) if name == "join" else ()
    if any(isinstance(each, str) and len(each) > SHORT for each in many):
        raise NotQuick
    if name == "join":
        _count(args)


@pass_context  # so that nothing is worked out before the template runs
def whole(_: Context, value: Any) -> Any:
    """Spend what it costs to spell ``value``, with all that is in it."""
    if isinstance(value, str):
        left.budget -= len(value)
        if left.budget < 0:
            raise NotQuick
    elif isinstance(value, list | tuple | dict):
        _count(value)
    elif isinstance(value, int) and not is_word(value):
        raise NotQuick
    return value


@pass_context
def outside(_: Context, value: Any) -> Any:
    """Spend what it costs to go over ``value``, but not into what is in it."""
    spend(size(value))
    return value


@pass_context
def step(_: Context, cost: int) -> bool:
    """Spend what a pass of a body costs; True, so that it may stand in a condition."""
    spend(cost)
    return True


def spend(cost: int) -> None:
    """Take from this thread's budget. Raises NotQuick where too little is left."""
    left.budget -= cost
    if left.budget < 0:
        raise NotQuick


def _count(value: Any) -> None:
    """A value that holds another one many times is spelled as often."""
    open_values = [value]
    while open_values:
        value = open_values.pop()
        spend(VALUE + size(value))
        if isinstance(value, dict):
            open_values += value.keys()
            open_values += value.values()
        elif isinstance(value, list | tuple):
            open_values += value


def size(value: Any) -> int:
    """How much there is of a value, without what is in its values."""
    return len(value) if isinstance(value, str | list | tuple | dict | range) else 1


def is_word(value: Any) -> bool:
    """Whether it is a number that takes no longer to work with than any other."""
    return isinstance(value, float) or (isinstance(value, int) and -_WORD < value < _WORD)
