"""The layout of prompts in a packed call: one copy holds tokens, runs and their positions."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.contract.calls import largest_prompts, packed, repacked
from tandemrt.runtime.caches.call_layout import MAX_PACKED_CALLS, PackedLayout, cache_calls
from tandemrt.runtime.device.prompt_plan import Chunk, num_tokens
from tandemrt.runtime.device.round_shape import RoundShape

SLOTS, BLOCKS, MOST, WINDOWS = 5, 3, 150, 40
CHUNKS = (
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), min_size=1, max_size=SLOTS)
    .flatmap(lambda spans: st.tuples(st.just(spans), st.permutations(range(SLOTS))))
    .map(
        lambda both: [
            Chunk(slot, start, start + tokens) for (start, tokens), slot in zip(both[0], both[1], strict=False)
        ]
    )
)


@given(st.lists(st.tuples(CHUNKS, st.integers(0, WINDOWS)), min_size=1, max_size=3), st.integers(0, WINDOWS))
def test_target_and_draft_calls_read_prompts_after_their_draft_windows(
    calls: list[tuple[list[Chunk], int]], draft: int
) -> None:
    table = torch.arange(SLOTS * BLOCKS, dtype=torch.int32).view(SLOTS, BLOCKS)
    runs = PackedLayout(windows=WINDOWS, largest=largest_prompts(SLOTS, MOST), table=table)
    texts = {slot: list(range(100 * slot, 100 * slot + 40)) for slot in range(SLOTS)}
    for chunks, windows in calls:
        targets = packed(windows, num_tokens(chunks), len(chunks))
        runs.write(chunks, texts, targets)
        fed = [texts[slot][start:end] for slot, start, end in chunks]
        tokens = [token for run in fed for token in run]
        for others, sizes in ((windows, targets), (draft, repacked(draft, targets))):
            own = torch.zeros(others, 1, dtype=torch.int64)
            runs.windows(own, sizes).fill_(-7)
            ids, bound = runs.token_ids(own, sizes), runs.bindings(sizes)
            padding, empty = sizes.prompt_tokens - len(tokens), sizes.prompts - len(chunks)
            assert ids.tolist() == [-7] * others + tokens + [0] * padding
            rows = [row for row, run in enumerate(fed) for _ in run]
            assert bound["prompt_rows"].tolist() == rows + [-1] * padding
            starts = [sum(map(len, fed[:row])) for row in range(len(fed) + 1)]
            assert bound["prompt_starts"].tolist() == starts + [len(tokens)] * empty
            assert bound["prompt_index"].tolist()[: len(chunks)] == [chunk.start for chunk in chunks]
            assert bound["prompt_table"].tolist()[: len(chunks)] == [table[chunk.slot].tolist() for chunk in chunks]
            assert [len(bound[name]) for name in ("prompt_index", "prompt_table")] == [sizes.prompts] * 2
            assert all(tensor.is_contiguous() for tensor in (ids, *bound.values()))


def test_missing_lookahead_tokens_are_zero_and_other_runs_keep_their_positions() -> None:
    table = torch.arange(SLOTS * BLOCKS, dtype=torch.int32).view(SLOTS, BLOCKS)
    runs = PackedLayout(windows=0, largest=largest_prompts(SLOTS, MOST), table=table)
    chunks, texts = [Chunk(0, 1, 4), Chunk(2, 0, 2)], {0: [10, 11, 12, 13, 14], 2: [20, 21, 22]}
    sizes = packed(0, 5, 2)
    for ahead, expected in ((1, [12, 13, 14, 21, 22]), (2, [13, 14, 0, 22, 0]), (3, [14, 0, 0, 0, 0])):
        runs.write(chunks, texts, sizes, ahead=ahead)
        assert runs.token_ids(torch.zeros(0, 1), sizes).tolist()[:5] == expected


def test_calls_with_prompts_are_dropped_when_they_are_oldest_and_others_never() -> None:
    bound: list[RoundShape] = []

    def bind(shape: RoundShape) -> RoundShape:
        bound.append(shape)
        return shape

    calls = cache_calls(bind)  # type: ignore[arg-type]
    plain = [RoundShape(batch, 1) for batch in range(1, MAX_PACKED_CALLS + 3)]
    prompts = [shape._replace(prompts=packed(0, 1, 1)) for shape in plain]
    for shape in (*plain, *prompts, *plain, prompts[-1]):
        calls(shape)
    assert bound == [*plain, *prompts]
    calls(prompts[0])
    assert bound[-1] == prompts[0], "it was dropped"
