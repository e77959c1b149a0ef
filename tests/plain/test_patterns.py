"""Regular expressions and formats: the translation for the engine matches exactly the strings of ECMA-262."""

import base64
import datetime
import ipaddress
import itertools
import json
import random
import re
import unicodedata
import urllib.parse
import uuid
from contextlib import closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.engines.text.formats import PATTERNS
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.grammars.library import GrammarLibrary
from tandemrt.runtime.grammars.regex import patterns
from tandemrt.runtime.grammars.regex.finite import few_texts
from tandemrt.runtime.grammars.regex.letter_case import cased_letters
from tandemrt.runtime.grammars.regex.parser import MAX_CASED_LETTERS
from tandemrt.runtime.grammars.regex.syntax import Characters, UnsupportedPattern
from tandemrt.runtime.grammars.sources import read
from tests.plain.constraints import STOP, VOCABULARY, byte_tokens, compiled, compiled_by
from tests.plain.drawing import accepts, grammar_of, write
from tests.waiting import PATIENCE_S

# Patterns and formats.


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"(a)\1", r"the escape \\1"),
        (r"\p{Script=Greek}", r"the escape \\p"),
        (r"\ud800", "a lone surrogate"),
        ("(?!a)*b", "a repetition of a lookahead or lookbehind"),
        ("(?<=a(?!b))", "a lookahead, .* inside a lookbehind"),
        ("a(?!b", "a missing closing parenthesis"),
        ("a.{300}b(?=c)", "a complement, lookahead or lookbehind of many cases"),
        (
            "(?:(?=.*a)|(?=.*b)|(?=.*c)|(?=.*d)|(?=.*e)|(?=.*f)){6}x",
            "a complement, lookahead or lookbehind of many cases",
        ),
        (r"\p{L}(?=a)", "a Unicode class together with"),
        ("(?x:a)", r"the group \(\?x"),
        ("(?si-i:a)", r"the flag i switched on and off"),
        (r"(?i)\p{Lu}", r"the escape \\p where case is ignored"),
        ("a{1,3}+", r"the repetition \{1,3\}\+"),
        ("a++", r"the repetition \+\+"),
        ("*a", r"the repetition \* without an expression before it"),
        ("a^b", "a pattern that no text matches"),
        (r"a\b\w", "a pattern that no text matches"),
        ("(a", "a missing closing parenthesis"),
        ("[a", "a missing closing bracket"),
        ("a\\", "a backslash at the end"),
        ("a)", "an unmatched closing parenthesis"),
        ("[]", "an empty character class"),
        (r"\ud8zz\udczz", r"the escape \\u"),
        (r"\ud83d", r"the escape \\ud83d, a lone surrogate"),
        ("(" * 65 + "a" + ")" * 65, "more than 64 nested groups"),
    ],
)
def test_unsupported_syntax_of_a_pattern_is_named(pattern, reason):
    with pytest.raises(UnsupportedPattern, match=reason):
        patterns.search_expression(pattern)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("(?i)^ab[^c]é$", ["ABxÉ", "aBdé"], ["abCé", "abcé"]),
        ("^(?i:a)b(c(?i)d)d$", ["AbcDd", "abcdd"], ["aBcdd", "abcdD"]),
        ("(?i)^[a-ck]$", ["B", "k"], ["d", "\u212a"]),
        ("(?i)^[^k]$", ["j"], ["K", "\u212a"]),
        ("^.(?s:.).$", ["a\nb"], ["\nab", "ab\n"]),
        ("(?is)^(?-i:a).b$", ["a\nB"], ["A\nB"]),
        (r"^\cJ[\cA-\cC]\cj$", ["\n\x01\n"], ["J\x01\n"]),
        (r"^\p{Uppercase_Letter}\p{gc=Nd}\P{L}$", ["É٣!"], ["é3!", "E3a"]),
        (r"^(?:a{,3})$", ["a{,3}"], ["aa", ""]),
        (r"^\u{1F600}$", ["😀"], ["u{1F600}"]),
        (r"^[^\d]+$", ["٣"], ["3"]),
        ("^a$", ["a"], ["a\n"]),
    ],
)
def test_a_grammar_and_the_check_of_a_finished_text_match_the_same_strings(pattern, good, bad):
    schema = {"type": "object", "patternProperties": {pattern: {"pattern": pattern}}, "additionalProperties": False}
    grammar = grammar_of(schema["patternProperties"][pattern] | {"type": "string"})
    names = grammar_of(schema)
    _, check = read(StructuredOutputs(json=schema, validate_output=True))
    for text in (*good, *bad):
        assert accepts(grammar, json.dumps(text, ensure_ascii=False)) == (text in good)
        named = json.dumps({text: text}, ensure_ascii=False)
        assert accepts(names, named) == (text in good) == (check(named) is None)


