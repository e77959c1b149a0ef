"""The adapter over xgrammar and the vocabulary it is built from."""

import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tandemrt.engines.errors import BadBundle, BadRequest, InternalError
from tandemrt.engines.vocabulary import Vocabulary, vocabulary_from_tokenizer
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
    compiler,
    json_grammar,
    regex_grammar,
    spell,
    tokens_in,
)


def row_of(grammar):
    row = np.full(WORDS, 0x55555555, np.int32)
    grammar.fill(row)
    return tokens_in(row)


def take(grammar, text):
    for token in spell(text):
        assert grammar.accept(token)
    return grammar


def test_a_complete_text_may_stop_and_an_incomplete_one_may_not():
    grammar = regex_grammar("ab+")
    assert row_of(grammar) == {ord("a")}
    take(grammar, "ab")
    assert row_of(grammar) == {ord("b"), STOP}


def test_stop_tokens_of_a_request_replace_those_of_the_compiler():
    grammar = compiler().compile("regex", "ab?").matcher([OTHER_STOP, ord("b")])
    assert not grammar.accept(OTHER_STOP)
    take(grammar, "a")
    assert row_of(grammar) == {ord("b"), OTHER_STOP}
    assert grammar.accept(ord("b"))
    assert grammar.is_terminated(), "a stop token ends the text, even one the grammar could read as text"


@pytest.mark.parametrize("stops", [[OTHER_STOP], [ord("x")], [STOP, OTHER_STOP], [STOP]], ids=str)
def test_a_row_allows_what_the_grammar_takes_and_nothing_else_whatever_stops_a_request(stops):
    """Inside a string xgrammar leaves the stop tokens of its compiler in the row, which it then refuses."""
    grammar = compiler().compile("json", '{"type": "string"}').matcher(stops)
    for token in [None, *spell('"ab"')]:
        assert token is None or grammar.accept(token)
        row = row_of(grammar)
        for candidate in range(VALID):
            taken = grammar.accept(candidate)
            grammar.rollback(int(taken))
            assert taken == (candidate in row), candidate


def test_a_terminated_grammar_takes_nothing_and_can_be_rolled_back():
    grammar = take(regex_grammar("a"), "a")
    assert grammar.accept(STOP)
    assert grammar.is_terminated()
    assert not grammar.accept(ord("a"))
    with pytest.raises(InternalError, match="must not be filled after its end"):
        row_of(grammar)
    grammar.rollback(1)
    assert row_of(grammar) == {STOP}


def test_a_refused_token_changes_nothing():
    grammar = regex_grammar("ab")
    assert not grammar.accept(ord("b"))
    assert row_of(grammar) == {ord("a")}


def test_a_fork_goes_its_own_way():
    """G7."""
    grammar = regex_grammar("a(b|c)")
    fork = take(grammar.fork(), "ab")
    assert row_of(fork) == {STOP}
    assert row_of(grammar) == {ord("a")}


def test_taking_back_fewer_than_no_tokens_is_refused():
    with pytest.raises(InternalError, match="count: must be >= 0"):
        regex_grammar("a").rollback(-1)


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
def test_a_row_that_cannot_be_written_safely_is_refused(row):
    """G15: xgrammar itself writes wrong memory when handed a strided view."""
    with pytest.raises(InternalError, match="row: must be"):
        regex_grammar("a").fill(row)


def test_control_tokens_and_padding_are_unknown_to_every_grammar():
    """G14, G16."""
    for grammar in (take(json_grammar({"type": "string"}), '"'), regex_grammar(".+")):
        row = row_of(grammar)
        assert row.isdisjoint(VOCABULARY.special)
        assert row.isdisjoint(range(VALID, len(VOCABULARY.tokens)))
        assert MERGED[b"<|"] in row


@pytest.mark.parametrize("schema", [{"type": "string", "minLength": 1}, {"type": "string", "maxLength": 3}, {}])
def test_raw_control_characters_cannot_appear_in_json(schema):
    """xgrammar's bounded strings allow them, JSON does not."""
    row = row_of(take(json_grammar(schema), '"'))
    assert row.isdisjoint(range(0x20))
    assert row.isdisjoint({MERGED[b"\n\n"]})


@pytest.mark.parametrize("repeats", [128, 129, 200])
def test_long_repetitions_of_a_class_compile(repeats):
    """With xgrammar's own cache, 129 and more raise."""
    take(json_grammar({"type": "string", "pattern": f"^[ab]{{1,{repeats}}}$"}), '"' + "a" * repeats)


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("regex", "a(", "parenthesis"),
        ("regex", r"(a)\1", "Backreference"),
        ("grammar", "root := 1", "EBNF"),
        ("json", json.dumps({"type": "integer", "minimum": 5, "maximum": 3}), "minimum greater than maximum"),
        ("json", "false", "cannot accept any value"),
    ],
)
def test_what_does_not_compile_is_refused_with_the_reason(kind, source, message):
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


def test_a_byte_level_vocabulary_spells_every_byte_once():
    vocabulary = vocabulary_from_tokenizer(byte_level(), 300)
    assert sorted(vocabulary.tokens[:256]) == [bytes([byte]) for byte in range(256)]
    assert (vocabulary.valid_tokens, vocabulary.special) == (256, frozenset())
    assert vocabulary.tokens[256:] == (b"",) * 44


def test_the_tokens_of_a_text_spell_the_text():
    tokenizer = byte_level()
    tokens = vocabulary_from_tokenizer(tokenizer, 256).tokens
    text = 'é 😀\n{"a": 1}\x00'
    assert b"".join(tokens[token] for token in tokenizer.encode(text).ids) == text.encode()


def test_added_tokens_spell_nothing_whether_they_are_called_special_or_not():
    """G14."""
    added = [AddedToken("<|end|>", special=True), AddedToken("<think>", special=False)]
    vocabulary = vocabulary_from_tokenizer(byte_level(added=added), 260)
    assert vocabulary.special == {256, 257}
    assert vocabulary.tokens[256:258] == (b"", b"")
    assert vocabulary.valid_tokens == 258


def test_a_byte_fallback_vocabulary_is_spelled_too():
    tokenizer = Tokenizer(models.BPE(vocab={"<0x0A>": 0, "▁a": 1, "é": 2}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert vocabulary_from_tokenizer(tokenizer, 3).tokens == (b"\n", b" a", "é".encode())


def test_a_tokenizer_that_does_not_fit_is_refused():
    with pytest.raises(BadBundle, match="width of the logits"):
        vocabulary_from_tokenizer(byte_level(), 255)
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(BadBundle, match="ByteLevel or ByteFallback"):
        vocabulary_from_tokenizer(words, 1)


def test_digests_tell_vocabularies_of_one_size_apart():
    """G17: neither a swap of tokens nor a shift of their borders goes unseen."""
    kinds = [(b"a", b"bc"), (b"bc", b"a"), (b"ab", b"c"), (b"abc", b"")]
    assert len({Vocabulary(tokens, frozenset(), 2).digest for tokens in kinds}) == len(kinds)


def test_a_token_that_spells_nothing_is_refused_without_a_word(capfd):
    """xgrammar says a line on stderr for each, and drafts hold such tokens all the time."""
    grammar = json_grammar({"type": "string"})
    assert not any(grammar.accept(token) for token in (THINK, END, CALL))
    fork = grammar.fork()
    assert not fork.accept(THINK)
    assert capfd.readouterr().err == ""
