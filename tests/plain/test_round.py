"""Rounds are planned first, their steps follow a schedule, and prompts are processed one chunk per round."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandemrt.engines.contract.calls import Packed
from tandemrt.plugins.operators.constants import Rule
from tandemrt.runtime.caches.call_layout import LinearLayout
from tandemrt.runtime.caches.linear import LinearCacheManager
from tandemrt.runtime.device.buffers import RoundBuffers
from tandemrt.runtime.device.prompt_plan import Chunk
from tandemrt.runtime.device.slot_state import SlotState
from tandemrt.runtime.device.streams import Streams
from tandemrt.runtime.device.timeline import Timeline
from tandemrt.runtime.drafters.none import NoDrafter, NullHooks
from tandemrt.runtime.drafters.text_lookup import TextLookup
from tandemrt.runtime.engine_loop import loop as loop_module
from tandemrt.runtime.engine_loop.draft_windows import DraftWindowPlanner
from tandemrt.runtime.engine_loop.loop import EngineLoop
from tandemrt.runtime.engine_loop.planner import RoundPlanner, plan_round
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.arrivals import Arrivals
from tandemrt.runtime.requests.request import Finish
from tandemrt.runtime.requests.round import Round, VerifiedRound
from tandemrt.runtime.requests.scheduler import Scheduler
from tandemrt.runtime.requests.slots import Slots
from tests.plain.requests import ids, make_queued
from tests.waiting import PATIENCE_S

SLOTS, WINDOW, CHUNK = 8, 4, 16
CPU = torch.device("cpu")
STAGES = ("propose", "fetch_drafts", "score", "deliver", "commit", "replace_drafts", "write_inputs", "verify")
LOOKUP = TextLookup(9, 9)  # copies nothing of a short text


class PromisingLookup(TextLookup):
    """A lookup for whose copies every round waits."""

    def promises(self, round_: Round, wait: float) -> bool:  # noqa: ARG002
        return True


PROMISING = PromisingLookup(1, 2)


def filled(*prompts: int, **params: Any) -> Slots:
    """Slots with requests of so many prompt tokens; those of one token need no prefill."""
    slots = Slots(SLOTS, LinearCacheManager(0), [], num_draft_tokens=0)
    for length in prompts:
        slots.join(make_queued(prompt=[0] * length, **params))
    return slots


def shorten(slots: Slots, remaining: Sequence[int]) -> None:
    """Lengthen the texts of all requests until so many tokens may follow."""
    for running, tokens in zip(slots, remaining, strict=True):
        running.tokens += [0] * (running.remaining - tokens)


class FakeTarget:
    """A target with a linear cache that always says "a", and notes its calls: first slot, places, tokens."""

    def __init__(self) -> None:
        self.buffers = RoundBuffers(
            slots=SLOTS, window=WINDOW, vocab=256, length=256, chunk=CHUNK, dtype=torch.float32, device=CPU
        )
        self.state = SlotState(SLOTS, CPU)
        self.layout = LinearLayout(CPU)
        # Not of a CPU, whose prompts come one by one (prompt_rows).
        self.engines = {"target": SimpleNamespace(contract=SimpleNamespace(inputs=()), device=torch.device("meta"))}
        self.images = None
        self.prefilled: list[tuple[int, list[int], list[list[int]]]] = []

    def prefill(self, chunks: Sequence[Chunk], tokens: torch.Tensor) -> None:
        slot = chunks[0].slot
        at = self.state.view("length", SLOTS)[slot : slot + len(tokens)]
        self.prefilled.append((slot, at.tolist(), tokens.tolist()))

    def score(self, round_: Round) -> None:
        pass

    def on_failure(self, call: Any) -> None:
        pass

    def end_waits(self, overdue: Any) -> None:
        pass

    def check(self) -> None:
        pass

    def adjust(self, round_: Round) -> None:
        pass

    def verify(self, round_: Round, draft_probs: None) -> None:  # noqa: ARG002
        self.buffers.tokens.view(round_.batch, round_.window + 1).fill_(ids("a")[0])
        self.buffers.count.view(round_.batch).fill_(1)


class FakeDrafter(NullHooks):
    """Drafts nothing."""

    window = WINDOW
    caches = ()
    max_length: int | None = None

    def join(self, running: Any) -> None:
        pass

    def leave(self, slot: int) -> None:
        pass

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[int]) -> None:
        pass

    def cached_tokens(self, running: Any) -> int:
        return len(running.tokens)

    def skip(self, round_: Round) -> None:
        pass

    def propose(self, round_: Round) -> None:
        pass


def make_loop(
    target: Any,
    drafter: Any,
    scheduler: Scheduler,
    streams: Streams,
    metrics: Metrics,
    *,
    overlap: bool,
    lookup: TextLookup | None = None,
) -> EngineLoop:
    return EngineLoop(
        target,
        drafter,
        lookup,
        scheduler,
        streams,
        LinearCacheManager(0),
        metrics,
        Timeline(CPU, metrics, enabled=False),
        slots=SLOTS,
        draft_windows=DraftWindowPlanner(WINDOW, WINDOW),
        slack=WINDOW,
        prefill_chunk=CHUNK,
        prefill_chunk_while_decoding=CHUNK,
        overlap=overlap,
    )


def test_a_round_serves_prefilled_requests_only() -> None:
    slots = filled(1, 5, 1)
    round_ = plan_round(slots, DraftWindowPlanner({1: 4, 3: 0}, WINDOW), SLOTS)
    assert [running.slot for running in round_.rows.values()] == list(round_.rows) == [0, 2]
    assert (round_.batch, round_.window) == (4, 4)  # slots 0 to 2 in a batch of 4
    empty = plan_round(filled(5, 7), DraftWindowPlanner(WINDOW, WINDOW), SLOTS)
    assert (dict(empty.rows), empty.batch, empty.window) == ({}, 0, 0)


@pytest.mark.parametrize(("asked", "window"), [([0, 3], 3), ([3, 0], 3), ([1, 2], 2), ([0, 0], 0), ([9, 1], WINDOW)])
def test_a_round_drafts_the_largest_window_of_its_requests_up_to_the_limit(asked: list[int], window: int) -> None:
    slots = filled()
    for each in asked:
        slots.join(make_queued(window=each))
    assert plan_round(slots, DraftWindowPlanner(WINDOW, WINDOW), SLOTS).window == window


@pytest.mark.parametrize(
    ("remaining", "any_shape", "window"),
    [([1], True, 0), ([1], False, WINDOW), ([1, 3], True, 2), ([3, 50], True, WINDOW), ([3, 50], False, WINDOW)],
)
def test_a_round_without_graphs_drafts_no_more_than_may_still_be_emitted(
    remaining: list[int], any_shape: bool, window: int
) -> None:
    """A request for one token drafts nothing."""
    slots, windows = filled(*[1] * len(remaining)), DraftWindowPlanner(WINDOW, WINDOW, any_shape=any_shape)
    shorten(slots, remaining)
    round_ = plan_round(slots, windows, SLOTS)
    assert (round_.window, round_.num_proposed) == (window, window)
    next(iter(slots)).replay.start([1, 2, 3])  # it drafts what it knows
    assert plan_round(slots, windows, SLOTS).window == WINDOW


def test_under_the_rejection_rule_a_window_of_forced_tokens_has_none_of_the_drafter_beside_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the drafter runs for others must not decide what a request learns about its own drafts."""
    slots = filled(1, 1, rule="rejection")
    forced, free = slots
    for running, count in ((forced, WINDOW), (free, 0)):
        monkeypatch.setattr(running, "fast_forward_tokens", lambda most, count=count: [0] * min(most, count))
    alone, beside = (
        Round(
            {running.slot: running for running in rows},
            batch=2,
            window=WINDOW,
            needs_probs=True,
            rules=frozenset({Rule.REJECTION}),
            num_proposed=WINDOW,
            may_fast_forward=frozenset({forced.slot}),
        ).with_fast_forward()
        for rows in ([forced], [forced, free])
    )
    assert not alone.needs_drafter
    assert beside.needs_drafter
    assert alone.num_proposed_for(forced) == beside.num_proposed_for(forced) == 0
    assert alone.max_fast_forward(forced) == beside.max_fast_forward(forced) == WINDOW
    assert beside.num_proposed_for(free) == WINDOW


