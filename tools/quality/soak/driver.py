"""Send waves of attempts to one LLM, and compare its answers and its counters with what they must be."""

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.engines.validation.errors import BadRequest, InternalError, QueueFull, TandemError
from tandemrt.runtime.caches.kv_cache import BlockTable
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.request import RequestOutput, StreamOutput
from tools.clients.listener import Listener
from tools.quality.soak.answers import Answer, problems
from tools.quality.soak.concurrent import run_concurrently
from tools.quality.soak.counters import Tally
from tools.quality.soak.faults import Fault, Faults
from tools.quality.soak.plans import Attempt, Plan
from tools.quality.soak.reference import Reference

PATIENCE_S = 300.0  # a wave that takes longer counts as stuck


class Driver:
    """Sends waves to the LLM that ``open_llm`` opens, and checks them.

    Attributes:
        ended: answers by finish reason.
        abandoned: streams that their client closed.
        rejected: requests that were rejected on submission, or had no thread.
        preemptions: times that requests lost their slot because cache memory ran out.
        stuck: a request got no answer in time. The state after that is undefined.
    """

    def __init__(
        self,
        name: str,
        open_llm: Callable[[], LLM],
        plans: Sequence[Plan],
        reference: Reference,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.name, self.reference = name, reference
        self.llm, self.faults = open_llm(), Faults()
        self.faults.attach(self.llm)
        self.ended: Counter[str] = Counter()
        self.abandoned = 0
        self.rejected = 0
        self.preemptions = 0
        self.stuck = False
        self._open_llm = open_llm
        self._refuse_first = 0
        self._plans = plans
        self._patience_s = patience_s
        self._tally = Tally()
        self._lock = threading.Lock()

    def reopen(self, *, refused_threads: int = 0) -> None:
        """Close the LLM and open it anew; its first requests meet ``refused_threads`` refused threads."""
        gc.unfreeze()
        self.close()
        del self.llm
        gc.collect()  # its faulty engines are cyclic garbage, which freezing would keep
        self.llm = self._open_llm()
        self.faults.attach(self.llm)
        self._refuse_first = refused_threads
        gc.freeze()

    def close(self) -> None:
        """Close the LLM."""
        self.llm.close()

    def wave(self, attempts: Sequence[Attempt], flood: Sequence[Attempt]) -> list[str]:
        """Send ``attempts`` from several clients, then all of ``flood`` at once and a request that fits no engine.

        Waits for all requests. Returns one line for each problem.
        """
        self.reference.run({attempt.plan for attempt in (*attempts, *flood)})
        before, self._tally = self.llm.metrics.copy(), Tally()
        differences: list[str] = []
        self.faults.refuse_threads(self._refuse_first)
        self._refuse_first = 0
        results = run_concurrently(self._attempt, attempts, self._patience_s)
        for attempt, lines in zip(attempts, results, strict=True):
            if lines is None:
                self.stuck = True
                differences.append(f"{attempt}: no answer within {self._patience_s:.0f} s")
            else:
                differences += [f"{attempt}: {line}" for line in lines]
        if not self.stuck:
            differences += self._flood(flood) if flood else []
        if not self.stuck:
            self.faults.clear()
            self.ended += self._tally.ended
            self.abandoned += self._tally.abandoned
            self.rejected += self._tally.refused
            counted = self.llm.metrics.since(before)
            self.preemptions += counted.preemptions
            differences += self._check_state(counted)
        return [f"{self.name}: {line}" for line in differences]

    def _attempt(self, attempt: Attempt) -> list[str]:
        plan, since = self._plans[attempt.plan], self._faults_met()
        params = plan.params.model_copy(update={"timeout_s": attempt.timeout_s})
        ways = {"generate": self._generate, "stream": self._stream, "listen": self._listen}
        answer = ways[attempt.way](attempt, plan, params)
        return self._check(attempt, self._with_faults(answer, since))

    def _faults_met(self) -> tuple[int, int]:
        return self.faults.engine_failures, self.faults.thread_refusals

    def _with_faults(self, answer: Answer, since: tuple[int, int]) -> Answer:
        """``answer`` with the shared faults that were met ``since`` its request was sent."""
        engine_failures, thread_refusals = self._faults_met()
        return replace(answer, engine_failed=engine_failures > since[0], threads_refused=thread_refusals > since[1])

    def _check(self, attempt: Attempt, answer: Answer) -> list[str]:
        with self._lock:
            self._tally.add(answer)
        return problems(attempt, self._plans[attempt.plan], answer, self.reference.output(attempt.plan))

    def _generate(self, attempt: Attempt, plan: Plan, params: SamplingParams) -> Answer:  # noqa: ARG002
        try:
            return Answer(self.llm.generate(plan.prompt, params))
        except TandemError as error:
            return Answer(None, f"{type(error).__name__}: {error}")

    def _stream(self, attempt: Attempt, plan: Plan, params: SamplingParams) -> Answer:
        return asyncio.run(self._stream_async(attempt, plan, params))

    async def _stream_async(self, attempt: Attempt, plan: Plan, params: SamplingParams) -> Answer:
        items: list[StreamOutput] = []
        try:
            async for item in (stream := self.llm.stream(plan.prompt, params)):
                items.append(item)
                received = sum(len(each.token_ids) for each in items)
                if attempt.cancel_after is not None and received >= attempt.cancel_after and item.output is None:
                    await stream.aclose()  # type: ignore[attr-defined]
                    break
        except TandemError as error:
            return Answer(None, f"{type(error).__name__}: {error}")
        return _answer(items, self.reference.output(attempt.plan))

    def _listen(self, attempt: Attempt, plan: Plan, params: SamplingParams) -> Answer:
        fault = Fault(attempt.fault, attempt.fault_at) if attempt.fault is not None else None
        listener = Listener()
        requests: list[Any] = []
        submitted = threading.Event()

        def listen(item: StreamOutput) -> None:
            listener(item)
            if item.output is None and attempt.cancel_after is not None and listener.num_tokens >= attempt.cancel_after:
                submitted.wait()
                self.llm.cancel(requests[0])
            if fault is not None and fault.kind.startswith("listener") and len(listener.items) == fault.at + 1:
                raise fault.error()

        try:
            with self.faults.inject(fault):
                requests.append(self.llm.submit(plan.prompt, params, listen))
        except InternalError as error:
            return Answer(None, f"{type(error).__name__}: {error}")
        submitted.set()
        if attempt.cancel_after == 0:
            self.llm.cancel(requests[0])
        listener.wait()
        output = listener.output
        assert output is not None
        return _answer(listener.items, self.reference.output(attempt.plan), output.error)

    def _flood(self, attempts: Sequence[Attempt]) -> list[str]:
        """Submit more requests than may wait, and one that can never fit. Each is answered or rejected."""
        since = self._faults_met()
        accepted: list[tuple[Attempt, Listener]] = []
        differences: list[str] = []
        for attempt in attempts:
            plan, listener = self._plans[attempt.plan], Listener()
            try:
                self.llm.submit(plan.prompt, plan.params, listener)
                accepted.append((attempt, listener))
            except QueueFull:
                self.rejected += 1
            except InternalError as error:
                differences += self._check(attempt, self._with_faults(Answer(None, str(error)), since))
        if not all(listener.wait(self._patience_s) for _, listener in accepted):
            self.stuck = True
            return [f"a flood: no answer within {self._patience_s:.0f} s"]
        for attempt, listener in accepted:
            output = listener.output
            answer = _answer(listener.items, self.reference.output(attempt.plan), output.error if output else None)
            answer = self._with_faults(answer, since)
            differences += [f"in a flood, {attempt}: {line}" for line in self._check(attempt, answer)]
        try:
            self.llm.generate([0], SamplingParams(max_tokens=10**6))
        except BadRequest:
            self.rejected += 1
            return differences
        return [*differences, "a request that cannot fit was accepted"]

    def _check_state(self, counted: Metrics) -> list[str]:
        """Check that no request is left, that no cache block is held, and that ``counted`` agrees with the answers."""
        manager = self.llm.loop.cache_manager
        waiting, running = self.llm.waiting, self.llm.running
        rules = {
            f"queue and slots are empty: {waiting}, {running}": not waiting and not running,
            "all blocks are free": not isinstance(manager, BlockTable)
            or manager.allocator.available == manager.allocator.blocks - 1,
            **self._tally.rules(counted),
        }
        return [f"does not hold: {rule}" for rule, holds in rules.items() if not holds]


def _answer(items: list[StreamOutput], alone: RequestOutput, error: str | None = None) -> Answer:
    tokens = [token for item in items for token in item.token_ids]
    streamed = (tokens, "".join(item.text for item in items), "".join(item.reasoning for item in items))
    output = items[-1].output if items else None
    if output is None:  # abandoned: compare what was received as the output of a cancelled request
        output = RequestOutput(
            streamed[1], streamed[2], tokens, alone.prompt_token_ids, "cancelled", None, alone.seed, alone.speculation
        )
        return Answer(output, streamed=streamed, abandoned=True)
    return Answer(output, error, streamed)
