"""Turns between clients: equal shares of slots and queue, whatever each of them sends."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.errors import Closed, QueueFull
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.scheduler import Scheduler
from tandemrt.runtime.requests.slots import Slots
from tandemrt.runtime.requests.turns import Turns
from tandemrt.runtime.requests.waiting import Waiting
from tests.plain.requests import make_waiting
from tests.plain.test_scheduler import in_thread
from tests.waiting import eventually


class Room:
    """Room for whoever asks, from ``open`` on; before it lets a request in it does ``first``."""

    finds_answers = True

    def __init__(self) -> None:
        self.open = True
        self.first: Callable[[], object] = lambda: None

    def reserve(self, slot: int, tokens: int, hashes: Sequence[bytes] = ()) -> int | None:  # noqa: ARG002
        if self.open:
            self.first()
        return 0 if self.open else None

    def know(self, slot: int, hashes: Sequence[bytes]) -> None:
        pass

    def leave(self, slot: int) -> None:
        pass


def opened(count: int, queue_limit: int, room: Room | None = None) -> tuple[Scheduler, Slots]:
    scheduler = Scheduler(count, queue_limit)
    return scheduler, Slots(count, room or Room(), [scheduler], window=0)


def of(*clients: str) -> list[Waiting]:
    return [make_waiting(client=client) for client in clients]


def send(scheduler: Scheduler, *clients: str) -> list[Waiting]:
    sent = of(*clients)
    for waiting in sent:
        scheduler.submit(waiting, block=False)
    return sent


def requests(waiting: Iterable[Waiting]) -> list[Request]:
    return [each.request for each in waiting]


def joined(scheduler: Scheduler, slots: Slots) -> list[Request]:
    return [running.request for running in scheduler.admit(slots).joined]


def test_a_client_that_floods_keeps_another_waiting_for_one_slot_only() -> None:
    """Over and over: 60 wait, then somebody else comes, and gets the next slot that is free."""
    scheduler, slots = opened(2, 1000)
    send(scheduler, *["flood"] * 60)
    joined(scheduler, slots)
    for _ in range(10):
        late = send(scheduler, "quiet")
        send(scheduler, *["flood"] * 5)
        slots.leave(0)
        assert joined(scheduler, slots) == requests(late)


def test_with_one_slot_clients_take_turns() -> None:
    scheduler, slots = opened(1, 1000)
    served = []
    send(scheduler, "a", "a", "a", "a", "b", "b", "c")
    for _ in range(7):
        [request] = joined(scheduler, slots)
        served.append(request.client)
        slots.leave(0)
    assert served == ["a", "b", "c", "a", "b", "a", "a"]


def test_newcomers_without_end_keep_nobody_waiting_for_ever() -> None:
    scheduler, slots = opened(1, 1000)
    served = []
    send(scheduler, "old", "old")
    joined(scheduler, slots)
    for number in range(5):
        send(scheduler, f"new {number}")
        slots.leave(0)
        [request] = joined(scheduler, slots)
        served.append(request.client)
    assert served == ["new 0", "old", "new 1", "new 2", "new 3"]


def test_who_finds_no_room_keeps_its_turn() -> None:
    scheduler, slots = opened(1, 1000, room := Room())
    send(scheduler, "a")
    joined(scheduler, slots)
    slots.leave(0)
    first, second = send(scheduler, "b", "c")
    room.open = False
    assert joined(scheduler, slots) == []
    room.open = True
    assert joined(scheduler, slots) == [first.request]
    slots.leave(0)
    assert joined(scheduler, slots) == [second.request]


@given(st.lists(st.sampled_from("abc")), st.lists(st.sampled_from("abc"), max_size=6))
def test_turns_are_an_order_of_all_and_within_a_client_that_of_arrival(waiting: list[str], running: list[str]) -> None:
    sent = of(*waiting)
    ordered = list(Turns().order(sent, requests(of(*running))))
    assert set(ordered) == set(sent)
    assert len(ordered) == len(sent)
    for client in "abc":
        assert [r for r in ordered if r.request.client == client] == [r for r in sent if r.request.client == client]


@given(st.lists(st.sampled_from("abc"), min_size=1), st.integers(1, 8))
def test_no_client_has_two_slots_more_than_one_that_waits(waiting: list[str], slots: int) -> None:
    served = list(islice(Turns().order(of(*waiting), []), slots))
    shares, left = Counter(r.request.client for r in served), Counter(waiting)
    for client in left:
        if left[client] > shares[client]:  # it waits
            assert max(shares.values()) <= shares[client] + 1


@given(st.integers(0, 30), st.integers(1, 8))
def test_without_names_it_is_first_come_first_served(waiting: int, slots: int) -> None:
    sent = of(*[""] * waiting)
    assert list(islice(Turns().order(sent, []), slots)) == sent[:slots]


def test_a_full_queue_gives_up_the_newest_of_the_client_with_the_most_waiting() -> None:
    scheduler, slots = opened(1, 4)
    _, *flood = send(scheduler, *["flood"] * 5)
    joined(scheduler, slots)
    with pytest.raises(QueueFull):
        send(scheduler, "flood")
    send(scheduler, "quiet", "quiet")
    with pytest.raises(QueueFull):  # as many as the other has
        send(scheduler, "quiet")
    dropped = scheduler.drop_waiting(time.monotonic())
    assert [each.waiting.request for each in dropped] == requests([flood[3], flood[2]])
    for each in dropped:
        assert each.reason == "error"
        assert isinstance(each.failure, QueueFull)
    assert scheduler.waiting == 4
    assert scheduler.drop_waiting(time.monotonic()) == []


def test_who_is_joining_a_slot_is_not_displaced_meanwhile() -> None:
    scheduler, slots = opened(2, 2, room := Room())
    room.open = False
    flood = send(scheduler, "flood", "flood")
    assert joined(scheduler, slots) == []  # so that both wait in a full queue
    refused = []

    def another_one_comes() -> None:
        try:
            send(scheduler, "quiet")
        except QueueFull as error:
            refused.append(error)

    room.open, room.first = True, another_one_comes
    assert joined(scheduler, slots) == requests(flood)
    assert scheduler.drop_waiting(time.monotonic()) == []
    assert len(refused) + scheduler.waiting == 2


def test_the_loop_wakes_for_a_request_that_had_to_leave_while_all_others_compile() -> None:
    scheduler, _ = opened(1, 1)
    for client in ("flood", "flood", "quiet"):
        scheduler.submit(make_waiting(client=client, enforcement=Future()), block=False)
    assert scheduler.wait_for_work()
    assert [each.waiting.request.client for each in scheduler.drop_waiting(time.monotonic())] == ["flood"]
    assert scheduler.waiting == 2


def test_the_outputs_of_a_prompt_displace_others_together_or_not_at_all() -> None:
    def asking(client: str, count: int) -> list[Waiting]:
        return [make_waiting(client=client, enforcement=Future()) for _ in range(count)]

    scheduler, _ = opened(1, 5)
    scheduler.submit(*asking("flood", 6), block=False)  # one for the slot
    with pytest.raises(QueueFull, match=r"at most 5 requests may wait and as many do, or would with 4 more; send"):
        scheduler.submit(*asking("quiet", 4), block=False)
    assert scheduler.drop_waiting(time.monotonic()) == []
    scheduler.submit(*asking("quiet", 2), block=False)
    assert [each.waiting.request.client for each in scheduler.drop_waiting(time.monotonic())] == ["flood", "flood"]


@pytest.mark.parametrize(("limit", "count", "left"), [(5, 1, 0), (5, 2, 0), (4, 2, 0), (3, 1, 1), (3, 2, 2)])
def test_nobody_leaves_for_room_that_a_group_in_front_waits_for(limit: int, count: int, left: int) -> None:
    """Three wait, and three who want to: in a full queue others get in as if these were not there, else not at all."""
    scheduler, _ = opened(1, limit)
    send(scheduler, *["flood"] * 4)  # one for the slot
    group = in_thread(lambda: scheduler.submit(*of("group", "group", "group"), block=True))
    assert eventually(lambda: bool(scheduler._line))
    if left:
        scheduler.submit(*of(*["quiet"] * count), block=False)
    else:
        with pytest.raises(QueueFull, match=f"at most {limit} requests may wait, and 3 that came before"):
            scheduler.submit(*of(*["quiet"] * count), block=False)
    assert [each.waiting.request.client for each in scheduler.drop_waiting(time.monotonic())] == ["flood"] * left
    scheduler.close()
    with pytest.raises(Closed):
        group.result(5)


def test_who_had_to_leave_is_told_so_also_when_the_runtime_closes() -> None:
    scheduler, _ = opened(1, 1)
    for client in ("flood", "flood", "quiet"):
        scheduler.submit(make_waiting(client=client, enforcement=Future()), block=False)
    scheduler.close()
    assert scheduler.wait_for_work()
    assert [each.reason for each in scheduler.drop_waiting(time.monotonic())] == ["error", "cancelled", "cancelled"]
    assert not scheduler.wait_for_work()


def test_who_had_to_leave_is_told_so_also_when_the_loop_dies_before() -> None:
    scheduler, _ = opened(1, 1)
    for client in ("flood", "flood", "quiet"):
        scheduler.submit(make_waiting(client=client, enforcement=Future()), block=False)
    assert len(scheduler.die(RuntimeError("the loop"))) == 3, "the one that was displaced among them"


def test_a_lower_number_comes_first_and_among_equals_clients_have_fair_turns() -> None:
    asked = [("a", 0), ("a", 5), ("b", 5), ("c", -1), ("a", 0), ("b", 0)]
    waiting = [make_waiting(client=client, priority=priority) for client, priority in asked]
    order = [waiting.index(each) for each in Turns().order(waiting, [])]
    assert order[0] == 3
    assert sorted(order[1:4]) == [0, 4, 5]
    assert order.index(5) < order.index(4)  # b has had no turn when a has had one
    assert sorted(order[4:]) == [1, 2]
