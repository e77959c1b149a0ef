"""A text stream grows by whole characters and never shows text that a stop string may remove."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tandemrt.engines.parameters.sampling import MOST_STOP_CHARACTERS, MOST_STOPS
from tandemrt.runtime.requests.request import Speculation
from tandemrt.runtime.requests.text import ROOT, StopMatcher, TextDelta, TextStream
from tests.plain.requests import TOKENIZER, byte_tokenizer

STOPS = st.lists(st.text("ab\né", min_size=1, max_size=4), max_size=3, unique=True)


def stream(ids: list[int], stops: list[str], *, include_stop: bool = False) -> tuple[TextStream, list[str]]:
    text_stream = TextStream(TOKENIZER, stops, include_stop=include_stop)
    deltas = []
    for token in ids:
        stopped = text_stream.add("answer", [token])
        deltas.append(text_stream.take().text)
        if stopped:
            break
    text_stream.finish()
    deltas.append(text_stream.take().text)
    return text_stream, deltas


@given(st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=30))
def test_deltas_join_to_the_text_and_split_no_character(text: str) -> None:
    text_stream, deltas = stream(TOKENIZER.encode(text).ids, [])
    assert text_stream.text == text == "".join(deltas)
    assert not any("\ufffd" in delta for delta in deltas)


@given(st.lists(st.integers(0, 255), max_size=20))
def test_any_bytes_decode_as_the_tokenizer_decodes_them(ids: list[int]) -> None:
    text_stream, deltas = stream(ids, [])
    assert text_stream.text == TOKENIZER.decode(ids) == "".join(deltas)


@given(st.text("ab\néc", max_size=30), STOPS, st.booleans())
def test_the_text_ends_at_the_first_stop_string_and_no_delta_is_taken_back(
    text: str, stops: list[str], include: bool
) -> None:
    text_stream, deltas = stream(TOKENIZER.encode(text).ids, stops, include_stop=include)
    # The first stop string is the one completed first; of those completed by one character, the one that begins first.
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if ends:
        end, start, stop = min(ends)
        assert text_stream.stopped_by == stop
        assert text_stream.text == (text[:end] if include else text[:start])
    else:
        assert text_stream.stopped_by is None
        assert text_stream.text == text
    assert "".join(deltas) == text_stream.text


def test_many_stop_strings_cost_two_steps_per_character_at_most() -> None:
    """Counted, not timed: each step looks a character up once, and once more for each failure link it follows."""
    lookups = 0

    class Counted(dict[str, int]):
        def __contains__(self, key: object) -> bool:
            nonlocal lookups
            lookups += 1
            return super().__contains__(key)

    stops = ["ab" * 15 + chr(0x100 + i) for i in range(MOST_STOPS)]  # all but the last character fits, again and again
    assert sum(map(len, stops)) <= MOST_STOP_CHARACTERS
    matcher = StopMatcher(stops)
    matcher._next = [Counted(each) for each in matcher._next]
    node, text = ROOT, "ab" * 500 + "ba" * 500
    for character in text:
        node = matcher.step(node, character)
    assert len(text) <= lookups <= 3 * len(text)


def test_a_stop_string_across_tokens_is_found_and_later_tokens_do_not_count() -> None:
    ids = TOKENIZER.encode("one END two").ids
    text_stream = TextStream(TOKENIZER, ["END"])
    assert text_stream.add("answer", ids)
    assert text_stream.text == "one "
    assert text_stream.tokens == len("one END")


def test_text_that_may_become_a_stop_string_is_held_back_until_it_is_decided() -> None:
    text_stream = TextStream(TOKENIZER, ["END"])
    text_stream.add("answer", TOKENIZER.encode("so EN").ids)
    assert text_stream.take().text == "so "
    text_stream.add("answer", TOKENIZER.encode("C").ids)
    assert text_stream.take().text == "ENC"


def test_reasoning_and_answer_are_two_texts_and_delimiters_are_in_neither() -> None:
    text_stream = TextStream(TOKENIZER)
    text_stream.add("reasoning", TOKENIZER.encode("why").ids)
    text_stream.add("delimiter", TOKENIZER.encode("|").ids)
    text_stream.add("answer", TOKENIZER.encode("this").ids)
    text_stream.finish()
    assert (text_stream.reasoning, text_stream.text, text_stream.tokens) == ("why", "this", 8)


def test_an_incomplete_character_at_the_end_is_a_replacement_character() -> None:
    text_stream, _ = stream(TOKENIZER.encode("é").ids[:1], [])
    assert text_stream.text == "\ufffd"


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_acceptance_counts_kept_drafts_without_the_bonus_token(kept: int) -> None:
    record = Speculation(num_spec_tokens=4)
    record.record(drafted=4, kept=kept, emitted=5)
    assert record.num_accepted_draft_tokens == max(0, kept - 1)
    assert record.mean_acceptance_length == max(1, kept)


def test_the_acceptance_rate_is_relative_to_drafted_tokens() -> None:
    record = Speculation(num_spec_tokens=4)
    record.record(drafted=2, kept=2, emitted=2)
    record.record(drafted=1, kept=2, emitted=2)
    assert (record.num_draft_tokens, record.num_accepted_draft_tokens) == (3, 2)
    assert record.draft_acceptance_rate == record.to_json()["draft_acceptance_rate"] == 2 / 3


def word_tokenizer(*words: str) -> Tokenizer:
    """A token per byte (decoded by byte fallback) and one per word, as sentencepiece models have them."""
    vocab = {symbol: i for i, symbol in enumerate([*(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


WORDS = word_tokenizer("▁a", "b", "▁", "é", "abcd")


def test_the_stop_string_completed_first_ends_the_text() -> None:
    text_stream = TextStream(WORDS, ["abcd", "bc"])
    assert text_stream.add("answer", [WORDS.token_to_id("abcd")])
    assert (text_stream.text, text_stream.stopped_by) == ("a", "bc")


@pytest.mark.parametrize("following", [[], [ord("x")], [256]])
def test_a_byte_that_invalidates_the_run_before_it_removes_no_text(following: list[int]) -> None:
    """Byte fallback decodes a run of byte tokens anew once it is no UTF-8: "A" alone, two U+FFFD with 0xF0 after it."""
    ids = [ord("A"), 0xF0, *following]
    assert not WORDS.decode(ids).startswith("A")
    text_stream = TextStream(WORDS)
    text_stream.add("answer", ids[:1])
    assert text_stream.take().text == "A"
    text_stream.add("answer", ids[1:])
    text_stream.finish()
    assert text_stream.text.startswith("A\ufffd")


@given(st.lists(st.sampled_from([0x0A, 0xE2, 0x82, 0xAC, 0xEF, 0xBF, 0xBD, *range(256, 261)]), max_size=12))
def test_deltas_join_to_the_text_if_a_decoder_changes_earlier_characters(ids: list[int]) -> None:
    text_stream = TextStream(WORDS)
    deltas = []
    for token in ids:
        text_stream.add("answer", [token])
        deltas.append(text_stream.take().text)
    text_stream.finish()
    assert "".join(deltas) + text_stream.take().text == text_stream.text
    if "\ufffd" not in WORDS.decode(ids):
        assert text_stream.text == WORDS.decode(ids)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, WORDS], ids=["bytes", "byte fallback"])
@given(st.data())
def test_the_text_does_not_depend_on_the_number_of_tokens_per_call(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """A round emits several tokens where plain decoding emits one: the text, its end and its stream are the same."""
    token = st.sampled_from([*b"ab\n", 0xC3, 0xA9, 0xEF, 0xBF, 0xBD, *range(256, tokenizer.get_vocab_size())])
    stops, include = data.draw(STOPS), data.draw(st.booleans())
    single, several = (TextStream(tokenizer, stops, include_stop=include) for _ in range(2))
    for run in data.draw(st.lists(st.lists(token, min_size=1, max_size=5), max_size=6)):
        stopped = any(single.add("answer", [each]) for each in run)
        assert several.add("answer", run) == stopped
        assert several.take() == single.take()
        if stopped:
            break
    for each in (single, several):
        each.finish()
    assert several.take() == single.take()
    assert (several.text, several.tokens, several.stopped_by) == (single.text, single.tokens, single.stopped_by)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, WORDS], ids=["bytes", "byte fallback"])
@given(st.data())
def test_a_text_that_is_read_late_is_the_same(tokenizer: Tokenizer, data: st.DataObject) -> None:
    token = st.sampled_from([*b"ab\n", 0xC3, 0xA9, 0xEF, 0xBF, 0xBD, *range(256, tokenizer.get_vocab_size())])
    role = st.sampled_from(["reasoning", "answer", "answer", "delimiter"])
    stops = data.draw(STOPS)
    always, late = TextStream(tokenizer, stops), TextStream(tokenizer, stops)
    deltas = []
    for kind, run in data.draw(st.lists(st.tuples(role, st.lists(token, min_size=1, max_size=40)), max_size=6)):
        stopped = always.add(kind, run)
        deltas.append(always.take())
        assert late.add(kind, run) == stopped
        if data.draw(st.booleans()):
            assert (late.reasoning, late.text) == (always.reasoning, always.text)
        if stopped:
            break
    for each in (always, late):
        each.finish()
    deltas.append(always.take())
    joined = TextDelta("".join(each.reasoning for each in deltas), "".join(each.text for each in deltas))
    assert late.take() == joined == TextDelta(late.reasoning, late.text)
    assert (late.tokens, late.reasoning_tokens, late.stopped_by) == (
        always.tokens,
        always.reasoning_tokens,
        always.stopped_by,
    )


@pytest.mark.parametrize(("stop", "undecided"), [("END", "EN"), ("ED", "E")])
def test_held_text_is_released_when_the_role_changes_and_no_stop_string_crosses_the_gap(
    stop: str, undecided: str
) -> None:
    text_stream = TextStream(TOKENIZER, [stop])
    text_stream.add("answer", TOKENIZER.encode(f"so {undecided}").ids)
    assert text_stream.take().text == "so "
    text_stream.add("delimiter", TOKENIZER.encode("|").ids)
    assert text_stream.take().text == undecided
    assert not text_stream.add("reasoning", TOKENIZER.encode("D").ids)
    assert not text_stream.add("answer", TOKENIZER.encode("D").ids)
    assert (text_stream.reasoning, text_stream.text) == ("D", f"so {stop}")


def test_a_stop_string_in_the_reasoning_ends_nothing_and_holds_nothing_back() -> None:
    text_stream = TextStream(TOKENIZER, ["END"])
    assert not text_stream.add("reasoning", TOKENIZER.encode("no END, EN").ids)
    assert text_stream.take().reasoning == "no END, EN"
    assert text_stream.add("answer", TOKENIZER.encode("so END of").ids)
    assert (text_stream.take().text, text_stream.stopped_by) == ("so ", "END")


def test_special_tokens_are_in_the_text_only_on_request() -> None:
    """D9: the openers of tool calls are special tokens of some models."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["[CALL]"])
    tokens = tokenizer.encode("a[CALL][CALL]b").ids
    for skip, text in ((True, "ab"), (False, "a[CALL][CALL]b")):
        text_stream = TextStream(tokenizer, skip_special=skip)
        text_stream.add("answer", tokens)
        text_stream.finish()
        assert text_stream.text == text


def test_a_token_with_two_roles_counts_once() -> None:
    text_stream = TextStream(TOKENIZER)
    why, because, so = (TOKENIZER.encode(text).ids for text in ("why", "|", "so"))
    text_stream.add("reasoning", why)
    text_stream.add("delimiter", because)
    text_stream.add("answer", so, {0})
    text_stream.finish()
    assert (text_stream.reasoning, text_stream.text) == ("why", "so")
    assert (text_stream.tokens, text_stream.reasoning_tokens) == (len(why) + len(because) + len(so) - 1, len(why))
