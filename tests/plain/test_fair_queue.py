"""Fairness between clients: equal shares of slots and queue, however many requests each of them sends."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemrt.engines.validation.errors import Closed, QueueFull
from tandemrt.runtime.requests.fair_queue import FairQueue
from tandemrt.runtime.requests.request import Finish, Request
from tandemrt.runtime.requests.running import QueuedRequest
from tandemrt.runtime.requests.scheduler import Scheduler
from tandemrt.runtime.requests.slots import Slots
from tandemrt.runtime.workers.clients import MAX_USERS, Client
from tests.plain.requests import MANY, make_queued
from tests.plain.test_scheduler import in_thread
from tests.waiting import eventually


class KVCacheManager:
    """Memory for every request once ``open``; calls ``first`` before it reserves."""

    caches_outputs = True
    reuses_whole_chunks = False

    def __init__(self) -> None:
        self.open = True
        self.first: Callable[[], object] = lambda: None

    def reserve(self, slot: int, tokens: int, hashes: Sequence[bytes] = ()) -> int | None:  # noqa: ARG002
        if self.open:
            self.first()
        return 0 if self.open else None

    def register_prefix(self, slot: int, hashes: Sequence[bytes], *, of_prompt: bool = True) -> None:
        pass

    def leave(self, slot: int) -> None:
        pass


def opened(count: int, queue_limit: int, caches: KVCacheManager | None = None) -> tuple[Scheduler, Slots]:
    scheduler = Scheduler(count, queue_limit)
    return scheduler, Slots(count, caches or KVCacheManager(), [scheduler], num_draft_tokens=0)


def of(*clients: str) -> list[QueuedRequest]:
    return [make_queued(client=client) for client in clients]


def send(scheduler: Scheduler, *clients: str) -> list[QueuedRequest]:
    sent = of(*clients)
    for waiting in sent:
        scheduler.submit(waiting, block=False)
    return sent


def requests(waiting: Iterable[QueuedRequest]) -> list[Request]:
    return [each.request for each in waiting]


def joined(scheduler: Scheduler, slots: Slots) -> list[Request]:
    return [running.request for running in scheduler.join_ready(slots, MANY).joined]


def test_a_flooding_client_delays_another_by_one_slot_only() -> None:
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
        served.append(request.client.name)
        slots.leave(0)
    assert served == ["a", "b", "c", "a", "b", "a", "a"]


def test_a_stream_of_new_clients_starves_no_request() -> None:
    scheduler, slots = opened(1, 1000)
    served = []
    send(scheduler, "old", "old")
    joined(scheduler, slots)
    for number in range(5):
        send(scheduler, f"new {number}")
        slots.leave(0)
        [request] = joined(scheduler, slots)
        served.append(request.client.name)
    assert served == ["new 0", "old", "new 1", "new 2", "new 3"]


def test_a_request_without_cache_memory_keeps_its_turn() -> None:
    scheduler, slots = opened(1, 1000, caches := KVCacheManager())
    send(scheduler, "a")
    joined(scheduler, slots)
    slots.leave(0)
    first, second = send(scheduler, "b", "c")
    caches.open = False
    assert joined(scheduler, slots) == []
    caches.open = True
    assert joined(scheduler, slots) == [first.request]
    slots.leave(0)
    assert joined(scheduler, slots) == [second.request]


@given(st.lists(st.sampled_from("abc")), st.lists(st.sampled_from("abc"), max_size=6))
def test_the_order_is_total_and_by_arrival_within_a_client(waiting: list[str], running: list[str]) -> None:
    sent = of(*waiting)
    ordered = list(FairQueue().order(sent, requests(of(*running))))
    assert set(ordered) == set(sent)
    assert len(ordered) == len(sent)
    for client in "abc":
        assert [r for r in ordered if r.request.client == Client(client)] == [
            r for r in sent if r.request.client == Client(client)
        ]


@given(st.lists(st.sampled_from("abc"), min_size=1), st.integers(1, 8))
def test_no_client_has_two_slots_more_than_one_that_waits(waiting: list[str], slots: int) -> None:
    served = list(islice(FairQueue().order(of(*waiting), []), slots))
    shares, left = Counter(r.request.client.name for r in served), Counter(waiting)
    for client in left:
        if left[client] > shares[client]:  # it waits
            assert max(shares.values()) <= shares[client] + 1


@given(st.integers(0, 30), st.integers(1, 8))
def test_without_names_it_is_first_come_first_served(waiting: int, slots: int) -> None:
    sent = of(*[""] * waiting)
    assert list(islice(FairQueue().order(sent, []), slots)) == sent[:slots]


def test_a_full_queue_displaces_the_newest_request_of_the_largest_client() -> None:
    scheduler, slots = opened(1, 4)
    _, *flood = send(scheduler, *["flood"] * 5)
    joined(scheduler, slots)
    with pytest.raises(QueueFull):
        send(scheduler, "flood")
    send(scheduler, "quiet", "quiet")
    with pytest.raises(QueueFull):  # as many as the other has
        send(scheduler, "quiet")
    dropped = scheduler.drop_queued(time.monotonic())
    assert [each.queued.request for each in dropped] == requests([flood[3], flood[2]])
    for each in dropped:
        assert each.finish.reason == "error"
        assert isinstance(each.finish.failure, QueueFull)
    assert scheduler.waiting == 4
    assert scheduler.drop_queued(time.monotonic()) == []


def test_a_request_that_is_joining_a_slot_is_not_displaced() -> None:
    scheduler, slots = opened(2, 2, caches := KVCacheManager())
    caches.open = False
    flood = send(scheduler, "flood", "flood")
    assert joined(scheduler, slots) == []  # so that both wait in a full queue
    rejected = []

    def another_one_comes() -> None:
        try:
            send(scheduler, "quiet")
        except QueueFull as error:
            rejected.append(error)

    caches.open, caches.first = True, another_one_comes
    assert joined(scheduler, slots) == requests(flood)
    assert scheduler.drop_queued(time.monotonic()) == []
    assert len(rejected) + scheduler.waiting == 2


def test_the_loop_wakes_for_a_displaced_request_while_grammars_compile() -> None:
    scheduler, _ = opened(1, 1)
    for client in ("flood", "flood", "quiet"):
        scheduler.submit(make_queued(client=client, constraints=Future()), block=False)
    assert scheduler.wait_for_work()
    assert [each.queued.request.client.name for each in scheduler.drop_queued(time.monotonic())] == ["flood"]
    assert scheduler.waiting == 2


def test_the_outputs_of_a_prompt_displace_others_together_or_not_at_all() -> None:
    def asking(client: str, count: int) -> list[QueuedRequest]:
        return [make_queued(client=client, constraints=Future()) for _ in range(count)]

    scheduler, _ = opened(1, 5)
    scheduler.submit(*asking("flood", 6), block=False)  # one for the slot
    with pytest.raises(QueueFull, match=r"at most 5 requests may wait and as many do, or would with 4 more; send"):
        scheduler.submit(*asking("quiet", 4), block=False)
    assert scheduler.drop_queued(time.monotonic()) == []
    scheduler.submit(*asking("quiet", 2), block=False)
    assert [each.queued.request.client.name for each in scheduler.drop_queued(time.monotonic())] == ["flood", "flood"]


@pytest.mark.parametrize(("limit", "count", "left"), [(5, 1, 0), (5, 2, 0), (4, 2, 0), (3, 1, 1), (3, 2, 2)])
def test_no_request_is_displaced_for_slots_that_an_earlier_group_waits_for(limit: int, count: int, left: int) -> None:
    """Three requests wait and a group of three blocks: others may displace requests, but get no free room."""
    scheduler, _ = opened(1, limit)
    send(scheduler, *["flood"] * 4)  # one for the slot
    group = in_thread(lambda: scheduler.submit(*of("group", "group", "group"), block=True))
    assert eventually(lambda: bool(scheduler._submissions))
    if left:
        scheduler.submit(*of(*["quiet"] * count), block=False)
    else:
        with pytest.raises(QueueFull, match=f"at most {limit} requests may wait, and 3 earlier ones"):
            scheduler.submit(*of(*["quiet"] * count), block=False)
    assert [each.queued.request.client.name for each in scheduler.drop_queued(time.monotonic())] == ["flood"] * left
    scheduler.close()
    with pytest.raises(Closed):
        group.result(5)


def test_displaced_requests_are_returned_after_close() -> None:
    scheduler, _ = opened(1, 1)
    for client in ("flood", "flood", "quiet"):
        scheduler.submit(make_queued(client=client, constraints=Future()), block=False)
    scheduler.close()
    assert scheduler.wait_for_work()
    assert [each.finish.reason for each in scheduler.drop_queued(time.monotonic())] == [
        "error",
        "cancelled",
        "cancelled",
    ]
    assert not scheduler.wait_for_work()


def test_displaced_requests_are_returned_when_the_loop_dies() -> None:
    scheduler, _ = opened(1, 1)
    for client in ("flood", "flood", "quiet"):
        scheduler.submit(make_queued(client=client, constraints=Future()), block=False)
    assert len(scheduler.die(RuntimeError("the loop"))) == 3, "the one that was displaced among them"


def test_lower_priority_numbers_come_first_and_equal_ones_are_fair() -> None:
    asked = [("a", 0), ("a", 5), ("b", 5), ("c", -1), ("a", 0), ("b", 0)]
    waiting = [make_queued(client=client, priority=priority) for client, priority in asked]
    order = [waiting.index(each) for each in FairQueue().order(waiting, [])]
    assert order[0] == 3
    assert sorted(order[1:4]) == [0, 4, 5]
    assert order.index(5) < order.index(4)  # b has had no turn when a has had one
    assert sorted(order[4:]) == [1, 2]


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), slots=st.integers(1, 8), all_groups=st.booleans())
def test_an_output_of_a_group_waits_for_its_own_slot_and_one_turn_of_each_other_client(
    seed: int, slots: int, all_groups: bool
) -> None:
    """64 clients send without pause; every or one of them asks for five outputs. No group starves.

    After an output of a client ends, each other client is served at most once before its next output is.
    """
    draw = Random(seed)
    scheduler, table = opened(slots, 1000)
    left = dict.fromkeys(range(64), 0)  # outputs of the client's group that have not ended
    served_since: dict[int, Counter[str]] = {number: Counter() for number in left}

    def ask(number: int) -> None:
        left[number] = 5 if all_groups or not number else 1
        scheduler.submit(*of(*[str(number)] * left[number]), block=False)
        served_since[number].clear()

    for number in left:
        ask(number)
    groups = 0
    for _ in range(600):
        for request in joined(scheduler, table):
            here = {each.request.client.name for each in table}
            name = request.client.name
            served_since[int(name)].clear()
            for number, counts in served_since.items():
                if str(number) not in here:
                    counts[name] += 1
                    assert counts[name] <= 1, f"{name} was served twice while {number} waited without a slot"
        ended = draw.choice([*table])
        table.leave(ended.slot)
        ended.request.finish(Finish("stop"))
        number = int(ended.request.client.name)
        left[number] -= 1
        if not left[number]:
            groups += all_groups or not number
            ask(number)
    assert groups > 0


def test_a_sender_with_many_names_gets_the_share_of_its_address() -> None:
    scheduler, slots = opened(2, 6)
    flood = [make_queued(client="address", user=str(number)) for number in range(8)]
    for waiting in flood:
        scheduler.submit(waiting, block=False)
    assert joined(scheduler, slots) == requests(flood[:2])
    quiet = send(scheduler, "other address")
    assert [each.queued.request for each in scheduler.drop_queued(time.monotonic())] == [flood[-1].request]
    with pytest.raises(QueueFull):
        scheduler.submit(make_queued(client="address", user="new"), block=False)
    slots.leave(0)
    assert joined(scheduler, slots) == requests(quiet)


def test_users_of_an_address_displace_and_follow_each_other_as_addresses_do() -> None:
    scheduler, slots = opened(1, 4)
    flood = [make_queued(client="address", user="flood") for _ in range(5)]
    for waiting in flood:
        scheduler.submit(waiting, block=False)
    joined(scheduler, slots)
    quiet = make_queued(client="address", user="quiet")
    scheduler.submit(quiet, block=False)
    assert [each.queued.request for each in scheduler.drop_queued(time.monotonic())] == [flood[-1].request]
    slots.leave(0)
    assert joined(scheduler, slots) == [quiet.request]


def test_a_sender_that_changes_its_user_displaces_no_request_of_another_user() -> None:
    scheduler, slots = opened(1, MAX_USERS + 20)
    quiet = [make_queued(client="address", user="quiet") for _ in range(3)]
    for waiting in quiet:
        scheduler.submit(waiting, block=False)
    assert joined(scheduler, slots) == [quiet[0].request]
    flood = [make_queued(client="address", user=str(number)) for number in range(MAX_USERS + 18)]
    for waiting in flood:
        scheduler.submit(waiting, block=False)
    for number in range(30):
        with pytest.raises(QueueFull):
            scheduler.submit(make_queued(client="address", user=f"new {number}"), block=False)
    no_user = make_queued(client="address")
    scheduler.submit(no_user, block=False)
    assert [each.queued for each in scheduler.drop_queued(time.monotonic())] == [flood[-1]]


def test_constraints_are_prepared_once_a_request_has_its_place_and_cancelled_when_it_loses_it() -> None:
    scheduler, _ = opened(1, 2)
    prepared: list[QueuedRequest] = []

    def submit(client: str) -> QueuedRequest:
        waiting = make_queued(client=client, constraints=Future())
        waiting = replace(waiting, prepare=lambda: prepared.append(waiting))
        scheduler.submit(waiting, block=False)
        return waiting

    flood = [submit("flood") for _ in range(3)]
    with pytest.raises(QueueFull):
        submit("flood")
    assert prepared == flood
    quiet = submit("quiet")
    assert prepared == [*flood, quiet]
    scheduler.drop_queued(time.monotonic())
    assert [each.constraints.cancelled() for each in prepared] == [False, False, True, False]
    scheduler.die(RuntimeError("the loop"))
    assert all(each.constraints.cancelled() for each in prepared)
