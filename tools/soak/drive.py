"""Clients that send turns to one LLM, and the books that must be in order once all have ended."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tandemrt.engines.errors import BadRequest, QueueFull, TandemError
from tandemrt.engines.params import SamplingParams
from tandemrt.runtime.caches.kv_cache import BlockTable
from tandemrt.runtime.llm import LLM
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.requests.outputs import RequestOutput, StreamOutput
from tools.soak.answers import Answer, problems
from tools.soak.books import Tally
from tools.soak.faults import Fault, Faults
from tools.soak.plans import Plan, Turn

CLIENTS = 12
PATIENCE_S = 300.0  # a wave that takes longer never ends


class Reference:
    """What every plan gets alone: no neighbours, no drafts under the coupled rule, its own under rejection.

    ``coupled`` knows what plans under the coupled rule get, where another bundle has the same target.
    """

    def __init__(self, llm: LLM, plans: Sequence[Plan], coupled: "Reference | None" = None) -> None:
        self._llm, self._plans, self._coupled = llm, plans, coupled
        self._known: dict[int, RequestOutput] = {}

    def learn(self, plans: set[int]) -> None:
        """Run what is not known yet, one after the other."""
        if self._coupled is not None:
            self._coupled.learn({index for index in plans if self._plans[index].params.rule == "coupled"})
        for index in plans - self._known.keys():
            plan = self._plans[index]
            if plan.params.rule == "rejection":
                self._known[index] = self._llm.generate(plan.prompt, plan.params)
            elif self._coupled is not None:
                self._known[index] = self._coupled.output(index)
            else:
                self._known[index] = self._llm.generate(plan.prompt, plan.params.model_copy(update={"window": 0}))

    def output(self, plan: int) -> RequestOutput:
        """What was learned of a plan."""
        return self._known[plan]


class Driver:
    """Sends waves of turns to ``llm``, and holds its answers and its books against what they should be."""

    def __init__(
        self,
        name: str,
        llm: LLM,
        faults: Faults,
        plans: Sequence[Plan],
        reference: Reference,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.name, self.llm, self.faults = name, llm, faults
        self.reference = reference
        self.ended: Counter[str] = Counter()  # by finish reason, as the answers say
        self.left = 0  # streams whose client went
        self.refused = 0
        self.stuck = False  # somebody waited in vain: nothing that comes after means anything
        self._plans = plans
        self._patience_s = patience_s
        self._tally = Tally()

    def wave(self, turns: Sequence[Turn], flood: Sequence[Turn]) -> list[str]:
        """Send ``turns`` from many clients, then all of ``flood`` at once and a request that fits no engine.

        Waits for all; returns what is wrong, one line each.
        """
        self.reference.learn({turn.plan for turn in (*turns, *flood)})
        before, self._tally = self.llm.metrics.copy(), Tally()
        found: list[str] = []
        for turn, lines in zip(turns, together(self._turn, turns, self._patience_s), strict=True):
            if lines is None:
                self.stuck = True
                found.append(f"{turn}: no answer within {self._patience_s:.0f} s")
            else:
                found += [f"{turn}: {line}" for line in lines]
        if not self.stuck:
            found += self._flood(flood) if flood else []
        if not self.stuck:
            self.faults.settle()
            self.ended += self._tally.ended
            self.left += self._tally.left
            found += self._books(self.llm.metrics.since(before))
        return [f"{self.name}: {line}" for line in found]

    def _turn(self, turn: Turn) -> list[str]:
        plan, strikes = self._plans[turn.plan], self.faults.strikes
        params = plan.params.model_copy(update={"timeout_s": turn.timeout_s})
        ways = {"generate": self._generate, "stream": self._stream, "listen": self._listen}
        answer = ways[turn.way](turn, plan, params)
        return self._judge(turn, replace(answer, struck=self.faults.strikes > strikes))

    def _judge(self, turn: Turn, answer: Answer) -> list[str]:
        with _LOCK:
            self._tally.add(answer)
        return problems(turn, self._plans[turn.plan], answer, self.reference.output(turn.plan))

    def _generate(self, turn: Turn, plan: Plan, params: SamplingParams) -> Answer:  # noqa: ARG002
        try:
            return Answer(self.llm.generate(plan.prompt, params))
        except TandemError as error:
            return Answer(None, f"{type(error).__name__}: {error}")

    def _stream(self, turn: Turn, plan: Plan, params: SamplingParams) -> Answer:
        return asyncio.run(self._streamed(turn, plan, params))

    async def _streamed(self, turn: Turn, plan: Plan, params: SamplingParams) -> Answer:
        items: list[StreamOutput] = []
        try:
            async for item in (stream := self.llm.stream(plan.prompt, params)):
                items.append(item)
                if turn.leave_after is not None and _count(items) >= turn.leave_after and item.output is None:
                    await stream.aclose()  # type: ignore[attr-defined]
                    break
        except TandemError as error:
            return Answer(None, f"{type(error).__name__}: {error}")
        return _answer(items, self.reference.output(turn.plan))

    def _listen(self, turn: Turn, plan: Plan, params: SamplingParams) -> Answer:
        fault = Fault(turn.fault, turn.fault_at) if turn.fault is not None else None
        items: list[StreamOutput] = []
        requests: list[Any] = []
        ended, sent = threading.Event(), threading.Event()

        def listen(item: StreamOutput) -> None:
            items.append(item)
            if item.output is not None:
                ended.set()
            elif turn.leave_after is not None and _count(items) >= turn.leave_after:
                sent.wait()
                self.llm.cancel(requests[0])
            if fault is not None and fault.kind.startswith("listener") and len(items) == fault.at + 1:
                raise fault.error()

        with self.faults.begun(fault):
            requests.append(self.llm.submit(plan.prompt, params, listen))
        sent.set()
        if turn.leave_after == 0:
            self.llm.cancel(requests[0])
        ended.wait()
        output = items[-1].output
        assert output is not None
        return _answer(items, self.reference.output(turn.plan), output.error)

    def _flood(self, turns: Sequence[Turn]) -> list[str]:
        """More requests at once than may wait: each is answered or refused. One that can never fit is refused."""
        ended, strikes = threading.Semaphore(0), self.faults.strikes
        taken: list[tuple[Turn, list[StreamOutput]]] = []
        for turn in turns:
            plan, items = self._plans[turn.plan], list[StreamOutput]()

            def listen(item: StreamOutput, items: list[StreamOutput] = items) -> None:
                items.append(item)
                if item.output is not None:
                    ended.release()

            try:
                self.llm.submit(plan.prompt, plan.params, listen)
                taken.append((turn, items))
            except QueueFull:
                self.refused += 1
        if not all(ended.acquire(timeout=self._patience_s) for _ in taken):
            self.stuck = True
            return [f"a flood: no answer within {self._patience_s:.0f} s"]
        found = []
        for turn, items in taken:
            answer = replace(_answer(items, self.reference.output(turn.plan)), struck=self.faults.strikes > strikes)
            found += [f"in a flood, {turn}: {line}" for line in self._judge(turn, answer)]
        try:
            self.llm.generate([0], SamplingParams(max_tokens=10**6))
        except BadRequest:
            self.refused += 1
            return found
        return [*found, "a request that cannot fit was accepted"]

    def _books(self, counted: Metrics) -> list[str]:
        """Nobody is left, nothing is held, and what was ``counted`` in the wave is what the answers say."""
        room = self.llm.loop.room
        waiting, running = self.llm.waiting, self.llm.running
        rules = {
            f"queue and slots are empty: {waiting}, {running}": not waiting and not running,
            "all blocks are free": not isinstance(room, BlockTable)
            or room.allocator.available == room.allocator.blocks - 1,
            **self._tally.rules(counted),
        }
        return [f"does not hold: {rule}" for rule, holds in rules.items() if not holds]


def together(work: Callable[[Turn], list[str]], turns: Sequence[Turn], limit_s: float) -> list[list[str] | None]:
    """Do ``work`` for every turn, CLIENTS at a time; None for those that had no end when the time was up."""
    results: list[list[str] | None] = [None] * len(turns)
    numbers = iter(range(len(turns)))

    def client() -> None:
        while True:
            with _LOCK:
                number = next(numbers, None)
            if number is None:
                return
            try:
                results[number] = work(turns[number])
            except Exception as error:
                results[number] = [f"{type(error).__name__}: {error}"]

    threads = [threading.Thread(target=client, name="soak", daemon=True) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return results


_LOCK = threading.Lock()


def _answer(items: list[StreamOutput], alone: RequestOutput, error: str | None = None) -> Answer:
    tokens = [token for item in items for token in item.token_ids]
    pieces = (tokens, "".join(item.text for item in items), "".join(item.reasoning for item in items))
    output = items[-1].output if items else None
    if output is None:  # left: what it would have said at its end nobody heard
        output = RequestOutput(
            pieces[1], pieces[2], tokens, alone.prompt_token_ids, "cancelled", None, alone.seed, alone.speculation
        )
        return Answer(output, pieces=pieces, left=True)
    return Answer(output, error, pieces)


def _count(items: list[StreamOutput]) -> int:
    return sum(len(item.token_ids) for item in items)
