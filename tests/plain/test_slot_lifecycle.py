"""Requests join and leave slots in any order, with faults: nothing is held for a request that left."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandemrt.engines.contract.calls import capacity
from tandemrt.engines.contract.contract import BLOCK_SIZE, blocks_of
from tandemrt.engines.validation.errors import InternalError
from tandemrt.runtime.caches.hashes import BlockHashes
from tandemrt.runtime.caches.kv_cache import BlockTable
from tandemrt.runtime.caches.linear import LinearCacheManager
from tandemrt.runtime.device.slot_state import SlotState
from tandemrt.runtime.drafters.text_lookup import TextLookup
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.running import QueuedRequest, RunningRequest
from tandemrt.runtime.requests.scheduler import Scheduler
from tandemrt.runtime.requests.slots import Slots
from tests.plain.requests import make_queued

SLOTS, BLOCKS, WINDOW = 3, 7, 4
CPU = torch.device("cpu")


class Fragile:
    """Passes calls on to ``inner`` and raises once where a fault is planted: before or after the call."""

    def __init__(self, inner: Any, faults: list["tuple[Any, str]"]) -> None:
        self.inner = inner
        self._faults = faults  # listener and time of the planted faults

    @property
    def caches_outputs(self) -> bool:
        return bool(self.inner.caches_outputs)

    @property
    def reuses_whole_chunks(self) -> bool:
        return bool(self.inner.reuses_whole_chunks)

    def join(self, running: RunningRequest) -> None:
        self._break("before it joined")
        self.inner.join(running)
        self._break("after its join")

    def reserve(self, slot: int, tokens: int, hashes: Sequence[bytes] = ()) -> int | None:
        self._break("before it joined")
        num_cached: int | None = self.inner.reserve(slot, tokens, hashes)
        self._break("after its join")
        return num_cached

    def register_prefix(self, slot: int, hashes: Sequence[bytes], *, of_prompt: bool = True) -> None:
        self.inner.register_prefix(slot, hashes, of_prompt=of_prompt)

    def leave(self, slot: int) -> None:
        self.inner.leave(slot)
        self._break("after its leave")

    def _break(self, when: str) -> None:
        if (self.inner, when) in self._faults:
            self._faults.remove((self.inner, when))
            raise RuntimeError(f"{type(self.inner).__name__} broke {when}")


class SeatsModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable(SLOTS, BLOCKS - 1, BLOCKS, CPU)
        self.state = SlotState(SLOTS, CPU)
        self.scheduler = Scheduler(SLOTS, 1)
        self.lookup = TextLookup(1, 2)
        self.all = [self.table, self.scheduler, self.state, self.lookup]
        self.faults: list[tuple[Any, str]] = []
        room, *listeners = [Fragile(each, self.faults) for each in self.all]
        self.slots = Slots(SLOTS, room, listeners, num_draft_tokens=WINDOW)
        self.running: list[RunningRequest] = []  # in the order in which they joined
        self.began: dict[RunningRequest, list[int]] = {}  # with which tokens they joined
        self.gone: list[QueuedRequest] = []  # found no memory to grow

    def needed(self, tokens: Sequence[int], request: Request) -> int:
        """Blocks for a text, a round in flight and the next one."""
        return blocks_of(capacity(min(len(tokens) + WINDOW + 1, request.max_length), WINDOW))

    def found(self, waiting: QueuedRequest) -> list[int]:
        """Blocks that hold what a text begins with, up to the token that a round feeds."""
        assert waiting.hashes is not None
        hashes = waiting.hashes.first(waiting.tokens, (len(waiting.tokens) - 1) // BLOCK_SIZE)
        return [self.table.allocator._registered[each] for each in hashes[: self.table.allocator.count_cached(hashes)]]

    @property
    def rows(self) -> list[list[int]]:
        """The block table as a round sees it."""
        self.table.flush()
        rows: list[list[int]] = self.table.device.tolist()
        return rows

    @property
    def available(self) -> int:
        """Blocks that are in no table."""
        return BLOCKS - 1 - len({block for row in self.rows for block in row if block})

    @precondition(lambda self: len(self.running) < SLOTS)
    @rule(
        prompt=st.lists(st.integers(1, 255), min_size=1, max_size=100),
        shared=st.integers(0, 2),
        temperature=st.sampled_from([0.0, 0.5, 2.0]),
        breaks=st.none() | st.tuples(st.integers(0, 3), st.sampled_from(["before it joined", "after its join"])),
    )
    def join(self, prompt: list[int], shared: int, temperature: float, breaks: tuple[int, str] | None) -> None:
        hashes = BlockHashes("bundle")
        waiting = make_queued(prompt=[7] * BLOCK_SIZE * shared + prompt, temperature=temperature, hashes=hashes)
        self.take_a_seat(waiting, breaks)

    @precondition(lambda self: self.gone and len(self.running) < SLOTS)
    @rule()
    def come_back(self) -> None:
        self.take_a_seat(self.gone[0], None)

    def take_a_seat(self, waiting: QueuedRequest, breaks: tuple[int, str] | None) -> None:
        cached = self.found(waiting)
        in_use = {block for row in self.rows for block in row}
        fits = self.needed(waiting.tokens, waiting.request) - len(cached) <= self.available - len(set(cached) - in_use)
        if breaks is not None and (fits or breaks[0] == 0):
            self.faults.append((self.all[breaks[0]], breaks[1]))
            with pytest.raises(RuntimeError, match=breaks[1]):
                self.slots.join(waiting)
            return
        running = self.slots.join(waiting)
        assert (running is not None) == fits
        if running is not None:
            assert running.request is waiting.request
            assert running.cached == running.prefilled == len(cached) * BLOCK_SIZE
            assert self.rows[running.slot][: len(cached)] == cached
            assert waiting.preempted in (None, running)
            self.running.append(running)
            self.began[running] = [*running.tokens]
            self.gone = [each for each in self.gone if each is not waiting]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 90))
    def grow(self, data: st.DataObject, count: int) -> None:
        running = data.draw(st.sampled_from(self.running))
        before = [block for block in self.rows[running.slot] if block]
        running.tokens += [9] * min(count, running.remaining)
        fits = self.needed(running.tokens, running.request) - len(before) <= self.available
        assert self.slots.grow(running) == fits
        after = [block for block in self.rows[running.slot] if block]
        assert after[: len(before)] == before, "what a text has written stays where it is"
        assert len(after) == max(len(before), self.needed(running.tokens, running.request) if fits else 0)
        if not fits:
            self.running.remove(running)
            self.slots.leave(running.slot)
            self.gone.insert(0, running.preempt())

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def register_prefix(self, data: st.DataObject) -> None:
        running = data.draw(st.sampled_from(self.running))
        self.slots.register_prefix(running, data.draw(st.integers(0, len(running.tokens) - 1)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), breaks=st.sets(st.integers(0, 3), max_size=3))
    def leave(self, data: st.DataObject, breaks: set[int]) -> None:
        running = data.draw(st.sampled_from(self.running))
        self.running.remove(running)
        self.faults += [(self.all[each], "after its leave") for each in breaks]
        if breaks:
            with pytest.raises(RuntimeError, match="after its leave"):
                self.slots.leave(running.slot)
        else:
            self.slots.leave(running.slot)

    @invariant()
    def all_components_hold_exactly_the_requests_in_slots(self) -> None:
        assert not self.faults
        assert list(self.slots) == self.running
        assert (len(self.slots), self.slots.free) == (len(self.running), SLOTS - len(self.running))
        assert self.scheduler.running == len(self.running)
        assert self.table.allocator.available == self.available
        assert self.table.usage == (BLOCKS - 1 - self.available) / (BLOCKS - 1)
        seated = {running.slot: running for running in self.running}
        assert len(seated) == len(self.running)
        assert all(running in self.lookup._sources for running in self.running)
        self.state.flush()  # as every round does
        tables, newest = self.rows, self.state.newest.tolist()
        state = [self.state.view(name, SLOTS).tolist() for name in ("length", "position", "temperature")]
        for slot in range(SLOTS):
            blocks = [block for block in tables[slot] if block]
            place = [values[slot] for values in state]
            if slot in seated:
                running = seated[slot]
                began, at = self.began[running], running.cached
                assert len(set(blocks)) >= self.needed(began, running.request)
                assert place == [at, at + 1, running.request.params.temperature]
                assert newest[slot] == [began[max(0, at - 1)], began[at]]
            else:
                assert blocks == []
                assert place == [0, 0, 0]

    def teardown(self) -> None:
        for running in self.slots:
            self.slots.leave(running.slot)
        self.running.clear()
        self.all_components_hold_exactly_the_requests_in_slots()


TestSeats = SeatsModel.TestCase
TestSeats.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_joining_full_slots_raises() -> None:
    slots = Slots(1, LinearCacheManager(0), [], num_draft_tokens=0)
    assert slots.join(make_queued()) is not None
    with pytest.raises(InternalError, match="slots: all 1 are taken"):
        slots.join(make_queued())
    assert len(slots) == 1


def test_all_listeners_leave_although_several_raise() -> None:
    class Leaving:
        def __init__(self, name: str) -> None:
            self.name = name

        def join(self, running: RunningRequest) -> None: ...

        def leave(self, slot: int) -> None:
            left.append((self.name, slot))
            raise RuntimeError(self.name)

    left = list[tuple[str, int]]()
    room = LinearCacheManager(0)
    slots = Slots(2, room, [Leaving("first"), Leaving("second")], num_draft_tokens=0)
    slots.join(make_queued())
    with pytest.raises(RuntimeError):
        slots.leave(0)
    assert left == [("first", 0), ("second", 0)]
    assert len(slots) == 0
    assert slots.join(make_queued()).slot == 0