def test_windows_under_the_rejection_rule_do_not_depend_on_what_others_may_emit() -> None:
    slots = filled(1)
    slots.join(make_queued(rule="rejection"))
    shorten(slots, [1, 2])
    assert plan_round(slots, DraftWindowPlanner(WINDOW, WINDOW, any_shape=True), SLOTS).window == WINDOW


def test_windows_under_the_rejection_rule_do_not_adapt_beside_others_that_accept_no_drafts() -> None:
    slots, windows = filled(1), DraftWindowPlanner(WINDOW, WINDOW, adaptive=True)
    for window in range(WINDOW + 1):
        for batch in (1, 2):
            windows.costs.calibrate(batch, window, 1 + window)
    [useless] = slots
    windows.join(useless)
    for _ in range(60):
        windows.observe(useless, 0, WINDOW)
    alone = plan_round(slots, windows, SLOTS)
    assert (alone.num_proposed, alone.adaptive) == (0, True)
    rejecting = slots.join(make_queued(rule="rejection"))
    assert rejecting is not None
    windows.join(rejecting)
    mixed = plan_round(slots, windows, SLOTS)
    assert (mixed.num_proposed, mixed.window, mixed.adaptive, mixed.least_gain) == (WINDOW, WINDOW, False, 0.0)


@pytest.mark.parametrize(
    ("remaining", "undrafted", "copies", "used"),
    [
        ([1, 1], [], False, False),
        ([1, 2], [], False, True),
        ([1, 2], [1], False, False),  # the drafter has not read its prompt
        ([1, 2], [1], True, True),
        ([1, 2], [0], False, True),
        ([2, 2], [0, 1], False, False),
    ],
)
def test_drafts_are_of_use_to_requests_that_may_verify_some(
    remaining: list[int], undrafted: list[int], copies: bool, used: bool
) -> None:
    slots = filled(*[1] * len(remaining))
    shorten(slots, remaining)
    round_ = plan_round(slots, DraftWindowPlanner(WINDOW, WINDOW), SLOTS)
    assert replace(round_, undrafted=frozenset(undrafted), may_copy=copies).can_use_drafts() == used


