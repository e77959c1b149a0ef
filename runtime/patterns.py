"""Which regular expressions a grammar matches exactly, and exact expressions for formats.

xgrammar 0.2.8 drops look-around and inner anchors with a warning, takes unknown escapes for letters, and writes a quote
or a backslash in a pattern into a JSON string as it stands. Patterns that need any of this are refused here. A pattern
matches the whole string: for one without anchors that is fewer strings than JSON Schema allows, never more.
"""

import re

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
    return None


def without_optional_groups(pattern: str) -> str:
    """Write ``(...)?`` as ``(...){0,1}``: xgrammar 0.2.8 lets a skipped group's last repetition run all the same."""
    tokens, written, inside = _TOKEN.findall(pattern), "", False
    for before, token in zip(["", *tokens], tokens, strict=False):
        inside = token == "[" or (inside and token != "]")
        written += "{0,1}" if token == "?" and before == ")" and not inside else token
    return written


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
    if (token == "^" and (depth or before not in ("", "|"))) or (token == "$" and (depth or after not in ("", "|"))):
        return f"the anchor {token} inside the pattern"
    return None
