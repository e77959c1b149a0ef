"""Rounds: one wait each on a CPU, nothing allocated, requests that come, go, are cancelled, time out and fail alone."""

import asyncio
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandemrt import LLM, RequestOutput, SamplingParams, StreamOutput, StructuredOutputs
from tandemrt.engines.validation.errors import BadRequest, Closed, InternalError, QueueFull
from tandemrt.runtime.device.adjust_buffers import AdjustEntries
from tandemrt.runtime.device.prompt_plan import Chunk
from tandemrt.runtime.engine_loop import planner
from tandemrt.runtime.requests.penalties import Penalties
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.requests.running import QueuedRequest
from tests.waiting import PATIENCE_S, Clock, eventually


@pytest.fixture
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, threads=1) as opened:
        yield opened


def endless(**params: Any) -> SamplingParams:
    """A request that runs to the engine's length."""
    return SamplingParams(**({"temperature": 1.0, "seed": 1, "ignore_eos": True} | params))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("window", [0, 5])
def test_on_a_cpu_the_host_waits_once_per_round(tiny_bundle: Path, window: int, overlap: bool) -> None:
    with LLM(tiny_bundle, threads=1, num_draft_tokens=window, overlap=overlap, lookup=False) as llm:
        llm.generate(["one", "two words", "three words here"], endless(max_tokens=40))
        # The last round's tokens need one more wait, after which no round follows.
        assert 0 < llm.metrics.rounds <= llm.metrics.waits <= llm.metrics.rounds + 1


def test_rounds_allocate_no_buffers(llm: LLM) -> None:
    target, drafter = llm.loop.target, llm.loop.drafter

    def addresses() -> dict[str, int]:
        parts = [
            part for part in vars(drafter).values() if type(part).__module__.startswith("tandemrt.runtime.drafters")
        ]
        owners = [target.buffers, target.state, drafter, *parts]
        buffers = {f"{type(o).__name__}.{name}": value for o in owners for name, value in vars(o).items()}
        for i, cache in enumerate((target.cache, *drafter.caches)):
            buffers |= {f"cache {i}.{name}": tensor for name, tensor in cache.tensors.items()}
        tensors = {name: getattr(value, "device", value) for name, value in buffers.items()}
        return {name: tensor.data_ptr() for name, tensor in tensors.items() if hasattr(tensor, "data_ptr")}

    llm.generate(["warm", "up"], endless(max_tokens=20))
    before = addresses()
    llm.generate(["measure", "this"], endless(max_tokens=20))
    assert len(before) > 10
    assert addresses() == before
    most = 2 * (llm.loop.draft_windows.largest + 1)
    assert target._verify_call.cache_info().currsize <= most, "one for each number of rows and drafts of a round"


def test_more_requests_than_slots_are_all_served_and_counted(llm: LLM) -> None:
    outputs = llm.generate([f"request {i}" for i in range(11)], endless(max_tokens=9))
    assert [len(output.token_ids) for output in outputs] == [9] * 11
    assert llm.metrics.finished == {"length": 11}
    assert llm.metrics.kept == llm.metrics.emitted == 99
    assert llm.metrics.evaluated <= llm.metrics.drafted
    assert llm.metrics.prefilled == sum(len(output.prompt_token_ids) - 1 for output in outputs)


def test_the_speculation_record_adds_up(llm: LLM) -> None:
    record = llm.generate("add up", endless(max_tokens=50)).speculation
    assert sum(record.acceptance_histogram) == record.num_spec_steps
    assert sum(n * steps for n, steps in enumerate(record.acceptance_histogram)) == record.num_accepted_draft_tokens
    assert record.num_accepted_draft_tokens <= record.num_draft_tokens
    assert record.to_json()["mean_acceptance_length"] == record.mean_acceptance_length


def test_the_rejection_rule_meets_the_refused_token_and_the_coupled_rule_stops_before_it(llm: LLM) -> None:
    """Stopping short would draw from the target where the rejection rule draws from the residual."""
    only = {"max_tokens": 12, "allowed_token_ids": [70, 71]}  # next to nothing of what is drafted
    coupled, rejection = (llm.generate("x", endless(rule=rule, **only)) for rule in ("coupled", "rejection"))
    assert coupled.speculation.num_spec_steps <= 3
    assert rejection.speculation.num_spec_steps >= 9
    assert rejection.speculation.num_draft_tokens <= rejection.speculation.num_spec_steps + 3
    assert set(rejection.token_ids) | set(coupled.token_ids) <= {70, 71}


