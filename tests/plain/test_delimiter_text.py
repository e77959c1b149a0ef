"""Reasoning delimiters are matched as text, independent of how tokens split them.

The tests compare the constraint with a reader that reads all symbols anew for every row.
"""

from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandemrt.engines.contract.masks import mask_words
from tandemrt.engines.text.vocabulary import CONTROL, Vocabulary
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.rows import MaskRows
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tandemrt.runtime.constraints.transitions import Phase
from tandemrt.runtime.grammars.compiler import GrammarCompiler
from tests.plain.constraints import UNREAD, tokens_in

# Every text of up to four letters is a token, so delimiters are split in every way. TAG and STOP are control tokens.
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
delimiter = (letters.map(lambda text: tuple(text.encode())) | st.sampled_from([(TAG,), (TAG, 97), (60, TAG)])).map(
    tuple
)


@st.composite
def rules(draw):
    start, *ends = draw(st.lists(delimiter, min_size=2, max_size=3, unique=True))
    implicit = [end for end in draw(st.lists(delimiter, max_size=1)) if end not in ends]
    forced = (*draw(tokens), *ends[0], *draw(tokens))
    budget = draw(st.sampled_from([None, None, 0, 1, 3]))
    return ThinkingRule(start, ends, forced, implicit, budget, vocabulary=VOCABULARY)


def constraint(rule, prompt, grammar=None):
    matcher = GRAMMARS[grammar].matcher() if grammar else None
    return Constraint(WIDTH, [STOP], prompt=prompt, thinking=rule, grammar=matcher)


def row_of(state):
    rows = np.full((1, mask_words(WIDTH)), UNREAD, np.int32)
    state.fill_rows([], MaskRows(rows), 0)
    return tokens_in(rows[0])


def symbols(ids):
    return VOCABULARY.symbols_of(ids)


# Reference: the thinking rule without incremental state. It reads the whole text anew, symbol by symbol.


@dataclass
class Reading:
    thinking: bool | None = None
    spent: int = 0
    forced: int | None = None  # number of emitted tokens of the forced end
    roles: list[tuple[str, int]] = field(default_factory=list)  # the role of every symbol of the output


def read(
    rule: ThinkingRule, prompt: list[int], output: list[int], grammar: str | None = None, *, shut: bool = False
) -> Reading:
    """Read a whole text. ``shut``: the answer began like a reasoning block, but the grammar does not allow one here."""
    now, seen, before = Reading(), [], len(symbols(prompt))
    start, ends, implicit = (
        symbols(rule.think_start),
        [*map(symbols, rule.think_ends)],
        [*map(symbols, rule.implicit_ends)],
    )
    for index, token in enumerate([*prompt, *output]):
        in_prompt = index < len(prompt)
        if now.forced is not None and not in_prompt:
            begin = len(symbols(rule.forced_end[: now.forced]))
            for at, symbol in enumerate(VOCABULARY.symbols(token), begin):
                place = rule.forced_delimiter
                after = "delimiter" if grammar else "answer"
                kind = "reasoning" if at < place.start else "delimiter" if at < place.stop else after
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
                relabel(now.roles, len(closed), "answer" if closed in implicit else "delimiter")
                now.thinking, whole, seen = False, False, []
            elif opened and (in_prompt or may_open(now, len(start), len(now.roles) - before, grammar, shut)):
                relabel(now.roles, len(start), "delimiter")
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
    """Return whether a reasoning block may open here. With a grammar it may only open before the answer."""
    return not now.thinking and (not grammar or (now.thinking is None and size >= written and not shut))


def relabel(roles, size, kind):
    roles[len(roles) - size :] = [(kind, symbol) for _, symbol in roles[len(roles) - size :]]


def roles_of(spans):
    return [(span.role, symbol) for span in spans for symbol in symbols(span.tokens)]


