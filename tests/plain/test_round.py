"""A round is made first, its stages follow a timetable, and prompts go into the caches a chunk a round."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandemrt.plugins.operators import Rule
from tandemrt.runtime.caches.linear import LinearRoom
from tandemrt.runtime.device import Clock
from tandemrt.runtime.drafters.base import Unmoved
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.requests.scheduler import Scheduler
from tandemrt.runtime.requests.slots import Slots
from tandemrt.runtime.round.buffers import RoundBuffers
from tandemrt.runtime.round.loop import Loop
from tandemrt.runtime.round.prompts import Prompts
from tandemrt.runtime.round.round import Round
from tandemrt.runtime.round.state import SlotState
from tandemrt.runtime.round.timeline import Timeline
from tandemrt.runtime.round.windows import Windows
from tests.plain.requests import ids, make_waiting

SLOTS, WINDOW, CHUNK = 8, 4, 16
CPU = torch.device("cpu")
STAGES = ("propose", "fetch", "score", "commit", "fill", "verify")


def filled(*prompts: int, **params: Any) -> Slots:
    """Slots with requests of so many prompt tokens; those of one token need no prefill."""
    slots = Slots(SLOTS, LinearRoom(0), [], window=0)
    for length in prompts:
        slots.join(make_waiting(prompt=[0] * length, **params))
    return slots


class FakeTandem:
    """A target with a linear cache that always says "a", and notes its calls: first slot, places, tokens."""

    def __init__(self) -> None:
        self.buffers = RoundBuffers(
            slots=SLOTS, window=WINDOW, vocab=256, length=256, chunk=CHUNK, dtype=torch.float32, device=CPU
        )
        self.state = SlotState(SLOTS, CPU)
        self.runs = None
        # Not of a CPU, whose prompts come one by one (prompt_rows).
        self.engines = {"target": SimpleNamespace(contract=SimpleNamespace(inputs=()), device=torch.device("meta"))}
        self.prefilled: list[tuple[int, list[int], list[list[int]]]] = []

    def prefill(self, slot: int, tokens: torch.Tensor) -> None:
        at = self.state.view("length", SLOTS)[slot : slot + len(tokens)]
        self.prefilled.append((slot, at.tolist(), tokens.tolist()))

    def score(self, this: Round) -> None:
        pass

    def adjust(self, this: Round) -> None:
        pass

    def verify(self, this: Round, draft_probs: None) -> None:  # noqa: ARG002
        self.buffers.tokens.view(this.batch, this.window + 1).fill_(ids("a")[0])
        self.buffers.count.view(this.batch).fill_(1)


class FakeDrafter(Unmoved):
    """Drafts nothing, either before the commit or behind it."""

    window = WINDOW
    caches = ()

    def __init__(self, *, ahead: bool) -> None:
        self.ahead = ahead
        self.reach: int | None = None

    def join(self, running: Any) -> None:
        pass

    def leave(self, slot: int) -> None:
        pass

    def prefill(self, slot: int, tokens: torch.Tensor, following: Sequence[int]) -> None:
        pass

    def held(self, running: Any) -> int:
        return len(running.tokens)

    def skip(self, this: Round) -> None:
        pass

    def propose(self, this: Round) -> None:
        pass


def test_a_round_serves_those_whose_prompts_are_in_the_caches_and_its_table_counts_nobody_else() -> None:
    slots = filled(1, 5, 1)
    this = Round.of(slots, Windows({1: 4, 3: 0}, WINDOW), SLOTS)
    assert [running.slot for running in this.rows.values()] == list(this.rows) == [0, 2]
    assert (this.batch, this.window) == (4, 4)  # slots 0 to 2 in a batch of 4
    nobody = Round.of(filled(5, 7), Windows(WINDOW, WINDOW), SLOTS)
    assert (dict(nobody.rows), nobody.batch, nobody.window) == ({}, 0, 0)


@pytest.mark.parametrize(("asked", "window"), [([0, 3], 3), ([3, 0], 3), ([1, 2], 2), ([0, 0], 0), ([9, 1], WINDOW)])
def test_a_round_drafts_as_many_tokens_as_the_one_who_asks_for_most_and_no_more_than_it_can(
    asked: list[int], window: int
) -> None:
    slots = filled()
    for each in asked:
        slots.join(make_waiting(window=each))
    assert Round.of(slots, Windows(WINDOW, WINDOW), SLOTS).window == window


@pytest.mark.parametrize(
    ("params", "filters", "rules"),
    [
        ({}, False, {Rule.COUPLED}),
        ({"top_k": 5}, True, {Rule.COUPLED}),
        ({"top_k": 5, "temperature": 0.0}, False, {Rule.COUPLED}),
        ({"rule": "rejection"}, True, {Rule.REJECTION}),
    ],
)
def test_a_round_says_whether_any_request_filters_and_by_which_rules_it_verifies(
    params: dict[str, Any], filters: bool, rules: set[Rule]
) -> None:
    slots = filled(1, 1)
    slots.join(make_waiting(**params))
    this = Round.of(slots, Windows(WINDOW, WINDOW), SLOTS)
    assert (this.filters, this.rules) == (filters, {Rule.COUPLED} | rules)


def test_who_finishes_meanwhile_leaves_a_round_whose_calls_stay_as_they_are() -> None:
    slots = filled(1, 1)
    slots.join(make_waiting(top_k=3))
    this = Round.of(slots, Windows(WINDOW, WINDOW), SLOTS)
    this.rows[2].finish("cancelled")
    rest = this.remaining()
    assert list(rest.rows) == [0, 1]
    assert (rest.batch, rest.window, rest.filters, rest.rules) == (this.batch, this.window, this.filters, this.rules)


def prompted(*lengths: int, beside: int = CHUNK) -> tuple[Any, Prompts, Slots]:
    """A target over a linear cache, and prompts of ``lengths`` tokens that count up from 100."""
    tandem: Any = FakeTandem()
    prompts = Prompts(tandem, FakeDrafter(ahead=True), Metrics(), chunk=CHUNK, chunk_beside=beside)
    slots = Slots(SLOTS, LinearRoom(0), [prompts], window=0)
    for length in lengths:
        slots.join(make_waiting(prompt=list(range(100, 100 + length))))
    return tandem, prompts, slots


def test_all_prompts_of_a_round_share_one_chunk_and_the_first_who_came_is_served_first() -> None:
    tandem, prompts, slots = prompted(41, 1, 4, 30)
    rounds, served = [], []
    for _ in range(6):
        this = prompts.begin(slots, Windows(0, WINDOW))
        rounds.append([(slot, at, [len(row) for row in tokens]) for slot, at, tokens in tandem.prefilled])
        served.append(list(this.rows))
        tandem.prefilled.clear()
    assert rounds == [
        [(0, [0], [16])],
        [(0, [16], [16])],
        [(0, [32], [8]), (2, [0], [3]), (3, [0], [5])],
        [(3, [5], [16])],
        [(3, [21], [8])],
        [],
    ]
    assert served == [[1], [1], [0, 1, 2], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]], "from the round on it is read in"
    assert tandem.state.view("length", 4).tolist() == [40, 0, 3, 29]
    assert tandem.state.newest[:4].tolist() == [[139, 140], [100, 100], [102, 103], [128, 129]]


def test_over_a_linear_cache_equally_long_chunks_of_slots_side_by_side_are_one_call() -> None:
    tandem, prompts, slots = prompted(5, 5, 5, 4)
    prompts.begin(slots, Windows(0, WINDOW))
    four = [100, 101, 102, 103]
    assert tandem.prefilled == [(0, [0, 0, 0], [four] * 3), (3, [0], [four[:3]])]


def test_fewer_prompt_tokens_go_in_beside_requests_that_decode() -> None:
    tandem, prompts, slots = prompted(60, beside=5)
    prompts.begin(slots, Windows(0, WINDOW))
    slots.join(make_waiting(prompt=[0]))
    prompts.begin(slots, Windows(0, WINDOW))
    slots.leave(1)
    prompts.begin(slots, Windows(0, WINDOW))
    assert [len(tokens[0]) for _, _, tokens in tandem.prefilled] == [16, 5, 16]


@pytest.mark.parametrize(
    ("overlap", "ahead", "timetable"),
    [
        (True, True, ["propose", "fetch", "score", "commit", "fill", "verify"]),
        (True, False, ["fetch", "commit", "propose", "score", "fill", "verify"]),
        (False, True, ["propose", "fetch", "commit", "fill", "score", "verify"]),
        (False, False, ["fetch", "commit", "propose", "fill", "score", "verify"]),
    ],
)
def test_a_round_has_a_timetable_with_one_wait_and_the_last_one_is_only_committed(
    monkeypatch: pytest.MonkeyPatch, overlap: bool, ahead: bool, timetable: list[str]
) -> None:
    tandem: Any = FakeTandem()
    metrics, scheduler, clock = Metrics(accepted=[0] * WINDOW), Scheduler(SLOTS, 1), Clock(CPU)
    loop = Loop(
        tandem,
        FakeDrafter(ahead=ahead),
        scheduler,
        clock,
        LinearRoom(0),
        metrics,
        Timeline(CPU, metrics, enabled=False),
        slots=SLOTS,
        windows=Windows(WINDOW, WINDOW),
        slack=WINDOW,
        prefill_chunk=CHUNK,
        prefill_chunk_beside=CHUNK,
        overlap=overlap,
    )
    done: list[str] = []

    def noted(stage: str) -> Any:
        work = getattr(loop._stages, stage)

        def run(*args: Any) -> Any:
            done.append(stage)
            return work(*args)

        return run

    for stage in STAGES:
        monkeypatch.setattr(loop._stages, stage, noted(stage))
    waiting = make_waiting(stop=["aaa"])
    scheduler.submit(waiting, block=False)
    for round_number in (1, 2, 3):
        loop.step()
        assert (done, clock.waits) == (timetable, round_number)
        done.clear()
    loop.step()
    assert (waiting.request.finish_reason, clock.waits, metrics.rounds) == ("stop", 4, 3)
    # The host hears of the end while the next round is on its way: what a drafter did ahead of it comes to nothing.
    assert done == timetable[: timetable.index("commit") + 1]
    done.clear()
    loop.step()
    assert (done, clock.waits) == ([], 4)
