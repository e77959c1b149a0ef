"""Random traffic in little memory, compared with each request alone: shared prefixes, salts, cancellations, preemption.

After every step no block is lost, and two tables share a block only for an equal prefix. In the end each text equals
the text of its request alone, and every registered block equals that of a fresh prefill.
"""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
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
from tandemrt.engines.contract.contract import BLOCK_SIZE
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.runtime.caches.kv_cache import BlockTable
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.workers.clients import Client
from tests.engine.test_paged_rounds import PAGED
from tests.engine.test_prefix_caching import content
from tests.makers import tiny_checkpoint, write_recipe
from tests.waiting import PATIENCE_S

BLOCKS = 5  # of 64 tokens: two long requests fill them
LENGTH = 300
TRUNK = [(7 * i) % 256 for i in range(140)]
SALTS = [None, None, "a", "b"]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.2, "seed": 4, "top_k": 40, "presence_penalty": 0.5},
    {"temperature": 1.0, "seed": 5, "num_draft_tokens": 0},
    {"temperature": 0.8, "seed": 6, "structured_outputs": {"regex": "[a-e]{60,120}"}, "ignore_eos": False},
]


@dataclass(eq=False)
class SentRequest:
    prompt: tuple[int, ...]
    params: dict[str, Any]
    salt: str | None
    request: Request
    heard: list[StreamOutput] = field(default_factory=list)