@pytest.mark.parametrize(
    ("undrafted", "copied", "needed"),
    [
        ([], [], True),
        ([], [1], True),
        ([], [0, 1], False),
        ([1], [], True),
        ([1], [1], True),
        ([1], [0], False),
        ([0, 1], [], False),
    ],
)
def test_the_drafter_is_needed_for_a_request_without_copies_whose_prompt_it_has_read(
    undrafted: list[int], copied: list[int], needed: bool
) -> None:
    round_ = plan_round(filled(1, 1), DraftWindowPlanner(WINDOW, WINDOW), SLOTS)
    drafts = {slot: [7] * WINDOW for slot in copied}
    assert replace(round_, undrafted=frozenset(undrafted), copied=drafts).needs_drafter == needed


@pytest.mark.parametrize("beside", ["undrafted", "copied"])
def test_the_drafter_proposed_nothing_where_it_was_needed_for_no_request(beside: str) -> None:
    """A window of fast-forward tokens holds none of its tokens, beside a request for which it does not run either."""
    slots = filled(1, 1)
    forced, other = slots
    round_ = plan_round(slots, DraftWindowPlanner(WINDOW, WINDOW), SLOTS)
    rest: dict[str, Any] = {"undrafted": frozenset({other.slot}), "copied": {other.slot: [7] * WINDOW}}
    round_ = replace(round_, fast_forward={forced.slot: [5] * WINDOW}, **{beside: rest[beside]})
    assert (round_.needs_drafter, round_.only_fast_forward) == (False, False)
    assert round_.num_proposed_for(forced) == 0