@pytest.mark.parametrize("pattern", [r"\p{Greek}", r"(?<n>a)\k<n>", r"[\w-.]"])
def test_a_pattern_of_ecma_262_is_a_schema_also_where_it_is_not_supported(pattern):
    with pytest.raises(BadRequest, match=r"#/pattern: .* is not supported"):
        grammar_of({"type": "string", "pattern": pattern})


@pytest.mark.parametrize(
    "pattern",
    [
        "^a|^b$",
        "",
        "^[ -~]+$",
        r'^[^"\\]{1,8}$',
        r"^\d+\.\d{2}$",
        r"^[\d\-x]\/$",
        "^(?:a|b)*?c$",
        "^[à-é]$",
        r"[\]a^-]",
        r"^\S+$",
        r"^[^\s\d]+$",
        r"^(a|ab|c)$",
        r"(^a|^b)c$",
        r'^"\\n\n$',
        r"^\ud83d\ude00$",
        r"[^\W]",
    ],
)
def test_a_pattern_writes_only_strings_that_match(pattern):
    grammar, chance = grammar_of({"type": "string", "pattern": pattern}), random.Random(0)
    texts = [text for _ in range(40) if (text := write(grammar, chance)) is not None]
    assert len(texts) > 20
    readable = pattern.replace(r"\ud83d\ude00", "😀")
    for text in texts:
        assert re.search(readable, json.loads(text), re.ASCII)


atoms = st.sampled_from(["a", "b", "[ab]", r"\d", '"', "a+", "b*", '"?', "[^b]", '[^"]', r"[^\\]", r"\\", ".", r"\W"])
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["?", "?", "*", "+", "{1,2}", "{2}", "{0,2}?", "{1,}"])).map(
            lambda p: f"(?:{p[0]}){p[1]}"
        ),
    ),
    max_leaves=6,
)


def strings_of(matcher):
    """Return every string of up to three letters that the grammar of a JSON string accepts."""
    accepted, encodings = (
        set(),
        {"a": b"a", "b": b"b", "0": b"0", '"': b'\\"', "\\": b"\\\\", "\n": b"\\n", "é": "é".encode()},
    )

    def explore(text):
        if matcher.accept(34):
            if matcher.accept(STOP):
                accepted.add(text)
                matcher.rollback(1)
            matcher.rollback(1)
        for letter, encoding in encodings.items() if len(text) < 3 else ():
            count = 0
            while count < len(encoding) and matcher.accept(encoding[count]):
                count += 1
            if count == len(encoding):
                explore(text + letter)
            matcher.rollback(count)

    assert matcher.accept(34)
    explore("")
    return accepted, [
        "".join(letters) for length in range(4) for letters in itertools.product(encodings, repeat=length)
    ]


@settings(max_examples=90, deadline=None, suppress_health_check=list(HealthCheck))
@given(pattern=expressions, begin=st.sampled_from(["", "^"]), end=st.sampled_from(["", "$"]))
def test_a_pattern_matches_the_same_strings_as_python(pattern, begin, end):
    pattern = begin + (f"(?:{pattern})" if begin or end else pattern) + end
    accepted, strings = strings_of(grammar_of({"type": "string", "pattern": pattern}).matcher())
    assert accepted == {text for text in strings if re.search(pattern.replace("$", r"\Z"), text, re.ASCII)}


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(?!b)(?!.*aa)[ab]*$",
        r"^(?=.*b)(?=..)[ab]*a$",
        r"^(?=[(]|a)(?!a\)|b)(?:.|b)+$",
        r"^(?!.*(ab|ba)$)(?<$>[ab]+)$",
        r"^a(?:(?!ba)[ab])*$",
        r"^(?!b)[ab]*(?<!bb)(?<=[ab])$",
    ],
)
def test_lookaheads_at_the_ends_and_named_groups_match_the_same_strings_as_python(pattern):
    accepted, strings = strings_of(grammar_of({"type": "string", "pattern": pattern}).matcher())
    assert accepted == {
        text for text in strings if re.search(pattern.replace("?<$", "?P<word").replace("$", r"\Z"), text)
    }


