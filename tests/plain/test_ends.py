"""However a request ends, and whatever raises while it does: its slot is free, it is counted, and it is told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tandemrt import StreamOutput
from tandemrt.runtime.caches.linear import LinearRoom
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.requests.checks import Checks
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.requests.slots import Slots
from tandemrt.runtime.round.buffers import RoundBuffers
from tandemrt.runtime.round.commit import Committer
from tandemrt.runtime.round.round import Round, Verified
from tandemrt.runtime.round.windows import Windows
from tests.plain.requests import ids, make_waiting

WINDOW = 4


class Gone:
    """A device that refuses everything."""

    def join(self, running: Running) -> None:
        pass

    def leave(self, slot: int) -> None:
        raise RuntimeError(f"the device is gone, slot {slot} with it")


class Loud:
    """Spells nothing."""

    def decode(self, token_ids: list[int], **options: Any) -> str:
        raise ValueError(f"cannot be spelled: {token_ids}, {options}")


def seated(slots: Slots, **request: Any) -> tuple[Running, list[StreamOutput]]:
    heard: list[StreamOutput] = []
    running = slots.join(make_waiting(heard.append, **request))
    assert running is not None
    return running, heard


def committed(emitted: dict[int, list[int]], slots: Slots) -> tuple[Committer, Callable[[], None]]:
    """A committer, and the commit of a round that emitted these tokens by slot."""
    buffers = RoundBuffers(
        slots=slots.count, window=WINDOW, vocab=256, length=64, chunk=8, dtype=torch.float32, device=torch.device("cpu")
    )
    for running in slots:
        running.prefilled = running.prefill_end
    this = Round.of(slots, Windows(WINDOW, WINDOW), slots.count)
    for slot, tokens in emitted.items():
        buffers.tokens.host_view(this.batch, WINDOW + 1)[slot, : len(tokens)] = torch.tensor(tokens)
        buffers.count.host_view(this.batch)[slot] = len(tokens)
    committer = Committer(buffers, slots, Checks(lambda: None), Metrics(accepted=[0] * WINDOW))
    return committer, lambda: committer.commit(Verified(this, dict.fromkeys(this.rows, 0), dict.fromkeys(this.rows, 0)))


def test_one_who_cannot_leave_is_counted_and_told_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    slots = Slots(2, LinearRoom(0), [Gone()], window=0)
    running, heard = seated(slots)
    committer, _ = committed({}, slots)
    committer.end(running, "cancelled")
    assert "the device is gone" in caplog.text
    assert len(slots) == 0
    assert committer._metrics.finished == {"cancelled": 1}
    assert [item.finish_reason for item in heard] == ["cancelled"]


def test_one_whose_text_ends_where_nobody_can_leave_is_counted_and_told_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slots = Slots(2, LinearRoom(0), [Gone()], window=0)
    _, heard = seated(slots, stop=["b"])
    committer, commit = committed({0: ids("ab")}, slots)
    commit()
    assert "the device is gone" in caplog.text
    assert len(slots) == 0
    assert committer._metrics.finished == {"stop": 1}
    assert [(item.text, item.finish_reason) for item in heard] == [("a", "stop")]


@pytest.mark.parametrize("reason", ["commit", "cancelled"])
def test_a_request_whose_tokens_cannot_be_spelled_ends_alone(reason: str) -> None:
    slots = Slots(2, LinearRoom(0), [], window=0)
    broken, heard = seated(slots, thinking=True)
    _, neighbour = seated(slots)
    committer, commit = committed({0: ids("<thi" if reason == "cancelled" else "ab"), 1: ids("ab")}, slots)
    for section in broken._transcript._sections.values():
        section._tokenizer = Loud()  # type: ignore[assignment]
    commit()
    if reason == "cancelled":
        committer.end(broken, "cancelled")
    assert [item.finish_reason for item in heard] == ["error"]
    assert heard[-1].output is not None
    assert str(heard[-1].output.error).startswith("ValueError: cannot be spelled")
    assert isinstance(broken.request.failure, ValueError)
    assert [item.text for item in neighbour] == ["ab"]
    assert [running.slot for running in slots] == [1]
    assert committer._metrics.finished == {"error": 1}


def test_requests_that_left_since_are_not_committed_again() -> None:
    slots = Slots(1, LinearRoom(0), [], window=0)
    first, heard = seated(slots)
    committer, commit = committed({0: ids("ab")}, slots)
    committer.end(first, "cancelled")
    second, others = seated(slots)  # sits where the first one sat
    commit()
    assert first.output_ids == second.output_ids == []
    assert [item.finish_reason for item in heard] == ["cancelled"]
    assert others == []
