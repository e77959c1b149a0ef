"""Patterns of the ``format`` values of JSON schemas."""

import difflib

# Proleptic Gregorian dates of the years 1000 to 2999; leap days only in leap years.
_YEAR = "[12][0-9]{3}"
_LEAP_YEAR = "([12][0-9](0[48]|[2468][048]|[13579][26])|(1[26]|2[048])00)"
_LONG, _SHORT = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])", "(0[469]|11)-(0[1-9]|[12][0-9]|30)"
_DATE = f"({_YEAR}-({_LONG}|{_SHORT}|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = f"{_OCTET}(\\.{_OCTET}){{3}}"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = f"{_LABEL}(\\.{_LABEL})*"
_PLAIN_LABEL = "[a-z0-9]([a-z0-9]|-[a-z0-9])*"

_HEX = "[0-9a-fA-F]"
_H16 = f"{_HEX}{{1,4}}"
_LS32 = f"({_H16}:{_H16}|{_IPV4})"
_IPV6 = "|".join(
    [f"({_H16}:){{6}}{_LS32}", f"::({_H16}:){{5}}{_LS32}"]
    + [f"(({_H16}:){{0,{n}}}{_H16})?::({_H16}:){{{4 - n}}}{_LS32}" for n in range(5)]
    + [f"(({_H16}:){{0,5}}{_H16})?::{_H16}", f"(({_H16}:){{0,6}}{_H16})?::"]
)

_PCT, _UNRESERVED, _SUB = "%[0-9A-Fa-f]{2}", "A-Za-z0-9._~", "!$&'()*+,;=\\-"
_PCHAR = f"([{_UNRESERVED}{_SUB}:@]|{_PCT})"
_AUTHORITY = f"(([{_UNRESERVED}{_SUB}:]|{_PCT})*@)?(\\[({_IPV6})\\]|([{_UNRESERVED}{_SUB}]|{_PCT})*)(:[0-9]{{1,5}})?"
_TAIL = f"(\\?({_PCHAR}|[/?])*)?(#({_PCHAR}|[/?])*)?"
_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*"
_ABSOLUTE = f"/({_PCHAR}+(/{_PCHAR}*)*)?"
_URI = f"{_SCHEME}:(//{_AUTHORITY}(/{_PCHAR}*)*|{_ABSOLUTE}|{_PCHAR}+(/{_PCHAR}*)*){_TAIL}"
_SEGMENT = f"([{_UNRESERVED}{_SUB}@]|{_PCT})+"  # without a colon, which would end a scheme
_URI_REFERENCE = f"({_URI}|(//{_AUTHORITY}(/{_PCHAR}*)*|{_ABSOLUTE}|({_SEGMENT}(/{_PCHAR}*)*)?){_TAIL})"

_DAYS = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_HOURS = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_POINTER = "(/([^/~]|~[01])*)*"

# Patterns that every dialect of regular expressions reads: three levels of groups, without back-references.
_ESCAPE = r"\\[dDwWsSnrtfv^$\\.*+?()[\]{}|/]"
_CLASS = rf"\[\^?([^\\\[\]^&~|-]|{_ESCAPE}|a-z|A-Z|0-9)+\]"
_ATOM = rf"([^\\^$.*+?()\[\]{{}}|]|\.|{_ESCAPE}|{_CLASS})"
_REPEATS = r"(([*+?]|\{[1-9][0-9]?,?\})\??)?"


def _alternatives(atom: str) -> str:
    return rf"({atom}{_REPEATS})*(\|({atom}{_REPEATS})*)*"


def _or_group(atom: str) -> str:
    return rf"({_ATOM}|\((\?:)?{_alternatives(atom)}\))"


_REGEX = rf"\^?{_alternatives(_or_group(_or_group(_ATOM)))}\$?"

PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_DAYS}({_HOURS})?|{_HOURS}|[0-9]+W)",
    # With (\\.LABEL)+ at its end, llguidance 1.9.1 rejects a maxLength of 100: it searches too long for a short text.
    "email": f"[A-Za-z0-9_+-]+(\\.[A-Za-z0-9_+-]+)*@({_PLAIN_LABEL}\\.)+{_PLAIN_LABEL}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "uri-reference": _URI_REFERENCE,
    "uuid": f"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "json-pointer": _POINTER,
    "regex": _REGEX,
    "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{_POINTER})",
    "base64": "([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
}
# Enforced as a stricter format.
PATTERNS |= {
    "idn-email": PATTERNS["email"],
    "idn-hostname": PATTERNS["hostname"],
    "iri": PATTERNS["uri"],
    "iri-reference": PATTERNS["uri-reference"],
    "url": PATTERNS["uri"],
    "base64url": "([A-Za-z0-9_-]{4})*([A-Za-z0-9_-]{2}(==)?|[A-Za-z0-9_-]{3}=?)?",
}
LONGEST = {"hostname": 253, "idn-hostname": 253}  # characters
PATTERNS |= {
    f"uuid{version}": f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"
    for version in range(1, 9)
}
UNSUPPORTED = frozenset({"uri-template"})


def misspelled(name: str) -> str | None:
    """Return the format that ``name`` is probably a misspelling of, or None. Unknown formats constrain nothing."""
    if name in PATTERNS or name in UNSUPPORTED:
        return None
    near = difflib.get_close_matches(name.lower().replace("_", "-"), [*PATTERNS, *UNSUPPORTED], n=1, cutoff=0.85)
    return near[0] if near else None
