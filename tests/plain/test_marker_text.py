"""Markers are text: found however tokens cut it, row by row, as reading all bytes anew says (D1)."""

from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandemrt.engines.contract import mask_words
from tandemrt.engines.vocabulary import CONTROL, Vocabulary
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.masks import MaskRows
from tandemrt.runtime.constraints.state import Phase
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tandemrt.runtime.grammars.grammar import GrammarCompiler
from tests.plain.constraints import UNREAD, tokens_in

# Every text of up to four letters is a token, so a marker is cut in every way; beside them, two control tokens.
LETTERS = "a<"
TEXTS = [bytes(map(ord, text)) for size in (1, 2, 3, 4) for text in product(LETTERS, repeat=size)]
SINGLE = [bytes([byte]) for byte in range(256)]
TAG, STOP = len(SINGLE) + len(TEXTS), len(SINGLE) + len(TEXTS) + 1
VOCABULARY = Vocabulary((*SINGLE, *TEXTS, b"", b""), frozenset([TAG, STOP]), STOP + 1)
WIDTH = STOP + 1
TEXT_TOKENS = range(len(SINGLE), TAG)
COMPILER = GrammarCompiler(VOCABULARY, [STOP])
GRAMMARS = {source: COMPILER.compile("regex", source) for source in ("a[a<]*", "<?a<?", "a{2}<a")}

patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
token = st.sampled_from([*TEXT_TOKENS, *TEXT_TOKENS, TAG, *map(ord, LETTERS)])
tokens = st.lists(token, max_size=6)
letters = st.text(LETTERS, min_size=1, max_size=5)
marker = (letters.map(lambda text: tuple(text.encode())) | st.sampled_from([(TAG,), (TAG, 97), (60, TAG)])).map(tuple)


@st.composite
def rules(draw):
    start, *ends = draw(st.lists(marker, min_size=2, max_size=3, unique=True))
    implicit = [end for end in draw(st.lists(marker, max_size=1)) if end not in ends]
    forced = (*draw(tokens), *ends[0], *draw(tokens))
    budget = draw(st.sampled_from([None, None, 0, 1, 3]))
    return ThinkingRule(start, ends, forced, implicit, budget, vocabulary=VOCABULARY)


def constraint(rule, prompt, grammar=None):
    made = GRAMMARS[grammar].matcher() if grammar else None
    return Constraint(WIDTH, [STOP], prompt=prompt, thinking=rule, grammar=made)


def row_of(state):
    rows = np.full((1, mask_words(WIDTH)), UNREAD, np.int32)
    state.fill([], MaskRows(rows), 0)
    return tokens_in(rows[0])


def symbols(ids):
    return VOCABULARY.spelled(ids)


# The rules as one would write them without any state: the whole text is read anew, symbol by symbol.


@dataclass
class Reading:
    thinking: bool | None = None
    spent: int = 0
    forced: int | None = None  # tokens of the forced end that are out
    roles: list[tuple[str, int]] = field(default_factory=list)  # of every symbol of the output


def read(
    rule: ThinkingRule, prompt: list[int], output: list[int], grammar: str | None = None, *, shut: bool = False
) -> Reading:
    """``shut``: the answer has begun with what might have been a block, which the grammar does not allow."""
    now, seen, before = Reading(), [], len(symbols(prompt))
    start, ends, implicit = symbols(rule.start), [*map(symbols, rule.ends)], [*map(symbols, rule.implicit_ends)]
    for index, token in enumerate([*prompt, *output]):
        in_prompt = index < len(prompt)
        if now.forced is not None and not in_prompt:
            begin = len(symbols(rule.forced_end[: now.forced]))
            for at, symbol in enumerate(VOCABULARY.symbols(token), begin):
                place = rule.forced_marker
                behind = "marker" if grammar else "answer"
                kind = "reasoning" if at < place.start else "marker" if at < place.stop else behind
                now.roles.append((kind, symbol))
            now.forced += 1
            if now.forced == len(rule.forced_end):
                now, seen = Reading(thinking=False, roles=now.roles), []
            continue
        whole = was = now.thinking
        for symbol in VOCABULARY.symbols(token):
            seen.append(symbol)
            now.roles.append(("reasoning" if now.thinking else "answer", symbol))
            closed = max((end for end in (*ends, *implicit) if tuple(seen[-len(end) :]) == end), key=len, default=None)
            ended = any(tuple(seen[-len(end) :]) == end for end in ends)
            opened = tuple(seen[-len(start) :]) == start
            if now.thinking and closed:
                relabel(now.roles, len(closed), "answer" if closed in implicit else "marker")
                now.thinking, whole, seen = False, False, []
            elif opened and (in_prompt or may_open(now, len(start), len(now.roles) - before, grammar, shut)):
                relabel(now.roles, len(start), "marker")
                now.thinking, now.spent, whole, seen = True, 0, False, []
            elif in_prompt and ended and not opened and not now.thinking:
                now.thinking, seen = False, []
        answer = [symbol for kind, symbol in now.roles[before:] if kind == "answer"]
        if grammar and was is None and now.thinking is not None and not in_prompt and not accepts(grammar, answer):
            return read(rule, prompt, output, grammar, shut=True)
        now.spent += bool(whole and now.thinking)
        spent = now.thinking and rule.budget is not None and now.spent >= rule.budget
        if spent and index >= len(prompt) - 1:
            now.forced = 0
    now.roles = now.roles[before:]
    return now