@settings(max_examples=200, **patient)
@given(rule=rules(), prompt=tokens, data=st.data())
def test_every_symbol_has_the_role_that_the_reference_reader_gives_it(rule, prompt, data):
    """Covers start, end, implicit end and forced end, in prompt and output."""
    state, output, spans = constraint(rule, prompt), [], []
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
        spans += state.commit(output[-1:]).spans
        roles = read(rule, prompt, output).roles
        certain = roles_of(spans)
        assert certain == roles[: len(certain)]
        assert (
            certain + roles_of([state.undecided_span])
            == [(kind, symbol) for kind, symbol in roles[: len(certain)]] + roles[len(certain) :]
        )
        emitted = sum(span.emitted for span in (*spans, state.undecided_span))
        assert emitted == len(output)


# With a grammar, a row allows exactly the tokens that lead to an acceptable text.


def accepts(grammar: str, text) -> bool:
    """Return whether a text of the grammar may begin with ``text``."""
    matcher = GRAMMARS[grammar].matcher()
    return all(symbol < CONTROL and matcher.accept(symbol) for symbol in text)


def allowed_by(rule, prompt, output, grammar, candidate) -> bool:
    """Return whether ``candidate`` is legal after prompt and output."""
    before = read(rule, prompt, output, grammar)
    if before.forced is not None:
        return candidate == rule.forced_end[before.forced]
    reading = read(rule, prompt, [*output, candidate], grammar)
    answer = [symbol for kind, symbol in reading.roles if kind == "answer"]
    if reading.thinking is None and begins_block(rule, prompt, [*output, candidate]):
        return True
    return accepts(grammar, answer)


def begins_block(rule, prompt, output) -> bool:
    """Return whether all of the output is part of a block's start that is not complete yet."""
    text, start = symbols([*prompt, *output]), symbols(rule.think_start)
    size = len(symbols(output))
    if any(tuple(text[:end][-len(start) :]) == tuple(start) for end in range(len(text) - size + 1, len(text) + 1)):
        return False  # a start is complete in the output, and another one cannot overlap it
    return any(text[-length:] == start[:length] for length in range(size, min(len(start), len(text) + 1)))


@pytest.mark.parametrize("begun", ["", "a", "aa"])
@pytest.mark.parametrize("together", [True, False], ids=["one token", "letters"])
def test_the_grammar_reads_only_the_output_part_of_a_delimiter_that_began_in_the_prompt(begun, together):
    rule = ThinkingRule(tuple(b"<<"), [tuple(b"<a<<")], tuple(b"<a<<"), [tuple(b"aa<a")], vocabulary=VOCABULARY)
    opened = f"<<{begun}".encode()
    state = constraint(rule, [len(SINGLE) + TEXTS.index(opened)] if together else [*opened], "<?a<?")
    for letter in b"aa<"[len(begun) :]:
        assert letter in row_of(state)
        state.commit([letter])
    assert (ord("a") in row_of(state)) == (begun == "aa")  # the grammar accepts "<a" and rejects "a<a" and "aa<a"
    assert state.phase is Phase.THINKING


@settings(max_examples=80, **patient)
@given(rule=rules(), prompt=tokens, grammar=st.sampled_from(sorted(GRAMMARS)), data=st.data())
def test_a_row_allows_a_delimiter_end_if_the_grammar_accepts_the_rest_of_the_token(rule, prompt, grammar, data):
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
def test_the_rows_of_a_draft_window_equal_token_by_token_rows(rule, prompt, grammar, data):
    """Start, end and forced end may lie inside the window. Filling rows leaves no state changed."""
    state, replay = constraint(rule, prompt, grammar), constraint(rule, prompt, grammar)
    draft, expected, spans = [], [row_of(replay)], []
    for _ in range(data.draw(st.integers(0, 6))):
        legal = sorted(expected[-1] & {*TEXT_TOKENS, TAG, *map(ord, LETTERS)})
        if not legal:
            break
        draft.append(data.draw(st.sampled_from(legal)))
        spans += replay.commit(draft[-1:]).spans
        expected.append(row_of(replay))
    rows = np.full((len(draft) + 1, mask_words(WIDTH)), UNREAD, np.int32)
    for _ in range(2):
        assert state.fill_rows(draft, MaskRows(rows), 0).tokens == draft
        assert [tokens_in(row) for row in rows] == expected
    commit = state.commit(draft)
    assert commit.kept == draft
    assert roles_of(commit.spans) == roles_of(spans)
    assert (state.phase, state.reasoning_tokens, row_of(state)) == (
        replay.phase,
        replay.reasoning_tokens,
        expected[-1],
    )


