"""Kept pairs: the last (token, feature) pairs of every text are kept, for any order of prompts and rounds."""

from hypothesis import given
from hypothesis import strategies as st

from tandemrt.plugins.tensors import torch
from tandemrt.runtime.drafters.kept_pairs import KeptPairs

SLOTS, QUERY = 3, 4
PROMPT = st.tuples(st.just("prompt"), st.integers(0, SLOTS - 1), st.integers(1, 5))
ROUND = st.tuples(
    st.just("round"), st.integers(1, QUERY), st.lists(st.integers(0, QUERY), min_size=SLOTS, max_size=SLOTS)
)
BEGIN = st.tuples(st.just("begin"), st.integers(0, SLOTS - 1), st.none())


@given(st.integers(1, 3), st.lists(st.one_of(PROMPT, ROUND, BEGIN), max_size=12))
def test_the_last_pairs_of_each_text_are_kept_before_emitted_ones(kept: int, steps: list) -> None:
    tokens = torch.zeros(SLOTS, kept + QUERY + 2, dtype=torch.int64).fill_(-1)
    states = torch.zeros(SLOTS, kept + QUERY, 2)
    counts = torch.zeros(SLOTS, dtype=torch.int64)
    pairs = KeptPairs(tokens, states, counts, kept=kept, query=QUERY)
    texts: list[list[int]] = [[] for _ in range(SLOTS)]  # tokens of the kept pairs, per slot
    reading, new = [True] * SLOTS, [0] * SLOTS
    following = iter(range(1, 10_000))

    def stated(values: list[int]) -> list[list[float]]:
        return [[value, -value] for value in values]

    for kind, which, how in steps:
        if kind == "begin":
            pairs.clear(which)
            counts[which] = 0
            texts[which], reading[which], new[which] = [], True, 0
        elif kind == "prompt":
            if not reading[which]:
                continue
            read = [next(following) for _ in range(how)]
            pairs.hide(which)
            assert int(counts[which]) == 0
            pairs.carry(which, read[-kept:], torch.tensor(stated(read), dtype=torch.float32))
            texts[which] += read
            new[which] = 0
        else:
            query = which
            emitted = [[next(following) for _ in range(min(count, query))] for count in how]
            rows = [[*each, *[-1] * (query - len(each))] for each in emitted]
            new_states = torch.tensor([stated(row) for row in rows], dtype=torch.float32)
            pairs.add_emitted(torch.tensor(rows), new_states, torch.tensor([len(each) for each in emitted]))
            for slot, each in enumerate(emitted):
                texts[slot] += each
                new[slot] = len(each)
                reading[slot] = reading[slot] and not each
        for slot, text in enumerate(texts):
            expected = text[-(kept + new[slot]) :]
            count = int(counts[slot])
            assert tokens[slot, :count].tolist() == expected
            assert states[slot, :count].tolist() == stated(expected)
            assert tokens[slot, kept + QUERY :].tolist() == [-1, -1]
