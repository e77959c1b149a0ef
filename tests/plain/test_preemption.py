"""Memory before a round: the oldest request gets it first, and a preempted one commits nothing of the round in flight.

A block becomes findable when its last token has been processed.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandemrt.engines.contract.contract import BLOCK_SIZE
from tandemrt.plugins.operators.constants import Rule
from tandemrt.runtime.caches.hashes import BlockHashes
from tandemrt.runtime.caches.kv_cache import BlockTable
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.drafters.none import NoDrafter
from tandemrt.runtime.engine_loop.draft_windows import DraftWindowPlanner
from tandemrt.runtime.engine_loop.planner import plan_round
from tandemrt.runtime.engine_loop.preemption import Preemption
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.request import Finish
from tandemrt.runtime.requests.round import Round, VerifiedRound
from tandemrt.runtime.requests.running import RunningRequest
from tandemrt.runtime.requests.scheduler import Scheduler
from tandemrt.runtime.requests.slots import Slots
from tests.plain.requests import make_queued

SLOTS, BLOCKS = 3, 4  # the first block is no request's


class Memory:
    """Slots over a small paged cache, without a draft, and what reserves their memory."""

    def __init__(self) -> None:
        self.table = BlockTable(SLOTS, BLOCKS - 1, BLOCKS, torch.device("cpu"))
        self.scheduler, self.metrics = Scheduler(SLOTS, SLOTS), Metrics()
        self.slots = Slots(SLOTS, self.table, [self.scheduler], num_draft_tokens=0)
        self.ended: list[tuple[RunningRequest, Finish]] = []
        end = lambda running, finish: self.ended.append((running, finish))  # noqa: E731
        committer: Any = SimpleNamespace(end=end, deliver=lambda: None)
        self.preemption = Preemption(self.slots, self.scheduler, NoDrafter(), committer, self.metrics)

    def join(self, prompt: Sequence[int], *, prefilled: bool = True, window: int = 0) -> RunningRequest:
        running = self.slots.join(make_queued(prompt=prompt, hashes=BlockHashes("bundle"), window=window))
        assert running is not None
        if prefilled:
            running.prefilled = running.prefill_end
        return running

    def round_in_flight(self) -> VerifiedRound:
        """A round of all requests in slots, which the host has not committed."""
        rows = {running.slot: running for running in self.slots}
        return VerifiedRound(Round(rows, SLOTS, 0, needs_probs=False, rules=frozenset({Rule.COUPLED})), {}, {})

    def registered(self, running: RunningRequest) -> int:
        """Blocks of the text that other requests find."""
        assert running.hashes is not None
        names = running.hashes.first(running.tokens, len(running.tokens) // BLOCK_SIZE)
        return self.table.allocator.count_cached(names)


@pytest.mark.parametrize(("length", "blocks"), [(63, 0), (64, 0), (65, 1), (128, 1), (129, 2)])
def test_a_block_is_registered_after_its_last_token_was_processed(length: int, blocks: int) -> None:
    """The newest token of a text is processed by the next round, which a cancelled request does not get."""
    memory = Memory()
    running = memory.join(range(60))
    running.tokens += range(60, length)
    assert memory.slots.grow(running)
    memory.preemption.reserve_memory(None)
    assert memory.registered(running) == blocks


def test_a_block_is_registered_in_one_round_only(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    running = memory.join(range(65))
    calls: list[int] = []
    register = memory.table.register_prefix
    monkeypatch.setattr(
        memory.table,
        "register_prefix",
        lambda slot, *arguments, **named: (calls.append(slot), register(slot, *arguments, **named)),
    )
    for _ in range(3):
        memory.preemption.reserve_memory(None)
    assert calls == [running.slot]
    assert memory.registered(running) == 1


@pytest.mark.parametrize(("prefilled", "blocks"), [(63, 0), (64, 1), (127, 1), (128, 2)])
def test_a_prompt_registers_the_blocks_that_were_prefilled(prefilled: int, blocks: int) -> None:
    memory = Memory()
    running = memory.join(range(140), prefilled=False)
    running.prefilled = prefilled
    memory.preemption.reserve_memory(None)
    assert memory.registered(running) == blocks


def test_the_oldest_requests_keep_their_memory_and_the_youngest_commit_nothing() -> None:
    memory = Memory()
    oldest, second, youngest = (memory.join([first, *range(40)]) for first in (101, 102, 103))
    last = memory.round_in_flight()
    assert memory.preemption.reserve_memory(last) is last, "memory suffices"

    oldest.tokens += [9] * 30  # a second block, where none is free
    last = memory.preemption.reserve_memory(last) or last
    assert list(memory.slots) == list(last.round.rows.values()) == [oldest, second]

    second.tokens += [9] * 30
    last = memory.preemption.reserve_memory(last) or last
    assert list(memory.slots) == list(last.round.rows.values()) == [oldest]
    assert [each.preempted for each in memory.scheduler._preempted] == [second, youngest]
    assert (memory.metrics.preemptions, second.preemptions, youngest.preemptions) == (2, 1, 1)
    assert not memory.ended


@pytest.mark.parametrize("ending", range(3))
def test_a_request_that_ends_with_its_last_text_gets_no_memory_and_no_place_in_the_queue(
    caplog: pytest.LogCaptureFixture, ending: int
) -> None:
    """Texts are delivered before a preemption, and one cannot be written."""
    memory = Memory()
    requests = [memory.join([first, *range(40)]) for first in (101, 102, 103)]
    oldest, _, youngest = requests

    def deliver() -> None:
        if not requests[ending].finished:
            requests[ending].finish(Finish("error"))
            memory.slots.leave(requests[ending].slot)

    end = lambda running, finish: memory.ended.append((running, finish))  # noqa: E731
    memory.preemption._committer = SimpleNamespace(deliver=deliver, end=end)  # type: ignore[assignment]
    oldest.tokens += [9] * 30  # a second block, where none is free
    memory.preemption.reserve_memory(None)
    preempted = [] if requests[ending] is youngest else [youngest]
    assert [each.preempted for each in memory.scheduler._preempted] == preempted
    assert list(memory.slots) == [each for each in requests if each not in (requests[ending], *preempted)]
    assert memory.table.allocator.num_blocks(requests[ending].slot) == 0
    assert (memory.ended, caplog.messages) == ([], [])


def test_a_request_that_lacks_memory_for_itself_is_preempted_alone() -> None:
    """Both want another block and one is free: the older one gets it."""
    memory = Memory()
    older, younger = (memory.join([first, *range(40)]) for first in (101, 102))
    last = memory.round_in_flight()
    for running in (older, younger):
        running.tokens += [9] * 30
    last = memory.preemption.reserve_memory(last) or last
    assert list(memory.slots) == list(last.round.rows.values()) == [older]
    assert [each.preempted for each in memory.scheduler._preempted] == [younger]


@pytest.mark.parametrize("rereads", [False, True], ids=["prefilled", "processed again"])
@pytest.mark.parametrize("planned", [False, True], ids=["planned without", "planned with"])
def test_a_repeated_round_drafts_fast_forward_tokens_if_the_dropped_one_did(
    monkeypatch: pytest.MonkeyPatch, planned: bool, rereads: bool
) -> None:
    """The host knows more of the text by now, and the text under the rejection rule depends on what is drafted."""
    monkeypatch.setattr(Constraint, "may_fast_forward", lambda *_: not planned)
    memory, windows = Memory(), DraftWindowPlanner(None, 4)
    older, running = (memory.join([first, *range(40)], window=4) for first in (101, 102))
    running.tokens += [7, 8]
    last = memory.round_in_flight()
    last = replace(last, round=replace(last.round, may_fast_forward=frozenset([running.slot] if planned else [])))
    with monkeypatch.context() as short:
        short.setattr(memory.slots, "grow", lambda each: each is older)
        memory.preemption.reserve_memory(last)
    assert memory.slots.join(memory.scheduler._preempted.pop()) is running
    running.assign_slot(running.slot, len(running.tokens) - 1, rereads=rereads)

    round_ = plan_round([running], windows, SLOTS)
    running.replay.mark_planned()
    if rereads:
        assert round_.with_fast_forward().fast_forward[running.slot] == [7]
        running.reread([7, 8])
        round_ = round_.with_fast_forward()
        running.replay.mark_planned()
    assert round_.may_fast_forward == ({running.slot} if planned else set())
    assert plan_round([running], windows, SLOTS).may_fast_forward == (set() if planned else {running.slot})


def test_a_request_that_is_preempted_before_its_round_is_repeated_keeps_the_plan() -> None:
    memory = Memory()
    running = memory.join(range(40), window=4)
    running.replay.drop_round(fast_forward=False, waits_for_drafts=False)
    memory.slots.grow = lambda _: False  # type: ignore[method-assign]
    empty = VerifiedRound(Round({}, SLOTS, 0, needs_probs=False, rules=frozenset()), {}, {})
    memory.preemption.reserve_memory(empty)
    assert memory.scheduler._preempted.pop().preempted is running
    assert running.replay.fast_forward is False
