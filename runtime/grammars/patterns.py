"""Regular expressions of ECMA-262, read here and written for the engine as what they match: a whole text.

The engines' own dialects differ in shorthands, in what ``.`` leaves out, in anchors and escapes; what is written for
them has sets of characters, groups, choices and repetitions, and nothing else.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

DEEPEST_GROUP = 64
MOST_BRANCHES = 256  # that anchors within groups may come to

Range = tuple[int, int]
LAST = 0x10FFFF
_DIGITS = [(48, 57)]
_WORD = [(48, 57), (65, 90), (95, 95), (97, 122)]
_SPACE = [(9, 13), (32, 32), (160, 160), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]
_SPACE += [(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
_LINE_ENDS = [(10, 10), (13, 13), (0x2028, 0x2029)]
_SHORTHANDS = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_PROPERTY = re.compile(r"\{(L|Lu|Ll|Lt|Lm|Lo|M|Mn|Mc|Me|N|Nd|Nl|No|P|Pc|Pd|Ps|Pe|Pi|Pf|Po|S|Sm|Sc|Sk|So|Z|Zs|Zl|Zp)\}")
_BOUNDS = re.compile(r"\{(\d{1,9})(,(\d{1,9})?)?\}")
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u\{([0-9a-fA-F]{1,6})\}|u([dD][89abAB]..)\\u([dD][c-fC-F]..)|u([0-9a-fA-F]{4})")
_GROUP = re.compile(r"\?(:|P?<[A-Za-z_]\w*>)")
_WRITTEN = re.compile(r"\\x\{([0-9A-F]+)\}")
ANYTHING = "(?s:.)*"


class Unreadable(Exception):
    """What in an expression is not held."""


@dataclass(frozen=True)
class Characters:
    ranges: tuple[Range, ...]
    properties: tuple[str, ...] = ()  # of Unicode, as the engine spells them
    negated: bool = False

    def written(self) -> str:
        if self.properties:
            inside = "".join(map(_range, _without_surrogates(self.ranges))) + "".join(self.properties)
            return f"[[{'^' if self.negated else ''}{inside}]--\\x00]"
        ranges = _without_surrogates(_inverted(self.ranges) if self.negated else self.ranges)
        if not (_within(ranges, '"') and _within(ranges, "\\")):
            # Within JSON strings llguidance 1.9.1 adds an escaped quote and backslash to a set of all control
            # characters, be they in the set or not. A set without U+0000 is never taken for one.
            ranges = [pair for low, high in ranges for pair in ((max(low, 1), high),) if pair[0] <= high]
        if not ranges:
            raise Unreadable("a class of no character")
        if ranges == [(0, LAST)]:
            return "(?s:.)"
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
            return _character(ranges[0][0])
        return f"[{''.join(map(_range, ranges))}]"

    def covered(self) -> list[Range]:
        """The characters of the set, in order. Raises Unreadable for classes of Unicode."""
        if self.properties:
            raise Unreadable("a class of Unicode beside its opposite")
        return _inverted(self.ranges) if self.negated else _merged(list(self.ranges))


@dataclass(frozen=True)
class Anchor:
    sign: str


@dataclass(frozen=True)
class Group:
    branches: tuple[tuple["Item", ...], ...]

    def anchored(self) -> bool:
        return any(
            isinstance(item.atom, Anchor) or (isinstance(item.atom, Group) and item.atom.anchored())
            for branch in self.branches
            for item in branch
        )

    def written(self) -> str:
        return f"(?:{'|'.join(map(_sequence, self.branches))})"


@dataclass(frozen=True)
class Item:
    atom: Characters | Anchor | Group
    repeats: str = ""

    def bounds(self) -> tuple[int, int | None]:
        """How often the atom stands there, at least and at most (None: without an end)."""
        if found := _BOUNDS.match(self.repeats):
            return int(found[1]), (int(found[1]) if found[2] is None else int(found[3]) if found[3] else None)
        return {"": (1, 1), "?": (0, 1), "*": (0, None), "+": (1, None)}[self.repeats]


def whole(pattern: str) -> str:
    """Write what a whole text matches in which ``pattern`` is found, as a JSON schema means it. Raises Unreadable."""
    branches = []
    for left, right, items in settled(pattern):
        branches.append(("" if left else ANYTHING) + _sequence(items) + ("" if right else ANYTHING))
    return _either(branches)


def full(pattern: str) -> str:
    """Write what a whole text matches that ``pattern`` matches from its beginning to its end. Raises Unreadable."""
    return _either([_sequence(items) for _, _, items in settled(pattern)])


def other_than(words: list[str]) -> str:
    """Write what every text but ``words`` matches. Raises Unreadable where they are too long."""
    if max(map(len, words), default=0) > DEEPEST_GROUP:
        raise Unreadable(f"a name of more than {DEEPEST_GROUP} characters beside others")
    return _other_than(sorted(set(words)), 0)


def literal(text: str) -> str:
    return "".join(_character(ord(character)) for character in text)


def matches(written: str, text: str) -> bool:
    """Whether a whole text fits an expression as it is written here. Raises Unreadable."""
    if "--\\x00]" in written:
        raise Unreadable("a class of Unicode beside names")
    return re.fullmatch(_WRITTEN.sub(lambda code: f"\\U{int(code[1], 16):08x}", written), text) is not None


def _other_than(words: list[str], at: int) -> str:
    """What follows the first ``at`` characters, which all ``words`` share, in any text but them."""
    ways = [] if len(words[0]) == at else [""]
    begun: dict[str, list[str]] = {}
    for word in words:
        if len(word) > at:
            begun.setdefault(word[at], []).append(word)
    if not begun:
        return f"(?s:.){ANYTHING}"
    others = Characters(tuple((ord(letter), ord(letter)) for letter in sorted(begun)), negated=True).written()
    ways += [
        others + ANYTHING,
        *(_character(ord(letter)) + _other_than(same, at + 1) for letter, same in begun.items()),
    ]
    return f"(?:{'|'.join(ways)})"


def settled(pattern: str) -> Iterator[tuple[bool, bool, tuple[Item, ...]]]:
    """The branches of a pattern without anchors, and whether each is held at its beginning and at its end.

    Raises Unreadable.
    """
    count = 0
    for branch in _Reader(pattern).read().branches:
        for alone in _unanchored(branch, False, False):
            count += 1
            if count > MOST_BRANCHES:
                raise Unreadable("anchors in more than a few groups")
            yield alone


def _unanchored(items: tuple[Item, ...], left: bool, right: bool) -> Iterator[tuple[bool, bool, tuple[Item, ...]]]:
    while items and items[0].atom == Anchor("^"):
        items, left = items[1:], True
    while items and items[-1].atom == Anchor("$"):
        items, right = items[:-1], True
    for index in {0, len(items) - 1} if items else ():
        group = items[index].atom
        if isinstance(group, Group) and not items[index].repeats and group.anchored():
            for branch in group.branches:
                yield from _unanchored((*items[:index], *branch, *items[index + 1 :]), left, right)
            return
    if Group((items,)).anchored():
        raise Unreadable("an anchor inside the pattern")
    yield left, right, items


def _either(branches: list[str]) -> str:
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _sequence(items: tuple[Item, ...]) -> str:
    return "".join(f"{item.atom.written()}{item.repeats}" for item in items if not isinstance(item.atom, Anchor))


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0

    def read(self) -> Group:
        group = self._branches()
        if self._at < len(self._text):
            raise Unreadable("a parenthesis that nothing opened")
        return group

    def _branches(self) -> Group:
        branches: list[tuple[Item, ...]] = []
        items: list[Item] = []
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._takes("|"):
                branches.append(tuple(items))
                items = []
            else:
                items.append(self._item())
        return Group((*branches, tuple(items)))

    def _item(self) -> Item:
        character = self._next()
        atom: Characters | Anchor | Group
        if character in "^$":
            atom = Anchor(character)
        elif character == "(":
            atom = self._group()
        elif character == "[":
            atom = self._class()
        elif character == ".":
            atom = Characters(tuple(_LINE_ENDS), negated=True)
        elif character == "\\":
            atom = self._escape()
        elif character in "*+?" or (character == "{" and _BOUNDS.match(self._text, self._at - 1)):
            raise Unreadable(f"the repetition {character} of nothing")
        else:
            atom = _only(ord(character))
        repeats = self._repeats()
        if repeats and isinstance(atom, Anchor):
            raise Unreadable(f"a repetition of the anchor {character}")
        return Item(atom, repeats)

    def _repeats(self) -> str:
        found = _BOUNDS.match(self._text, self._at)
        if found:
            repeats = found[0]
            self._at = found.end()
            if found[3] and int(found[3]) < int(found[1]):
                raise Unreadable(f"the repetition {repeats}")
        elif self._text[self._at : self._at + 1] in ("*", "+", "?"):
            repeats = self._next()
        else:
            return ""
        self._takes("?")  # lazy: which way is tried first changes nothing here
        following = self._text[self._at : self._at + 1]
        if following in ("*", "+", "?") or _BOUNDS.match(self._text, self._at):
            raise Unreadable(f"the repetition {repeats}{following}") if following else Unreadable("")
        return repeats

    def _group(self) -> Group:
        found = _GROUP.match(self._text, self._at)
        if found:
            self._at = found.end()
        elif self._text.startswith("?", self._at):
            raise Unreadable(f"the group ({self._text[self._at : self._at + 2]}")
        self._depth += 1
        if self._depth > DEEPEST_GROUP:
            raise Unreadable(f"a group within more than {DEEPEST_GROUP} others")
        group = self._branches()
        if not self._takes(")"):
            raise Unreadable("a missing closing parenthesis")
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
                    raise Unreadable("a range of more than characters in a class")
                ranges.append((first.ranges[0][0], last.ranges[0][1]))
                continue
            properties += first.properties
            ranges += _inverted(first.ranges) if first.negated else first.ranges
        return Characters(tuple(_merged(ranges)), properties, negated)

    def _member(self) -> Characters:
        character = self._next("a missing closing bracket")
        if character != "\\":
            return _only(ord(character))
        if self._takes("b"):
            return _only(8)
        return self._escape()

    def _escape(self) -> Characters:
        if found := _CODE.match(self._text, self._at):
            self._at = found.end()
            if found[3]:
                high, low = int(found[3], 16), int(found[4], 16)
                return _only(0x10000 + ((high & 0x3FF) << 10 | low & 0x3FF))
            code = int(found[1] or found[2] or found[5], 16)
            if 0xD800 <= code <= 0xDFFF or code > LAST:
                raise Unreadable(f"the escape \\{found[0]}, half a character")
            return _only(code)
        character = self._next("a backslash at the end")
        if character.lower() in _SHORTHANDS:
            ranges = _SHORTHANDS[character.lower()]
            return Characters(tuple(_inverted(ranges) if character.isupper() else ranges))
        if character in _CONTROLS and not (character == "0" and self._text[self._at : self._at + 1].isdigit()):
            return _only(_CONTROLS[character])
        if character in "pP" and (found := _PROPERTY.match(self._text, self._at)):
            self._at = found.end()
            return Characters((), (f"\\{character}{found[0]}",))
        if character.isascii() and (character.isalnum()):
            raise Unreadable(f"the escape \\{character}")
        return _only(ord(character))

    def _takes(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _next(self, missing: str = "") -> str:
        if self._at >= len(self._text):
            raise Unreadable(missing)
        self._at += 1
        return self._text[self._at - 1]


def _only(code: int) -> Characters:
    return Characters(((code, code),))


def _merged(ranges: list[Range]) -> list[Range]:
    merged: list[Range] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def _inverted(ranges: tuple[Range, ...] | list[Range]) -> list[Range]:
    inverted, start = [], 0
    for low, high in _merged(list(ranges)):
        if low > start:
            inverted.append((start, low - 1))
        start = high + 1
    return [*inverted, (start, LAST)] if start <= LAST else inverted


def _without_surrogates(ranges: tuple[Range, ...] | list[Range]) -> list[Range]:
    kept = []
    for low, high in _merged(list(ranges)):
        low, high = (0xE000 if 0xD800 <= low < 0xE000 else low), (0xD7FF if 0xD800 <= high < 0xE000 else high)
        if low <= high:
            kept.append((low, high))
    return kept


def _within(ranges: list[Range], character: str) -> bool:
    return any(low <= ord(character) <= high for low, high in ranges)


def _range(pair: Range) -> str:
    low, high = pair
    return _character(low) if low == high else f"{_character(low)}-{_character(high)}"


def _character(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:X}}}"
