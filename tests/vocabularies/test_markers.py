"""Markers of reasoning in real tokenizers, as reading all bytes anew finds them, however tokens cut the text."""

from itertools import product
from random import Random

import numpy as np

from tandemrt.engines.contract import mask_words
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.masks import MaskRows
from tandemrt.runtime.constraints.state import Phase
from tests.vocabularies.conftest import Family

BEFORE = ["", "\n", "\n\n", "a", ".", " so", "x <", "</", "你好", "Here is my"]
BEHIND = ["", "\n", "\n\n", " yes", ">", "</", "42", "é"]
ANSWER = r"(\n\n|\n| )?(yes|no|[0-9]{1,3})"


def commit(family: Family, state: Constraint, tokens: list[int], random: Random) -> dict[str, tuple[int, ...]]:
    """Take ``tokens`` in windows of any size, whose rows must allow them; what they spell, by role."""
    found: dict[str, tuple[int, ...]] = {"reasoning": (), "marker": (), "answer": ()}
    at = 0
    while at < len(tokens):
        window = tokens[at : at + random.randrange(1, 6)]
        rows = np.zeros((len(window) + 1, mask_words(family.width)), np.int32)
        assert state.fill(window, MaskRows(rows), 0).tokens == window
        done = state.commit(window)
        assert done.kept == window
        for piece in done.pieces:
            found[piece.kind] += family.vocabulary.spelled(piece.tokens)
        at += len(window)
    held = state.undecided
    found[held.kind] += family.vocabulary.spelled(held.tokens)
    return found


def spellings(family: Family, text: str, random: Random) -> list[list[int]]:
    """As the tokenizer spells it, and cut in two other ways."""
    ids = family.encode(text)
    return [ids, family.cut(ids, random), family.cut(ids, random)]


def symbols(family: Family, text: str) -> tuple[int, ...]:
    return family.vocabulary.spelled(family.encode(text))


def test_a_prompt_says_whether_a_block_is_open_however_it_is_cut(family: Family) -> None:
    random, rule = Random(2), family.rule()
    marks = family.reasoning
    for before, behind in product(BEFORE, BEHIND):
        cases = {
            before + behind: Phase.OPEN,
            before + marks.start + behind: Phase.THINKING,
            before + marks.start + "why" + marks.end + behind: Phase.ANSWER,
        }
        for text, phase in cases.items():
            for prompt in spellings(family, text, random):
                assert family.constraint(thinking=rule, prompt=prompt).phase is phase, (text, prompt)


def test_the_roles_of_a_text_are_those_of_its_bytes(family: Family) -> None:
    """A block that the prompt opened ends at the first end marker; a second block begins with a start marker."""
    random, rule, marks = Random(3), family.rule(), family.reasoning
    prompt, marker = family.encode(marks.start), symbols(family, marks.end)
    for before, behind in product(BEFORE, BEHIND):
        text = f"{before}{marks.end}{behind}"
        for tokens in spellings(family, text, random):
            found = commit(family, family.constraint(thinking=rule, prompt=prompt), tokens, random)
            written = family.vocabulary.spelled(tokens)
            at = next(i for i in range(len(written)) if written[i : i + len(marker)] == marker)
            assert found["reasoning"] == written[:at], (text, tokens)
            assert found["answer"] == written[at + len(marker) :], (text, tokens)
    text = f"{marks.start}a{marks.end}b{marks.start}c{marks.end}d"
    for tokens in spellings(family, text, random):
        found = commit(family, family.constraint(thinking=rule), tokens, random)
        assert (found["reasoning"], found["answer"]) == (tuple(b"ac"), tuple(b"bd"))


def test_the_grammar_begins_behind_the_marker_inside_of_its_token_too(family: Family) -> None:
    rule, marks, random = family.rule(), family.reasoning, Random(4)
    grammar = family.compiler.compile("regex", ANSWER)

    def thinking() -> Constraint:
        return family.constraint(thinking=rule, prompt=family.encode(marks.start), grammar=grammar.matcher())

    for before, (answer, fits) in product(
        BEFORE, [("yes", True), ("\n\nno", True), (" 42", True), ("\n7", True), ("maybe", False), ("\n\n\nno", False)]
    ):
        for tokens in spellings(family, f"{before}{marks.end}{answer}", random):
            if fits:
                found = commit(family, state := thinking(), tokens, random)
                assert found["answer"] == tuple(answer.encode())
                assert state.commit([family.stop]).finish == "stop"
            else:
                rows = np.zeros((len(tokens) + 1, mask_words(family.width)), np.int32)
                assert len(thinking().fill(tokens, MaskRows(rows), 0).tokens) < len(tokens), (before, answer)


def test_a_spent_budget_writes_the_forced_end_token_by_token(family: Family) -> None:
    rule, marks = family.rule(budget=3), family.reasoning
    state = family.constraint(thinking=rule, prompt=family.encode(marks.start))
    for token in (spent := family.encode("so it is then")[:3]):
        assert not family.row(state)[family.stop]
        state.commit([token])
    found: dict[str, tuple[int, ...]] = {"reasoning": (), "marker": (), "answer": ()}
    for token in rule.forced_end:
        assert np.flatnonzero(family.row(state)).tolist() == [token]
        for piece in state.commit([token]).pieces:
            found[piece.kind] += family.vocabulary.spelled(piece.tokens)
    assert state.phase is Phase.ANSWER
    before, behind = marks.forced_end.split(marks.end)
    assert found["reasoning"] == symbols(family, before)
    assert (found["marker"], found["answer"]) == (symbols(family, marks.end), tuple(behind.encode()))
    assert state.reasoning_tokens == len(spent)