def test_a_commit_does_not_change_whether_the_drafter_was_needed() -> None:
    """The last tokens of one request must not decide what is known of the drafts of another."""
    slots = filled(1, 1, 1)
    round_ = plan_round(slots, DraftWindowPlanner(WINDOW, WINDOW), SLOTS)
    round_ = replace(round_, fast_forward={0: [5] * WINDOW}, undrafted=frozenset({1}))
    assert round_.needs_drafter
    shorten(slots, [WINDOW + 1, WINDOW + 1, 0])
    assert round_.num_proposed_for(round_.rows[0]) == WINDOW


def test_fast_forward_tokens_are_of_use_before_the_drafter_has_read_the_prompt() -> None:
    slots = filled(1)
    next(iter(slots)).replay.start([1, 2, 3])
    round_ = plan_round(slots, DraftWindowPlanner(WINDOW, WINDOW), SLOTS)
    assert replace(round_, undrafted=frozenset({0})).can_use_drafts()


@pytest.mark.parametrize(
    ("params", "filters", "rules"),
    [
        ({}, False, {Rule.COUPLED}),
        ({"top_k": 5}, True, {Rule.COUPLED}),
        ({"top_k": 5, "temperature": 0.0}, False, {Rule.COUPLED}),
        ({"rule": "rejection"}, True, {Rule.REJECTION}),
    ],
)
def test_a_round_has_the_filters_and_rules_of_its_requests(
    params: dict[str, Any], filters: bool, rules: set[Rule]
) -> None:
    slots = filled(1, 1)
    slots.join(make_queued(**params))
    round_ = plan_round(slots, DraftWindowPlanner(WINDOW, WINDOW), SLOTS)
    assert (round_.needs_probs, round_.rules) == (filters, {Rule.COUPLED} | rules)


def test_finished_requests_leave_a_round_and_its_calls_do_not_change() -> None:
    slots = filled(1, 1)
    slots.join(make_queued(top_k=3))
    round_ = plan_round(slots, DraftWindowPlanner(WINDOW, WINDOW), SLOTS)
    round_.rows[2].finish(Finish("cancelled"))
    rest = round_.unfinished()
    assert list(rest.rows) == [0, 1]
    assert (rest.batch, rest.window, rest.needs_probs, rest.rules) == (
        round_.batch,
        round_.window,
        round_.needs_probs,
        round_.rules,
    )


def prompted(*lengths: int, while_decoding: int = CHUNK) -> tuple[Any, RoundPlanner, Slots]:
    """A target over a linear cache, and prompts of ``lengths`` tokens that count up from 100."""
    target: Any = FakeTarget()
    prompts = RoundPlanner(target, FakeDrafter(), Metrics(), chunk=CHUNK, chunk_while_decoding=while_decoding)
    slots = Slots(SLOTS, LinearCacheManager(0), [target.state], num_draft_tokens=0)
    for length in lengths:
        slots.join(make_queued(prompt=list(range(100, 100 + length))))
    return target, prompts, slots


def test_prompts_share_the_chunk_of_a_round_in_order_of_arrival() -> None:
    target, prompts, slots = prompted(41, 1, 4, 30)
    rounds, served = [], []
    for _ in range(6):
        round_ = prompts.plan(slots, DraftWindowPlanner(0, WINDOW))
        rounds.append([(slot, at, [len(row) for row in tokens]) for slot, at, tokens in target.prefilled])
        served.append(list(round_.rows))
        target.prefilled.clear()
    assert rounds == [
        [(0, [0], [16])],
        [(0, [16], [16])],
        [(0, [32], [8]), (2, [0], [3]), (3, [0], [5])],
        [(3, [5], [16])],
        [(3, [21], [8])],
        [],
    ]
    assert served == [[1], [1], [0, 1, 2], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]], "from the round on it is read in"
    assert target.state.view("length", 4).tolist() == [40, 0, 3, 29]
    assert target.state.newest[:4].tolist() == [[139, 140], [100, 100], [102, 103], [128, 129]]


