"""Reasoning delimiters in real tokenizers are found independent of how tokens split the text."""

from itertools import product
from random import Random

import numpy as np

from tandemrt.engines.contract.masks import mask_words
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.rows import MaskRows
from tandemrt.runtime.constraints.transitions import Phase
from tests.vocabularies.conftest import Family

BEFORE = ["", "\n", "\n\n", "a", ".", " so", "x <", "</", "你好", "Here is my"]
AFTER = ["", "\n", "\n\n", " yes", ">", "</", "42", "é"]
ANSWER = r"(\n\n|\n| )?(yes|no|[0-9]{1,3})"


def commit(family: Family, state: Constraint, tokens: list[int], random: Random) -> dict[str, tuple[int, ...]]:
    """Commit ``tokens`` in draft windows of random size whose rows must allow them. Return their text by role."""
    symbols_of_roles: dict[str, tuple[int, ...]] = {"reasoning": (), "delimiter": (), "answer": ()}
    at = 0
    while at < len(tokens):
        window = tokens[at : at + random.randrange(1, 6)]
        rows = np.zeros((len(window) + 1, mask_words(family.width)), np.int32)
        assert state.fill_rows(window, MaskRows(rows), 0).tokens == window
        done = state.commit(window)
        assert done.kept == window
        for span in done.spans:
            symbols_of_roles[span.role] += family.vocabulary.symbols_of(span.tokens)
        at += len(window)
    undecided = state.undecided_span
    symbols_of_roles[undecided.role] += family.vocabulary.symbols_of(undecided.tokens)
    return symbols_of_roles


def tokenizations(family: Family, text: str, random: Random) -> list[list[int]]:
    """Return the tokenizer's own tokens, and two other tokenizations of the same text."""
    ids = family.encode(text)
    return [ids, family.retokenize(ids, random), family.retokenize(ids, random)]


def symbols(family: Family, text: str) -> tuple[int, ...]:
    return family.vocabulary.symbols_of(family.encode(text))


def test_an_open_block_of_a_prompt_is_found_for_any_tokenization(family: Family) -> None:
    random, rule = Random(2), family.rule()
    marks = family.reasoning
    for before, after in product(BEFORE, AFTER):
        cases = {
            before + after: Phase.OPEN,
            before + marks.start + after: Phase.THINKING,
            before + marks.start + "why" + marks.end + after: Phase.ANSWER,
        }
        for text, phase in cases.items():
            for prompt in tokenizations(family, text, random):
                assert family.constraint(thinking=rule, prompt=prompt).phase is phase, (text, prompt)


def test_the_roles_of_a_text_follow_from_its_bytes(family: Family) -> None:
    """A block of the prompt ends at the first end delimiter. A second block begins with a start delimiter."""
    random, rule, marks = Random(3), family.rule(), family.reasoning
    prompt, delimiter = family.encode(marks.start), symbols(family, marks.end)
    for before, after in product(BEFORE, AFTER):
        text = f"{before}{marks.end}{after}"
        for tokens in tokenizations(family, text, random):
            symbols_of_roles = commit(family, family.constraint(thinking=rule, prompt=prompt), tokens, random)
            written = family.vocabulary.symbols_of(tokens)
            at = next(i for i in range(len(written)) if written[i : i + len(delimiter)] == delimiter)
            assert symbols_of_roles["reasoning"] == written[:at], (text, tokens)
            assert symbols_of_roles["answer"] == written[at + len(delimiter) :], (text, tokens)
    text = f"{marks.start}a{marks.end}b{marks.start}c{marks.end}d"
    for tokens in tokenizations(family, text, random):
        symbols_of_roles = commit(family, family.constraint(thinking=rule), tokens, random)
        assert (symbols_of_roles["reasoning"], symbols_of_roles["answer"]) == (tuple(b"ac"), tuple(b"bd"))


def test_the_grammar_begins_after_the_delimiter_even_inside_its_token(family: Family) -> None:
    rule, marks, random = family.rule(), family.reasoning, Random(4)
    grammar = family.compiler.compile("regex", ANSWER)

    def thinking() -> Constraint:
        return family.constraint(thinking=rule, prompt=family.encode(marks.start), grammar=grammar.matcher())

    for before, (answer, fits) in product(
        BEFORE, [("yes", True), ("\n\nno", True), (" 42", True), ("\n7", True), ("maybe", False), ("\n\n\nno", False)]
    ):
        for tokens in tokenizations(family, f"{before}{marks.end}{answer}", random):
            if fits:
                symbols_of_roles = commit(family, state := thinking(), tokens, random)
                assert symbols_of_roles["answer"] == tuple(answer.encode())
                assert state.commit([family.stop]).finish == "stop"
            else:
                rows = np.zeros((len(tokens) + 1, mask_words(family.width)), np.int32)
                assert len(thinking().fill_rows(tokens, MaskRows(rows), 0).tokens) < len(tokens), (before, answer)


def test_a_spent_budget_writes_the_forced_end_token_by_token(family: Family) -> None:
    rule, marks = family.rule(budget=3), family.reasoning
    state = family.constraint(thinking=rule, prompt=family.encode(marks.start))
    for token in (spent := family.encode("so it is then")[:3]):
        assert not family.row(state)[family.stop]
        state.commit([token])
    symbols_of_roles: dict[str, tuple[int, ...]] = {"reasoning": (), "delimiter": (), "answer": ()}
    for token in rule.forced_end:
        assert np.flatnonzero(family.row(state)).tolist() == [token]
        for span in state.commit([token]).spans:
            symbols_of_roles[span.role] += family.vocabulary.symbols_of(span.tokens)
    assert state.phase is Phase.ANSWER
    before, after = marks.forced_end.split(marks.end)
    assert symbols_of_roles["reasoning"] == symbols(family, before)
    assert (symbols_of_roles["delimiter"], symbols_of_roles["answer"]) == (
        symbols(family, marks.end),
        tuple(after.encode()),
    )
    assert state.reasoning_tokens == len(spent)