conditions = st.one_of(
    st.builds("({}{}{})".format, st.sampled_from(["?=", "?!"]), expressions, st.sampled_from(["", "$"])),
    st.builds(
        "({}{})".format, st.sampled_from(["?<=", "?<!"]), st.sampled_from(["a", "ab", "[^b]", r"\d\W", "^", r"\b"])
    ),
    st.sampled_from(["^", "$", r"\b", r"\B"]),
)
conditional = st.recursive(
    st.one_of(atoms, conditions),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.builds("({}|{})".format, inner, inner),
        st.builds("(?:{}){}".format, inner, st.sampled_from(["*", "+", "{2}", "{0,2}"])),
        st.builds("({}{})".format, st.sampled_from(["?=", "?!"]), inner),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(pattern=conditional, begin=st.sampled_from(["", "^"]), end=st.sampled_from(["", "$"]))
def test_conditions_anywhere_in_a_pattern_match_the_same_strings_as_python(pattern, begin, end):
    pattern = f"{begin}(?:{pattern}){end}"
    strings = ["".join(letters) for length in range(4) for letters in itertools.product('ab0"\\\n', repeat=length)]
    # Before Python 3.14 ``\B`` does not match an empty text.
    python = re.compile(pattern.replace("$", r"\Z").replace(r"\B", r"(?!\b)"), re.ASCII)
    fitting = list(filter(python.search, strings))
    try:
        written = patterns.search_expression(pattern)
    except UnsupportedPattern as error:
        reason = str(error)
    else:
        reason = ""
        assert [text for text in strings if patterns.matches(written, text)] == fitting
    assert not reason or any(limit in reason for limit in ("no text matches", "many cases", "inside a lookbehind"))
    assert "no text" not in reason or not fitting


@pytest.mark.parametrize("words", [["a"], ["a", "ab", "b"], [""], ["", "a"], ['"', "a\\"], ["é", "e\n"]])
def test_negated_words_accept_every_other_text(words):
    strings = ["".join(letters) for length in range(4) for letters in itertools.product('abe"\\\né', repeat=length)]
    written = patterns.other_than(words)
    assert {text for text in strings if not patterns.matches(written, text)} == {w for w in words if w in strings}
    grammar = grammar_of({"type": "string", "not": {"enum": words}})
    for text in strings[:60] + words:
        assert accepts(grammar, json.dumps(text, ensure_ascii=False)) == (text not in words)


@pytest.mark.parametrize(("text", "most"), [("a", 63), ("ab", 32)])
def test_so_many_names_may_begin_with_each_other_and_no_more(text, most):
    written = patterns.other_than([text * count for count in range(1, most + 1)])
    assert [patterns.matches(written, text * count) for count in (most, most + 1)] == [False, True]
    with pytest.raises(UnsupportedPattern, match="names that begin with each other"):
        patterns.other_than([text * count for count in range(1, most + 2)])


@pytest.mark.parametrize("pattern", ["[a-c]+", r"\d{2}:\d{2}", '"[^"]*"', r"a\n\tb", "yes|no", ".{1,3}"])
def test_a_regex_source_writes_only_full_matches(pattern):
    chance = random.Random(0)
    for _ in range(30):
        text = write(compiled("regex", patterns.fullmatch_expression(pattern)), chance)
        assert text is None or re.fullmatch(pattern, text.decode())


def uri(text):
    parts = urllib.parse.urlsplit(text)
    assert (re.fullmatch(r"[!-~]*", text) and parts.port is None) or parts.port >= 0
    return parts


def uri_of_a_scheme(text):
    assert uri(text).scheme
    return text


def duration(text):
    pattern = r"P(?=.)(\d+Y)?(\d+M)?(\d+W)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?"
    return re.fullmatch(pattern, text).group()


def pointer(text):
    return re.fullmatch(r"(/([^/~]|~0|~1)*)*", text, re.DOTALL).group()


def hostname(text):
    assert len(text) <= 253
    return [re.fullmatch(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)", label).group() for label in text.split(".")]


ORACLES = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "ipv4": ipaddress.IPv4Address,
    "uuid": uuid.UUID,
    **{f"uuid{n}": lambda text, n=n: uuid.UUID(text).version == n or None for n in range(1, 9)},
    "duration": duration,
    "hostname": hostname,
    "idn-hostname": hostname,
    "ipv6": ipaddress.IPv6Address,
    "uri": uri_of_a_scheme,
    "url": uri_of_a_scheme,
    "iri": uri_of_a_scheme,
    "uri-reference": uri,
    "iri-reference": uri,
    "json-pointer": pointer,
    "relative-json-pointer": lambda text: re.fullmatch(r"(0|[1-9]\d*)(#|(?s:/.*)?)", text).group(),
    "base64": lambda text: base64.b64decode(text, validate=True),
    "base64url": lambda text: base64.urlsafe_b64decode(text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4)),
    "regex": lambda text: (patterns.search_expression(text), re.compile(text)),
    "idn-email": lambda text: ORACLES["email"](text),
    "email": lambda text: re.fullmatch(r"[^@\s.]+(\.[^@\s.]+)*@[^@\s.]+(\.[^@\s.]+)+", text).group(),
}


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_every_text_of_a_format_is_valid_for_a_standard_parser(name):
    grammar, chance = grammar_of({"type": "string", "format": name}), random.Random(1)
    for _ in range(60):
        text = write(grammar, chance)
        assert text is None or ORACLES[name](json.loads(text)) is not None


