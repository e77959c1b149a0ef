"""The budget of a template's rendering: steps and characters, counted per thread."""

import threading
from types import BuiltinMethodType
from typing import Any

from jinja2 import pass_context
from jinja2.runtime import Context

from tandemrt.engines.validation.errors import NotQuick

BUDGET = 1 << 22  # characters: about 10 ms
STEP = 64  # cost of a step, in characters
VALUE = 32  # cost of each nested value
SHORT = 64  # characters of a text that may be repeated
_WORD = 1 << 63

# Methods whose output is at most two or three times as long as their input.
_METHODS = frozenset(
    """capitalize copy count endswith find get index isalnum isalpha isdecimal isdigit islower isnumeric isspace istitle
    isupper items join keys lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit
    rstrip split splitlines startswith strip swapcase title upper values""".split()  # noqa: SIM905
)


class _Left(threading.local):
    """The remaining budget of this thread."""

    budget = 0


left = _Left()


def require_linear(method: BuiltinMethodType, args: tuple[Any, ...]) -> None:
    """Charge a call of ``method``. Raises NotQuick for a method whose output may far exceed its input."""
    owner, name = method.__self__, method.__name__
    if not isinstance(owner, str | list | tuple | dict) or name not in _METHODS:
        raise NotQuick
    spend(size(owner))
    many = args[1:] if name == "replace" else (owner,) if name == "join" else ()
    if any(isinstance(each, str) and len(each) > SHORT for each in many):
        raise NotQuick
    if name == "join":
        _count(args)


@pass_context  # prevents constant folding at compile time
def charge_value(_: Context, value: Any) -> Any:
    """Charge the conversion of ``value`` to text, nested values included."""
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
def charge_length(_: Context, value: Any) -> Any:
    """Charge one iteration over ``value``, without its nested values."""
    spend(size(value))
    return value


@pass_context
def charge_step(_: Context, cost: int) -> bool:
    """Charge one pass of a body. Returns True, so that a condition may hold it."""
    spend(cost)
    return True


def spend(cost: int) -> None:
    """Charge this thread's budget. Raises NotQuick when it is exhausted."""
    left.budget -= cost
    if left.budget < 0:
        raise NotQuick


def _count(value: Any) -> None:
    """Charge every nested value, as often as it occurs."""
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
    """Return the length of a value, without nested values."""
    return len(value) if isinstance(value, str | list | tuple | dict | range) else 1


def is_word(value: Any) -> bool:
    """Return whether ``value`` is a float or an integer of at most 64 bits."""
    return isinstance(value, float) or (isinstance(value, int) and -_WORD < value < _WORD)