def may_open(now: Reading, size: int, written: int, grammar: str | None, shut: bool) -> bool:
    """A block begins outside of one; where a grammar owns the answer, in place of all of it."""
    return not now.thinking and (not grammar or (now.thinking is None and size >= written and not shut))


def relabel(roles, size, kind):
    roles[len(roles) - size :] = [(kind, symbol) for _, symbol in roles[len(roles) - size :]]


def told(pieces):
    return [(piece.kind, symbol) for piece in pieces for symbol in symbols(piece.tokens)]


@settings(max_examples=200, **patient)
@given(rule=rules(), prompt=tokens, data=st.data())
def test_every_symbol_has_the_role_that_reading_the_whole_text_gives_it(rule, prompt, data):
    """Begin, end, implicit and forced end, over prompt and output, and every piece is the text that it says."""
    state, output, pieces = constraint(rule, prompt), [], []
    for _ in range(data.draw(st.integers(0, 8))):
        expected = read(rule, prompt, output)
        row = row_of(state)
        assert (state.phase is Phase.FORCING) == (expected.forced is not None)
        assert (state.phase is Phase.THINKING) == (expected.thinking is True and expected.forced is None)
        if expected.forced is not None:
            assert row == {rule.forced_end[expected.forced]}
        elif expected.thinking:
            assert row == set(range(WIDTH)) - {STOP}
            assert state.reasoning_tokens == expected.spent
        else:
            assert row == set(range(WIDTH))
        output.append(data.draw(st.sampled_from(sorted(row & {*TEXT_TOKENS, TAG}) or sorted(row))))
        pieces += state.commit(output[-1:]).pieces
        roles = read(rule, prompt, output).roles
        certain = told(pieces)
        assert certain == roles[: len(certain)]
        assert (
            certain + told([state.undecided])
            == [(kind, symbol) for kind, symbol in roles[: len(certain)]] + roles[len(certain) :]
        )
        emitted = sum(piece.emitted for piece in (*pieces, state.undecided))
        assert emitted == len(output)


# Rows where a grammar owns the answer: what is allowed is what leads to a text that some output has.


def accepts(grammar: str, text) -> bool:
    """Whether a text of the grammar begins so."""
    matcher = GRAMMARS[grammar].matcher()
    return all(symbol < CONTROL and matcher.accept(symbol) for symbol in text)


def allowed_by(rule, prompt, output, grammar, candidate) -> bool:
    """Whether reading ``candidate`` behind prompt and output breaks nothing."""
    before = read(rule, prompt, output, grammar)
    if before.forced is not None:
        return candidate == rule.forced_end[before.forced]
    reading = read(rule, prompt, [*output, candidate], grammar)
    answer = [symbol for kind, symbol in reading.roles if kind == "answer"]
    if reading.thinking is None and begins_block(rule, prompt, [*output, candidate]):
        return True
    return accepts(grammar, answer)


def begins_block(rule, prompt, output) -> bool:
    text, start = symbols([*prompt, *output]), symbols(rule.start)
    size = len(symbols(output))
    return any(text[-length:] == start[:length] for length in range(size, min(len(start), len(text) + 1)))


