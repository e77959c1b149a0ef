"""Prefix caching: a text reuses cached blocks of an equal prefix, and no text changes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandemrt import LLM, RequestOutput, SamplingParams
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.runtime.caches.kv_cache import BlockTable
from tests.engine.test_paged_rounds import PAGED
from tests.makers import tiny_checkpoint, write_recipe

SHARED = [(7 * i) % 256 for i in range(150)]  # two full blocks and a few tokens
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
    """A bundle with paged caches."""
    return bundles["paged"]


@pytest.fixture(params=["paged", "linear"])
def llm(bundles: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(bundles[request.param], device="cpu", threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def llm_without_caching(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle, device="cpu", threads=1, prefix_caching=False) as opened:
        yield opened


def asked(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 20, "ignore_eos": True, **params})


def output_of(output: RequestOutput) -> tuple[list[int], str, str]:
    return output.token_ids, output.text, output.finish_reason


def test_several_outputs_share_one_prefill_and_keep_the_texts_of_their_seeds(
    llm: LLM, llm_without_caching: LLM
) -> None:
    several = llm.generate(SHARED, asked(n=3, cache_salt="several")).outputs
    alone = [llm_without_caching.generate(SHARED, asked(seed=3 + index, num_draft_tokens=0)) for index in range(3)]
    assert [output_of(output) for output in several] == [output_of(output) for output in alone]
    assert [output.num_cached_tokens for output in several] == [0, 128, 128]


def content(llm: LLM) -> dict[bytes, list[torch.Tensor]]:
    """Return the content of all registered blocks of all caches, by hash."""
    table = llm.loop.cache_manager
    assert isinstance(table, BlockTable)
    caches = (llm.loop.target.cache, *llm.loop.drafter.caches)
    return {
        name: [tensor[block] for cache in caches for tensor in cache.tensors.values()]
        for name, block in table.allocator._registered.items()
    }


def count_blocks_equal_to_a_prefill(
    llm: LLM, fresh: LLM, texts: Sequence[Sequence[int]], salt: str | None = None
) -> int:
    """Check that registered blocks of ``texts`` equal those of a fresh prefill by ``fresh``. Return their number."""
    for text in texts:
        fresh.generate([*text, 0], asked(max_tokens=1, cache_salt=salt))
    expected = content(fresh)
    blocks = {name: tensors for name, tensors in content(llm).items() if name in expected}
    for name, tensors in blocks.items():
        for a, b in zip(tensors, expected[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    return len(blocks)


def test_a_second_text_reuses_the_full_blocks_of_the_common_prefix(llm: LLM, llm_without_caching: LLM) -> None:
    first = llm.generate([*SHARED, 1], asked())
    second = llm.generate([*SHARED, 2], asked())
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 128)
    assert [output_of(first), output_of(second)] == [
        output_of(llm_without_caching.generate([*SHARED, end], asked())) for end in (1, 2)
    ]
    assert (llm.metrics.cached, llm.metrics.prefilled) == (128, 150 + 22)
    assert llm_without_caching.metrics.cached == 0


@pytest.mark.parametrize(("length", "cached"), [(64, 0), (65, 64), (128, 64), (129, 128), (299, 256)])
def test_the_last_token_of_a_prompt_is_always_processed(
    llm: LLM, llm_without_caching: LLM, length: int, cached: int
) -> None:
    prompt = [(11 * i) % 256 for i in range(length)]
    outputs = [llm.generate(prompt, asked(max_tokens=1)) for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, cached]
    assert {output_of(output)[0][0] for output in outputs} == set(
        llm_without_caching.generate(prompt, asked(max_tokens=1)).token_ids
    )


@pytest.mark.parametrize(
    ("salts", "cached"),
    [(("a", "a"), 128), ((None, None), 128), (("a", "b"), 0), ((None, "a"), 0), (("a", None), 0)],
)
def test_texts_with_another_salt_share_no_block(llm: LLM, salts: tuple[str | None, str | None], cached: int) -> None:
    first, second = (llm.generate(SHARED, asked(cache_salt=salt)) for salt in salts)
    assert second.num_cached_tokens == cached
    assert output_of(first) == output_of(second)


def test_the_next_turn_of_a_conversation_reuses_its_answers(llm: LLM, llm_without_caching: LLM) -> None:
    first = llm.generate(SHARED, asked(max_tokens=60))
    assert sum(llm.metrics.accepted) > 0, "drafts are accepted and refused on the way"
    assert sum(llm.metrics.accepted) < llm.metrics.drafted
    prompt = [*SHARED, *first.token_ids, 5, 6, 7]
    second = llm.generate(prompt, asked())
    paged = isinstance(llm.loop.cache_manager, BlockTable)  # see LinearCacheManager
    assert second.num_cached_tokens == (192 if paged else 128)
    assert output_of(second) == output_of(llm_without_caching.generate(prompt, asked()))


def test_two_concurrent_requests_with_one_prompt_get_their_texts(llm: LLM, llm_without_caching: LLM) -> None:
    params = [asked(seed=seed) for seed in (1, 2)]
    outputs = llm.generate([SHARED] * 2, params)
    assert [output_of(output) for output in outputs] == [
        output_of(llm_without_caching.generate(SHARED, each)) for each in params
    ]
    assert all(output.num_cached_tokens in (0, 64, 128) for output in outputs)
    assert llm.generate(SHARED, asked()).num_cached_tokens == 128


def test_a_request_that_joins_during_a_prefill_reuses_the_finished_blocks(
    bundle: Path, llm_without_caching: LLM
) -> None:
    with LLM(bundle, device="cpu", threads=1) as llm, llm.loop.streams.active():
        outputs: list[RequestOutput] = []
        prompt = [*SHARED, *SHARED[:100]]
        # The second request joins when 4 x 48 tokens are queued, because what is left does not fill a round.
        for seed, steps in ((1, 3), (2, 100)):
            params, listen = asked(seed=seed), lambda item: item.output and outputs.append(item.output)
            llm._scheduler.submit(*llm._admission.admit(prompt, params, listen), block=False)
            for _ in range(steps):
                if llm.running or llm.waiting:
                    llm.loop.step()
        assert sorted(output.num_cached_tokens for output in outputs) == [0, 192]
        alone = [output_of(llm_without_caching.generate(prompt, asked(seed=seed))) for seed in (1, 2)]
        assert sorted(map(output_of, outputs)) == sorted(alone)


@pytest.mark.parametrize(("window", "known"), [(0, 7), (3, 7), ({1: 3, 2: 0}, 3)])
@pytest.mark.parametrize("overlap", [True, False])
def test_registered_blocks_equal_those_of_a_fresh_prefill(bundle: Path, window: Any, known: int, overlap: bool) -> None:
    """Includes the draft's blocks. In rounds without drafts the draft processes no tokens.

    A draft block is registered only after the draft catches up, here when one request is left.
    """
    options = {"device": "cpu", "threads": 1, "num_draft_tokens": window}
    with LLM(bundle, overlap=overlap, **options) as llm, LLM(bundle, **options) as fresh:
        prompts = [[*SHARED, end] for end in range(5)]
        outputs = llm.generate(prompts, [asked(seed=seed, max_tokens=50 + 10 * seed) for seed in range(5)])
        texts = [prompt + output.token_ids for prompt, output in zip(prompts, outputs, strict=True)]
        assert count_blocks_equal_to_a_prefill(llm, fresh, texts) == len(content(llm)) == known


def test_a_seed_has_one_text_under_the_rejection_rule_whether_its_prompt_is_cached_or_not(bundle: Path) -> None:
    """A paged draft model reads a prompt after the first token, so no first round verifies drafts."""
    with LLM(bundle, device="cpu", threads=1) as llm:
        params = [asked(rule="rejection", seed=seed, max_tokens=12) for seed in range(6)]
        first, second = ([llm.generate(SHARED[:129], each) for each in params] for _ in range(2))
        assert [output_of(output) for output in first] == [output_of(output) for output in second]
        assert [output.num_cached_tokens for output in (first[0], second[0])] == [0, 64]


def test_the_least_recently_used_blocks_are_evicted(bundle: Path) -> None:
    with LLM(bundle, device="cpu", threads=1, cache_tokens=320) as llm:  # five blocks
        texts = [[first, *SHARED] for first in range(3)]
        assert [llm.generate(text, asked()).num_cached_tokens for text in (*texts, texts[2])] == [0, 0, 0, 128]
        assert llm.generate(texts[0], asked()).num_cached_tokens < 128


def test_a_free_row_inside_the_batch_of_other_requests_is_still_registered(
    bundles: dict[str, Path], llm_without_caching: LLM
) -> None:
    """A free slot lies between running ones. Its text is copied at the end, and found there."""
    with LLM(bundles["linear"], threads=1) as llm:
        others = [[other, *SHARED] for other in (8, 9)]
        params = [asked(max_tokens=5), *[asked(max_tokens=100, seed=seed) for seed in (1, 2)]]
        outputs = llm.generate([SHARED, *others], params)  # the first request ends first
        assert [output_of(output) for output in outputs] == [
            output_of(llm_without_caching.generate(prompt, each))
            for prompt, each in zip([SHARED, *others], params, strict=True)
        ]
        again = llm.generate([[*SHARED, end] for end in range(4)], asked())
        assert [output.num_cached_tokens for output in again] == [128] * 4
        assert [output_of(output) for output in again] == [
            output_of(llm_without_caching.generate([*SHARED, end], asked())) for end in range(4)
        ]


def test_with_prefix_caching_off_no_block_is_registered(llm_without_caching: LLM) -> None:
    assert [llm_without_caching.generate(SHARED, asked()).num_cached_tokens for _ in range(2)] == [0, 0]
    assert content(llm_without_caching) == {}


def test_requests_without_drafts_skip_the_draft_and_share_no_prefix_with_drafted_ones(
    llm: LLM, llm_without_caching: LLM
) -> None:
    """Requests without drafts share prefixes with each other, and none with drafted requests."""
    drafts = [tensor for cache in llm.loop.drafter.caches for tensor in cache.tensors.values()]
    for tensor in drafts:
        tensor.fill_(float("nan"))
    plain = [llm.generate([*SHARED, end], asked(num_draft_tokens=0)) for end in (1, 2)]
    assert all(np.isnan(tensor.numpy()).all() for tensor in drafts)
    assert [output.num_cached_tokens for output in plain] == [0, 128]
    drafted = [llm.generate([*SHARED, end], asked()) for end in (1, 2)]
    assert [output.num_cached_tokens for output in drafted] == [0, 128]
    together = llm.generate([[*SHARED, end] for end in (1, 2)], [asked(num_draft_tokens=0), asked()])
    if isinstance(llm.loop.cache_manager, BlockTable):  # a linear cache has few rows, and these were overwritten
        assert [output.num_cached_tokens for output in together] == [128, 128]
    expected = [output_of(llm_without_caching.generate([*SHARED, end], asked(num_draft_tokens=0))) for end in (1, 2)]
    assert [output_of(output) for output in plain] == [output_of(output) for output in drafted] == expected
    assert [output_of(output) for output in together] == expected
    for output in (*drafted, together[1]):
        assert output.speculation.num_accepted_draft_tokens > 0
