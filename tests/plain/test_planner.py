"""Prefill planning of a round: one token budget in queue order, and few sizes of calls with prompts."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.contract.calls import (
    NO_PROMPTS,
    TILE,
    largest_calls,
    largest_prompts,
    most_query,
    packed,
    packed_sizes,
    repacked,
    unpadded,
)
from tandemrt.engines.contract.contract import BLOCK_SIZE
from tandemrt.engines.contract.draft_kinds import DRAFT_KINDS
from tandemrt.runtime.device.prompt_plan import Chunk, group_equal_chunks, num_tokens, plan

SLOTS = 6
MISSING = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 40)).map(lambda each: (each[0], sum(each))), max_size=SLOTS
).flatmap(lambda spans: st.permutations([Chunk(slot, *span) for slot, span in enumerate(spans)]))


@given(MISSING, st.integers(1, 200))
def test_a_plan_spends_the_whole_budget_in_queue_order(missing: list[Chunk], budget: int) -> None:
    chunks = plan(missing, budget)
    assert num_tokens(chunks) == min(budget, num_tokens(missing))
    assert all(chunk.tokens for chunk in chunks)
    wanted = [chunk for chunk in missing if chunk.tokens]
    *whole, last = chunks or [None]
    assert whole == wanted[: len(whole)], "an earlier chunk is planned completely before a later one"
    if last is not None:
        first = wanted[len(whole)]
        assert (last.slot, last.start) == (first.slot, first.start)
        assert last.end <= first.end


@given(MISSING, st.integers(1, 30))
def test_every_token_is_prefilled_once_and_in_order(missing: list[Chunk], budget: int) -> None:
    at = {chunk.slot: chunk.start for chunk in missing}
    rounds = 0
    while chunks := plan([chunk._replace(start=at[chunk.slot]) for chunk in missing], budget):
        rounds += 1
        for slot, start, end in chunks:
            assert start == at[slot]
            at[slot] = end
    assert at == {chunk.slot: chunk.end for chunk in missing}
    assert rounds == -(-num_tokens(missing) // budget)


@given(MISSING, st.integers(1, 30), st.lists(st.integers(1, 15), min_size=2, max_size=8))
def test_no_chunk_ends_within_an_image(missing: list[Chunk], budget: int, lengths: list[int]) -> None:
    ends = list(accumulate(lengths))
    images = list(zip(ends[::2], ends[1::2], strict=False))
    whole, at = dict.fromkeys(range(SLOTS), images), {chunk.slot: chunk.start for chunk in missing}
    at = {slot: next((end for begin, end in images if begin < start < end), start) for slot, start in at.items()}
    while left := [Chunk(slot, at[slot], end) for slot, _, end in missing if at[slot] < end]:
        first, *others = plan(left, budget, whole=whole)
        assert first.slot == left[0].slot
        assert not others or num_tokens([first, *others]) <= budget
        for slot, start, end in (first, *others):
            assert start == at[slot]
            at[slot] = end
            text_ends = {chunk.slot: chunk.end for chunk in left}
            assert end == text_ends[slot] or not any(begin < end < after for begin, after in images)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 500)), min_size=1, max_size=SLOTS), st.integers(64, 600))
def test_texts_are_cut_at_block_ends_alone(texts: list[tuple[int, int]], budget: int) -> None:
    at = [blocks * BLOCK_SIZE for blocks, _ in texts]  # where cached prefixes end
    ends = [start + tokens for start, (_, tokens) in zip(at, texts, strict=True)]
    while missing := [Chunk(slot, at[slot], end) for slot, end in enumerate(ends) if at[slot] < end]:
        chunks = plan(missing, budget, at_block_ends=True)
        assert 0 < num_tokens(chunks) <= budget
        assert [chunk[:2] for chunk in chunks] == [chunk[:2] for chunk in missing[: len(chunks)]]
        for slot, _, end in chunks:
            assert end % BLOCK_SIZE == 0 or end == ends[slot]
            at[slot] = end
    assert at == ends


@given(MISSING, st.integers(1, 60))
def test_calls_on_a_linear_cache_are_rectangles_of_adjacent_slots(missing: list[Chunk], budget: int) -> None:
    chunks = plan(missing, budget)
    rectangles = group_equal_chunks(chunks)
    assert sorted(chunk for rectangle in rectangles for chunk in rectangle) == sorted(chunks)
    for rectangle in rectangles:
        assert len({chunk.tokens for chunk in rectangle}) == 1
        assert [chunk.slot for chunk in rectangle] == list(range(rectangle[0].slot, rectangle[-1].slot + 1))


@given(st.integers(0, 600), st.integers(1, 5000), st.integers(1, 64))
def test_a_packed_call_fits_its_prompts_with_little_padding(windows: int, tokens: int, runs: int) -> None:
    prompt_tokens, prompts = packed(windows, tokens, runs)
    assert tokens <= prompt_tokens <= max(16, 2 * (windows + tokens))
    assert prompt_tokens - tokens < TILE
    assert runs <= prompts < 4 * runs
    assert windows + tokens <= TILE or (windows + prompt_tokens) % TILE == 0


@given(st.integers(0, 600), st.integers(1, 5000))
def test_a_call_is_filled_completely_if_enough_tokens_wait(windows: int, most: int) -> None:
    """Draft windows count, unless they would leave prompts less than half of the call."""
    tokens = unpadded(windows, most)
    assert most / 2 <= tokens <= most
    if tokens < most:
        assert most - TILE < windows + tokens <= most
        assert packed(windows, tokens, 1).prompt_tokens == tokens


@given(st.sampled_from([*DRAFT_KINDS]), st.integers(1, 64), st.integers(0, 16), st.integers(1, 4096), st.data())
def test_the_largest_call_fits_every_other_call_and_the_draft_call(
    kind: str, batch: int, window: int, chunk: int, data: st.DataObject
) -> None:
    query, rows = most_query(kind, window), data.draw(st.integers(0, batch))
    windows = rows * data.draw(st.integers(1, query))
    tokens, runs = data.draw(st.integers(1, chunk)), data.draw(st.integers(1, batch))
    call, largest = packed(windows, tokens, runs), largest_prompts(batch, chunk)
    most = max(sizes["tokens"] for sizes in largest_calls(kind, batch, window, chunk))
    for others in (windows, 2 * rows, query * rows, 0):
        each = call if others == windows else repacked(others, call)
        assert call.prompt_tokens <= each.prompt_tokens <= largest.prompt_tokens
        assert each.prompts == call.prompts <= largest.prompts
        assert others + each.prompt_tokens <= most
        assert others + each.prompt_tokens in packed_sizes(most)


def test_a_round_without_prompts_has_a_call_without_prompts() -> None:
    assert packed(5, 0, 0) == NO_PROMPTS