def test_the_metrics_add_up_to_what_the_requests_say(llm: LLM) -> None:
    prompts = [f"count {i} <think>" for i in range(6)]
    outputs = llm.generate(prompts, endless(max_tokens=30, thinking_token_budget=8))
    metrics = llm.metrics
    records = [output.speculation for output in outputs]
    assert metrics.steps == sum(record.num_spec_steps for record in records) > 0
    assert sum(metrics.accepted) == sum(record.num_accepted_draft_tokens for record in records) > 0
    assert metrics.accepted == sorted(metrics.accepted, reverse=True)
    assert metrics.evaluated == sum(record.num_draft_tokens for record in records)
    assert metrics.evaluated + metrics.constraint_rejected_drafts == metrics.drafted
    assert metrics.kept == metrics.emitted == sum(len(output.token_ids) for output in outputs)
    assert metrics.forced_ends == 6
    assert metrics.queue_seconds.count == metrics.time_to_first_token_seconds.count == 6
    assert metrics.inter_token_seconds.count == metrics.kept - 6
    assert metrics.accepted_per_step.count == metrics.steps
    assert metrics.accepted_per_step.sum == sum(metrics.accepted)


def test_times_are_those_that_requests_waited(tiny_bundle: Path, clock: Clock) -> None:
    """A clock that goes by one second per round. One request runs when four come: three at once, one in its place."""
    clock.stopped = True
    with LLM(tiny_bundle, threads=1, num_draft_tokens=0, overlap=False) as llm:
        score, inside, sent = llm.loop.target.score, threading.Event(), threading.Event()
        ended = threading.Semaphore(0)

        def one_second(round_: Round) -> None:
            inside.set()
            sent.wait(PATIENCE_S)
            score(round_)
            clock.ahead += 1.0

        def listen(item: StreamOutput) -> None:
            if item.output is not None:
                ended.release()

        llm.loop.target.score = one_second  # type: ignore[method-assign]
        llm.submit([65], endless(max_tokens=5), listen)
        assert inside.wait(PATIENCE_S)
        for _ in range(4):
            llm.submit([65], endless(max_tokens=5), listen)
        sent.set()
        assert all(ended.acquire(timeout=PATIENCE_S) for _ in range(5))
        metrics = llm.metrics
    assert metrics.queue_seconds.sum == 0 + 3 * 1 + 6
    assert metrics.time_to_first_token_seconds.sum == 1 + 3 * 2 + 7
    assert (metrics.inter_token_seconds.sum, metrics.inter_token_seconds.count) == (20, 20)


def test_metrics_tell_what_came_after_a_copy(llm: LLM) -> None:
    llm.generate("before", endless(max_tokens=10))
    copy = llm.metrics.copy()
    llm.generate("after", endless(max_tokens=7))
    since = llm.metrics.since(copy)
    assert (since.kept, since.finished) == (7, {"length": 1})
    assert since.time_to_first_token_seconds.count == 1
    assert copy.kept == 10


def test_a_prompt_longer_than_a_chunk_is_prefilled_in_parts_and_gives_the_same_text(tiny_bundle: Path) -> None:
    prompt = "the quick brown fox jumps over the lazy dog and then some more"
    with LLM(tiny_bundle, threads=1) as llm:
        chunked = llm.generate(prompt, endless(max_tokens=15))
        assert len(chunked.prompt_token_ids) > 2 * llm.bundle.limits.prefill_chunk
        llm.loop.planner.chunk = 7
        assert llm.generate(prompt, endless(max_tokens=15)).token_ids == chunked.token_ids


@pytest.mark.parametrize("profiled", [False, True])
def test_equal_chunks_share_a_call_unless_the_engine_takes_one_prompt_per_call(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, profiled: bool
) -> None:
    monkeypatch.setattr(planner, "prompt_rows", lambda _: 1)  # as on a GPU
    with LLM(tiny_bundle, threads=1) as llm:
        target = llm.loop.target
        if profiled:
            target.engines["target"].profiles = []  # type: ignore[attr-defined]
        rows: list[int] = []
        monkeypatch.setattr(target, "prefill", lambda _slot, tokens: rows.append(len(tokens)))
        chunks = [Chunk(slot, 0, 5) for slot in range(3)]
        llm.loop.planner._prefill(chunks, {chunk.slot: [65, 66, 67, 68, 69, 70] for chunk in chunks})
    assert rows == ([1, 1, 1] if profiled else [3])


