"""Text grows by whole characters, and never shows what a stop string may still take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tandemrt.engines.params import MOST_STOP_CHARACTERS, MOST_STOPS
from tandemrt.runtime.requests.outputs import Speculation
from tandemrt.runtime.requests.stops import ROOT, StopMatcher
from tandemrt.runtime.requests.text import Transcript
from tests.plain.requests import TOKENIZER, byte_tokenizer

STOPS = st.lists(st.text("ab\né", min_size=1, max_size=4), max_size=3, unique=True)


def stream(ids: list[int], stops: list[str], *, include_stop: bool = False) -> tuple[Transcript, list[str]]:
    transcript = Transcript(TOKENIZER, stops, include_stop=include_stop)
    pieces = []
    for token in ids:
        stopped = transcript.add("answer", [token])
        pieces.append(transcript.take().text)
        if stopped:
            break
    transcript.finish()
    pieces.append(transcript.take().text)
    return transcript, pieces


@given(st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=30))
def test_the_pieces_of_a_stream_add_up_to_the_text_and_split_no_character(text: str) -> None:
    transcript, pieces = stream(TOKENIZER.encode(text).ids, [])
    assert transcript.text == text == "".join(pieces)
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 255), max_size=20))
def test_any_bytes_come_out_as_the_tokenizer_decodes_them(ids: list[int]) -> None:
    transcript, pieces = stream(ids, [])
    assert transcript.text == TOKENIZER.decode(ids) == "".join(pieces)


@given(st.text("ab\néc", max_size=30), STOPS, st.booleans())
def test_the_text_ends_before_the_first_stop_string_and_no_piece_is_ever_taken_back(
    text: str, stops: list[str], include: bool
) -> None:
    transcript, pieces = stream(TOKENIZER.encode(text).ids, stops, include_stop=include)
    # The first stop string is the one completed first; of those completed by one character, the one that begins first.
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if ends:
        end, start, stop = min(ends)
        assert transcript.stopped_by == stop
        assert transcript.text == (text[:end] if include else text[:start])
    else:
        assert transcript.stopped_by is None
        assert transcript.text == text
    assert "".join(pieces) == transcript.text


def test_as_many_stop_strings_as_there_may_be_cost_a_step_or_two_per_character() -> None:
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


def test_a_stop_string_that_straddles_tokens_is_found_and_its_last_token_is_the_last_one_counted() -> None:
    ids = TOKENIZER.encode("one END two").ids
    transcript = Transcript(TOKENIZER, ["END"])
    assert transcript.add("answer", ids)
    assert transcript.text == "one "
    assert transcript.tokens == len("one END")


def test_text_that_may_become_a_stop_string_is_held_back_until_it_is_decided() -> None:
    transcript = Transcript(TOKENIZER, ["END"])
    transcript.add("answer", TOKENIZER.encode("so EN").ids)
    assert transcript.take().text == "so "
    transcript.add("answer", TOKENIZER.encode("C").ids)
    assert transcript.take().text == "ENC"


def test_reasoning_and_answer_are_two_texts_and_markers_are_in_neither() -> None:
    transcript = Transcript(TOKENIZER)
    transcript.add("reasoning", TOKENIZER.encode("why").ids)
    transcript.add("marker", TOKENIZER.encode("|").ids)
    transcript.add("answer", TOKENIZER.encode("this").ids)
    transcript.finish()
    assert (transcript.reasoning, transcript.text, transcript.tokens) == ("why", "this", 8)


def test_an_incomplete_character_at_the_end_is_a_replacement_character() -> None:
    transcript, _ = stream(TOKENIZER.encode("é").ids[:1], [])
    assert transcript.text == "\ufffd"


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_acceptance_counts_what_was_kept_and_never_the_token_verification_adds(kept: int) -> None:
    record = Speculation(window=4)
    record.record(drafted=4, kept=kept, emitted=5)
    assert record.num_accepted_draft_tokens == max(0, kept - 1)
    assert record.mean_acceptance_length == max(1, kept)


def test_the_acceptance_rate_is_of_what_was_drafted_and_not_of_what_a_window_could_hold() -> None:
    record = Speculation(window=4)
    record.record(drafted=2, kept=2, emitted=2)
    record.record(drafted=1, kept=2, emitted=2)
    assert (record.num_draft_tokens, record.num_accepted_draft_tokens) == (3, 2)
    assert record.draft_acceptance_rate == record.to_json()["draft_acceptance_rate"] == 2 / 3


def word_tokenizer(*words: str) -> Tokenizer:
    """A token per byte (spelled by byte fallback) and one per word, as sentencepiece models have them."""
    vocab = {symbol: i for i, symbol in enumerate([*(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


WORDS = word_tokenizer("▁a", "b", "▁", "é", "abcd")


def test_of_two_stop_strings_in_one_token_the_one_completed_first_ends_the_text() -> None:
    transcript = Transcript(WORDS, ["abcd", "bc"])
    assert transcript.add("answer", [WORDS.token_to_id("abcd")])
    assert (transcript.text, transcript.stopped_by) == ("a", "bc")


@pytest.mark.parametrize("behind", [[], [ord("x")], [256]])
def test_a_byte_that_spoils_the_run_before_it_takes_no_text_back(behind: list[int]) -> None:
    """Byte fallback spells a run of byte tokens anew once it is no UTF-8: "A" alone, two U+FFFD with 0xF0 behind it."""
    ids = [ord("A"), 0xF0, *behind]
    assert not WORDS.decode(ids).startswith("A")
    transcript = Transcript(WORDS)
    transcript.add("answer", ids[:1])
    assert transcript.take().text == "A"
    transcript.add("answer", ids[1:])
    transcript.finish()
    assert transcript.text.startswith("A\ufffd")


@given(st.lists(st.sampled_from([0x0A, 0xE2, 0x82, 0xAC, 0xEF, 0xBF, 0xBD, *range(256, 261)]), max_size=12))
def test_pieces_add_up_whatever_a_decoder_takes_back(ids: list[int]) -> None:
    transcript = Transcript(WORDS)
    pieces = []
    for token in ids:
        transcript.add("answer", [token])
        pieces.append(transcript.take().text)
    transcript.finish()
    assert "".join(pieces) + transcript.take().text == transcript.text
    if "\ufffd" not in WORDS.decode(ids):
        assert transcript.text == WORDS.decode(ids)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, WORDS], ids=["bytes", "byte fallback"])
@given(st.data())
def test_how_many_tokens_come_at_once_makes_no_difference(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """A round emits several tokens where plain decoding emits one: the text, its end and its stream are the same."""
    token = st.sampled_from([*b"ab\n", 0xC3, 0xA9, 0xEF, 0xBF, 0xBD, *range(256, tokenizer.get_vocab_size())])
    stops, include = data.draw(STOPS), data.draw(st.booleans())
    single, several = (Transcript(tokenizer, stops, include_stop=include) for _ in range(2))
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


@pytest.mark.parametrize(("stop", "held"), [("END", "EN"), ("ED", "E")])
def test_what_is_held_back_comes_out_when_the_section_ends_and_no_stop_string_straddles_the_gap(
    stop: str, held: str
) -> None:
    transcript = Transcript(TOKENIZER, [stop])
    transcript.add("reasoning", TOKENIZER.encode(f"so {held}").ids)
    assert transcript.take().reasoning == "so "
    transcript.add("marker", TOKENIZER.encode("|").ids)
    assert transcript.take().reasoning == held
    assert not transcript.add("answer", TOKENIZER.encode("D").ids)
    assert not transcript.add("reasoning", TOKENIZER.encode("D").ids)
    assert (transcript.reasoning, transcript.text) == (f"so {stop}", "D")


def test_special_tokens_are_in_the_text_only_where_that_is_asked_for() -> None:
    """D9: the openers of tool calls are special tokens of some models."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["[CALL]"])
    tokens = tokenizer.encode("a[CALL][CALL]b").ids
    for skip, text in ((True, "ab"), (False, "a[CALL][CALL]b")):
        transcript = Transcript(tokenizer, skip_special=skip)
        transcript.add("answer", tokens)
        transcript.finish()
        assert transcript.text == text


def test_the_rest_of_a_token_of_two_kinds_is_text_and_counts_no_second_time() -> None:
    transcript = Transcript(TOKENIZER)
    why, because, so = (TOKENIZER.encode(text).ids for text in ("why", "|", "so"))
    transcript.add("reasoning", why)
    transcript.add("marker", because)
    transcript.add("answer", so, {0})
    transcript.finish()
    assert (transcript.reasoning, transcript.text) == ("why", "so")
    assert (transcript.tokens, transcript.reasoning_tokens) == (len(why) + len(because) + len(so) - 1, len(why))