class Alone:
    """The text of each request alone, from a runtime without prefix caching. Each is computed once."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._known: dict[str, Any] = {}

    def __getitem__(self, asked: SentRequest) -> Any:
        key = repr((asked.prompt, asked.params))
        if key not in self._known:
            self._known[key] = self._llm.generate(list(asked.prompt), SamplingParams(**asked.params))
        return self._known[key]


class SharedMemory(RuleBasedStateMachine):
    bundle: Path
    alone: Alone
    overlap: bool
    seen: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.end = ExitStack()
        options = {"device": "cpu", "threads": 1, "overlap": self.overlap, "cache_tokens": BLOCKS * BLOCK_SIZE}
        self.llm = self.end.enter_context(LLM(self.bundle, **options))
        cache_manager = self.llm.loop.cache_manager
        assert isinstance(cache_manager, BlockTable)
        self.table = cache_manager
        self.asked: list[SentRequest] = []

    @initialize()
    def begin(self) -> None:
        for at in range(3):
            self.submit(130, (at,), PARAMS[1], None, 100)

    @rule(
        shared=st.sampled_from([0, 30, 64, 128, 140]),
        own=st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple),
        params=st.sampled_from(PARAMS),
        salt=st.sampled_from(SALTS),
        count=st.integers(1, 120),
    )
    def submit(self, shared: int, own: tuple[int, ...], params: dict[str, Any], salt: str | None, count: int) -> None:
        if self.llm.waiting + self.llm.running >= 6:
            return
        prompt, params = (*TRUNK[:shared], *own), {"ignore_eos": True, **params, "max_tokens": count}
        heard: list[StreamOutput] = []
        client = Client(str(len(self.asked) % 2))
        [waiting] = self.llm._admission.admit(
            list(prompt), SamplingParams(**params, cache_salt=salt), heard.append, client=client
        )
        self.llm._scheduler.submit(waiting, block=False)
        waiting.constraints.result(timeout=PATIENCE_S)
        self.asked.append(SentRequest(prompt, params, salt, waiting.request, heard))

    @precondition(lambda self: any(not asked.request.finished for asked in self.asked))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from([asked for asked in self.asked if not asked.request.finished]))
        self.llm.cancel(asked.request)

    @rule(count=st.integers(1, 40))
    def step(self, count: int) -> None:
        with self.llm.loop.streams.active():
            for _ in range(count):
                if not (self.llm.waiting or self.llm.running):
                    break
                before = [running.request for running in self.llm.loop.slots]
                preempted = self.llm.metrics.preemptions
                self.llm.loop.step()
                if self.llm.metrics.preemptions > preempted and before:
                    still = {running.request for running in self.llm.loop.slots}
                    assert before[0] in still or before[0].finished, "the oldest keeps its slot"
                self.blocks_are_accounted_for()

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        self.table.flush()
        tables = self.table.device.tolist()
        texts = {running.slot: running.tokens for running in self.llm.loop.slots}
        salts = {running.slot: running.request.params.cache_salt for running in self.llm.loop.slots}
        owners: dict[int, list[tuple[int, int]]] = {}
        for slot, row in enumerate(tables):
            blocks = [block for block in row if block]
            assert row[len(blocks) :] == [0] * (len(row) - len(blocks))
            assert bool(blocks) == (slot in texts)
            for at, block in enumerate(blocks):
                owners.setdefault(block, []).append((slot, at))
        assert self.table.allocator.available == BLOCKS - len(owners)
        for sharing in owners.values():
            ends = {at for _, at in sharing}
            assert len(ends) == 1
            end = (ends.pop() + 1) * BLOCK_SIZE
            begun = {(tuple(texts[slot][:end]), salts[slot]) for slot, _ in sharing}
            assert len(sharing) == 1 or (len(begun) == 1 and len(next(iter(begun))[0]) == end)

    @invariant()
    def emitted_text_equals_the_text_alone(self) -> None:
        for asked in self.asked:
            streamed = [token for item in asked.heard for token in item.token_ids]
            if not streamed:
                continue
            alone = self.alone[asked]
            assert streamed == alone.token_ids[: len(streamed)]
            output = asked.heard[-1].output
            if output is not None and output.finish_reason != "cancelled":
                assert (streamed, output.text, output.finish_reason) == (
                    alone.token_ids,
                    alone.text,
                    alone.finish_reason,
                )
                assert output.num_cached_tokens % BLOCK_SIZE == 0
                assert output.num_cached_tokens < len(asked.prompt)

    def teardown(self) -> None:
        for _ in range(3000):
            if not (self.llm.waiting or self.llm.running):
                break
            self.step(1)
        assert all(asked.request.finished for asked in self.asked), "no request waits for ever"
        self.emitted_text_equals_the_text_alone()
        assert self.table.allocator.available == BLOCKS
        assert not self.table.device.any()
        self.seen.update(
            preemptions=self.llm.metrics.preemptions,
            cached=self.llm.metrics.cached,
            continued=sum(len(asked.heard) > 1 for asked in self.asked),
        )
        self.registered_blocks_equal_a_fresh_prefill()
        self.end.close()

    def registered_blocks_equal_a_fresh_prefill(self) -> None:
        blocks, checked = content(self.llm), 0
        with LLM(self.bundle, device="cpu", threads=1) as fresh:
            for asked in self.asked:
                text = [*asked.prompt, *(token for item in asked.heard for token in item.token_ids)]
                params = SamplingParams(max_tokens=1, cache_salt=asked.salt)
                fresh.generate(text[: LENGTH - 1], params)
            expected = content(fresh)
        for name, tensors in blocks.items():
            if name in expected:  # skip a text whose last tokens were never emitted
                checked += 1
                for a, b in zip(tensors, expected[name], strict=True):
                    assert np.abs(np.asarray(a) - np.asarray(b)).max() < 1e-4
        assert checked >= len(blocks) - 1 or any(asked.request.finish_reason == "cancelled" for asked in self.asked)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("shared")
    target = tiny_checkpoint(folder / "target", seed=1, head_dim=32, max_length=512)
    draft = tiny_checkpoint(folder / "draft", layers=1, seed=1, head_dim=32, max_length=512)
    limits = {"length": LENGTH, "prefill_chunk": 48, "batch": 4}

    def built(name: str, **drafting: Any) -> Path:
        recipe = write_recipe(folder / f"{name}.toml", target=target, backend=PAGED, **drafting, **limits)
        return build(Recipe.load(recipe), folder / name).folder

    ngram = 'kind = "ngram"\nnum_draft_tokens = 3'
    return {"model": built("model", draft=draft, window=3), "ngram": built("ngram", drafting=ngram)}


@pytest.mark.parametrize(("drafter", "overlapping"), [("model", True), ("model", False), ("ngram", True)])
def test_traffic_in_little_memory_gives_the_texts_of_requests_alone(
    bundles: dict[str, Path], drafter: str, overlapping: bool
) -> None:
    class Model(SharedMemory):
        bundle, overlap, seen = bundles[drafter], overlapping, Counter()

    quick = settings(
        max_examples=2,
        stateful_step_count=15,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    with LLM(bundles[drafter], device="cpu", threads=1, prefix_caching=False) as llm:
        Model.alone = Alone(llm)
        run_state_machine_as_test(Model, settings=quick)
    print(dict(Model.seen))
    assert min(Model.seen.values()) > 0