def taken_endings(matcher, endings):
    """Return the strings that the grammar accepts as the rest of a JSON string."""
    taken = set()
    for ending in endings:
        count = 0
        for token in [*byte_tokens(ending), 34, STOP]:
            if not matcher.accept(token):
                break
            count += 1
        else:
            taken.add(ending)
        matcher.rollback(count)
    return taken


def format_grammar(name, begun):
    matcher = grammar_of({"type": "string", "format": name}).matcher()
    assert all(map(matcher.accept, byte_tokens('"' + begun)))
    return matcher


@pytest.mark.parametrize("year", [1000, 1896, 1900, 1999, 2000, 2001, 2004, 2100, 2400, 2999])
def test_date_format_accepts_exactly_calendar_dates(year):
    days = {f"-{month:02}-{day:02}" for month in range(14) for day in range(33)}
    first = datetime.date(year, 1, 1)
    known = {(first + datetime.timedelta(day)).isoformat() for day in range(366)}
    assert taken_endings(format_grammar("date", str(year)), days) == {day for day in days if f"{year}{day}" in known}


def test_time_format_accepts_exactly_times_of_a_day():
    pairs = [f"{pair:02}" for pair in range(100)]
    assert taken_endings(format_grammar("time", ""), [f"{hour}:30:00Z" for hour in pairs]) == {
        f"{hour}:30:00Z" for hour in pairs[:24]
    }
    assert taken_endings(format_grammar("time", "23:"), [f"{part}:00Z" for part in pairs]) == {
        f"{part}:00Z" for part in pairs[:60]
    }
    endings = ["", "Z", ".5Z", "5Z", ".Z", ".1234567Z", "+23:59", "+24:00", "-00:60", "+1:00", "z"]
    assert taken_endings(format_grammar("time", "23:59:59"), endings) == {"Z", ".5Z", "+23:59"}


@pytest.mark.parametrize("begun", ["", "1.", "1.255.", "0.0.10."])
def test_ipv4_parts_are_bytes_without_leading_zeros(begun):
    rest = ".1" * (3 - begun.count("."))
    parts = [str(part) + rest for part in range(1000)] + [f"0{part}{rest}" for part in range(100)]
    assert taken_endings(format_grammar("ipv4", begun), parts) == {f"{part}{rest}" for part in range(256)}


@pytest.mark.parametrize(
    "pattern",
    ["", "[ab]", "a|b{2,3}|aa", "(?:a?b?){1,2}", "(a|(b|))(?:){2}", "a{0,5}", "a{5}b?", r"é\.?", "[^b]", "a*"],
)
def test_the_texts_of_an_expression_are_listed_if_they_are_few(pattern):
    texts = {"".join(letters) for length in range(7) for letters in itertools.product("ab.é", repeat=length)}
    matched = {text for text in texts if re.fullmatch(pattern, text)}
    endless = pattern in ("[^b]", "a*")
    for most in (0, len(matched) - 1, len(matched), 99):
        listed = few_texts(patterns.search_expression(f"^(?:{pattern})$"), most)
        assert listed == (matched if most >= len(matched) and not endless else None)


# As zod 4 writes z.email() in a JSON schema.
ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"


