"""The scheduler against a model: a queue, slots in order of admission, and no forgotten request."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandemrt.engines.contract.calls import capacity
from tandemrt.engines.validation.errors import BadRequest, Closed, QueueFull
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.engine_loop import loop_thread
from tandemrt.runtime.requests.request import Finish, Request
from tandemrt.runtime.requests.running import QueuedRequest, RequestConstraints, RunningRequest
from tandemrt.runtime.requests.scheduler import Scheduler
from tandemrt.runtime.requests.slots import Slots
from tests.plain.requests import MANY, make_queued
from tests.waiting import PATIENCE_S, eventually

SLOTS, LIMIT = 2, 3


class Turnstile:
    """Room for the next ``count`` requests that ask (None: for all); notes for how many tokens they ask."""

    caches_outputs = True
    reuses_whole_chunks = False

    def __init__(self, count: int | None = None) -> None:
        self.count = count
        self.asked: list[int] = []

    def reserve(self, slot: int, tokens: int, hashes: Sequence[bytes] = ()) -> int | None:  # noqa: ARG002
        self.asked.append(tokens)
        return 0 if self.count is None or len(self.asked) <= self.count else None

    def register_prefix(self, slot: int, hashes: Sequence[bytes], *, of_prompt: bool = True) -> None:
        pass

    def leave(self, slot: int) -> None:
        pass


def needed(waiting: QueuedRequest) -> int:
    """Tokens of memory that a request joins with: what it comes with, a round in flight, and the next one."""
    return capacity(len(waiting.request.prompt) + 1, 0)


def opened(count: int, queue_limit: int, room: Turnstile) -> tuple[Scheduler, Slots]:
    scheduler = Scheduler(count, queue_limit)
    return scheduler, Slots(count, room, [scheduler], num_draft_tokens=0)


class SchedulerModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.room = Turnstile()
        self.scheduler, self.slots = opened(SLOTS, LIMIT, self.room)
        self.preempted: list[QueuedRequest] = []  # the oldest first
        self.queue: list[QueuedRequest] = []
        self.running: list[QueuedRequest] = []  # in order of admission
        self.compiling: list[Future[RequestConstraints]] = []
        self.closed = False
        self.cancelled: set[QueuedRequest] = set()
        self.known: set[Request] = set()  # whose prompts the caches hold
        self.short = False  # of room: the last time that anybody was to join, somebody found none
        self.sent = 0

    @initialize(compiling=st.lists(st.booleans(), min_size=2, max_size=SLOTS + LIMIT - 1), led=st.booleans())
    def begin(self, compiling: list[bool], led: bool) -> None:
        for at, each in enumerate(compiling):
            self.submit(each, 1 if at else 2, led)

    @rule(compiling=st.booleans(), count=st.integers(1, 3), led=st.booleans())
    def submit(self, compiling: bool, count: int = 1, led: bool = False) -> None:
        """Submit all or none, also while others wait. Requests after the first may share its prompt."""
        enforcements = [Future[RequestConstraints]() for _ in range(count)]
        waiting = []
        for constraints in enforcements:
            self.sent += 1  # lengths increase, so that a length identifies the request that reserves memory
            queued = make_queued(prompt=[0] * self.sent, constraints=constraints if compiling else None)
            waiting.append(replace(queued, leader=waiting[0].request) if led and waiting else queued)
        if self.closed:
            with pytest.raises(Closed, match="closed"):
                self.scheduler.submit(*waiting, block=True)
        elif len(self.queue) - self.joining + count > LIMIT:
            with pytest.raises(QueueFull):
                self.scheduler.submit(*waiting, block=False)
        else:
            self.scheduler.submit(*waiting, block=True)
            self.queue += waiting
            self.compiling += enforcements if compiling else []

    @property
    def joining(self) -> int:
        """Free slots make room in the queue unless other requests wait for them."""
        return 0 if self.short or self.preempted else SLOTS - len(self.running)

    @precondition(lambda self: self.compiling)
    @rule(fails=st.booleans(), data=st.data())
    def compiled(self, fails: bool, data: st.DataObject) -> None:
        constraints = self.compiling.pop(data.draw(st.integers(0, len(self.compiling) - 1)))
        if fails:
            constraints.set_exception(BadRequest("no such grammar"))
        else:
            constraints.set_result(RequestConstraints(Constraint(256, ())))

    @precondition(lambda self: self.everybody)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        waiting = data.draw(st.sampled_from(self.everybody))
        waiting.request.cancel()
        self.cancelled.add(waiting)

    @precondition(lambda self: self.preempted or self.queue)
    @rule()
    def drop(self) -> None:
        gone = [r for r in self.preempted + self.queue if r in self.cancelled or self.failed(r)]
        self.preempted = [r for r in self.preempted if r not in gone]
        self.queue = [r for r in self.queue if r not in gone]
        dropped = self.scheduler.drop_queued(time.monotonic())
        self.compiling = [each for each in self.compiling if not each.cancelled()]  # no request waits for them
        assert [each.queued.request for each in dropped] == [waiting.request for waiting in gone]
        assert [each.finish.reason for each in dropped] == [
            "cancelled" if r in self.cancelled else "error" for r in gone
        ]
        for each in dropped:
            each.queued.request.finish(each.finish)

    @precondition(lambda self: self.preempted or self.queue or self.short)
    @rule(room=st.integers(0, SLOTS))
    def admit(self, room: int) -> None:
        here = {r.request for r in self.everybody if r not in self.queue or self.can_run(r)}
        due = [r for r in self.queue if self.can_run(r) or (self.compiles(r) and r.leader in here)]
        can_run = [r for r in (self.preempted + due)[: SLOTS - len(self.running)] if not self.follows(r)]
        joined = can_run[:room]
        self.room.count, self.room.asked = room, []
        ran, failed = self.scheduler.join_ready(self.slots, MANY)
        asked = self.room.asked
        assert failed is None
        assert [running.request for running in ran] == [waiting.request for waiting in joined]
        assert asked == [needed(r) for r in can_run[: len(asked)]]  # no request overtakes one that lacked memory
        assert asked[:room] == [needed(r) for r in joined]
        self.preempted = [r for r in self.preempted if r not in joined]
        self.queue = [r for r in self.queue if r not in joined]
        self.running += joined
        self.short = len(asked) > room

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        waiting = data.draw(st.sampled_from(self.running))
        self.running.remove(waiting)
        self.slots.leave(self.seat(waiting).slot)
        waiting.request.finish(Finish("stop"))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def register_prefix(self, data: st.DataObject) -> None:
        """The caches hold all of a prompt."""
        running = self.seat(data.draw(st.sampled_from(self.running)))
        running.prefilled = running.prefill_end
        self.slots.register_prefix(running, running.prefilled)
        self.known.add(running.request)

    @precondition(lambda self: self.running)
    @rule()
    def preempt(self) -> None:
        *_, youngest = self.slots
        waiting = self.running.pop()
        self.scheduler.preempt(youngest.preempt())
        self.slots.leave(youngest.slot)
        self.preempted.insert(0, waiting)

    @precondition(lambda self: self.sent > 5)  # late, and not always: a closed scheduler has little to show
    @rule(really=st.sampled_from([False, False, False, True]))
    def close(self, really: bool) -> None:
        if not really:
            return
        self.scheduler.close()
        self.closed = True
        self.cancelled.update(self.everybody)

    @precondition(lambda self: self.running or self.preempted or self.closed or any(map(self.moves, self.queue)))
    @rule()
    def wait(self) -> None:
        assert self.scheduler.wait_for_work() == bool(self.everybody)

    @property
    def everybody(self) -> list[QueuedRequest]:
        return self.preempted + self.queue + self.running

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert [running.request for running in self.slots] == [waiting.request for waiting in self.running]
        assert len({running.slot for running in self.slots} & set(range(SLOTS))) == len(self.running)
        assert (self.scheduler.waiting, self.scheduler.running) == (
            len(self.preempted + self.queue),
            len(self.running),
        )
        assert all((r.request.interrupted(0.0) == Finish("cancelled")) == (r in self.cancelled) for r in self.everybody)

    def seat(self, waiting: QueuedRequest) -> RunningRequest:
        return next(running for running in self.slots if running.request is waiting.request)

    def can_run(self, waiting: QueuedRequest) -> bool:
        return self.compiles(waiting) and not self.follows(waiting)

    def compiles(self, waiting: QueuedRequest) -> bool:
        return waiting.constraints.done() and not self.failed(waiting)

    def follows(self, waiting: QueuedRequest) -> bool:
        """Whether its leader is running or queued and has not prefilled the prompt yet."""
        return waiting.leader in {each.request for each in self.everybody} - self.known

    def moves(self, waiting: QueuedRequest) -> bool:
        return waiting.constraints.done() or waiting in self.cancelled

    @staticmethod
    def failed(waiting: QueuedRequest) -> bool:
        return waiting.constraints.done() and waiting.constraints.exception() is not None


TestScheduler = SchedulerModel.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def in_thread(work: Callable[[], object]) -> "Future[object]":
    result: Future[object] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def test_a_blocked_submission_is_queued_or_raises_closed() -> None:
    scheduler, slots = opened(1, 1, Turnstile())
    for _ in range(2):  # one for the free slot, one that waits
        scheduler.submit(make_queued(), block=False)
    first = in_thread(lambda: scheduler.submit(make_queued(), block=True))
    time.sleep(0.02)
    assert not first.done()
    [running] = scheduler.join_ready(slots, MANY).joined
    time.sleep(0.02)
    assert not first.done()
    slots.leave(running.slot)
    scheduler.join_ready(slots, MANY)
    first.result(5)
    second = in_thread(lambda: scheduler.submit(make_queued(), block=True))
    time.sleep(0.02)
    assert not second.done()
    scheduler.close()
    with pytest.raises(Closed, match="closed"):
        second.result(5)


def test_a_blocked_group_is_not_overtaken_by_smaller_submissions() -> None:
    scheduler, slots = opened(1, 3, Turnstile())
    queued = [make_queued() for _ in range(4)]  # one for the free slot
    for waiting in queued:
        scheduler.submit(waiting, block=False)

    def one_leaves() -> None:
        if running := [*slots]:
            slots.leave(running[0].slot)
        scheduler.join_ready(slots, MANY)
        time.sleep(0.02)

    one_leaves()
    group = in_thread(lambda: scheduler.submit(make_queued(), make_queued(), block=True))
    time.sleep(0.02)
    single = in_thread(lambda: scheduler.submit(make_queued(), block=True))
    one_leaves()
    assert (group.done(), single.done()) == (False, False)
    with pytest.raises(QueueFull):
        scheduler.submit(make_queued(), block=False)
    one_leaves()
    group.result(5)
    assert not single.done()
    one_leaves()
    single.result(5)


def test_a_request_whose_join_raises_leaves_the_queue_and_the_next_one_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, slots = opened(3, 3, Turnstile())
    sent = [make_queued(prompt=[0] * length) for length in (1, 2, 3)]
    for waiting in sent:
        scheduler.submit(waiting, block=False)

    def refuse_the_second(running: RunningRequest) -> None:
        if running.request is sent[1].request:
            raise RuntimeError("no such slot")
        joined(running)

    joined = scheduler.join
    monkeypatch.setattr(scheduler, "join", refuse_the_second)
    first, failed = scheduler.join_ready(slots, MANY)
    assert [running.request for running in first] == [sent[0].request]
    assert failed is not None
    assert (failed[0], str(failed[1])) == (sent[1], "no such slot")
    assert (scheduler.waiting, scheduler.running, len(slots)) == (1, 1, 1)
    assert [running.request for running in scheduler.join_ready(slots, MANY).joined] == [sent[2].request]


def test_requests_join_until_their_prompts_fill_a_round() -> None:
    scheduler, slots = opened(5, 5, Turnstile())
    sent = [make_queued(prompt=[0] * length) for length in (5, 1, 5, 5, 1)]  # the last token is not prefilled
    for waiting in sent:
        scheduler.submit(waiting, block=False)
    first = scheduler.join_ready(slots, 6).joined
    assert [running.request for running in first] == [each.request for each in sent[:3]]
    assert scheduler.join_ready(slots, 6).joined == []
    first[0].prefilled = 3
    assert [running.request for running in scheduler.join_ready(slots, 6).joined] == [sent[3].request]
    for running in slots:
        running.prefilled = running.prefill_end
    assert [running.request for running in scheduler.join_ready(slots, 6).joined] == [sent[4].request]


class RoomForTheSecond(Turnstile):
    """Memory for every request but the first."""

    def reserve(self, slot: int, tokens: int, *more: Any) -> Any:
        self.count = None if self.asked else 0
        return super().reserve(slot, tokens, *more)


def test_no_request_overtakes_one_that_lacks_cache_memory() -> None:
    scheduler, slots = opened(2, 5, RoomForTheSecond())
    for _ in range(2):
        scheduler.submit(make_queued(), block=False)
    assert scheduler.join_ready(slots, MANY).joined == []
    assert (scheduler.waiting, scheduler.running) == (2, 0)
    assert len(scheduler.join_ready(slots, MANY).joined) == 2


def test_free_slots_without_cache_memory_do_not_shorten_the_queue() -> None:
    room = Turnstile(0)
    scheduler, slots = opened(4, 1, room)
    scheduler.submit(make_queued(), block=False)
    assert scheduler.join_ready(slots, MANY).joined == []
    with pytest.raises(QueueFull):
        scheduler.submit(make_queued(), block=False)
    room.count = None
    [_] = scheduler.join_ready(slots, MANY).joined
    scheduler.submit(make_queued(), block=False)


def test_outputs_of_a_prompt_wait_until_the_leader_has_prefilled_it() -> None:
    scheduler, slots = opened(4, 4, Turnstile())
    first = make_queued()
    second, third = (replace(make_queued(), leader=first.request) for _ in range(2))
    scheduler.submit(first, second, third, block=False)
    [running] = scheduler.join_ready(slots, MANY).joined
    single = make_queued()
    scheduler.submit(single, block=False)
    [other] = scheduler.join_ready(slots, MANY).joined  # two slots are kept for them, a third is free
    assert other.request is single.request
    scheduler.submit(make_queued(), block=False)
    assert scheduler.join_ready(slots, MANY).joined == []
    slots.register_prefix(running, 1)
    assert [each.request for each in scheduler.join_ready(slots, MANY).joined] == [second.request, third.request]


def test_outputs_of_a_prompt_do_not_wait_for_a_finished_leader() -> None:
    scheduler, slots = opened(4, 4, Turnstile())
    first = make_queued()
    scheduler.submit(first, replace(make_queued(), leader=first.request), block=False)
    first.request.cancel()
    [dropped] = scheduler.drop_queued(time.monotonic())
    first.request.finish(dropped.finish)
    assert len(scheduler.join_ready(slots, MANY).joined) == 1


@pytest.mark.parametrize("timeout_s", [None, 1e9, 1e300])
def test_the_loop_sleeps_until_a_grammar_is_compiled(timeout_s: float | None) -> None:
    scheduler, constraints = Scheduler(1, 1), Future[RequestConstraints]()
    scheduler.submit(make_queued(constraints=constraints, timeout_s=timeout_s), block=False)
    work = in_thread(scheduler.wait_for_work)
    time.sleep(0.02)
    assert not work.done()
    constraints.set_result(RequestConstraints(Constraint(256, ())))
    assert work.result(5) is True


@pytest.mark.parametrize("wait", [Scheduler.wait_for_work, partial(Scheduler.has_work, within=PATIENCE_S)])
def test_the_loop_wakes_for_the_deadline_of_a_queued_request(wait: Callable[[Scheduler], bool]) -> None:
    scheduler = Scheduler(1, 1)
    scheduler.submit(make_queued(constraints=Future(), timeout_s=0.05), block=False)
    assert in_thread(lambda: wait(scheduler)).result(5) is True
    assert [dropped.finish.reason for dropped in scheduler.drop_queued(time.monotonic())] == ["timeout"]


@pytest.mark.parametrize("soon", [True, False])
def test_a_request_that_soon_follows_waits_for_no_part_of_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, soon: bool
) -> None:
    scheduler, ran = Scheduler(1, 1), list[int]()
    loop: Any = SimpleNamespace(idle=True, scheduler=scheduler)
    monkeypatch.setattr(loop_thread, "_QUIET_S", PATIENCE_S if soon else 0.0)
    work = in_thread(lambda: loop_thread._work_comes(loop, (ran.append(part) for part in range(3))))
    assert soon or eventually(lambda: ran == [0, 1, 2])
    scheduler.submit(make_queued(), block=False)
    assert work.result(PATIENCE_S)
    assert len(ran) == (0 if soon else 3)
