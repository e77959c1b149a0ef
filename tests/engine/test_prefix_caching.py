"""What the caches hold of a text is found again by texts that begin alike, and changes none of them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandemrt import LLM, RequestOutput, SamplingParams
from tandemrt.engines.recipe import Recipe
from tandemrt.export.build import build
from tandemrt.runtime.caches.kv_cache import BlockTable
from tests.engine.test_paged_rounds import PAGED
from tests.makers import tiny_checkpoint, write_recipe

SHARED = [(7 * i) % 256 for i in range(150)]  # two full blocks and a bit
LIMITS = {"length": 300, "prefill_chunk": 48}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("prefix")
    target = tiny_checkpoint(folder / "target", seed=1, head_dim=32, max_length=512)
    draft = tiny_checkpoint(folder / "draft", layers=1, seed=1, head_dim=32, max_length=512)

    def built(name: str, backend: str) -> Path:
        recipe = write_recipe(folder / f"{name}.toml", target=target, draft=draft, window=3, backend=backend, **LIMITS)
        return build(Recipe.load(recipe), folder / name).folder

    return {"paged": built("paged", PAGED), "linear": built("linear", 'name = "onnxruntime-cpu"')}


@pytest.fixture(scope="module")
def bundle(bundles: dict[str, Path]) -> Path:
    """One whose caches are paged."""
    return bundles["paged"]


@pytest.fixture(params=["paged", "linear"])
def llm(bundles: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(bundles[request.param], device="cpu", threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def forgetful(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle, device="cpu", threads=1, prefix_caching=False) as opened:
        yield opened


def asked(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 20, "ignore_eos": True, **params})


def told(output: RequestOutput) -> tuple[list[int], str, str]:
    return output.token_ids, output.text, output.finish_reason


def content(llm: LLM) -> dict[bytes, list[torch.Tensor]]:
    """What all caches hold in blocks whose content is known, by its hash."""
    table = llm.loop.room
    assert isinstance(table, BlockTable)
    caches = (llm.loop.tandem.cache, *llm.loop.drafter.caches)
    return {
        name: [tensor[block] for cache in caches for tensor in cache.tensors.values()]
        for name, block in table.allocator._known.items()
    }


def hold_what_a_prefill_writes(llm: LLM, fresh: LLM, texts: Sequence[Sequence[int]], salt: str | None = None) -> int:
    """Every block that is known of ``texts`` holds what ``fresh`` writes for them; returns how many there are."""
    for text in texts:
        fresh.generate([*text, 0], asked(max_tokens=1, cache_salt=salt))
    expected = content(fresh)
    found = {name: tensors for name, tensors in content(llm).items() if name in expected}
    for name, tensors in found.items():
        for a, b in zip(tensors, expected[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    return len(found)


def test_a_second_text_reuses_the_full_blocks_that_both_begin_with(llm: LLM, forgetful: LLM) -> None:
    first = llm.generate([*SHARED, 1], asked())
    second = llm.generate([*SHARED, 2], asked())
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 128)
    assert [told(first), told(second)] == [told(forgetful.generate([*SHARED, end], asked())) for end in (1, 2)]
    assert (llm.metrics.cached, llm.metrics.prefilled) == (128, 150 + 22)
    assert forgetful.metrics.cached == 0


@pytest.mark.parametrize(("length", "cached"), [(64, 0), (65, 64), (128, 64), (129, 128), (299, 256)])
def test_the_last_token_of_a_prompt_is_always_fed(llm: LLM, forgetful: LLM, length: int, cached: int) -> None:
    prompt = [(11 * i) % 256 for i in range(length)]
    outputs = [llm.generate(prompt, asked(max_tokens=1)) for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, cached]
    assert {told(output)[0][0] for output in outputs} == set(forgetful.generate(prompt, asked(max_tokens=1)).token_ids)


@pytest.mark.parametrize(
    ("salts", "cached"),
    [(("a", "a"), 128), ((None, None), 128), (("a", "b"), 0), ((None, "a"), 0), (("a", None), 0)],
)
def test_texts_with_other_salts_are_never_found(llm: LLM, salts: tuple[str | None, str | None], cached: int) -> None:
    first, second = (llm.generate(SHARED, asked(cache_salt=salt)) for salt in salts)
    assert second.num_cached_tokens == cached
    assert told(first) == told(second)


def test_a_conversation_that_goes_on_finds_its_own_answers(llm: LLM, forgetful: LLM) -> None:
    first = llm.generate(SHARED, asked(max_tokens=60))
    assert sum(llm.metrics.accepted) > 0, "drafts are accepted and refused on the way"
    assert sum(llm.metrics.accepted) < llm.metrics.drafted
    prompt = [*SHARED, *first.token_ids, 5, 6, 7]
    second = llm.generate(prompt, asked())
    paged = isinstance(llm.loop.room, BlockTable)  # a CPU's linear cache finds prompts alone (LinearRoom)
    assert second.num_cached_tokens == (192 if paged else 128)
    assert told(second) == told(forgetful.generate(prompt, asked()))


def test_two_requests_with_one_prompt_at_once_are_as_if_alone(llm: LLM, forgetful: LLM) -> None:
    params = [asked(seed=seed) for seed in (1, 2)]
    found = llm.generate([SHARED] * 2, params)
    assert [told(output) for output in found] == [told(forgetful.generate(SHARED, each)) for each in params]
    assert all(output.num_cached_tokens in (0, 64, 128) for output in found)
    assert llm.generate(SHARED, asked()).num_cached_tokens == 128


def test_one_who_joins_while_the_first_is_in_prefill_finds_what_has_been_written(bundle: Path, forgetful: LLM) -> None:
    with LLM(bundle, device="cpu", threads=1) as llm, llm.loop.clock.active():
        outputs: list[RequestOutput] = []
        prompt = [*SHARED, *SHARED[:100]]
        for seed, steps in ((1, 3), (2, 100)):  # 3 x 48 tokens are enqueued when the second one joins
            params, listen = asked(seed=seed), lambda item: item.output and outputs.append(item.output)
            llm._scheduler.submit(llm._admission.admit(prompt, params, listen), block=False)
            for _ in range(steps):
                if llm.running or llm.waiting:
                    llm.loop.step()
        assert sorted(output.num_cached_tokens for output in outputs) == [0, 128]
        alone = [told(forgetful.generate(prompt, asked(seed=seed))) for seed in (1, 2)]
        assert sorted(map(told, outputs)) == sorted(alone)


@pytest.mark.parametrize(("window", "known"), [(0, 7), (3, 7), ({1: 3, 2: 0}, 3)])
@pytest.mark.parametrize("overlap", [True, False])
def test_known_blocks_hold_what_a_fresh_prefill_writes(bundle: Path, window: Any, known: int, overlap: bool) -> None:
    """Those of the draft as well: where rounds without drafts let it lag behind, a block is not known before it is
    asked again, here when one request is left."""
    options = {"device": "cpu", "threads": 1, "window": window}
    with LLM(bundle, overlap=overlap, **options) as llm, LLM(bundle, **options) as fresh:
        prompts = [[*SHARED, end] for end in range(5)]
        outputs = llm.generate(prompts, [asked(seed=seed, max_tokens=50 + 10 * seed) for seed in range(5)])
        texts = [prompt + output.token_ids for prompt, output in zip(prompts, outputs, strict=True)]
        assert hold_what_a_prefill_writes(llm, fresh, texts) == len(content(llm)) == known


def test_memory_that_others_need_is_taken_from_what_was_kept_longest(bundle: Path) -> None:
    with LLM(bundle, device="cpu", threads=1, cache_tokens=320) as llm:  # five blocks
        texts = [[first, *SHARED] for first in range(3)]
        assert [llm.generate(text, asked()).num_cached_tokens for text in (*texts, texts[2])] == [0, 0, 0, 128]
        assert llm.generate(texts[0], asked()).num_cached_tokens < 128


def test_a_row_that_rounds_of_others_ran_over_is_still_known(bundles: dict[str, Path], forgetful: LLM) -> None:
    """Its slot is free and in the middle of theirs; in the end its text is copied, and found where it was."""
    with LLM(bundles["linear"], threads=1) as llm:
        others = [[other, *SHARED] for other in (8, 9)]
        params = [asked(max_tokens=5), *[asked(max_tokens=100, seed=seed) for seed in (1, 2)]]
        found = llm.generate([SHARED, *others], params)  # the first one leaves first
        assert [told(output) for output in found] == [
            told(forgetful.generate(prompt, each)) for prompt, each in zip([SHARED, *others], params, strict=True)
        ]
        again = llm.generate([[*SHARED, end] for end in range(4)], asked())
        assert [output.num_cached_tokens for output in again] == [128] * 4
        assert [told(output) for output in again] == [
            told(forgetful.generate([*SHARED, end], asked())) for end in range(4)
        ]


def test_a_cache_that_nobody_may_look_into_keeps_nothing(forgetful: LLM) -> None:
    assert [forgetful.generate(SHARED, asked()).num_cached_tokens for _ in range(2)] == [0, 0]
    assert content(forgetful) == {}


def test_a_draft_is_not_fed_what_nobody_drafts_behind_and_goes_on_behind_nothing_that_it_was_not_fed(
    llm: LLM, forgetful: LLM
) -> None:
    """Requests without drafts share beginnings with one another, and nothing with those that draft."""
    drafts = [tensor for cache in llm.loop.drafter.caches for tensor in cache.tensors.values()]
    for tensor in drafts:
        tensor.fill_(float("nan"))
    plain = [llm.generate([*SHARED, end], asked(window=0)) for end in (1, 2)]
    assert all(np.isnan(tensor.numpy()).all() for tensor in drafts)
    assert [output.num_cached_tokens for output in plain] == [0, 128]
    drafted = [llm.generate([*SHARED, end], asked()) for end in (1, 2)]
    assert [output.num_cached_tokens for output in drafted] == [0, 128]
    together = llm.generate([[*SHARED, end] for end in (1, 2)], [asked(window=0), asked()])
    if isinstance(llm.loop.room, BlockTable):  # rows of a linear cache are few, and were written over
        assert [output.num_cached_tokens for output in together] == [128, 128]
    expected = [told(forgetful.generate([*SHARED, end], asked(window=0))) for end in (1, 2)]
    assert [told(output) for output in plain] == [told(output) for output in drafted] == expected
    assert [told(output) for output in together] == expected
    for output in (*drafted, together[1]):
        assert output.speculation.num_accepted_draft_tokens > 0