def test_equally_long_chunks_of_adjacent_slots_are_one_linear_call() -> None:
    target, prompts, slots = prompted(5, 5, 5, 4)
    prompts.plan(slots, DraftWindowPlanner(0, WINDOW))
    four = [100, 101, 102, 103]
    assert target.prefilled == [(0, [0, 0, 0], [four] * 3), (3, [0], [four[:3]])]


def test_fewer_prompt_tokens_are_processed_while_requests_decode() -> None:
    target, prompts, slots = prompted(60, while_decoding=5)
    prompts.plan(slots, DraftWindowPlanner(0, WINDOW))
    slots.join(make_queued(prompt=[0]))
    prompts.plan(slots, DraftWindowPlanner(0, WINDOW))
    slots.leave(1)
    prompts.plan(slots, DraftWindowPlanner(0, WINDOW))
    assert [len(tokens[0]) for _, _, tokens in target.prefilled] == [16, 5, 16]


@pytest.mark.parametrize(("remaining", "rows", "prompt_tokens"), [(1, [], 16), (2, [0], 5)])
def test_a_request_that_the_round_in_flight_completes_takes_part_in_no_further_round(
    remaining: int, rows: list[int], prompt_tokens: int
) -> None:
    target, prompts, slots = prompted(while_decoding=5)
    running = slots.join(make_queued(prompt=[0]))
    assert running is not None
    running.tokens += [0] * (running.remaining - remaining)
    last = VerifiedRound(prompts.plan(slots, DraftWindowPlanner(0, WINDOW)), {0: 0}, {0: 0})
    slots.join(make_queued(prompt=[0] * 60))
    round_ = prompts.plan(slots, DraftWindowPlanner(0, WINDOW), last)
    assert list(round_.rows) == rows
    assert [len(tokens[0]) for _, _, tokens in target.prefilled] == [prompt_tokens]


@pytest.mark.parametrize(
    ("overlap", "drafter", "lookup", "schedule"),
    [
        (
            True,
            FakeDrafter(),
            None,
            ["propose", "fetch_drafts", "score", "deliver", "commit", "write_inputs", "verify"],
        ),
        (
            True,
            FakeDrafter(),
            LOOKUP,
            ["propose", "fetch_drafts", "score", "deliver", "commit", "write_inputs", "verify"],
        ),
        (
            True,
            FakeDrafter(),
            PROMISING,
            ["propose", "fetch_drafts", "deliver", "commit", "replace_drafts", "score", "write_inputs", "verify"],
        ),
        (True, NoDrafter(), LOOKUP, ["score", "deliver", "commit", "write_inputs", "verify"]),
        (
            True,
            NoDrafter(),
            PROMISING,
            ["deliver", "commit", "propose", "replace_drafts", "score", "write_inputs", "verify"],
        ),
        (
            False,
            FakeDrafter(),
            None,
            ["propose", "fetch_drafts", "commit", "deliver", "write_inputs", "score", "verify"],
        ),
        (
            False,
            NoDrafter(),
            LOOKUP,
            ["commit", "deliver", "propose", "replace_drafts", "write_inputs", "score", "verify"],
        ),
    ],
)
def test_each_schedule_orders_the_steps_and_the_last_round_is_only_committed(
    monkeypatch: pytest.MonkeyPatch, overlap: bool, drafter: Any, lookup: TextLookup | None, schedule: list[str]
) -> None:
    target: Any = FakeTarget()
    metrics, scheduler, streams = Metrics(accepted=[0] * WINDOW), Scheduler(SLOTS, 1), Streams(CPU)
    loop = make_loop(target, drafter, scheduler, streams, metrics, overlap=overlap, lookup=lookup)
    done: list[str] = []
    on_device: list[str] = []

    def note(owner: Any, name: str, into: list[str]) -> None:
        work = getattr(owner, name)

        def run(*args: Any) -> Any:
            into.append(name)
            return work(*args)

        monkeypatch.setattr(owner, name, run)

    for stage in STAGES:
        note(loop._stages, stage, done)
    for owner, name in ((streams, "wait_for_copies_on_device"), (target, "adjust"), (target, "verify")):
        note(owner, name, on_device)
    note(loop._stages, "_fetch_tokens", on_device)
    note(drafter, "after_verify", on_device)
    waiting = make_queued(stop=["aaa"])
    scheduler.submit(waiting, block=False)
    for round_number in (1, 2, 3):
        loop.step()
        assert (done, streams.waits) == (schedule, round_number)
        done.clear()
    # Masks arrive before they are read, and tokens leave before the drafter goes on.
    assert on_device == ["wait_for_copies_on_device", "adjust", "verify", "_fetch_tokens", "after_verify"] * 3
    loop.step()
    assert (waiting.request.finish_reason, streams.waits, metrics.rounds) == ("stop", 4, 3)
    # The host commits the end while the next round is in flight: its drafts are dropped.
    assert done[: schedule.index("commit") + 1] == schedule[: schedule.index("commit") + 1]
    assert {*done[schedule.index("commit") + 1 :]} == {"deliver"}
    done.clear()
    loop.step()
    assert (done, streams.waits) == ([], 4)