@pytest.mark.parametrize("begun", ["", "a", "aa"])
@pytest.mark.parametrize("together", [True, False], ids=["one token", "letters"])
def test_a_marker_that_the_prompt_began_is_the_grammars_as_far_as_the_output_has_it(begun, together):
    rule = ThinkingRule(tuple(b"<<"), [tuple(b"<a<<")], tuple(b"<a<<"), [tuple(b"aa<a")], vocabulary=VOCABULARY)
    opened = f"<<{begun}".encode()
    state = constraint(rule, [len(SINGLE) + TEXTS.index(opened)] if together else [*opened], "<?a<?")
    for letter in b"aa<"[len(begun) :]:
        assert letter in row_of(state)
        state.commit([letter])
    assert (ord("a") in row_of(state)) == (begun == "aa")  # "<a" is of the grammar, "a<a" and "aa<a" are not
    assert state.phase is Phase.THINKING


@settings(max_examples=80, **patient)
@given(rule=rules(), prompt=tokens, grammar=st.sampled_from(sorted(GRAMMARS)), data=st.data())
def test_a_row_allows_what_ends_a_marker_where_the_grammar_can_go_on_inside_that_token(rule, prompt, grammar, data):
    state, output = constraint(rule, prompt, grammar), []
    for _ in range(data.draw(st.integers(1, 5))):
        row = row_of(state) - {STOP}
        candidates = {*TEXT_TOKENS, TAG, *map(ord, LETTERS)}
        expected = {each for each in candidates if allowed_by(rule, prompt, output, grammar, each)}
        assert row & candidates == expected
        if not expected:
            return
        output.append(data.draw(st.sampled_from(sorted(expected))))
        state.commit(output[-1:])
        if state.finished:
            return


@settings(max_examples=120, **patient)
@given(rule=rules(), prompt=tokens, grammar=st.none() | st.sampled_from(sorted(GRAMMARS)), data=st.data())
def test_the_rows_of_a_window_are_those_of_one_token_after_another(rule, prompt, grammar, data):
    """Begin, end and forced end in the middle of a window, and nothing stays behind of having looked ahead."""
    state, replay = constraint(rule, prompt, grammar), constraint(rule, prompt, grammar)
    draft, expected, pieces = [], [row_of(replay)], []
    for _ in range(data.draw(st.integers(0, 6))):
        legal = sorted(expected[-1] & {*TEXT_TOKENS, TAG, *map(ord, LETTERS)})
        if not legal:
            break
        draft.append(data.draw(st.sampled_from(legal)))
        pieces += replay.commit(draft[-1:]).pieces
        expected.append(row_of(replay))
    rows = np.full((len(draft) + 1, mask_words(WIDTH)), UNREAD, np.int32)
    for _ in range(2):
        assert state.fill(draft, MaskRows(rows), 0).tokens == draft
        assert [tokens_in(row) for row in rows] == expected
    commit = state.commit(draft)
    assert commit.kept == draft
    assert told(commit.pieces) == told(pieces)
    assert (state.phase, state.reasoning_tokens, row_of(state)) == (
        replay.phase,
        replay.reasoning_tokens,
        expected[-1],
    )


# As tokenizers of Llama 3 cut them: ``<th`` ``ink`` ``>\n``, ``.</`` ``think`` ``>\n\n``.

LLAMA = [
    b"<th",
    b"ink",
    b">\n",
    b"</",
    b"think",
    b">\n\n",
    b".</",
    b">{",
    b'>{"',
    b"\n\n",
    b"Hm",
    b'{"',
    b"<",
    b"think>",
]
LLAMA_IDS = {text: len(SINGLE) + index for index, text in enumerate(LLAMA)}
LLAMA_STOP = len(SINGLE) + len(LLAMA)
LLAMA_3 = Vocabulary((*SINGLE, *LLAMA, b""), frozenset([LLAMA_STOP]), LLAMA_STOP + 1)


def ids(*texts: bytes) -> list[int]:
    return [LLAMA_IDS[text] for text in texts]


def llama_rule(**changes) -> ThinkingRule:
    given = {"start": list(b"<think>"), "ends": [list(b"</think>")], "forced_end": list(b"</think>")} | changes
    return ThinkingRule(**given, vocabulary=LLAMA_3)


def llama(prompt=(), grammar=None, **changes) -> Constraint:
    compiler = GrammarCompiler(LLAMA_3, [LLAMA_STOP])
    made = compiler.compile("json", grammar).matcher() if grammar else None
    width = LLAMA_STOP + 1
    return Constraint(width, [LLAMA_STOP], prompt=prompt, thinking=llama_rule(**changes), grammar=made)


