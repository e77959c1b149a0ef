"""Grammar matchers on llguidance and xgrammar behave alike, and the vocabulary that they are built from."""

import json
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tandemrt.engines.text.vocabulary import Vocabulary, vocabulary_from_tokenizer
from tandemrt.engines.validation.errors import BadBundle, BadRequest, InternalError
from tandemrt.runtime.grammars.compiler import GrammarCompiler
from tandemrt.runtime.grammars.grammar_cache import GrammarCache
from tandemrt.runtime.grammars.matcher_checks import MAX_FAST_FORWARD_BYTES
from tandemrt.runtime.grammars.schema.emit import enforceable
from tests.plain.constraints import (
    CALL,
    END,
    MERGED,
    OTHER_STOP,
    STOP,
    THINK,
    VALID,
    VOCABULARY,
    WORDS,
    byte_tokens,
    compiled,
    compiler,
    json_grammar,
    regex_grammar,
    tokens_in,
)

# One language in the form of each engine: llguidance reads a regular expression, xgrammar an EBNF.
AB = {"llguidance": ("regex", "ab+"), "xgrammar": ("grammar", 'root ::= "a" "b"+')}
MAYBE_B = {"llguidance": ("regex", "ab?"), "xgrammar": ("grammar", 'root ::= "a" "b"?')}
CHOICE = {"llguidance": ("regex", "a(b|c)"), "xgrammar": ("grammar", 'root ::= "a" ("b" | "c")')}
ANY = {"llguidance": ("regex", "[^x]+"), "xgrammar": ("grammar", "root ::= [^x]+")}
QUOTED = {
    "llguidance": ("json", '{"type": "string"}'),
    "xgrammar": ("grammar", 'root ::= "\\"" [^"\\\\\\x00-\\x1f]* "\\""'),
}
NESTED = {
    "llguidance": ("json", json.dumps({"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]})),
    "xgrammar": ("grammar", 'root ::= "null" | "[" (root (", " root)*)? "]"'),
}
engines = pytest.mark.parametrize("engine", ["llguidance", "xgrammar"])


def start(engine, language, stops=None):
    return compiled(*language[engine]).matcher(stops)


def row_of(grammar):
    row = np.full(WORDS, 0x55555555, np.int32)
    grammar.fill_row(row)
    return tokens_in(row)


def accept_text(grammar, text):
    for token in byte_tokens(text):
        assert grammar.accept(token)
    return grammar


@engines
def test_a_complete_text_may_stop_and_an_incomplete_one_may_not(engine):
    grammar = start(engine, AB)
    assert row_of(grammar) == {ord("a")}
    accept_text(grammar, "ab")
    assert row_of(grammar) == {ord("b"), STOP}


@engines
def test_a_longer_grammar_takes_more_of_the_caches_memory(engine):
    many = {"llguidance": ("regex", "ab+" * 200), "xgrammar": ("grammar", 'root ::= "a" "b"+' + ' "a" "b"+' * 200)}
    assert 0 < compiled(*AB[engine]).size_bytes < compiled(*many[engine]).size_bytes


@engines
def test_stop_tokens_of_a_request_replace_those_of_the_compiler(engine):
    grammar = start(engine, MAYBE_B, [OTHER_STOP, ord("b")])
    assert not grammar.accept(OTHER_STOP)
    accept_text(grammar, "a")
    assert row_of(grammar) == {ord("b"), OTHER_STOP}
    assert grammar.accept(ord("b"))
    assert grammar.is_terminated(), "a stop token ends the text, even one the grammar could read as text"


@engines
@pytest.mark.parametrize("stops", [[OTHER_STOP], [ord("x")], [STOP, OTHER_STOP], [STOP]], ids=str)
def test_a_row_allows_exactly_the_tokens_that_the_grammar_accepts_for_any_stop_ids(engine, stops):
    """Inside a string, xgrammar leaves the stop tokens of its compiler in the row and then rejects them."""
    grammar = start(engine, QUOTED, stops)
    for token in [None, *byte_tokens('"aé"')]:
        assert token is None or grammar.accept(token)
        row = row_of(grammar)
        for candidate in range(VALID):
            taken = grammar.accept(candidate)
            grammar.rollback(int(taken))
            assert taken == (candidate in row), candidate


@engines
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_row_equals_that_of_a_fresh_replay_after_any_calls(engine, seed):
    """Accepts, rejections, rollbacks, forks, lookahead and precomputed rows in any order leave no trace in a row."""
    chance = Random(seed)
    language = chance.choice([AB, CHOICE, QUOTED, NESTED, ANY])
    grammar, text = start(engine, language), []
    for _ in range(30):
        fresh = start(engine, language)
        assert all(map(fresh.accept, text))
        assert grammar.is_terminated() == fresh.is_terminated()
        if not grammar.is_terminated():
            assert row_of(grammar) == row_of(fresh)
        match chance.randrange(6):
            case 0:
                back = chance.randint(0, len(text))
                grammar.rollback(back)
                text = text[: len(text) - back]
            case 1:
                other = grammar.fork()
                for _ in range(3):
                    other.accept(chance.randrange(VALID))
            case 2:
                assert grammar.fast_forward_tokens() == fresh.fast_forward_tokens()
            case 3:
                token = chance.randrange(VALID)
                text += [token] if grammar.accept(token) else []
            case 4:
                grammar.precompute_rows([*write_tokens(fresh, chance, 3), chance.randrange(VALID), ord("a")])
            case 5 if not grammar.is_terminated():
                token = chance.choice(sorted(row_of(grammar)))
                assert grammar.accept(token)
                text.append(token)


def write_tokens(grammar, chance, most):
    """Advance ``grammar`` by up to ``most`` tokens that it accepts, and return them."""
    text = []
    while len(text) < most and not grammar.is_terminated():
        text.append(chance.choice(sorted(row_of(grammar))))
        assert grammar.accept(text[-1])
    return text


def test_the_rows_of_a_draft_window_are_computed_in_one_call(monkeypatch):
    grammar = start("llguidance", NESTED)
    window = byte_tokens("[[null,")
    grammar.precompute_rows([*window, ord("x"), ord("y")])
    monkeypatch.setattr(grammar, "_matcher", None)  # any call of it would fail
    for token in window:
        assert token in row_of(grammar)
        assert grammar.accept(token)
    assert not grammar.accept(ord("x"))
    grammar.rollback(len(window))
    assert ord("[") in row_of(grammar)


PAIRS = {"type": "array", "items": {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "maxItems": 2}}


@pytest.mark.parametrize("taken_back", ["rollback", "precompute_rows"])
def test_the_row_of_another_text_of_the_same_length_is_not_kept(taken_back):
    grammar, fresh = (compiled("json", json.dumps(PAIRS), whitespace="any").matcher() for _ in range(2))
    accept_text(grammar, "[[1")
    if taken_back == "rollback":
        accept_text(grammar, "] ")
        row_of(grammar)
        grammar.rollback(2)
    else:
        grammar.precompute_rows(byte_tokens("] "))
    row = row_of(accept_text(grammar, ", "))
    assert row == row_of(accept_text(fresh, "[[1, "))
    assert ord("2") in row


@engines
def test_a_terminated_grammar_accepts_no_token_and_can_be_rolled_back(engine):
    grammar = accept_text(start(engine, CHOICE), "ab")
    assert grammar.accept(STOP)
    assert grammar.is_terminated()
    assert not grammar.accept(ord("a"))
    assert grammar.fast_forward_tokens() == []
    with pytest.raises(InternalError, match="must not be filled after its end"):
        row_of(grammar)
    grammar.rollback(1)
    assert row_of(grammar) == {STOP}


@engines
def test_a_rejected_token_changes_nothing(engine):
    grammar = start(engine, AB)
    assert not grammar.accept(ord("b"))
    assert not grammar.accept(len(VOCABULARY.tokens))
    assert row_of(grammar) == {ord("a")}


@engines
def test_a_fork_does_not_change_its_original(engine):
    grammar = start(engine, CHOICE)
    fork = accept_text(grammar.fork(), "ab")
    assert row_of(fork) == {STOP}
    assert row_of(grammar) == {ord("a")}


@engines
def test_a_fork_of_a_terminated_grammar_is_terminated(engine):
    grammar = accept_text(start(engine, CHOICE), "ab")
    assert grammar.accept(STOP)
    fork = grammar.fork()
    assert fork.is_terminated()
    assert not fork.accept(STOP)
    fork.rollback(1)
    assert row_of(fork) == {STOP}
    assert grammar.is_terminated()


@engines
def test_tokens_without_an_alternative_are_fast_forwarded(engine):
    grammar = start(engine, AB)
    assert grammar.fast_forward_tokens() == [ord("a"), ord("b")]
    accept_text(grammar, "ab")
    assert grammar.fast_forward_tokens() == []


@engines
def test_a_fast_forward_text_uses_the_longest_tokens(engine):
    literal = {"llguidance": ("regex", "true"), "xgrammar": ("grammar", 'root ::= "true"')}
    assert start(engine, literal).fast_forward_tokens() == [MERGED[b"true"]]


@engines
@pytest.mark.parametrize(
    ("choices", "shared"),
    [
        ("✅❌", b"\xe2"),
        (("日本", "日曜"), b"\xe6\x97\xa5\xe6"),
        ("😀😁😿", b"\xf0\x9f\x98"),
        ("éê", b"\xc3"),
        ("aé", b""),
    ],
)
def test_texts_that_differ_inside_a_character_are_fast_forwarded_up_to_there(engine, choices, shared):
    written = " | ".join(f'"{choice}"' for choice in choices)
    language = {"llguidance": ("regex", "|".join(choices)), "xgrammar": ("grammar", f"root ::= {written}")}
    assert start(engine, language).fast_forward_tokens() == [*shared]
    for choice in choices:
        grammar = start(engine, language)
        for byte in choice.encode():
            assert grammar.accept(byte)
            forced = bytes(grammar.fast_forward_tokens())
            assert not forced or len(row_of(grammar)) == 1
        assert row_of(grammar) == {STOP}


@engines
def test_a_long_fast_forward_text_is_cut_at_the_limit(engine):
    text = "true" * 20_000
    literal = {"llguidance": ("regex", text), "xgrammar": ("grammar", f'root ::= "{text}"')}
    assert start(engine, literal).fast_forward_tokens() == [MERGED[b"true"]] * (MAX_FAST_FORWARD_BYTES // 4)


@engines
@pytest.mark.parametrize(
    "encoded",
    [b"\xed\xa0\x80", b"\xe0\x80\x80", b"\xf0\x80\x80\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xff", b"\x80"],
    ids=["surrogate", "overlong 3", "overlong 4", "overlong 2", "beyond U+10FFFF", "no lead", "no start"],
)
@pytest.mark.parametrize("language", [ANY, QUOTED], ids=["class", "string"])
def test_bytes_that_are_no_utf8_are_rejected(engine, language, encoded):
    grammar = start(engine, language)
    if language is QUOTED:
        accept_text(grammar, '"')
    for byte in encoded:
        legal = row_of(grammar)
        assert grammar.accept(byte) == (byte in legal)
        if byte not in legal:
            return
    pytest.fail("all of it was taken")


@engines
def test_characters_of_every_utf8_length_are_accepted(engine):
    accept_text(start(engine, ANY), "aé€😀\ud7ff\ue000\U0010ffff")


@engines
def test_rolling_back_a_negative_count_is_rejected(engine):
    with pytest.raises(InternalError, match="count: must be >= 0"):
        start(engine, AB).rollback(-1)


@engines
@pytest.mark.parametrize(
    "row",
    [
        np.zeros(WORDS + 1, np.int32),
        np.zeros(WORDS, np.int64),
        np.zeros(WORDS, np.uint32),
        np.zeros((1, WORDS), np.int32),
        np.zeros(2 * WORDS, np.int32)[::2],
        [0] * WORDS,
    ],
)
def test_a_row_that_cannot_be_written_safely_is_rejected(engine, row):
    """The engines write through a raw address."""
    with pytest.raises(InternalError, match="row: must be"):
        start(engine, AB).fill_row(row)


def test_grammars_mask_control_tokens_and_padding():
    for grammar in (accept_text(json_grammar({"type": "string"}), '"'), regex_grammar(".+")):
        row = row_of(grammar)
        assert row.isdisjoint(VOCABULARY.special)
        assert row.isdisjoint(range(VALID, len(VOCABULARY.tokens)))
        assert MERGED[b"<|"] in row


@pytest.mark.parametrize("schema", [{"type": "string", "minLength": 1}, {"type": "string", "maxLength": 3}, {}])
def test_raw_control_characters_cannot_appear_in_json(schema):
    row = row_of(accept_text(json_grammar(schema), '"'))
    assert row.isdisjoint(range(0x20))
    assert row.isdisjoint({MERGED[b"\n\n"]})


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("regex", "a(", "invalid regex"),
        ("grammar", "root := 1", "EBNF"),
        ("grammar", 'root ::= "✅" | ❌', "EBNF"),
        ("json", json.dumps({"type": "object", "patternProperties": {"^a$": {}, "^[ab]$": {}}}), "match the same name"),
    ],
)
def test_an_invalid_source_is_rejected_with_the_reason(kind, source, message):
    with pytest.raises(BadRequest, match=rf"structured_outputs\.{kind}: cannot be compiled: .*{message}"):
        compiler().compile(kind, source)


# Vocabularies of real tokenizers.


def byte_level(vocabulary=None, added=()):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab=vocabulary or {text: index for index, text in enumerate(alphabet)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(added))
    return tokenizer


def test_a_byte_level_vocabulary_has_every_byte_once():
    vocabulary = vocabulary_from_tokenizer(byte_level(), 300)
    assert sorted(vocabulary.tokens[:256]) == [bytes([byte]) for byte in range(256)]
    assert (vocabulary.valid_tokens, vocabulary.special) == (256, frozenset())
    assert vocabulary.tokens[256:] == (b"",) * 44


def test_the_bytes_of_tokens_join_to_the_encoded_text():
    tokenizer = byte_level()
    tokens = vocabulary_from_tokenizer(tokenizer, 256).tokens
    text = 'é 😀\n{"a": 1}\x00'
    assert b"".join(tokens[token] for token in tokenizer.encode(text).ids) == text.encode()


def test_special_tokens_and_template_tags_have_no_text_and_other_added_tokens_have_theirs():
    """Line breaks and HTML tags are added tokens of some tokenizers, and are text."""
    texts = [("<|end|>", True), ("<think>", False), ("\n\n", False), ("<table>", False)]
    added = [AddedToken(text, special=special, normalized=False) for text, special in texts]
    vocabulary = vocabulary_from_tokenizer(byte_level(added=added), 262, ["{{ '\n\n' }}<think>\n\n"])
    assert vocabulary.special == {256, 257}
    assert vocabulary.tokens[256:260] == (b"", b"", b"\n\n", b"<table>")
    assert vocabulary.valid_tokens == 260


def test_a_byte_fallback_vocabulary_is_read():
    tokenizer = Tokenizer(models.BPE(vocab={"<0x0A>": 0, "▁a": 1, "é": 2}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert vocabulary_from_tokenizer(tokenizer, 3).tokens == (b"\n", b" a", "é".encode())


def test_a_tokenizer_that_does_not_fit_is_rejected():
    with pytest.raises(BadBundle, match="width of the logits"):
        vocabulary_from_tokenizer(byte_level(), 255)
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(BadBundle, match="ByteLevel or ByteFallback"):
        vocabulary_from_tokenizer(words, 1)


def test_vocabularies_of_one_size_have_different_digests():
    """The digest changes if tokens are swapped or if their borders shift."""
    kinds = [(b"a", b"bc"), (b"bc", b"a"), (b"ab", b"c"), (b"abc", b"")]
    assert len({Vocabulary(tokens, frozenset(), 2).digest for tokens in kinds}) == len(kinds)


@engines
def test_a_token_without_text_is_rejected_without_output_on_stderr(engine, capfd):
    """xgrammar prints a line on stderr for each such token, and drafts contain them often."""
    grammar = start(engine, QUOTED)
    assert not any(grammar.accept(token) for token in (THINK, END, CALL))
    fork = grammar.fork()
    assert not fork.accept(THINK)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("filled", [True, False])
def test_a_long_string_with_a_pattern_does_not_end_in_the_middle(filled):
    """llguidance's default limits end it at the third character, and without a row they reject a valid one."""
    schema = enforceable({"type": "string", "pattern": r"^([^,]+,\s*)*[^,]+$", "maxLength": 2000})
    matcher = compiler().compile("json", json.dumps(schema)).matcher()
    for token in byte_tokens('"aé, aé, aé, b"'):
        assert not filled or token in row_of(matcher)
        assert matcher.accept(token)


# Its text exceeds the lexer limit.
COMPLEX = enforceable({"type": "string", "pattern": r"^([^,]+,\s*)*[^,]+$", "maxLength": 60_000})


def object_of(**properties):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def test_a_text_that_exceeds_the_lexer_limit_is_an_error():
    grammar = compiler().compile("json", json.dumps(object_of(a=COMPLEX)))
    with pytest.raises(BadRequest, match="makes the grammar too complex"):
        accept_text(grammar.matcher(), '{"a": "aé, aé')


def test_a_grammar_whose_first_row_exceeds_the_lexer_limit_is_not_compiled():
    vocabulary = replace(VOCABULARY, tokens=(*VOCABULARY.tokens, '"aé, aé'.encode()))
    with pytest.raises(BadRequest, match="cannot be compiled: lexer error: too many expressions"):
        GrammarCompiler(vocabulary, [STOP]).compile("json", json.dumps(COMPLEX))


def test_a_lexer_that_takes_long_to_replace_ends_the_request_and_is_compiled_again_for_the_next(monkeypatch):
    """The engine loop cannot wait for it. The failed text is that of another request."""
    slow = object_of(a=COMPLEX, **{f"b{i}": {"type": "integer", "multipleOf": 9000 + i} for i in range(8)})
    cache, grammar = GrammarCache(), compiler().compile("json", json.dumps(slow))
    cache.put(("slow",), grammar, 1)
    matcher, other = grammar.matcher(), grammar.matcher()
    assert cache.get(("slow",)) is grammar
    monkeypatch.setattr(grammar, "_compile", lambda: pytest.fail("a slow lexer was replaced"))
    with pytest.raises(BadRequest, match=r"too complex: lexer error: too many expressions .* the expression$"):
        accept_text(matcher, '{"a": "aé, aé')
    for _ in range(2):
        with pytest.raises(BadRequest, match=r"too complex: lexer error: too many expressions .* or send it again"):
            row_of(other)
    assert cache.get(("slow",)) is None
    cache.put(("slow",), compiler().compile("json", '{"type": "string"}'), 1)
    assert cache.get(("slow",)) is not None


@pytest.fixture
def complex_grammar(monkeypatch):
    """The grammar of an object with a text that exceeds the lexer limit, and the lexers that it creates from now on."""
    grammar, lexers = compiler().compile("json", json.dumps(object_of(a=COMPLEX))), []
    create = grammar._compile
    monkeypatch.setattr(grammar, "_compile", lambda: lexers.append(create()) or lexers[-1])
    return grammar, lexers


def test_a_too_complex_text_is_not_tried_again_by_any_request(complex_grammar):
    """Its row takes 80 ms of the engine loop, and a new lexer would fail as well."""
    grammar, lexers = complex_grammar
    text = '{"a": "a'
    matchers = [accept_text(grammar.matcher(), text) for _ in range(3)]
    for matcher in (*matchers, matchers[0].fork(), matchers[0]):
        with pytest.raises(BadRequest, match="lexer error: too many expressions"):
            row_of(matcher)
        with pytest.raises(BadRequest, match="lexer error: too many expressions"):
            matcher.accept(ord("a"))
    assert lexers == []


def test_other_texts_of_a_grammar_share_one_new_lexer_after_a_too_complex_text(complex_grammar):
    grammar, lexers = complex_grammar
    before, failing = grammar.matcher(), accept_text(grammar.matcher(), '{"a": "a')
    row = row_of(before)
    with pytest.raises(BadRequest, match="too complex"):
        row_of(failing)
    others = [before.fork(), before, grammar.matcher()]
    assert [row_of(accept_text(other, "{")) for other in others] == [row_of(accept_text(grammar.matcher(), "{"))] * 3
    assert len(lexers) == 1
    failing.rollback(8)
    assert row_of(failing) == row
    assert len(lexers) == 1


def test_precomputed_rows_end_before_a_too_complex_text(complex_grammar):
    """The rows before it are kept, and the row after it is not tried a second time."""
    grammar, lexers = complex_grammar
    text = byte_tokens('{"a": "aé')
    matcher, alone = grammar.matcher(), compiler().compile("json", json.dumps(object_of(a=COMPLEX))).matcher()
    matcher.precompute_rows(text)
    for token in byte_tokens('{"a": "a'):
        assert row_of(matcher) == row_of(alone)
        assert matcher.accept(token)
        assert alone.accept(token)
    with pytest.raises(BadRequest, match="too complex"):
        row_of(matcher)
    assert lexers == []


def test_a_grammar_remembers_a_few_too_complex_texts():
    grammar = compiler().compile("json", '{"type": "string"}')
    for token in range(20):
        grammar.remember_too_complex([token, 1], f"reason {token}")
    reasons = [grammar.too_complex([token, 1]) for token in range(20)]
    assert reasons == [None] * 4 + [f"reason {token}" for token in range(4, 20)]
    assert grammar.too_complex([19]) is None


def test_the_lexer_limit_of_one_request_does_not_affect_others(monkeypatch):
    """Copies of an llguidance matcher share a lexer and its limit. A copy that reaches the limit gets its own lexer."""
    grammar = compiler().compile("json", '{"type": "string"}')
    one, other = grammar.matcher(), grammar.matcher()
    accept_text(one, '"a')
    failed = accept_text(other, '"a')._matcher.deep_copy()
    failed.consume_token(ord("\x00"))
    assert failed.is_error()
    monkeypatch.setattr(one, "_matcher", failed)
    assert row_of(one) == row_of(other)
    monkeypatch.setattr(other, "_matcher", failed)
    assert other.accept(ord("b"))
    assert row_of(accept_text(other, '"')) == {STOP}
    monkeypatch.setattr(other, "_matcher", failed)
    assert other.accept(STOP)
