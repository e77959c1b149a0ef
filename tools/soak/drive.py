"""Clients that send turns to one LLM, and the books that must be in order once all have ended."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandemrt.engines.errors import BadRequest, QueueFull, TandemError
from tandemrt.engines.params import SamplingParams
from tandemrt.runtime.caches.kv_cache import BlockTable
from tandemrt.runtime.llm import LLM
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.requests.outputs import RequestOutput, StreamOutput
from tools.soak.answers import Answer, problems
from tools.soak.faults import Fault, Faults
from tools.soak.plans import Plan, Turn

CLIENTS = 12
PATIENCE_S = 300.0  # a wave that takes longer never ends


class Reference:
    """What every plan gets alone: no neighbours, no drafts under the coupled rule, its own under rejection."""

    def __init__(self, llm: LLM, plans: Sequence[Plan]) -> None:
        self._llm, self._plans = llm, plans
        self._known: dict[int, RequestOutput] = {}

    def learn(self, turns: Sequence[Turn]) -> None:
        """Run what ``turns`` ask for and is not known yet, one after the other."""
        for index in {turn.plan for turn in turns} - self._known.keys():
            plan = self._plans[index]
            changed = {"window": 0} if plan.params.rule == "coupled" else {}
            self._known[index] = self._llm.generate(plan.prompt, plan.params.model_copy(update=changed))

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
        self._plans, self._reference = plans, reference
        self.ended: Counter[str] = Counter()  # by finish reason, as the answers say
        self.refused = 0
        self.stuck = False  # somebody waited in vain: nothing that comes after means anything
        self._patience_s = patience_s
        self._tally = _Tally()

    def wave(self, turns: Sequence[Turn], *, flood: int) -> list[str]:
        """Send ``turns`` from many clients, then ``flood`` requests at once, wait for all; return what is wrong."""
        self._reference.learn(turns)
        before, self._tally = self.llm.metrics.copy(), _Tally()
        found: list[str] = []
        for turn, lines in zip(turns, together(self._turn, turns, self._patience_s), strict=True):
            if lines is None:
                self.stuck = True
                found.append(f"{turn}: no answer within {self._patience_s:.0f} s")
            else:
                found += [f"{turn}: {line}" for line in lines]
        if self.stuck:
            return [f"{self.name}: {line}" for line in found]
        found += self._flood(turns[:flood])
        self.faults.settle()
        self.ended += self._tally.ended
        return [f"{self.name}: {line}" for line in found + self._books(self.llm.metrics.since(before))]

    def _turn(self, turn: Turn) -> list[str]:
        plan, strikes = self._plans[turn.plan], self.faults.strikes
        params = plan.params.model_copy(update={"timeout_s": turn.timeout_s})
        ways = {"generate": self._generate, "stream": self._stream, "listen": self._listen}
        answer = ways[turn.way](turn, plan, params)
        answer = replace(answer, struck=self.faults.strikes > strikes)
        self._note(answer)
        return problems(turn, plan, answer, self._reference.output(turn.plan))

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
        return _answer(items, self._reference.output(turn.plan))

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
        return _answer(items, self._reference.output(turn.plan), output.error)

    def _flood(self, turns: Sequence[Turn]) -> list[str]:
        """More requests at once than may wait: each is answered or refused."""
        ended, taken = threading.Semaphore(0), 0
        outputs: list[RequestOutput] = []

        def listen(item: StreamOutput) -> None:
            if item.output is not None:
                outputs.append(item.output)
                ended.release()

        for turn in turns:
            plan = self._plans[turn.plan]
            try:
                self.llm.submit(plan.prompt, plan.params, listen)
                taken += 1
            except QueueFull:
                self.refused += 1
        if not all(ended.acquire(timeout=self._patience_s) for _ in range(taken)):
            self.stuck = True
            return [f"a flood: no answer within {self._patience_s:.0f} s"]
        for output in outputs:
            self._note(Answer(output))
        try:
            self.llm.generate([0], SamplingParams(max_tokens=10**6))
        except BadRequest:
            self.refused += 1
        else:
            return ["a request that cannot fit was accepted"]
        return []

    def _note(self, answer: Answer) -> None:
        with _LOCK:
            self._tally.add(answer)

    def _books(self, counted: Metrics) -> list[str]:
        """Nobody is left, nothing is held, and what was ``counted`` in the wave is what the answers say."""
        room = self.llm.loop.room
        free = not isinstance(room, BlockTable) or room.allocator.available == room.allocator.blocks - 1
        rules = {
            f"queue and slots are empty: {self.llm.waiting}, {self.llm.running}": not (
                self.llm.waiting or self.llm.running
            ),
            "all blocks are free": free,
            **_sums(counted),
            **self._tally.rules(counted),
        }
        return [f"does not hold: {rule}" for rule, holds in rules.items() if not holds]


@dataclass
class _Tally:
    """What the answers of a wave come to. What became of a stream that was left, its client never heard."""

    ended: Counter[str] = field(default_factory=Counter)
    left: int = 0
    unseen: int = 0  # answers without an output: an exception in its place, or nobody who heard it
    tokens: int = 0
    of_errors: int = 0  # of those, in answers that ended with an error: what broke may not have been counted
    steps: int = 0
    accepted: int = 0

    def add(self, answer: Answer) -> None:
        if answer.left:
            self.left += 1
        else:
            self.ended[answer.reason] += 1
        if answer.left or answer.output is None:
            self.unseen += 1
            return
        self.tokens += len(answer.output.token_ids)
        self.of_errors += len(answer.output.token_ids) if answer.reason == "error" else 0
        self.steps += answer.output.speculation.num_spec_steps
        self.accepted += answer.output.speculation.num_accepted_draft_tokens

    def rules(self, counted: Metrics) -> dict[str, bool]:
        more = Counter(counted.finished)
        more.subtract(self.ended)
        rules = {
            f"finished {counted.finished}, answered {dict(self.ended)}, {self.left} left": sum(more.values())
            == self.left
            and all(count >= 0 for count in more.values())
        }
        if self.unseen:
            return rules
        mine, theirs = (self.steps, self.accepted), (counted.steps, sum(counted.accepted))
        return rules | {
            f"kept {counted.kept}, answers hold {self.tokens}, {self.of_errors} of them with errors": 0
            <= self.tokens - counted.kept
            <= self.of_errors,
            f"steps and accepted drafts {theirs}, answers {mine}": mine == theirs,
        }


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


def _sums(metrics: Metrics) -> dict[str, bool]:
    return {
        f"drafted {metrics.drafted} = {metrics.evaluated} + {metrics.cut_drafts}": metrics.drafted
        == metrics.evaluated + metrics.cut_drafts,
        f"emitted {metrics.emitted} >= kept {metrics.kept}": metrics.emitted >= metrics.kept,
        "every step is in the histogram": metrics.accepted_per_step.count == metrics.steps,
        "no request had two slots": metrics.queue_seconds.count <= sum(metrics.finished.values()),
    }


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
