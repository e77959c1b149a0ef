"""Which regular expressions a grammar matches exactly, and exact expressions for formats.

xgrammar 0.2.8 drops look-around and inner anchors with a warning, takes unknown escapes for letters, and writes a quote
or a backslash in a pattern into a JSON string as it stands. Patterns that need any of this are refused here. A pattern
matches the whole string: for one without anchors that is fewer strings than JSON Schema allows, never more.
"""

import re
from collections import deque

# Proleptic Gregorian dates of the years 1000 to 2999; leap days only in leap years.
_YEAR = "[12][0-9]{3}"
_LEAP_YEAR = "([12][0-9](0[48]|[2468][048]|[13579][26])|(1[26]|2[048])00)"
_LONG, _SHORT = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])", "(0[469]|11)-(0[1-9]|[12][0-9]|30)"
_DATE = f"({_YEAR}-({_LONG}|{_SHORT}|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[a-z0-9]([a-z0-9-]*[a-z0-9])?"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": f"[A-Za-z0-9_+-]+(\\.[A-Za-z0-9_+-]+)*@{_LABEL}(\\.{_LABEL})+",
    "ipv4": f"{_OCTET}(\\.{_OCTET}){{3}}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}

DEEPEST_GROUP = 64

_TOKEN = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|\{\d+(?:,\d*)?\}|\(\?<?[^<]|.", re.DOTALL)
_SHORTHANDS = ("\\d", "\\w", "\\s")
_PUNCTUATION = ".*+?()[]{}|^$/-"
_EXCLUDABLE = '\\"ntr'  # escapes fit for plain text, and for a negated class, which never writes what it names


def unenforceable(pattern: str, *, quoted: bool = True) -> str | None:
    """Say what in ``pattern`` a grammar does not hold exactly, or None. ``quoted``: it describes a JSON string."""
    tokens = _TOKEN.findall(pattern)
    depth, inside, negated = 0, False, False
    for before, token, after in zip(["", *tokens], tokens, [*tokens[1:], ""], strict=False):
        if inside and token == "]":
            inside = negated = False
        elif reason := _character_trouble(token, plain=negated or not quoted, negated=negated):
            return reason
        elif inside:
            continue
        elif token == "[":
            inside, negated = True, after == "^"
        elif reason := _structure_trouble(before, token, after, depth):
            return reason
        else:
            depth += token.startswith("(") - (token == ")")
            if quoted and depth > DEEPEST_GROUP:
                return f"a group within more than {DEEPEST_GROUP} others"
    if quoted and _first_characters(deque(tokens), _alphabet(pattern)) is None:
        return "a choice between branches that begin with the same character"
    return None


def respelled(pattern: str) -> str:
    """Write repeated groups in the ways that xgrammar 0.2.8 reads right.

    ``(...)?`` as ``(...){0,1}``, for a skipped group's last repetition would run all the same, and ``(...){1,}`` as
    ``(...)+``.
    """
    tokens, written, inside = _TOKEN.findall(pattern), "", False
    for before, token in zip(["", *tokens], tokens, strict=False):
        inside = token == "[" or (inside and token != "]")
        written += _GROUP_REPETITIONS.get(token, token) if before == ")" and not inside else token
    return written


_GROUP_REPETITIONS = {"?": "{0,1}", "{0,}": "*", "{1,}": "+"}


def _first_characters(tokens: deque[str], alphabet: str) -> tuple[set[str], bool] | None:
    """Read alternatives up to their closing bracket: the characters they begin with, and whether they may be empty.

    None if two branches begin alike: xgrammar then merges states that it must keep apart.
    """
    begun: set[str] = set()
    first, empty, any_empty = set[str](), True, False
    while tokens and tokens[0] != ")":
        token = tokens.popleft()
        if token == "|":
            if begun & first:
                return None
            begun, any_empty = begun | first, any_empty or empty
            first, empty = set(), True
        elif token not in ("^", "$"):
            characters, skippable = _matched(token, alphabet), False
            if token in ("(", "(?:"):
                inner = _first_characters(tokens, alphabet)
                if inner is None:
                    return None
                characters, skippable = inner
                if tokens:
                    tokens.popleft()
            elif token == "[":
                characters = _matched(_character_class(tokens), alphabet)
            if tokens and tokens[0][0] in "*+?{":
                skippable = tokens.popleft()[:2] in ("*", "?", "{0") or skippable
                if tokens and tokens[0] == "?":
                    tokens.popleft()
            first |= characters if empty else set()
            empty = empty and skippable
    return None if begun & first else (begun | first, any_empty or empty)


def _character_class(tokens: deque[str]) -> str:
    text = "["
    while tokens:
        token = tokens.popleft()
        if token == "]":
            break
        text += "\\[" if token == "[" else token
    return text + "]"


def _matched(expression: str, alphabet: str) -> set[str]:
    try:
        return set(re.findall(expression, alphabet, re.ASCII))
    except re.error:  # a bracket that belongs to what follows, or a mistake that the compiler will name
        return set()


def _alphabet(pattern: str) -> str:
    return "".join(sorted({*map(chr, range(0x20, 0x7F)), *pattern, "\u00e9", "\u4e2d"}))


def _character_trouble(token: str, *, plain: bool, negated: bool) -> str | None:
    if token in _SHORTHANDS:  # dialects disagree on what lies outside of them
        return f"{token} in a negated class" if negated else None
    if token[0] == "\\" and len(token) == 2 and token[1] not in _PUNCTUATION + (_EXCLUDABLE if plain else ""):
        return f"the escape {token}"
    character = chr(int(token[2:], 16)) if len(token) > 2 and token[0] == "\\" else token[-1]
    if not plain and (character in '"\\' or ord(character) < 0x20):
        return "a quote, a backslash or a control character"
    return None


def _structure_trouble(before: str, token: str, after: str, depth: int) -> str | None:
    if token.startswith("(?") and token != "(?:":
        return f"the group {token}"
    if token[0] in "*+{" and before[:1] in ("*", "+", "?", "{"):
        return f"the repetition {before}{token}"
    if before == ")" and re.fullmatch(r"\{\d+,\}", token) and token not in _GROUP_REPETITIONS:
        return f"the repetition {token} of a group"
    if (token == "^" and (depth or before not in ("", "|"))) or (token == "$" and (depth or after not in ("", "|"))):
        return f"the anchor {token} inside the pattern"
    return None
