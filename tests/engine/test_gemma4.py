"""Gemma 4 as a target: layers that share caches, wider heads in full layers, 4-bit weights."""

from collections.abc import Iterator

import pytest

from tandemrt import LLM, SamplingParams
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tests.engine.decoding import make_checkpoint
from tests.makers import VOCAB, tiny_checkpoint, tiny_tokenizer, write_recipe

PROMPTS = [[(7 * i * i + tokens) % 199 for i in range(tokens)] for tokens in (1, 5, 40)]  # within and beyond windows


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("gemma4")
    sizes = {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "eos_token_id": 5}
    make_checkpoint("gemma4", tiny_tokenizer(folder), sizes=sizes)
    draft = tiny_checkpoint(folder / "draft", layers=1, seed=1)
    recipe = write_recipe(folder / "r.toml", target=folder, draft=draft, dtype="int4")
    with LLM(build(Recipe.load(recipe), folder / "bundle").folder, device="cpu", threads=2) as opened:
        yield opened


def logprobs(llm: LLM, prompts: list[list[int]], window: int) -> list[list[TokenLogprobs] | None]:
    params = SamplingParams(
        temperature=1.0,
        seed=3,
        max_tokens=12,
        ignore_eos=True,
        logprobs=4,
        logprobs_mode="raw",
        num_draft_tokens=window,
    )
    return [output.logprobs for output in llm.generate(prompts, params)]


def test_logits_have_the_same_bits_with_drafts_neighbours_chunks_and_cached_prefixes(llm: LLM) -> None:
    alone = [logprobs(llm, [prompt], 0)[0] for prompt in PROMPTS]
    for chunk, window in ((16, 4), (7, 2)):
        llm.loop.planner.chunk = llm.loop.planner.chunk_while_decoding = chunk
        assert logprobs(llm, PROMPTS, window) == alone
    assert llm.metrics.drafted > 0
