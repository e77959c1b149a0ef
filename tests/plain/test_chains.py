"""Mask tokens after texts, as parallel drafts are trained: their valid positions."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tools.drafts.chains import draw, with_masks
from tools.drafts.texts import Batch

TEXTS = st.integers(2, 9).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length - 1)))


@given(
    texts=st.lists(TEXTS, min_size=1, max_size=3),
    window=st.integers(2, 5),
    kept=st.floats(0.1, 0.95),
    seed=st.integers(0, 99),
)
def test_consecutive_mask_tokens_follow_answers_and_predict_tokens_of_the_text(
    texts: list[tuple[int, int]], window: int, kept: float, seed: int
) -> None:
    ids = torch.full((len(texts), max(length for length, _ in texts)), -1)
    for row, (length, _) in enumerate(texts):
        ids[row, :length] = row
    batch = Batch(ids, torch.tensor([begin for _, begin in texts]))
    chains = draw(batch, window, kept, torch.Generator().manual_seed(seed))
    rows = with_masks(ids, chains)
    for row, (length, begin) in enumerate(texts):
        there = [(int(a), int(d)) for a, d in zip(chains.anchors[row], chains.depths[row], strict=True) if a >= 0]
        assert len(set(there)) == len(there)
        for anchor, depth in there:
            assert begin - 1 <= anchor < anchor + depth < length - 1
            assert 1 <= depth < window
            assert depth == 1 or (anchor, depth - 1) in there
            at = ids.shape[1] + there.index((anchor, depth))
            seen = rows.seen[row, 0, at].nonzero()[:, 0].tolist()
            places = sorted(int(rows.places[row, each]) for each in seen)
            assert places == list(range(anchor + depth + 1)), "the text up to its anchor, then the masks"
