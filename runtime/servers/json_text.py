"""JSON of clients: only what can be written again, because answers repeat parts of it."""

import json
import math
import re
from typing import Any

MOST_VALUES = 1 << 16  # no other thread runs while json parses, which takes about 1 us for each

encode_event = json.JSONEncoder(separators=(",", ":")).encode  # ASCII: some clients end a line at U+2028

_TEXT = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_LONE_SURROGATE = re.compile(
    r"(?:[^\\]++|\\(?:[^u]|u(?![dD][89a-fA-F])|u[dD][89abAB]..\\u[dD][c-fC-F]))*+\\u", re.DOTALL
)


def parse_json_text(text: str) -> Any:
    """Parse JSON of at most MOST_VALUES texts, lists and objects; keys are texts.

    Raises ValueError, also for NaN and for a number beyond the range of a double.
    """
    if len(text) > MOST_VALUES:
        _require_few_values(text)
    return json.loads(text, parse_constant=_reject_constant, parse_float=_double)


def lone_surrogate(text: str) -> bool:
    """Whether ``text``, which is JSON, has a text that UTF-8 cannot encode."""
    return _LONE_SURROGATE.match(text) is not None


def is_encodable(value: Any) -> bool:
    """Whether UTF-8 can encode all texts in a JSON value."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _require_few_values(text: str) -> None:
    """Raise ValueError if ``text`` has more than MOST_VALUES texts, lists and objects."""
    count = end = 0
    while count <= MOST_VALUES and (start := text.find('"', end)) >= 0 and (match := _TEXT.match(text, start)):
        count += 1 + text.count("[", end, start) + text.count("{", end, start)
        end = match.end()
    if count + text.count("[", end) + text.count("{", end) > MOST_VALUES:
        raise ValueError(f"it may have at most {MOST_VALUES} texts, lists and objects; send fewer")


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _double(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is beyond the range of numbers, about 1.8e308")
    return number