def test_a_prompt_of_one_token_is_served(llm: LLM) -> None:
    assert len(llm.generate([65], endless(max_tokens=5)).token_ids) == 5


def test_a_text_may_fill_the_engines_length_exactly(llm: LLM) -> None:
    output = llm.generate("fill it", endless())
    assert len(output.prompt_token_ids) + len(output.token_ids) == llm.bundle.limits.length
    assert output.finish_reason == "length"


def test_a_request_cancelled_in_prefill_ends_and_its_slot_is_used_again(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle, threads=1) as llm:
        seen: list[StreamOutput] = []
        ended = threading.Event()
        prompt = list(range(90))  # six chunks

        def listen(item: StreamOutput) -> None:
            seen.append(item)
            ended.set()

        request = llm.submit(prompt, endless(), listen)
        llm.cancel(request)
        assert ended.wait(PATIENCE_S)
        assert seen[-1].finish_reason == "cancelled"
        assert llm.metrics.prefilled < len(prompt)
        assert len(llm.generate(["a", "b", "c", "d"], endless(max_tokens=3))) == 4


@pytest.mark.parametrize("overlap", [False, True])
def test_a_cancelled_request_ends_at_the_beginning_of_the_next_round(tiny_bundle: Path, overlap: bool) -> None:
    with LLM(tiny_bundle, threads=1, overlap=overlap) as llm:
        rounds, step = 0, llm.loop.step
        cancelled: list[int] = []
        ended: list[tuple[str, int]] = []
        request: Future[Request] = Future()

        def counted() -> None:
            nonlocal rounds
            rounds += 1
            step()

        llm.loop.step = counted  # type: ignore[method-assign]

        def listen(item: StreamOutput) -> None:
            if item.output is not None:
                ended.append((item.output.finish_reason, rounds))
            elif not cancelled:
                cancelled.append(rounds)
                request.result().cancel()

        request.set_result(llm.submit("go on", endless(max_tokens=60), listen))
        assert eventually(lambda: bool(ended))
    assert ended == [("cancelled", cancelled[0] + 1)]


def test_a_request_cancelled_between_rounds_keeps_its_text_and_leaves_the_others_alone(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle, threads=1) as llm:
        expected = llm.generate("neighbour", endless(max_tokens=60)).token_ids
        done: dict[str, RequestOutput] = {}
        both = threading.Barrier(2)

        def listen(name: str, item: StreamOutput) -> None:
            if name == "victim" and item.output is None and len(victim_tokens) < 10:
                victim_tokens.extend(item.token_ids)
                if len(victim_tokens) >= 10:
                    llm.cancel(requests["victim"])
            if item.output is not None:
                done[name] = item.output
                if len(done) == 2:
                    both.wait()

        victim_tokens: list[int] = []
        requests = {}
        requests["victim"] = llm.submit("victim", endless(), lambda item: listen("victim", item))
        requests["other"] = llm.submit("neighbour", endless(max_tokens=60), lambda item: listen("other", item))
        both.wait(PATIENCE_S)
        assert done["victim"].finish_reason == "cancelled"
        assert 10 <= len(done["victim"].token_ids) < 80
        assert done["other"].token_ids == expected


def test_a_deadline_ends_a_request_with_the_text_so_far(llm: LLM, clock: Clock) -> None:
    expected = llm.generate("too slow", endless()).token_ids
    seen: list[StreamOutput] = []
    ended = threading.Event()

    def listen(item: StreamOutput) -> None:
        seen.append(item)
        if sum(len(each.token_ids) for each in seen) >= 5:
            clock.ahead = 3601.0
        if item.output is not None:
            ended.set()

    llm.submit("too slow", endless(timeout_s=3600), listen)
    assert ended.wait(PATIENCE_S)
    output = seen[-1].output
    assert output is not None
    assert output.finish_reason == "timeout"
    assert 5 <= len(output.token_ids) < len(expected)
    assert output.token_ids == expected[: len(output.token_ids)]