@pytest.mark.parametrize(("waited_s", "delivered_after"), [(0, "score"), (100, "verify")])
def test_a_host_that_would_only_wait_delivers_texts_first(
    monkeypatch: pytest.MonkeyPatch, waited_s: int, delivered_after: str
) -> None:
    """Else they are delivered while the device is busy with the next round."""
    monkeypatch.setattr(loop_module, "_LONG_WAIT_S", 60)
    target: Any = FakeTarget()
    metrics, scheduler, streams = Metrics(accepted=[0] * WINDOW), Scheduler(SLOTS, 1), Streams(CPU)
    loop = make_loop(target, FakeDrafter(), scheduler, streams, metrics, overlap=True)
    done: list[str] = []
    for stage in ("score", "verify"):
        monkeypatch.setattr(loop._stages, stage, noting(done, stage, getattr(loop._stages, stage)))

    def wait(event: Any) -> None:  # noqa: ARG001
        metrics.seconds["wait"] += waited_s

    monkeypatch.setattr(streams, "wait", wait)
    scheduler.submit(make_queued(lambda _: done.append("text")), block=False)
    for _ in range(6):  # the first token is committed alone
        loop.step()
    assert [before for before, event in pairwise(done) if event == "text"][-1] == delivered_after


@pytest.mark.parametrize(("prompt_tokens", "first"), [(0, "write_inputs"), (64, "deliver")])
def test_texts_leave_before_masks_of_a_long_call_are_written(
    monkeypatch: pytest.MonkeyPatch, prompt_tokens: int, first: str
) -> None:
    scheduler, metrics = Scheduler(SLOTS, 1), Metrics(accepted=[0] * WINDOW)
    target: Any = FakeTarget()
    loop = make_loop(target, FakeDrafter(), scheduler, Streams(CPU), metrics, overlap=True)
    scheduler.submit(make_queued(), block=False)
    loop.step()
    monkeypatch.setattr(loop_module, "_LONG_WAIT_S", -1)
    done: list[str] = []
    for stage in ("commit", "deliver", "write_inputs"):
        monkeypatch.setattr(loop._stages, stage, noting(done, stage, getattr(loop._stages, stage)))
    round_ = plan_round(loop.slots, loop.draft_windows, SLOTS)
    loop._overlapped(replace(round_, prompts=Packed(prompt_tokens, 1)), loop._last, True)
    assert done[done.index("commit") + 1] == first