@pytest.mark.parametrize(
    ("prompt", "phase", "spent"),
    [
        ((b"<th", b"ink", b">\n"), Phase.THINKING, 0),
        ((b"<th", b"ink", b">\n", b"Hm", b"Hm"), Phase.THINKING, 2),
        ((b"<th", b"ink", b">\n", b"Hm", b".</"), Phase.THINKING, 2),
        ((b"<th", b"ink", b">\n", b".</", b"think", b">\n\n"), Phase.ANSWER, 0),
        ((b"</", b"think", b">\n"), Phase.ANSWER, 0),
        ((b"Hm",), Phase.OPEN, 0),
    ],
    ids=str,
)
def test_a_prompt_is_read_as_text(prompt, phase, spent):
    """D1: a prompt that ends in ``<think>\\n`` stayed open: no budget held, and a grammar bound the reasoning."""
    state = llama(ids(*prompt))
    assert (state.phase, state.reasoning_tokens) == (phase, spent)


@pytest.mark.parametrize(
    ("output", "reasoning", "answer"),
    [
        ((b"<th", b"ink", b">\n", b"Hm", b".</", b"think", b">\n\n", b"Hm"), "\nHm.", "\n\nHm"),
        ((b"<", b"think>", b"Hm", b"</", b"think", b">{", b"Hm"), "Hm", "{Hm"),
        ((b"<th", b"ink", b">\n", b".</", b"Hm", b"</", b"think>", b"Hm"), "\n.</Hm", "Hm"),
    ],
)
def test_a_token_with_the_end_of_a_marker_in_it_is_split_where_the_marker_ends(output, reasoning, answer):
    state = llama()
    pieces = [piece for token in ids(*output) for piece in state.commit([token]).pieces]

    def said(kind):
        return b"".join(LLAMA_3.tokens[token] for piece in pieces if piece.kind == kind for token in piece.tokens)

    assert (said("reasoning").decode(), said("answer").decode()) == (reasoning, answer)
    assert sum(piece.emitted for piece in pieces) == len(output)


def test_a_grammar_begins_inside_the_token_that_ends_the_marker():
    state = llama(ids(b"<th", b"ink", b">\n"), '{"type": "object"}')
    state.commit(ids(b"</", b"think"))
    width = LLAMA_STOP + 1
    rows = np.full((1, mask_words(width)), UNREAD, np.int32)
    state.fill([], MaskRows(rows), 0)
    row = tokens_in(rows[0])
    assert {LLAMA_IDS[b">{"], LLAMA_IDS[b'>{"'], ord(">"), LLAMA_IDS[b"Hm"]} <= row
    assert row.isdisjoint([*ids(b">\n", b">\n\n"), LLAMA_STOP]), "no JSON begins with a line break here"
    commit = state.commit([*ids(b'>{"'), *b'":1}', LLAMA_STOP])
    assert commit.finish == "stop"
    assert [(piece.kind, [LLAMA_3.tokens[token] for token in piece.tokens]) for piece in commit.pieces] == [
        ("marker", [b"</", b"think", b">"]),
        ("answer", [b'{"', b'"', b":", b"1", b"}"]),
    ]


def test_a_budget_counts_the_tokens_behind_the_marker_and_forces_a_phrase_that_holds_one():
    """D2: a phrase may begin with line breaks, and what ends it may hold more than the marker."""
    phrase = [*ids(b"\n\n", b"Hm"), *b"\n", *ids(b"</", b"think", b">\n\n")]
    state = llama(budget=2, forced_end=phrase)
    commit = state.commit([*ids(b"<th", b"ink", b">\n", b"Hm", b"Hm"), *phrase, *ids(b"Hm")])
    assert (state.phase, state.reasoning_tokens, state.forced_ends) == (Phase.ANSWER, 2, 1)
    assert [(p.kind, b"".join(LLAMA_3.tokens[token] for token in p.tokens)) for p in commit.pieces] == [
        ("marker", b"<think>"),
        ("reasoning", b"\nHmHm\n\nHm\n"),
        ("marker", b"</think>"),
        ("answer", b"\n\nHm"),
    ]


def test_stop_tokens_are_free_again_once_the_answer_has_begun():
    """D1: the end was missed, so stop tokens stayed masked and the request ran to max_tokens with an empty answer."""
    state = llama(ids(b"<th", b"ink", b">\n"))
    commit = state.commit([*ids(b"Hm", b".</", b"think", b">\n\n", b"Hm"), LLAMA_STOP])
    assert (commit.finish, commit.stop_token) == ("stop", LLAMA_STOP)