def test_a_deadline_holds_in_the_queue(llm: LLM) -> None:
    output = llm.generate("too slow", endless(timeout_s=1e-6))
    assert (output.finish_reason, output.token_ids) == ("timeout", [])


def test_a_full_queue_refuses_a_stream_and_makes_a_list_wait(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle, threads=1, queue_limit=1) as llm:
        gate, listeners = threading.Event(), []

        def block(item: StreamOutput) -> None:
            gate.wait(PATIENCE_S)
            listeners.append(item)

        async def stream() -> list[StreamOutput]:
            return [item async for item in llm.stream("too many", endless(max_tokens=4))]

        llm.submit("holds the loop", endless(), block)
        assert eventually(lambda: llm.waiting == 0)
        for _ in range(llm.bundle.limits.batch):  # one for each slot that is free, and one that waits
            llm.submit("waits", endless(max_tokens=4), listeners.append)
        with pytest.raises(QueueFull, match="queue_limit: at most 1 requests may wait"):
            llm.submit("too many", endless(max_tokens=4), listeners.append)
        with pytest.raises(QueueFull, match="queue_limit: at most 1 requests may wait"):
            asyncio.run(stream())
        gate.set()
        assert len(llm.generate(["a", "b", "c", "d", "e", "f"], endless(max_tokens=4))) == 6


def test_a_request_whose_constraint_breaks_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from tandemrt.runtime.constraints.constraint import Constraint

    commit = Constraint.commit

    def break_one(self: Constraint, tokens: list[int]) -> Any:
        if self._rules.max_tokens == 13:
            raise InternalError("this one is broken")
        return commit(self, tokens)

    monkeypatch.setattr(Constraint, "commit", break_one)
    outputs = llm.generate(["a", "b", "c"], [endless(max_tokens=n) for n in (12, 13, 14)])
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].error == "InternalError: this one is broken"
    with pytest.raises(InternalError, match="this one is broken"):
        llm.generate("b", endless(max_tokens=13))


@pytest.mark.parametrize("broken", ["raises", "more entries than there is memory for"])
def test_a_request_whose_penalties_break_fails_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    params = [endless(max_tokens=12, presence_penalty=value) for value in (0.5, 1.25, 0.75)]
    expected = llm.generate(["a", "b", "c"], params)
    entries = Penalties.entries

    def break_one(self: Penalties, text: Sequence[int], draft: Sequence[int]) -> AdjustEntries:
        rows = entries(self, text, draft)
        if self.presence != 1.25 or len(text) < 5:
            return rows
        if broken == "raises":
            raise InternalError("these entries are broken")
        return AdjustEntries(np.zeros((3, 10**6), np.int32), np.zeros(10**6, np.float32), 0, 0, 1)

    monkeypatch.setattr(Penalties, "entries", break_one)
    outputs = llm.generate(["a", "b", "c"], params)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert "entries" in str(outputs[1].error)
    assert outputs[1].token_ids == expected[1].token_ids[: len(outputs[1].token_ids)]
    assert [outputs[i].token_ids for i in (0, 2)] == [expected[i].token_ids for i in (0, 2)]
    assert not caplog.records, "no round failed"


def test_an_engine_that_fails_ends_its_requests_with_an_error_and_later_ones_run(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = llm.loop.target
    score, calls = target.score, []

    def fail_once(round_: Round) -> None:
        calls.append(round_)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        score(round_)

    monkeypatch.setattr(target, "score", fail_once)
    outputs = llm.generate(["a", "b"], endless(max_tokens=20))
    assert {output.finish_reason for output in outputs} == {"error"}
    assert "out of memory" in str(outputs[0].error)
    assert "a round failed" in caplog.text
    assert llm.generate("c", endless(max_tokens=20)).finish_reason == "length"


def test_logits_that_are_not_numbers_end_the_request_with_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    target = llm.loop.target
    score = target.score

    def poisoned(round_: Round) -> None:
        score(round_)
        target.buffers.logits.device.fill_(float("nan"))

    monkeypatch.setattr(target, "score", poisoned)
    with pytest.raises(InternalError, match="not finite"):
        llm.generate("nan", endless(max_tokens=5))


def test_a_stream_adds_up_to_the_output_and_shows_each_token_once(llm: LLM) -> None:
    async def collect() -> list[StreamOutput]:
        return [item async for item in llm.stream("stream <think>", endless(max_tokens=40, thinking_token_budget=10))]

    items = asyncio.run(collect())
    output = items[-1].output
    assert output is not None
    assert len(items) > 3
    assert all(item.output is None for item in items[:-1])
    assert "".join(item.text for item in items) == output.text
    assert "".join(item.reasoning for item in items) == output.reasoning
    assert [token for item in items for token in item.token_ids] == output.token_ids


def test_leaving_a_stream_cancels_its_request(llm: LLM) -> None:
    async def leave() -> None:
        stream = llm.stream("leave", endless())
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave())
    assert eventually(lambda: llm.metrics.finished == {"cancelled": 1})


