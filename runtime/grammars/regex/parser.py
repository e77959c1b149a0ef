"""A parser of ECMA-262 regular expressions, and of the flags ``(?i)`` and ``(?s)`` that other languages write."""

import re
from functools import cache

from tandemrt.runtime.grammars.regex.letter_case import cased_letters, without_case
from tandemrt.runtime.grammars.regex.syntax import (
    BOUNDS,
    LAST,
    Anchor,
    Characters,
    Group,
    Item,
    Look,
    MalformedPattern,
    Range,
    UnsupportedPattern,
    inverted,
    merged,
)

MAX_GROUP_DEPTH = 64
MAX_CASED_LETTERS = 100_000  # in all sets of a pattern that ignores case; they take about 0.1 s
_DIGITS = [(48, 57)]
_WORD = [(48, 57), (65, 90), (95, 95), (97, 122)]
_SPACE = [(9, 13), (32, 32), (160, 160), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]
_SPACE += [(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
_LINE_ENDS = [(10, 10), (13, 13), (0x2028, 0x2029)]
_SHORTHANDS = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_CATEGORIES = {
    "L": "Letter", "Lu": "Uppercase_Letter", "Ll": "Lowercase_Letter", "Lt": "Titlecase_Letter",
    "Lm": "Modifier_Letter", "Lo": "Other_Letter", "M": "Mark", "Mn": "Nonspacing_Mark", "Mc": "Spacing_Mark",
    "Me": "Enclosing_Mark", "N": "Number", "Nd": "Decimal_Number", "Nl": "Letter_Number", "No": "Other_Number",
    "P": "Punctuation", "Pc": "Connector_Punctuation", "Pd": "Dash_Punctuation", "Ps": "Open_Punctuation",
    "Pe": "Close_Punctuation", "Pi": "Initial_Punctuation", "Pf": "Final_Punctuation", "Po": "Other_Punctuation",
    "S": "Symbol", "Sm": "Math_Symbol", "Sc": "Currency_Symbol", "Sk": "Modifier_Symbol", "So": "Other_Symbol",
    "Z": "Separator", "Zs": "Space_Separator", "Zl": "Line_Separator", "Zp": "Paragraph_Separator",
}  # fmt: skip
_SHORT = {name: short for short, long in _CATEGORIES.items() for name in (short, long)}
_PROPERTY = re.compile(r"\{(?:(?:General_Category|gc)=)?(\w+)\}")
_CONTROL = re.compile("[A-Za-z]")
_TOO_MANY = re.compile(r"\{(\d{10,}(,\d*)?|\d+,\d{10,})\}")
_FLAGS = re.compile(r"\?([is]+)\)")  # for the rest of the group
_FLAGS_OF_GROUP = re.compile(r"\?([is]*)(?:-([is]+))?:")
_CODE = re.compile(
    r"x([0-9a-fA-F]{2})|u\{([0-9a-fA-F]{1,6})\}|u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"
    r"|u([0-9a-fA-F]{4})"
)
_GROUP = re.compile(r"\?P?<(?!\d)[\w$]+>")
_LOOK = re.compile(r"\?(<?)([=!])")


def read(pattern: str) -> Group:
    """Parse a pattern. Raises UnsupportedPattern for a construct that is not supported."""
    return _Reader(pattern).read()


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0
        self._cased_letters = 0
        self._ignore_case = self._dot_all = False

    def read(self) -> Group:
        group = self._branches()
        if self._at < len(self._text):
            raise MalformedPattern("an unmatched closing parenthesis")
        return group

    def _branches(self) -> Group:
        branches: list[tuple[Item, ...]] = []
        items: list[Item] = []
        while self._at < len(self._text) and self._text[self._at] != ")":
            if match := _FLAGS.match(self._text, self._at + 1) if self._text[self._at] == "(" else None:
                self._at = match.end()
                self._set_flags(match[1], True)
            elif self._takes("|"):
                branches.append(tuple(items))
                items = []
            else:
                items.append(self._item())
        return Group((*branches, tuple(items)))

    def _item(self) -> Item:
        character = self._next()
        atom: Characters | Anchor | Look | Group
        if character in "^$":
            atom = Anchor(character)
        elif character == "(":
            atom = self._look() or self._group()
        elif character == "[":
            atom = self._cased(self._class())
        elif character == ".":
            atom = Characters(() if self._dot_all else tuple(_LINE_ENDS), negated=True)
        elif character == "\\":
            atom = self._word_boundary() or self._cased(self._escape())
        elif character in "*+?" or (character == "{" and BOUNDS.match(self._text, self._at - 1)):
            raise MalformedPattern(f"the repetition {character} without an expression before it")
        else:
            atom = self._cased(_only(ord(character)))
        repeats = self._repeats()
        if repeats and isinstance(atom, Anchor):
            raise UnsupportedPattern(f"a repetition of the anchor {character}")
        if repeats and isinstance(atom, Look):
            raise UnsupportedPattern("a repetition of a lookahead or lookbehind")
        return Item(atom, repeats)

    def _repeats(self) -> str:
        match = BOUNDS.match(self._text, self._at)
        if _TOO_MANY.match(self._text, self._at):
            raise UnsupportedPattern("a repetition with a number of more than 9 digits")
        if match:
            repeats = match[0]
            self._at = match.end()
            if match[3] and int(match[3]) < int(match[1]):
                raise MalformedPattern(f"the repetition {repeats}")
        elif self._text[self._at : self._at + 1] in ("*", "+", "?"):
            repeats = self._next()
        else:
            return ""
        self._takes("?")  # lazy; the set of matched texts is the same
        following = self._text[self._at : self._at + 1]
        if following in ("*", "+", "?") or BOUNDS.match(self._text, self._at):
            raise MalformedPattern(f"the repetition {repeats}{following}")
        return repeats

    def _look(self) -> Look | None:
        match = _LOOK.match(self._text, self._at)
        if match is None:
            return None
        self._at = match.end()
        return Look(self._inside(), ahead=match[1] == "", negated=match[2] == "!")

    def _word_boundary(self) -> Group | None:
        """Read what follows a backslash as ``\\b`` or ``\\B``: a letter of words on one side, or on both or none."""
        if self._takes("b"):
            return _boundary(False)
        return _boundary(True) if self._takes("B") else None

    def _set_flags(self, letters: str, value: bool) -> None:
        self._ignore_case = value if "i" in letters else self._ignore_case
        self._dot_all = value if "s" in letters else self._dot_all

    def _cased(self, characters: Characters) -> Characters:
        if not self._ignore_case:
            return characters
        self._cased_letters += cased_letters(characters)
        if self._cased_letters > MAX_CASED_LETTERS:
            raise UnsupportedPattern(f"(?i) with more than {MAX_CASED_LETTERS} letters in sets")
        return without_case(characters)

    def _group(self) -> Group:
        if match := _GROUP.match(self._text, self._at):
            self._at = match.end()
        elif match := _FLAGS_OF_GROUP.match(self._text, self._at):
            self._at = match.end()
            outside, off = (self._ignore_case, self._dot_all), match[2] or ""
            if both := sorted({*match[1]} & {*off}):
                raise MalformedPattern(f"the flag {both[0]} switched on and off")
            self._set_flags(match[1], True)
            self._set_flags(off, False)
            group = self._inside()
            self._ignore_case, self._dot_all = outside
            return group
        elif self._text.startswith("?", self._at):
            raise UnsupportedPattern(f"the group ({self._text[self._at : self._at + 2]}")
        return self._inside()

    def _inside(self) -> Group:
        """Read a group up to its closing parenthesis."""
        self._depth += 1
        if self._depth > MAX_GROUP_DEPTH:
            raise UnsupportedPattern(f"more than {MAX_GROUP_DEPTH} nested groups")
        outside = self._ignore_case, self._dot_all
        group = self._branches()
        self._ignore_case, self._dot_all = outside
        if not self._takes(")"):
            raise MalformedPattern("a missing closing parenthesis")
        self._depth -= 1
        return group

    def _class(self) -> Characters:
        negated = self._takes("^")
        ranges: list[Range] = []
        properties: tuple[str, ...] = ()
        while not self._takes("]"):
            first = self._member()
            single = len(first.ranges) == 1 and first.ranges[0][0] == first.ranges[0][1] and not first.properties
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._next()
                last = self._member()
                if not single or len(last.ranges) != 1 or last.ranges[0][0] < first.ranges[0][0]:
                    raise UnsupportedPattern("a range whose ends are not single characters")
                ranges.append((first.ranges[0][0], last.ranges[0][1]))
                continue
            properties += first.properties
            ranges += inverted(first.ranges) if first.negated else first.ranges
        return Characters(tuple(merged(ranges)), properties, negated)

    def _member(self) -> Characters:
        character = self._next("a missing closing bracket")
        if character != "\\":
            return _only(ord(character))
        if self._takes("b"):
            return _only(8)
        return self._escape()

    def _escape(self) -> Characters:
        if match := _CODE.match(self._text, self._at):
            self._at = match.end()
            if match[3]:
                high, low = int(match[3], 16), int(match[4], 16)
                return _only(0x10000 + ((high & 0x3FF) << 10 | low & 0x3FF))
            code = int(match[1] or match[2] or match[5], 16)
            if 0xD800 <= code <= 0xDFFF or code > LAST:
                raise UnsupportedPattern(f"the escape \\{match[0]}, a lone surrogate")
            return _only(code)
        character = self._next("a backslash at the end")
        if character.lower() in _SHORTHANDS:
            ranges = _SHORTHANDS[character.lower()]
            return Characters(tuple(inverted(ranges) if character.isupper() else ranges))
        if character in _CONTROLS and not (character == "0" and self._text[self._at : self._at + 1].isdigit()):
            return _only(_CONTROLS[character])
        if character in "pP" and (match := _PROPERTY.match(self._text, self._at)) and match[1] in _SHORT:
            if self._ignore_case:
                raise UnsupportedPattern(f"the escape \\{character} where case is ignored")
            self._at = match.end()
            return Characters((), (f"\\{character}{{{_SHORT[match[1]]}}}",))
        if character == "c" and (match := _CONTROL.match(self._text, self._at)):
            self._at = match.end()
            return _only(ord(match[0]) % 32)
        if character.isascii() and (character.isalnum()):
            raise UnsupportedPattern(f"the escape \\{character}")
        return _only(ord(character))

    def _takes(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _next(self, missing: str = "") -> str:
        if self._at >= len(self._text):
            raise MalformedPattern(missing)
        self._at += 1
        return self._text[self._at - 1]


def _only(code: int) -> Characters:
    return Characters(((code, code),))


@cache
def _boundary(inside: bool) -> Group:
    """``\\b``: a letter of words on one side; or with ``inside`` ``\\B``: on both sides or on none."""
    word = Group(((Item(Characters(tuple(_WORD))),),))
    before, no_before, after, no_after = (
        Item(Look(word, ahead, negated)) for ahead in (False, True) for negated in (False, True)
    )
    if inside:
        return Group(((before, after), (no_before, no_after)))
    return Group(((before, no_after), (no_before, after)))
