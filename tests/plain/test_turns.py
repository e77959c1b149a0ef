"""Turns between clients: equal shares of slots and queue, whatever each of them sends."""

import time
from collections import Counter
from concurrent.futures import Future
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.errors import QueueFull
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.scheduler import Scheduler
from tandemrt.runtime.requests.turns import Turns
from tests.plain.requests import make_request


def of(*clients: str) -> list[Request]:
    return [make_request(client=client) for client in clients]


def seat(scheduler: Scheduler) -> list[Request]:
    return [request for _, request in scheduler.admit(lambda _, __: True)]


def test_a_client_that_floods_keeps_another_waiting_for_one_slot_only() -> None:
    """Over and over: 60 wait, then somebody else comes, and gets the next slot that is free."""
    scheduler = Scheduler(2, 1000)
    for request in of(*["flood"] * 60):
        scheduler.submit(request, block=False)
    seat(scheduler)
    for _ in range(10):
        [late] = of("quiet")
        scheduler.submit(late, block=False)
        for request in of(*["flood"] * 5):
            scheduler.submit(request, block=False)
        scheduler.free(0)
        assert seat(scheduler) == [late]


def test_with_one_slot_clients_take_turns() -> None:
    scheduler, served = Scheduler(1, 1000), []
    for request in of("a", "a", "a", "a", "b", "b", "c"):
        scheduler.submit(request, block=False)
    for _ in range(7):
        [request] = seat(scheduler)
        served.append(request.client)
        scheduler.free(0)
    assert served == ["a", "b", "c", "a", "b", "a", "a"]


@given(st.lists(st.sampled_from("abc")), st.lists(st.sampled_from("abc"), max_size=6))
def test_turns_are_an_order_of_all_and_within_a_client_that_of_arrival(waiting: list[str], running: list[str]) -> None:
    requests = of(*waiting)
    ordered = list(Turns().order(requests, of(*running)))
    assert {id(request) for request in ordered} == {id(request) for request in requests}
    assert len(ordered) == len(requests)
    for client in "abc":
        assert [r for r in ordered if r.client == client] == [r for r in requests if r.client == client]


@given(st.lists(st.sampled_from("abc"), min_size=1), st.integers(1, 8))
def test_no_client_has_two_slots_more_than_one_that_waits(waiting: list[str], slots: int) -> None:
    served = list(islice(Turns().order(of(*waiting), []), slots))
    shares, left = Counter(r.client for r in served), Counter(waiting)
    for client in left:
        if left[client] > shares[client]:  # it waits
            assert max(shares.values()) <= shares[client] + 1


@given(st.integers(0, 30), st.integers(1, 8))
def test_without_names_it_is_first_come_first_served(waiting: int, slots: int) -> None:
    requests = of(*[""] * waiting)
    assert list(islice(Turns().order(requests, []), slots)) == requests[:slots]


def test_a_full_queue_gives_up_the_newest_of_the_client_with_the_most_waiting() -> None:
    scheduler = Scheduler(1, 4)
    running, *flood = of(*["flood"] * 5)
    for request in (running, *flood):
        scheduler.submit(request, block=False)
    seat(scheduler)
    with pytest.raises(QueueFull):
        scheduler.submit(of("flood")[0], block=False)
    quiet = of("quiet", "quiet", "quiet")
    scheduler.submit(quiet[0], block=False)
    scheduler.submit(quiet[1], block=False)
    with pytest.raises(QueueFull):  # as many as the other has
        scheduler.submit(quiet[2], block=False)
    dropped = scheduler.drop_waiting(time.monotonic())
    assert dropped == [flood[3], flood[2]]
    for request in dropped:
        assert request.finish_reason == "error"
        assert isinstance(request.failure, QueueFull)
    assert scheduler.waiting == 4


def test_the_loop_wakes_for_a_request_that_had_to_leave_while_all_others_compile() -> None:
    scheduler = Scheduler(1, 1)
    for client in ("flood", "flood", "quiet"):
        scheduler.submit(make_request(client=client, rules=Future()), block=False)
    assert scheduler.wait_for_work()
    assert [request.client for request in scheduler.drop_waiting(time.monotonic())] == ["flood"]
    assert scheduler.waiting == 2