@pytest.mark.parametrize("whole", [ZOD_EMAIL, r"^[a-z]+@([a-z]+\.)+[a-z]{2,}$"])
@pytest.mark.parametrize("limits", [{"maxLength": 254}, {"minLength": 12, "maxLength": 3000}])
def test_a_pattern_with_a_long_limit_matches_the_same_strings_as_python(whole, limits):
    letters = {"type": "string", "pattern": whole} | limits
    tag = {"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": letters}, "end": ">"}
    tags = StructuredOutputs(structural_tag={"type": "structural_tag", "format": tag})
    with closing(GrammarLibrary(VOCABULARY, [STOP])) as library:
        grammars = [compiled_by(library, each).result(PATIENCE_S) for each in (StructuredOutputs(json=letters), tags)]
    for text in (
        "a@b.cd",
        "a.b@c.de",
        "a..b@c.de",
        ".a@c.de",
        "a'b@c.d.ef",
        "a@b.c",
        "aaaaaa@bbb.cd",
        "a" * 250 + "@b.c",
    ):
        for longer in (text, text + "d" * 8, text[0] * 2980 + text):
            valid = limits.get("minLength", 0) <= len(longer) <= limits["maxLength"] and re.search(whole, longer)
            assert accepts(grammars[0], f'"{longer}"') == bool(valid)
            assert accepts(grammars[1], f'<"{longer}">') == bool(valid)


def test_letters_of_either_case_are_bounded_over_all_sets_of_a_pattern():
    letters = cased_letters(Characters(((0x100, 0x500),)))
    most = MAX_CASED_LETTERS // letters
    assert patterns.fullmatch_expression("(?i)" + "[\u0100-\u0500]" * most)
    with pytest.raises(UnsupportedPattern, match=r"\(\?i\) with more than 100000 letters in sets"):
        patterns.fullmatch_expression("(?i)" + "[\u0100-\u0500]" * (most + 1))
    assert patterns.fullmatch_expression("[\u0100-\u0500]" * (most + 1)), "none of them is case-insensitive"


@pytest.mark.parametrize("shape", ["{}", "(?:{})b", "^(?:{})$"])
def test_a_pattern_has_few_branches_with_anchors(shape: str) -> None:
    most, more = (
        shape.format("|".join(f"^{number}" for number in range(count)))
        for count in (patterns.MAX_BRANCHES, patterns.MAX_BRANCHES + 1)
    )
    assert patterns.search_expression(most)
    with pytest.raises(UnsupportedPattern, match="anchors in more than a few groups"):
        patterns.search_expression(more)


def accepts_format(name: str, text: str) -> bool:
    matcher = format_grammar(name, text)
    return matcher.accept(34) and matcher.accept(STOP)


@pytest.mark.parametrize("groups", range(8))
def test_zeros_of_an_ipv6_address_may_be_left_out_at_any_place(groups: int) -> None:
    """An address of eight groups, or six and an IPv4 address, of which those after ``groups`` are left out."""
    for after in range(8 - groups):
        assert accepts_format("ipv6", ":".join(["a1"] * groups) + "::" + ":".join(["2"] * after))
    for after in range(6 - groups):
        assert accepts_format("ipv6", ":".join(["a1"] * groups) + "::" + ":".join([*["2"] * after, "1.2.3.4"]))


@pytest.mark.parametrize("pattern", ["a{2}", "a{2,}", "[ab]{12,}?", "(?:a|b)*", r"^\\d+$", "(a(b)+)"])
def test_common_patterns_are_texts_of_the_format_regex(pattern: str) -> None:
    assert accepts_format("regex", pattern)


def test_white_space_is_that_of_ecma_262():
    """Of all characters: the category Zs, tab, vertical tab, form feed, the byte order mark and line ends."""
    others = {"\t", "\v", "\f", "\ufeff", "\n", "\r", "\u2028", "\u2029"}
    white = {chr(code) for code in range(0x10000) if unicodedata.category(chr(code)) == "Zs"} | others
    near = {chr(ord(each) + step) for each in white for step in (-1, 1) if ord(each) + step >= 0} | {"\x85", "\u200b"}
    for pattern, expected in ((r"^\s$", white), (r"^\S$", near - white)):
        written = patterns.search_expression(pattern)
        assert {each for each in white | near if patterns.matches(written, each)} == expected


@pytest.mark.parametrize("negated", [False, True])
@pytest.mark.parametrize("name", ["L", "N", "Lu"])
def test_a_class_with_a_unicode_property_has_these_characters_or_all_others(name: str, negated: bool) -> None:
    grammar = grammar_of({"type": "string", "pattern": rf"^[{'^' if negated else ''}\p{{{name}}}_]$"})
    for character in "aAzÉé5٣_-¿ 中":
        inside = character == "_" or unicodedata.category(character).startswith(name)
        assert accepts(grammar, f'"{character}"') == (inside != negated), character