@pytest.mark.parametrize("num_proposed", [0, WINDOW])
def test_copies_that_are_found_late_become_drafts_whether_or_not_the_drafter_ran(num_proposed: int) -> None:
    target: Any = FakeTarget()
    scheduler, metrics = Scheduler(SLOTS, 1), Metrics(accepted=[0] * WINDOW)
    loop = make_loop(target, FakeDrafter(), scheduler, Streams(CPU), metrics, overlap=True, lookup=PROMISING)
    round_ = plan_round(filled(1), DraftWindowPlanner(WINDOW, WINDOW), SLOTS)
    round_ = replace(round_, num_proposed=num_proposed, may_copy=True)
    loop._stages.propose(round_)
    loop._stages.replace_drafts(replace(round_, copied={0: [5, 6]}))
    assert target.buffers.draft_tokens.view(1, WINDOW).tolist() == [[5, 6, -1, -1]]


def noting(done: list[str], name: str, work: Any) -> Any:
    def run(*args: Any) -> Any:
        done.append(name)
        return work(*args)

    return run


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_a_burst_shares_the_first_round_of_an_idle_device(runs_ahead: bool) -> None:
    """On a CPU a step computes, and does not wait for requests that are being admitted."""
    target: Any = FakeTarget()
    scheduler = Scheduler(SLOTS, SLOTS)
    scheduler.arrivals = Arrivals(gather_s=PATIENCE_S, pause_s=PATIENCE_S)
    loop = make_loop(target, FakeDrafter(), scheduler, Streams(CPU), Metrics(accepted=[0] * WINDOW), overlap=True)
    loop._runs_ahead = runs_ahead
    with ThreadPoolExecutor(1) as executor:
        with scheduler.arrivals.admitting():
            scheduler.submit(make_queued(), block=False)
            step = executor.submit(loop.step)
            if not runs_ahead:
                step.result(PATIENCE_S)
            scheduler.submit(make_queued(), block=False)
        step.result(PATIENCE_S)
    assert len(loop.slots) == (2 if runs_ahead else 1)


@pytest.mark.parametrize("prompt_tokens", [CHUNK, CHUNK // 2 - 1])
def test_while_a_large_call_runs_the_next_one_waits_for_the_rest_of_a_burst(prompt_tokens: int) -> None:
    """The device would be idle after a small call, so nothing waits there."""
    target: Any = FakeTarget()
    scheduler = Scheduler(SLOTS, SLOTS)
    scheduler.arrivals = Arrivals(gather_s=PATIENCE_S, pause_s=PATIENCE_S)
    loop = make_loop(target, FakeDrafter(), scheduler, Streams(CPU), Metrics(accepted=[0] * WINDOW), overlap=True)
    loop._runs_ahead = True
    scheduler.submit(make_queued(prompt=[0] * (prompt_tokens + 1)), block=False)
    loop.step()
    with ThreadPoolExecutor(1) as executor:
        with scheduler.arrivals.admitting():
            step = executor.submit(loop.step)
            if prompt_tokens < CHUNK:
                step.result(PATIENCE_S)
            scheduler.submit(make_queued(), block=False)
        step.result(PATIENCE_S)
    assert len(loop.slots) == (2 if prompt_tokens == CHUNK else 1)


@pytest.mark.parametrize(("max_length", "verified"), [(None, WINDOW), (4, 2), (3, 1), (2, 0)])
def test_drafts_beyond_the_length_of_the_draft_are_not_verified(max_length: int | None, verified: int) -> None:
    target: Any = FakeTarget()
    drafter, scheduler = FakeDrafter(), Scheduler(SLOTS, 1)
    drafter.max_length = max_length
    loop = make_loop(target, drafter, scheduler, Streams(CPU), Metrics(accepted=[0] * WINDOW), overlap=False)
    scheduler.submit(make_queued(prompt=ids("abc")), block=False)
    loop.step()
    assert target.buffers.draft_len.host_view(1).tolist() == [verified]
