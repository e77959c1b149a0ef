"""Paged caches give the same texts as linear caches, and requests share the memory of a paged cache safely."""

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tandemrt import LLM, RequestOutput, SamplingParams, StreamOutput
from tandemrt.engines.contract.contract import BLOCK_SIZE
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.export.bundle.build import build
from tandemrt.runtime.caches.kv_cache import BlockTable
from tandemrt.runtime.requests.round import Round
from tests.engine.test_invisible import REQUESTS, open_llm, output_of, outputs
from tests.makers import tiny_checkpoint, write_recipe
from tests.waiting import PATIENCE_S, Clock, eventually

PAGED = 'name = "onnxruntime-cuda"\ncache = "paged"\ncompute_capabilities = ["9.0"]'


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("paged")
    target = tiny_checkpoint(folder / "target", seed=1, head_dim=32)
    draft = tiny_checkpoint(folder / "draft", layers=1, seed=1, head_dim=32)

    def built(name: str, backend: str) -> Path:
        recipe = write_recipe(folder / f"{name}.toml", target=target, draft=draft, window=8, backend=backend)
        return build(Recipe.load(recipe), folder / name).folder

    return {"paged": built("paged", PAGED), "linear": built("linear", 'name = "onnxruntime-cpu"')}


@pytest.fixture(scope="module")
def autoregressive(bundles: dict[str, Path]) -> list[Any]:
    return [output_of(output) for output in outputs(bundles["linear"], num_draft_tokens=0)]


@pytest.fixture
def llm(bundles: dict[str, Path]) -> Iterator[LLM]:
    with open_llm(bundles["paged"], device="cpu") as opened:
        yield opened


def table(llm: LLM) -> BlockTable:
    cache_manager = llm.loop.cache_manager
    assert isinstance(cache_manager, BlockTable)
    return cache_manager


@pytest.mark.parametrize("window", [0, 1, 8, {1: 8, 2: 3, 3: 0}])
def test_a_paged_cache_gives_the_texts_of_a_linear_one(
    bundles: dict[str, Path], autoregressive: list[Any], window: Any
) -> None:
    paged = outputs(bundles["paged"], device="cpu", num_draft_tokens=window)
    assert [output_of(output) for output in paged] == autoregressive
    assert window == 0 or sum(output.speculation.num_accepted_draft_tokens for output in paged) > 0


@pytest.mark.parametrize("cache_tokens", [128, 192, 300])
def test_requests_share_little_memory_and_change_no_token(
    bundles: dict[str, Path], autoregressive: list[Any], cache_tokens: int
) -> None:
    with open_llm(bundles["paged"], device="cpu", cache_tokens=cache_tokens) as llm:
        most = [0]
        step = llm.loop.target.score

        def score(round_: Round) -> None:
            most[0] = max(most[0], llm.running)
            step(round_)

        llm.loop.target.score = score  # type: ignore[method-assign]
        outputs = llm.generate([p for p, _ in REQUESTS], [SamplingParams(**params) for _, params in REQUESTS])
        assert [output_of(output) for output in outputs] == autoregressive
        assert most[0] <= table(llm).allocator.blocks - 1  # at least one block each
        assert table(llm).allocator.available == table(llm).allocator.blocks - 1
        assert eventually(lambda: not table(llm).device.any())  # a step after the last text


def test_stale_cache_entries_are_never_read(llm: LLM, autoregressive: list[Any]) -> None:
    with torch.inference_mode():
        for cache in (llm.loop.target.cache, *llm.loop.drafter.caches):
            for tensor in cache.tensors.values():
                tensor.fill_(float("nan"))
    outputs = llm.generate([p for p, _ in REQUESTS], [SamplingParams(**params) for _, params in REQUESTS])
    assert [output_of(output) for output in outputs] == autoregressive


def test_a_cache_larger_than_the_memory_is_rejected(bundles: dict[str, Path]) -> None:
    rule = r"cache_tokens: caches and logits must fit into the \d+ bytes of 'cpu', received 1000000000000000, "
    with pytest.raises(BadRequest, match=rule):
        LLM(bundles["paged"], device="cpu", threads=1, cache_tokens=10**15)


def test_a_cache_too_small_for_one_request_is_rejected_with_numbers(bundles: dict[str, Path]) -> None:
    rule = "cache_tokens: must hold one request of the bundle's length 96 and its last drafts, 105 tokens in blocks of"
    with pytest.raises(BadRequest, match=f"{rule} 64, received 64; give at least 128, or build .* limits.length"):
        LLM(bundles["paged"], device="cpu", threads=1, cache_tokens=64)
    with LLM(bundles["paged"], device="cpu", threads=1, cache_tokens=65) as llm:  # two blocks, and the scratch block
        assert table(llm).allocator.blocks == 3
        assert len(llm.generate("fits", SamplingParams(ignore_eos=True)).token_ids) == 92