# Tokens as in Llama 3: ``<th`` ``ink`` ``>\n``, ``.</`` ``think`` ``>\n\n``.

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
    arguments = {
        "think_start": list(b"<think>"),
        "think_ends": [list(b"</think>")],
        "forced_end": list(b"</think>"),
    } | changes
    return ThinkingRule(**arguments, vocabulary=LLAMA_3)


def llama(prompt=(), grammar=None, **changes) -> Constraint:
    compiler = GrammarCompiler(LLAMA_3, [LLAMA_STOP])
    matcher = compiler.compile("json", grammar).matcher() if grammar else None
    width = LLAMA_STOP + 1
    return Constraint(width, [LLAMA_STOP], prompt=prompt, thinking=llama_rule(**changes), grammar=matcher)


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
def test_the_phase_of_a_prompt_follows_from_its_text(prompt, phase, spent):
    r"""A prompt that ends in ``<think>\n`` is inside a reasoning block."""
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
def test_a_token_is_split_at_the_end_of_a_delimiter_inside_it(output, reasoning, answer):
    state = llama()
    spans = [span for token in ids(*output) for span in state.commit([token]).spans]

    def text_of_role(kind):
        return b"".join(LLAMA_3.tokens[token] for span in spans if span.role == kind for token in span.tokens)

    assert (text_of_role("reasoning").decode(), text_of_role("answer").decode()) == (reasoning, answer)
    assert sum(span.emitted for span in spans) == len(output)


def test_a_grammar_begins_inside_the_token_that_ends_the_delimiter():
    state = llama(ids(b"<th", b"ink", b">\n"), '{"type": "object"}')
    state.commit(ids(b"</", b"think"))
    width = LLAMA_STOP + 1
    rows = np.full((1, mask_words(width)), UNREAD, np.int32)
    state.fill_rows([], MaskRows(rows), 0)
    row = tokens_in(rows[0])
    assert {LLAMA_IDS[b">{"], LLAMA_IDS[b'>{"'], ord(">"), LLAMA_IDS[b"Hm"]} <= row
    assert row.isdisjoint([*ids(b">\n", b">\n\n"), LLAMA_STOP]), "no JSON begins with a line break here"
    commit = state.commit([*ids(b'>{"'), *b'":1}', LLAMA_STOP])
    assert commit.finish == "stop"
    assert [(span.role, [LLAMA_3.tokens[token] for token in span.tokens]) for span in commit.spans] == [
        ("delimiter", [b"</", b"think", b">"]),
        ("answer", [b'{"', b'"', b":", b"1", b"}"]),
    ]


def test_a_budget_counts_tokens_after_the_delimiter_and_forces_a_phrase_that_contains_one():
    """The forced phrase may begin with line breaks, and its last token may extend past the delimiter."""
    phrase = [*ids(b"\n\n", b"Hm"), *b"\n", *ids(b"</", b"think", b">\n\n")]
    state = llama(budget=2, forced_end=phrase)
    commit = state.commit([*ids(b"<th", b"ink", b">\n", b"Hm", b"Hm"), *phrase, *ids(b"Hm")])
    assert (state.phase, state.reasoning_tokens, state.forced_ends) == (Phase.ANSWER, 2, 1)
    assert [(p.role, b"".join(LLAMA_3.tokens[token] for token in p.tokens)) for p in commit.spans] == [
        ("delimiter", b"<think>"),
        ("reasoning", b"\nHmHm\n\nHm\n"),
        ("delimiter", b"</think>"),
        ("answer", b"\n\nHm"),
    ]


def test_stop_tokens_are_allowed_once_the_answer_has_begun():
    """Regression: a missed end kept stop tokens masked, and the request ran to max_tokens with an empty answer."""
    state = llama(ids(b"<th", b"ink", b">\n"))
    commit = state.commit([*ids(b"Hm", b".</", b"think", b">\n\n", b"Hm"), LLAMA_STOP])
    assert (commit.finish, commit.stop_token) == ("stop", LLAMA_STOP)
