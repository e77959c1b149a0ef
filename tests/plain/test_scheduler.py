"""The scheduler, against a model of it: a queue, slots in order of admission, and nobody forgotten."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandemrt.engines.errors import BadRequest, Closed, QueueFull
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.requests.request import Request, Rules
from tandemrt.runtime.requests.scheduler import Scheduler
from tests.plain.requests import make_request

SLOTS, LIMIT = 2, 3


def everyone(slot: int, request: Request) -> bool:  # noqa: ARG001
    return True


class SchedulerModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(SLOTS, LIMIT)
        self.queue: list[Request] = []
        self.running: list[Request] = []  # in order of admission
        self.compiling: list[Future[Rules]] = []
        self.closed = False
        self.cancelled: set[Request] = set()
        self.short = False  # of room: the last time that anybody was to join, somebody found none

    @rule(compiling=st.booleans())
    def submit(self, compiling: bool) -> None:
        rules: Future[Rules] = Future()
        request = make_request(rules=rules if compiling else None)
        if self.closed:
            with pytest.raises(Closed, match="closed"):
                self.scheduler.submit(request, block=True)
        elif len(self.queue) - (0 if self.short else SLOTS - len(self.running)) >= LIMIT:  # free slots make room
            with pytest.raises(QueueFull):
                self.scheduler.submit(request, block=False)
        else:
            self.scheduler.submit(request, block=True)
            self.queue.append(request)
            self.compiling += [rules] if compiling else []

    @precondition(lambda self: self.compiling)
    @rule(fails=st.booleans(), data=st.data())
    def compiled(self, fails: bool, data: st.DataObject) -> None:
        rules = self.compiling.pop(data.draw(st.integers(0, len(self.compiling) - 1)))
        if fails:
            rules.set_exception(BadRequest("no such grammar"))
        else:
            rules.set_result(Rules(Constraint(256, ())))

    @precondition(lambda self: self.queue or self.running)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.queue + self.running))
        request.cancel()
        self.cancelled.add(request)

    @rule()
    def drop(self) -> None:
        gone = [r for r in self.queue if r in self.cancelled or self.failed(r)]
        self.queue = [r for r in self.queue if r not in gone]
        assert self.scheduler.drop_waiting(time.monotonic()) == gone
        assert [r.finish_reason for r in gone] == ["cancelled" if r in self.cancelled else "error" for r in gone]

    @rule(room=st.integers(0, SLOTS))
    def admit(self, room: int) -> None:
        can_run = [r for r in self.queue if r.pending_rules.done() and not self.failed(r)]
        joined = can_run[: min(room, SLOTS - len(self.running))]
        asked: list[tuple[int, Request]] = []

        def reserve(slot: int, request: Request) -> bool:
            asked.append((slot, request))
            return len(asked) <= room

        assert self.scheduler.admit(reserve) == asked[:room]
        assert [request for _, request in asked] == can_run[: len(asked)]  # nobody overtakes one who found no room
        assert [request for _, request in asked[:room]] == joined
        self.queue = [r for r in self.queue if r not in joined]
        self.running += joined
        self.short = len(asked) > room

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.scheduler.free(next(slot for slot, r in self.scheduler.slots() if r is request))

    @rule()
    def close(self) -> None:
        self.scheduler.close()
        self.closed = True
        self.cancelled.update(self.queue, self.running)

    @precondition(lambda self: self.running or self.closed or any(self.moves(r) for r in self.queue))
    @rule()
    def wait(self) -> None:
        assert self.scheduler.wait_for_work() == bool(self.running or self.queue)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert [request for _, request in self.scheduler.slots()] == self.running
        assert len({slot for slot, _ in self.scheduler.slots()} & set(range(SLOTS))) == len(self.running)
        assert self.scheduler.waiting == len(self.queue)
        assert all((r.interrupted(0.0) == "cancelled") == (r in self.cancelled) for r in self.queue + self.running)

    def moves(self, request: Request) -> bool:
        return request.pending_rules.done() or request in self.cancelled

    @staticmethod
    def failed(request: Request) -> bool:
        return request.pending_rules.done() and request.pending_rules.exception() is not None


TestScheduler = SchedulerModel.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def in_thread(work: Callable[[], object]) -> "Future[object]":
    result: Future[object] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def test_one_who_waits_for_room_is_let_in_or_told_that_the_runtime_closed() -> None:
    scheduler = Scheduler(1, 1)
    for _ in range(2):  # one for the free slot, one that waits
        scheduler.submit(make_request(), block=False)
    first = in_thread(lambda: scheduler.submit(make_request(), block=True))
    time.sleep(0.02)
    assert not first.done()
    [(slot, _)] = scheduler.admit(everyone)
    time.sleep(0.02)
    assert not first.done()
    scheduler.free(slot)
    scheduler.admit(everyone)
    first.result(5)
    second = in_thread(lambda: scheduler.submit(make_request(), block=True))
    time.sleep(0.02)
    assert not second.done()
    scheduler.close()
    with pytest.raises(Closed, match="closed"):
        second.result(5)


def test_slots_that_nobody_fits_into_make_no_room_in_the_queue() -> None:
    scheduler = Scheduler(4, 1)
    scheduler.submit(make_request(), block=False)
    assert scheduler.admit(lambda slot, request: False) == []  # noqa: ARG005
    with pytest.raises(QueueFull):
        scheduler.submit(make_request(), block=False)
    [_] = scheduler.admit(everyone)
    scheduler.submit(make_request(), block=False)


@pytest.mark.parametrize("timeout_s", [None, 1e9, 1e300])
def test_the_loop_sleeps_until_a_grammar_is_compiled_however_late_the_deadline(timeout_s: float | None) -> None:
    scheduler, rules = Scheduler(1, 1), Future[Rules]()
    scheduler.submit(make_request(rules=rules, timeout_s=timeout_s), block=False)
    work = in_thread(scheduler.wait_for_work)
    time.sleep(0.02)
    assert not work.done()
    rules.set_result(Rules(Constraint(256, ())))
    assert work.result(5) is True


def test_the_loop_wakes_for_a_deadline_of_one_who_waits() -> None:
    scheduler = Scheduler(1, 1)
    scheduler.submit(make_request(rules=Future(), timeout_s=0.05), block=False)
    assert in_thread(scheduler.wait_for_work).result(5) is True
    assert [request.finish_reason for request in scheduler.drop_waiting(time.monotonic())] == ["timeout"]
