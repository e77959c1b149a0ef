"""A state machine drives the whole loop: requests arrive, are cancelled or time out, and any call may raise.

After every step each request is queued, in a slot, or ended. An ended request was counted once and notified once, after
its resources were freed. A cancelled or late request ends in the next step. A text is a prefix of the request's text
without other requests. An error reaches only the requests that caused it.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tandemrt import LLM, SamplingParams, StreamOutput
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import Closed, InternalError, QueueFull
from tandemrt.export.bundle.build import build
from tandemrt.runtime.caches.call_layout import PackedLayout
from tandemrt.runtime.caches.kv_cache import BlockTable
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.device.slot_state import SlotState
from tandemrt.runtime.engine_loop.loop_thread import advance
from tandemrt.runtime.engine_loop.target import TargetRunner
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.running import RunningRequest
from tandemrt.runtime.requests.slots import Slots
from tandemrt.runtime.requests.text import Detokenizer, TextStream
from tandemrt.runtime.workers.clients import Client
from tests.engine.test_paged_rounds import PAGED
from tests.makers import tiny_checkpoint, write_recipe
from tests.waiting import Clock

KINDS = [RuntimeError, MemoryError, SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit]
OWN = {  # an exception here belongs to one request
    "joining": (RunningRequest, "__init__"),
    "being seated": (SlotState, "join"),
    "growing": (Slots, "grow"),
    "fill": (Constraint, "fill_rows"),
    "commit": (RunningRequest, "commit"),
    "detokenize": (Detokenizer, "push"),
    "last words": (Detokenizer, "finish"),
    "telling": (TextStream, "take"),
    "telling for good": (TextStream, "take"),
}
JOINING = ("joining", "being seated")
ROUND = {"prefill": (PackedLayout, "write"), "score": (TargetRunner, "score"), "verify": (TargetRunner, "verify")}
ROOM = 192  # tokens: three KV cache blocks, shared by four slots
QUEUE = 3
PROMPTS = ["a", "the quick brown fox jumps over and over and over", "b c", "the quick brown fox jumps over"]


@dataclass(eq=False)
class SentRequest:
    prompt: str
    length: int
    cursed: bool  # its listener raises
    model: "LoopModel"
    heard: list[StreamOutput] = field(default_factory=list)
    request: Request | None = None

    def listen(self, item: StreamOutput) -> None:
        self.heard.append(item)
        if item.output is not None:
            self.model.note_order(self)
        if self.cursed:
            raise SystemExit("the listener")


class Faults:
    """Raises once at the chosen call. A permanent fault raises again for the request that met it first."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.armed: dict[str, BaseException] = {}
        self.broken: dict[int, tuple[Any, BaseException]] = {}  # by request id: the faulty object, and how it fails
        for place, (owner, name) in (OWN | ROUND).items():
            self._guard(patched, place, owner, name)

    def _guard(self, patched: pytest.MonkeyPatch, place: str, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def guarded(*args: Any, **options: Any) -> Any:
            if (error := self.armed.pop(place, None)) is not None:
                if place.endswith("for good"):
                    self.broken[id(args[0])] = args[0], error
                raise error
            if place.endswith("for good") and id(args[0]) in self.broken:
                raise self.broken[id(args[0])][1]
            return real(*args, **options)

        patched.setattr(owner, name, guarded)


class LoopModel(RuleBasedStateMachine):
    bundle: Path
    overlap: bool
    alone: dict[str, list[int]]
    seen: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.end = ExitStack()
        patched = self.end.enter_context(pytest.MonkeyPatch.context())
        self.clock = Clock(patched)
        self.clock.stopped = True
        self.llm = self.end.enter_context(
            LLM(self.bundle, device="cpu", threads=1, cache_tokens=ROOM, overlap=self.overlap, queue_limit=QUEUE)
        )
        self.loop = self.llm.loop
        self.faults = Faults(patched)
        self.asked: list[SentRequest] = []
        self.failed = 0  # requests that may have ended with an error
        self.too_early: list[str] = []  # notified of an end before cleanup
        self.closed = False
        self.dead = False

    @initialize()
    def begin(self) -> None:
        for prompt in PROMPTS:
            self.submit(prompt, 25, None, cursed=False, client="")
        self.step(8)  # texts grow until memory is short

    @precondition(lambda self: not self.closed)
    @rule(
        prompt=st.sampled_from(PROMPTS),
        length=st.integers(1, 25),
        timeout_s=st.sampled_from([None, None, 5.0]),
        cursed=st.sampled_from([False, False, False, True]),
        client=st.sampled_from(["", "", "another"]),
    )
    def submit(self, prompt: str, length: int, timeout_s: float | None, cursed: bool, client: str) -> None:
        if self.closed:
            return
        asked = SentRequest(prompt, length, cursed, self)
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, timeout_s=timeout_s)
        [waiting] = self.llm._admission.admit(prompt, params, asked.listen, client=Client(client))
        asked.request = waiting.request
        displaced = len(self.llm._scheduler._displaced)
        try:
            self.llm._scheduler.submit(waiting, block=False)
        except QueueFull:
            return
        self.asked.append(asked)
        self.failed += len(self.llm._scheduler._displaced) - displaced  # displaced by another client's

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from(self.asked))
        assert asked.request is not None
        self.llm.cancel(asked.request)

    @rule(seconds=st.sampled_from([1.0, 3.0]))
    def advance_clock(self, seconds: float) -> None:
        self.clock.ahead += seconds

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.llm.waiting or self.llm.running:
                self.advance()

    @precondition(lambda self: self.llm.waiting or self.llm.running)
    @rule(
        place=st.sampled_from([*OWN, *OWN, *ROUND, "leaving", "the loop's"]),
        kind=st.sampled_from(KINDS),
        quiet=st.integers(0, 3),
    )
    def inject_fault(self, place: str, kind: type[BaseException], quiet: int) -> None:
        self.step(quiet)
        if place in JOINING and not self.closed:  # a request joins in the next step: preempt to free a slot
            for running in self.loop.slots:
                running.request.cancel()
            self.submit(PROMPTS[0], 9, None, cursed=False, client="")
        before, seated = self.errors, {id(asked) for asked in self.asked if not asked.heard or not self.ended(asked)}
        error = kind(f"broken: {place}")
        if place in ("leaving", "the loop's"):
            owner, name = (self.loop.drafter, "leave") if place == "leaving" else (self.loop.scheduler, "drop_queued")
            alive = bool(self.llm.running)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(owner, name, lambda *_: (_ for _ in ()).throw(error))
                self.failed += len(seated) if place == "the loop's" else 0
                self.advance(quietly=place == "leaving")
            if place == "the loop's":
                assert self.dead or alive, "an error of no request ends the loop"
            return
        self.faults.armed[place] = error
        self.failed += 1 if place in OWN else len(seated)
        self.advance()
        fired = place not in self.faults.armed
        self.faults.armed.clear()
        if place in OWN:
            assert self.errors - before <= fired, "one fault, one error"
        elif fired and self.llm.running:
            raise AssertionError("an engine failed, and somebody is still in a slot")
        for asked in self.asked:
            output = self.output(asked)
            if id(asked) in seated and output is not None and output.finish_reason == "error":
                assert str(output.error) == f"{kind.__name__}: broken: {place}"

    @precondition(lambda self: len(self.asked) > 4 and not self.closed)
    @rule(really=st.sampled_from([False, False, True]))
    def close(self, really: bool) -> None:
        if really:
            self.llm._scheduler.close()
            self.closed = True

    @precondition(lambda self: self.closed)
    @rule()
    def time_out(self) -> None:
        [late] = self.llm._admission.admit("late", SamplingParams(), lambda _: None)
        with pytest.raises(InternalError if self.dead else Closed, match="open the bundle again"):
            self.llm._scheduler.submit(late, block=True)  # step manually: the loop has no thread in this test

    @invariant()
    def every_request_has_one_place_and_one_end(self) -> None:
        slots = {running.request for running in self.loop.slots}
        assert len(slots) == len(self.loop.slots) == self.llm.running
        scheduler = self.llm._scheduler
        queue = {each.request for each in (*scheduler._preempted, *scheduler._waiting)}
        queue |= {each.queued.request for each in scheduler._displaced}
        ended = [asked for asked in self.asked if self.ended(asked)]
        assert slots | queue == {asked.request for asked in self.asked if not self.ended(asked)}
        assert not slots & queue
        cache_manager = self.loop.cache_manager
        assert isinstance(cache_manager, BlockTable)
        cache_manager.flush()
        assert cache_manager.allocator.available == cache_manager.allocator.blocks - 1 - len(
            {block for row in cache_manager.device.tolist() for block in row} - {0}
        )
        self.seen.update(preempted=len(scheduler._preempted))
        assert sum(self.llm.metrics.finished.values()) == len(ended)
        assert self.errors <= self.failed
        assert not self.too_early
        for asked in self.asked:
            assert not asked.cursed or len(asked.heard) <= 2, "a listener that raised hears of the end and no more"
            assert [item.output is not None for item in asked.heard[:-1]] == [False] * (len(asked.heard) - 1)
            streamed = [token for item in asked.heard for token in item.token_ids]
            assert streamed == self.alone[asked.prompt][: len(streamed)]
            output = self.output(asked)
            if output is None:
                continue
            if output.finish_reason == "length":
                assert streamed == output.token_ids == self.alone[asked.prompt][: asked.length]
            else:
                assert output.finish_reason in ("error", "cancelled", "timeout")

    def teardown(self) -> None:
        for _ in range(300):
            if not (self.llm.waiting or self.llm.running):
                break
            self.advance()
        assert all(self.ended(asked) for asked in self.asked), "no request waits for ever"
        self.every_request_has_one_place_and_one_end()
        self.end.close()

    def advance(self, *, quietly: bool = True) -> None:
        """One iteration of the loop's thread. Unless the queue itself fails, it also ends requests that must stop."""
        overdue = [each for each in self.asked if each.request and each.request.interrupted(self.clock.ahead)]
        with self.loop.streams.active():
            try:
                advance(self.loop)
            except BaseException as error:
                self.loop.die(error)
                self.closed = self.dead = True
        if quietly:
            assert all(self.ended(asked) for asked in overdue), "cancelled or late, and it goes on"

    def note_order(self, asked: SentRequest) -> None:
        """A listener may rely on free slots and updated counters when it is notified of an end."""
        kept = [running for running in self.loop.slots if running.request is asked.request]
        ended = sum(self.output(each) is not None for each in self.asked)
        if kept or sum(self.llm.metrics.finished.values()) < ended:
            self.too_early.append(asked.prompt)

    @property
    def errors(self) -> int:
        outputs = [self.output(asked) for asked in self.asked]
        return sum(output is not None and output.finish_reason == "error" for output in outputs)

    def ended(self, asked: SentRequest) -> bool:
        assert asked.request is not None
        assert asked.request.finished == (self.output(asked) is not None), "an ended request has its last event"
        return asked.request.finished

    @staticmethod
    def output(asked: SentRequest) -> Any:
        return asked.heard[-1].output if asked.heard else None


@pytest.fixture(scope="module")
def paged_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paged")
    target = tiny_checkpoint(folder / "target", seed=1, head_dim=32)
    draft = tiny_checkpoint(folder / "draft", layers=1, seed=1, head_dim=32)
    recipe = write_recipe(folder / "paged.toml", target=target, draft=draft, window=8, backend=PAGED)
    return build(Recipe.load(recipe), folder / "bundle").folder


@pytest.fixture(scope="module")
def alone(paged_bundle: Path) -> Iterator[dict[str, list[int]]]:
    with LLM(paged_bundle, device="cpu", threads=1) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)
        yield {prompt: llm.generate(prompt, params).token_ids for prompt in PROMPTS}


@pytest.mark.parametrize("overlapping", [True, False], ids=["overlap", "lockstep"])
def test_no_request_waits_forever_after_any_fault(
    paged_bundle: Path, alone: dict[str, list[int]], overlapping: bool
) -> None:
    class Model(LoopModel):
        bundle, overlap = paged_bundle, overlapping

    Model.alone, Model.seen = alone, Counter()
    quick = settings(
        max_examples=5,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    run_state_machine_as_test(Model, settings=quick)
    assert Model.seen["preempted"] > 0, "memory is short, and some give theirs back"