@pytest.mark.parametrize(
    ("bundle", "cache_tokens", "message"),
    [
        ("linear", 100, "cache_tokens: this bundle's cache is linear, .* received 100"),
        ("paged", 0, "cache_tokens: must be at least 1 token, received 0"),
        ("paged", True, "cache_tokens: must be an integer, received True"),
        ("paged", 640.0, r"cache_tokens: must be an integer, received 640\.0"),
    ],
)
def test_an_invalid_cache_size_is_rejected(
    bundles: dict[str, Path], bundle: str, cache_tokens: Any, message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        LLM(bundles[bundle], device="cpu", threads=1, cache_tokens=cache_tokens)


@pytest.mark.parametrize("reason", ["cancelled", "timeout", "error"])
def test_interrupted_requests_free_their_memory(
    llm: LLM, clock: Clock, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """Four requests run and two wait. All end with the same reason, and those in slots keep their text."""
    ended, sent = threading.Semaphore(0), threading.Event()
    outputs: list[RequestOutput] = []
    heard: set[int] = set()
    requests: list[Any] = []

    def interrupt() -> None:
        sent.wait(PATIENCE_S)
        if reason == "timeout":
            clock.ahead = 7200.0
        if reason == "error":
            monkeypatch.setattr(llm.loop.target, "score", fail)
        for request in requests if reason == "cancelled" else ():
            llm.cancel(request)

    def fail(round_: Round) -> None:
        raise RuntimeError(f"no memory for {round_.batch} rows of {round_.window}")

    def listen(i: int, item: StreamOutput) -> None:
        if item.output is not None:
            outputs.append(item.output)
            ended.release()
            return
        heard.add(i)
        if len(heard) == 4:
            interrupt()

    params = SamplingParams(temperature=1.0, seed=1, ignore_eos=True, timeout_s=3600)
    requests += [llm.submit(f"victim {i}", params, partial(listen, i)) for i in range(6)]
    sent.set()
    assert all(ended.acquire(timeout=PATIENCE_S) for _ in requests)
    monkeypatch.undo()
    assert {output.finish_reason for output in outputs} == {reason}
    assert sorted(bool(output.token_ids) for output in outputs) == [False] * 2 + [True] * 4
    assert len(llm.generate("last", SamplingParams(max_tokens=2, ignore_eos=True)).token_ids) == 2
    assert table(llm).allocator.available == table(llm).allocator.blocks - 1
    assert eventually(lambda: not llm.loop.target.state.view("length", 4).any())


def test_a_request_owns_blocks_for_every_token_of_its_next_round(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens without a block would be written to the scratch block that all rows share."""
    written, score = [], llm.loop.target.score

    def watched(round_: Round) -> None:
        score(round_)
        for slot in round_.rows:
            end = int(llm.loop.target.state.view("length", slot + 1)[slot]) + round_.window + 1
            written.append((end, BLOCK_SIZE * table(llm).allocator.num_blocks(slot)))

    monkeypatch.setattr(llm.loop.target, "score", watched)
    llm.generate(["a prompt", "b" * 50], SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=1))
    assert all(end <= owned for end, owned in written)
    assert {owned for _, owned in written} == {BLOCK_SIZE, 2 * BLOCK_SIZE}, "memory grows with the text"


def test_by_default_the_pool_holds_every_slot_at_its_full_length(llm: LLM) -> None:
    limits = llm.bundle.limits
    blocks = -(-limits.capacity // 64)
    assert table(llm).allocator.available == limits.batch * blocks


def test_a_request_whose_block_table_fails_ends_with_an_error_and_later_ones_run(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, broken = llm.loop.cache_manager.reserve, [True, True]

    def reserve(slot: int, tokens: int, hashes: Sequence[bytes] = ()) -> int | None:
        num_cached: int | None = real(slot, tokens, hashes)
        if broken:
            broken.pop()
            raise RuntimeError("the device is gone")
        return num_cached

    monkeypatch.setattr(llm.loop.cache_manager, "reserve", reserve)
    outputs = llm.generate(
        ["first", "second", "third"], SamplingParams(max_tokens=4, ignore_eos=True, timeout_s=PATIENCE_S)
    )
    assert [output.finish_reason for output in outputs] == ["error", "error", "length"]
    assert outputs[0].error == "RuntimeError: the device is gone"
    assert "a request could not join a slot" in caplog.text
    assert table(llm).allocator.available == table(llm).allocator.blocks - 1


def test_profile_times_the_parts_of_a_round_and_they_add_up(bundles: dict[str, Path]) -> None:
    with LLM(bundles["paged"], device="cpu", threads=1, profile=True) as llm:
        llm.generate("timed", SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True))
        ms = llm.metrics.device_ms_per_round
        assert llm.metrics.timed_rounds == llm.metrics.rounds - 1
        assert ms["round"] > ms["target"] > 0
        assert ms["round"] == pytest.approx(sum(ms[phase] for phase in ms if phase != "round"))
        assert ms["idle"] > 0
