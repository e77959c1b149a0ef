"""Rounds of a preempted request process its output again, in windows of any size, then repeat the dropped round."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.validation.errors import InternalError
from tandemrt.runtime.constraints.rows import MaskRows
from tandemrt.runtime.requests.replay import Replay
from tests.plain.constraints import tokens_in

TOKENS = st.integers(0, 63)


@given(
    output=st.lists(TOKENS, min_size=1, max_size=20),
    windows=st.lists(st.integers(0, 5), min_size=20, max_size=20),
    dropped=st.booleans(),
)
def test_rounds_allow_the_output_alone_and_then_the_dropped_round_is_repeated(
    output: list[int], windows: list[int], dropped: bool
) -> None:
    replay = Replay()
    replay.drop_round(fast_forward=dropped, waits_for_drafts=False)
    replay.start(output)
    processed: list[int] = []
    for window in windows:
        if not replay.rereading:
            break
        assert replay.fast_forward is True
        replay.mark_planned()
        masks = np.full((window + 1, 2), -1, np.int32)
        drafts = replay.next_drafts(window)
        filled = replay.fill_rows(MaskRows(masks), 0, window)
        assert (filled.tokens, filled.fast_forward) == (drafts, list(range(len(drafts))))
        emitted = [token for row in masks[: len(drafts) + 1] for token in tokens_in(row)]
        replay.advance(emitted)
        processed += emitted
    assert processed == output
    assert replay.fast_forward is dropped
    replay.mark_planned()
    assert replay.fast_forward is None


def test_a_preemption_while_output_is_processed_again_keeps_the_older_dropped_round() -> None:
    replay = Replay()
    replay.drop_round(fast_forward=False, waits_for_drafts=False)
    replay.start([7, 8, 9])
    replay.advance([7])
    replay.drop_round(fast_forward=True, waits_for_drafts=True)
    assert replay.stop() == [8, 9]
    assert (replay.fast_forward, replay.waits_for_drafts) == (False, True)


@pytest.mark.parametrize("emitted", [[], [8], [7, 8, 9]])
def test_a_round_that_emits_other_tokens_is_an_error(emitted: list[int]) -> None:
    replay = Replay()
    replay.start([7, 8])
    with pytest.raises(InternalError, match="processes again"):
        replay.advance(emitted)
    assert replay.stop() == [7, 8], "nothing is lost"
