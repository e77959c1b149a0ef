"""However a request ends, and whatever raises: its slot is freed, it is counted, and its listener is notified."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tandemrt import StreamOutput
from tandemrt.runtime.caches.linear import LinearCacheManager
from tandemrt.runtime.device.buffers import RoundBuffers
from tandemrt.runtime.engine_loop.commit import Committer
from tandemrt.runtime.engine_loop.draft_windows import DraftWindowPlanner
from tandemrt.runtime.engine_loop.planner import plan_round
from tandemrt.runtime.engine_loop.steady_rows import SteadyRows
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.request import Finish
from tandemrt.runtime.requests.round import VerifiedRound
from tandemrt.runtime.requests.running import DroppedRequest, RunningRequest
from tandemrt.runtime.requests.slots import PendingValidations, Slots
from tests.plain.requests import ids, make_queued

WINDOW = 4


class FailingListener:
    """A listener whose device has failed."""

    def join(self, running: RunningRequest) -> None:
        pass

    def leave(self, slot: int) -> None:
        raise RuntimeError(f"the device failed, slot {slot} with it")


class FailingTokenizer:
    """A tokenizer that decodes nothing."""

    def decode(self, token_ids: list[int], **options: Any) -> str:
        raise ValueError(f"cannot be decoded: {token_ids}, {options}")


def join_slot(slots: Slots, **request: Any) -> tuple[RunningRequest, list[StreamOutput]]:
    items: list[StreamOutput] = []
    running = slots.join(make_queued(items.append, **request))
    assert running is not None
    return running, items


def committed(emitted: dict[int, list[int]], slots: Slots) -> tuple[Committer, Callable[[], None]]:
    """A committer, and the commit of a round that emitted these tokens by slot."""
    buffers = RoundBuffers(
        slots=slots.count, window=WINDOW, vocab=256, length=64, chunk=8, dtype=torch.float32, device=torch.device("cpu")
    )
    for running in slots:
        running.prefilled = running.prefill_end
    windows = DraftWindowPlanner(WINDOW, WINDOW)
    round_ = plan_round(slots, windows, slots.count)
    for slot, tokens in emitted.items():
        buffers.tokens.host_view(round_.batch, WINDOW + 1)[slot, : len(tokens)] = torch.tensor(tokens)
        buffers.count.host_view(round_.batch)[slot] = len(tokens)
    steady, metrics = SteadyRows(slots.count), Metrics(accepted=[0] * WINDOW)
    committer = Committer(buffers, slots, steady, PendingValidations(lambda: None), windows, metrics)
    return committer, lambda: committer.commit(
        VerifiedRound(round_, dict.fromkeys(round_.rows, 0), dict.fromkeys(round_.rows, 0))
    )


def test_a_request_whose_slot_cannot_be_freed_is_counted_and_notified(caplog: pytest.LogCaptureFixture) -> None:
    slots = Slots(2, LinearCacheManager(0), [FailingListener()], num_draft_tokens=0)
    running, items = join_slot(slots)
    committer, _ = committed({}, slots)
    committer.end(running, Finish("cancelled"))
    assert "the device failed" in caplog.text
    assert len(slots) == 0
    assert committer._metrics.finished == {"cancelled": 1}
    assert [item.finish_reason for item in items] == ["cancelled"]


def test_a_finished_text_whose_slot_cannot_be_freed_is_counted_and_notified(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slots = Slots(2, LinearCacheManager(0), [FailingListener()], num_draft_tokens=0)
    _, items = join_slot(slots, stop=["b"])
    committer, commit = committed({0: ids("ab")}, slots)
    commit()
    assert "the device failed" in caplog.text
    assert len(slots) == 0
    assert committer._metrics.finished == {"stop": 1}
    assert [(item.text, item.finish_reason) for item in items] == [("a", "stop")]


@pytest.mark.parametrize("reason", ["commit", "cancelled"])
def test_a_request_whose_tokens_cannot_be_decoded_ends_alone(reason: str) -> None:
    slots = Slots(2, LinearCacheManager(0), [], num_draft_tokens=0)
    broken, items = join_slot(slots, thinking=True)
    _, neighbour = join_slot(slots)
    committer, commit = committed({0: ids("<thi" if reason == "cancelled" else "ab"), 1: ids("ab")}, slots)
    for detokenizer in broken._text._detokenizers.values():
        detokenizer._tokenizer = FailingTokenizer()  # type: ignore[assignment]
    commit()
    if reason == "cancelled":
        committer.end(broken, Finish("cancelled"))
    assert [item.finish_reason for item in items] == ["error"]
    assert items[-1].output is not None
    assert str(items[-1].output.error).startswith("ValueError: cannot be decoded")
    assert isinstance(broken.request.failure, ValueError)
    assert [item.text for item in neighbour] == ["ab"]
    assert [running.slot for running in slots] == [1]
    assert committer._metrics.finished == {"error": 1}


def test_a_round_is_planned_before_a_text_that_cannot_be_written_ends_its_request_alone() -> None:
    """The next round is planned between a round's commit and its delivery, for all requests at once."""
    slots = Slots(2, LinearCacheManager(0), [], num_draft_tokens=WINDOW)
    broken, items = join_slot(slots, num_draft_tokens=WINDOW)
    _, neighbour = join_slot(slots, num_draft_tokens=WINDOW)
    committer, commit = committed({0: ids("a"), 1: ids("b")}, slots)
    commit()

    def failing(*_: object) -> bool:
        raise ValueError("cannot be decoded")

    broken._text.add = failing  # type: ignore[method-assign]
    commit()  # of rows that only lengthen their texts
    assert committer._undelivered
    round_ = plan_round(slots, DraftWindowPlanner(WINDOW, WINDOW, fast_forward=True), slots.count)
    assert set(round_.rows) == {0, 1}
    committer.deliver()
    assert [item.finish_reason for item in items] == [None, "error"]
    assert "".join(item.text for item in neighbour) == "bb"
    assert [running.slot for running in slots] == [1]


@pytest.mark.parametrize("place", ["queue", "slot"])
def test_an_end_without_text_has_the_index_of_its_output(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """In a slot, the text cannot be taken when the listener is notified."""
    slots = Slots(1, LinearCacheManager(0), [], num_draft_tokens=0)
    items: list[StreamOutput] = []
    queued = make_queued(items.append)
    queued.request.index = 2
    committer, _ = committed({}, slots)
    if place == "queue":
        committer.drop(DroppedRequest(queued, Finish("cancelled")))
    else:
        running = slots.join(queued)
        assert running is not None
        monkeypatch.setattr(running._text, "take", None)
        committer.end(running, Finish("cancelled"))
    assert [(item.index, item.text) for item in items] == [(2, "")]
    assert items[0].output is not None
    assert items[0].output.index == 2


def test_requests_that_ended_before_the_commit_are_not_committed() -> None:
    slots = Slots(1, LinearCacheManager(0), [], num_draft_tokens=0)
    first, items = join_slot(slots)
    committer, commit = committed({0: ids("ab")}, slots)
    committer.end(first, Finish("cancelled"))
    second, others = join_slot(slots)  # joins the slot of the first
    commit()
    assert first.output_ids == second.output_ids == []
    assert [item.finish_reason for item in items] == ["cancelled"]
    assert others == []