def test_requests_come_from_many_threads_at_once(llm: LLM) -> None:
    expected = [llm.generate(f"thread {i}", endless(seed=i, max_tokens=20)).token_ids for i in range(8)]
    texts: dict[int, list[int]] = {}

    def work(i: int) -> None:
        texts[i] = llm.generate(f"thread {i}", endless(seed=i, max_tokens=20)).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [texts[i] for i in range(8)] == expected


def test_a_listener_that_raises_harms_no_neighbour(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    expected = llm.generate(["left", "right"], endless(max_tokens=30))
    neighbours: list[StreamOutput] = []
    both = threading.Semaphore(0)

    def listen(item: StreamOutput) -> None:
        if item.output is not None:
            neighbours.append(item)
            both.release()

    def broken(item: StreamOutput) -> None:
        raise RuntimeError(f"no room for {len(item.token_ids)} tokens")

    llm.submit("left", endless(max_tokens=30), listen)
    llm.submit("broken", endless(), broken)
    llm.submit("right", endless(max_tokens=30), listen)
    assert all(both.acquire(timeout=PATIENCE_S) for _ in range(2))
    assert sorted(item.output.token_ids for item in neighbours if item.output) == sorted(o.token_ids for o in expected)
    assert "the listener of a request failed" in caplog.text
    assert llm.generate("later", endless(max_tokens=2)).finish_reason == "length"
    assert llm.metrics.finished == {"length": 5, "cancelled": 1}


def test_a_listener_that_raises_while_an_engine_fails_leaves_the_loop_alive(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(round_: Round) -> None:
        raise RuntimeError(f"no memory for {round_.batch} rows of {round_.window}")

    ended = threading.Event()

    def broken(_: StreamOutput) -> None:
        ended.set()
        raise RuntimeError("the client is gone")

    with monkeypatch.context() as patched:
        patched.setattr(llm.loop.target, "score", fail)
        llm.submit("broken", endless(), broken)
        assert ended.wait(PATIENCE_S)
    assert "no memory" in caplog.text
    assert llm.generate("later", endless(max_tokens=2)).finish_reason == "length"


def test_the_books_are_in_order_when_a_listener_hears_of_the_end(llm: LLM) -> None:
    seen: list[tuple[dict[str, int], int, int]] = []
    done = threading.Event()

    def listen(item: StreamOutput) -> None:
        if item.output is not None:
            seen.append((dict(llm.metrics.finished), llm.metrics.kept, len(llm.loop.slots)))
            done.set()

    llm.submit("one", endless(max_tokens=7), listen)
    assert done.wait(PATIENCE_S)
    assert seen == [({"length": 1}, 7, 0)]


def test_a_listener_runs_outside_of_the_queues_lock(llm: LLM) -> None:
    """The dropped request's listener waits for another thread, which sends a request meanwhile."""
    done: list[str] = []
    over = threading.Event()

    def listen(item: StreamOutput) -> None:
        if item.output is not None:
            other = threading.Thread(target=lambda: llm.submit("other", endless(max_tokens=2), lambda _: None))
            other.start()
            other.join(PATIENCE_S)
            done.append("blocked" if other.is_alive() else item.output.finish_reason)
            over.set()

    for _ in range(4):
        llm.submit("occupies a slot", endless(), lambda _: None)
    llm.submit("waits in the queue", endless(timeout_s=1e-6), listen)
    assert over.wait(PATIENCE_S)
    assert done == ["timeout"]


def test_closing_waits_for_the_first_request_as_well(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny_bundle, threads=1)
    submit, finished = llm.loop.scheduler.submit, []

    def close_after(waiting: QueuedRequest, *, block: bool) -> None:
        submit(waiting, block=block)
        closer = threading.Thread(target=llm.close)
        closer.start()
        closer.join(PATIENCE_S)
        finished.append(waiting.request.finished)

    monkeypatch.setattr(llm.loop.scheduler, "submit", close_after)
    llm.submit("first", endless(), lambda _: None)
    assert finished == [True]


def test_a_request_ends_when_the_event_loop_of_its_stream_is_closed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    score, closed, rounds = llm.loop.target.score, threading.Event(), []

    def hold(round_: Round) -> None:
        rounds.append(round_)
        if len(rounds) > 2:
            closed.wait(PATIENCE_S)
        score(round_)

    monkeypatch.setattr(llm.loop.target, "score", hold)
    events = asyncio.new_event_loop()
    stream = llm.stream("abandoned", endless())
    first = events.run_until_complete(anext(stream))
    events.close()
    closed.set()
    assert first.token_ids
    assert eventually(lambda: llm.metrics.finished == {"cancelled": 1})


def test_a_draft_may_have_another_dtype_than_its_target(tmp_path: Path) -> None:
    from tandemrt.engines.recipe.recipe import Recipe
    from tandemrt.export.bundle.build import build
    from tests.makers import tiny_checkpoint, write_recipe

    target, draft = (tiny_checkpoint(tmp_path / name, layers=1, seed=1) for name in ("target", "draft"))
    recipe = write_recipe(tmp_path / "mixed.toml", target=target, draft=draft)
    recipe.write_text(
        recipe.read_text().replace(f'checkpoint = "{draft}"', f'checkpoint = "{draft}"\ndtype = "float16"')
    )
    with LLM(build(Recipe.load(recipe), tmp_path / "bundle").folder, threads=1) as llm:
        output = llm.generate("a prompt of two chunks", endless(max_tokens=12))
        plain = llm.generate("a prompt of two chunks", endless(max_tokens=12, num_draft_tokens=0))
    assert output.token_ids == plain.token_ids
    assert output.speculation.num_accepted_draft_tokens > 0


def test_closing_cancels_what_runs_and_refuses_what_comes(tiny_bundle: Path) -> None:
    """The engine stands still from the first token on until the runtime takes no more requests."""
    llm = LLM(tiny_bundle, threads=1)
    score, began, closed = llm.loop.target.score, threading.Event(), threading.Event()
    items: list[StreamOutput] = []

    def hold(round_: Round) -> None:
        if items and not closed.is_set():
            began.set()
            closed.wait(PATIENCE_S)
        score(round_)

    def refuses() -> bool:
        try:
            llm.submit("late", endless(), lambda _: None)
        except Closed:
            return True
        return False

    llm.loop.target.score = hold  # type: ignore[method-assign]
    llm.submit("going on", endless(), items.append)
    assert began.wait(PATIENCE_S)
    closer = threading.Thread(target=llm.close)
    closer.start()
    assert eventually(refuses)
    closed.set()
    closer.join(PATIENCE_S)
    llm.close()
    assert items[-1].finish_reason == "cancelled"
    assert items[-1].output is not None
    assert 1 <= len(items[-1].output.token_ids) < 40
    with pytest.raises(Closed, match="closed"):
        llm.generate("too late", endless())


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", {}, "prompt: must hold at least one token"),
        ("a\ud800", {}, "prompt: must be text that UTF-8 can encode, received .* at character 1"),
        ([{"role": "user", "content": "\ud800"}], {}, "prompt: must be text that UTF-8 can encode"),
        ([], {}, "prompt: must hold at least one token"),
        (
            list(range(96)),
            {},
            "prompt: This model's maximum context length is 96 tokens. However, at most 95 tokens leave",
        ),
        ([1, 300], {}, r"prompt: token ids must be in 0..\d+, received 300"),
        ([1, -1], {}, r"prompt: token ids must be in 0..\d+, received -1"),
        ([1, "a"], {}, "prompt: must be a text, a list of token ids or a list of chat messages"),
        ([1, True], {}, "prompt: must be a text, a list of token ids or a list of chat messages"),
        (
            "long",
            {"max_tokens": 93},
            "max_tokens: This model's .* 96 tokens. However, the prompt has 4 tokens",
        ),
        (
            "wide",
            {"num_draft_tokens": 9},
            "num_draft_tokens: this runtime drafts at most 8 tokens per round, received 9",
        ),
        ("ban", {"banned_token_ids": [4000]}, "banned: token ids must be in"),
        ("bias", {"logit_bias": {3: 1, 4000: 1}}, r"logit_bias: token ids must be in 0..\d+, received 4000"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_anything_runs(
    llm: LLM, prompt: Any, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        llm.generate(prompt, SamplingParams(**params))
    assert llm.metrics.rounds == 0
    assert llm.generate("still alive", endless(max_tokens=2)).finish_reason == "length"


@pytest.mark.parametrize("params", [{"temperature": 0.0}, [SamplingParams()], 0.7])
def test_params_of_another_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(BadRequest, match="params: must be SamplingParams, received"):
        llm.generate("hello", params)


def test_one_bad_prompt_in_a_list_is_refused_before_the_others_run(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="prompt: must hold at least one token"):
        llm.generate(["good", "", "good"], endless(max_tokens=2))
    assert llm.metrics.rounds == 0


def test_a_budget_needs_a_bundle_that_names_its_delimiters(tmp_path: Path) -> None:
    from tandemrt.engines.recipe.recipe import Recipe
    from tandemrt.export.bundle.build import build
    from tests.makers import tiny_checkpoint, write_recipe

    recipe = write_recipe(tmp_path / "plain.toml", target=tiny_checkpoint(tmp_path / "target"))
    text = recipe.read_text()
    recipe.write_text(text[: text.index("[reasoning]")] + text[text.index("[limits]") :])
    bundle = build(Recipe.load(recipe), tmp_path / "bundle").folder
    with LLM(bundle, threads=1) as llm, pytest.raises(BadRequest, match="has no reasoning delimiters"):
        llm.generate("think", SamplingParams(thinking_token_budget=3))


def test_delimiters_that_are_text_hold_a_budget_and_a_grammar_with_and_without_speculation(tmp_path: Path) -> None:
    """D1, D2: no token of their own, and a phrase that begins with a line break."""
    from tandemrt.engines.recipe.recipe import Recipe
    from tandemrt.export.bundle.build import build
    from tests.makers import tiny_checkpoint, write_recipe

    draft = tiny_checkpoint(tmp_path / "draft", layers=1, seed=1)
    recipe = write_recipe(tmp_path / "text.toml", target=tiny_checkpoint(tmp_path / "target", seed=1), draft=draft)
    text = recipe.read_text().replace('"<think>"', '"[the]"').replace('"</think>"', '"[/the and]"')
    recipe.write_text(text.replace('"enough.</think>"', '"\\n enough.[/the and]\\n"'))
    params = SamplingParams(seed=2, thinking_token_budget=5, structured_outputs=StructuredOutputs(regex="[ab]{3}"))
    with LLM(build(Recipe.load(recipe), tmp_path / "bundle").folder, threads=1) as llm:
        assert llm.tokenizer.token_to_id("[the]") is None
        drafted, plain = (
            llm.generate("so[the]\n", params.model_copy(update={"num_draft_tokens": window})) for window in (None, 0)
        )
    assert (drafted.token_ids, drafted.text) == (plain.token_ids, plain.text)
    assert (drafted.reasoning_tokens - len(llm.tokenizer.encode("\n enough.")), drafted.forced_ends) == (4, 1)
    assert drafted.reasoning.endswith("\n enough.")
    assert (len(drafted.text), set(drafted.text) <= set("ab"), drafted.finish_reason) == (3, True, "stop")


def test_closing_gives_the_memory_of_engines_and_caches_back(tiny_bundle: Path) -> None:
    llm = LLM(tiny_bundle, threads=1)
    llm.generate("a", SamplingParams(max_tokens=3, ignore_eos=True))
    engine = weakref.ref(llm.loop.target.engines["target"])
    llm.close()
    assert engine() is None
    assert llm.metrics.emitted >= 3
    llm.close()
