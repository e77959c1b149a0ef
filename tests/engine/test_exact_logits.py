"""On a CPU a token's logits have the same bits with any draft windows, neighbours and chunks of its prompt.

Equal texts do not show this: a difference in the last bits changes a token only where two scores nearly tie.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandemrt import LLM, SamplingParams
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tests.engine.test_paged_rounds import PAGED
from tests.makers import ON_A_GPU, tiny_checkpoint, tiny_hybrid, tiny_latent, write_recipe

MOST, CHUNK, TOKENS = 6, 64, 9
LINEAR = 'name = "onnxruntime-cpu"'
BUNDLES = {  # backend, dtype and dtype of the cache: every pair that runs on a CPU
    "linear-float32": (LINEAR, "float32", None),
    "linear-float16": (LINEAR, "float16", None),
    "linear-int8": (LINEAR, "int8", None),
    "linear-int4": (LINEAR, "int4", None),
    "paged-float32": (PAGED, "float32", None),
    "paged-float16": (PAGED, "float16", None),
    "paged-float8": (PAGED, "float16", "float8_e4m3"),
    "hybrid-float32": (LINEAR, "float32", None),
    "hybrid-paged": (PAGED, "float32", None),
    "latent-float32": (LINEAR, "float32", None),  # heads of 576 values
}
# Texts that end within a block of 64, at its end, and in the fifth: onnxruntime adds up to 128 or 256 products at once.
PROMPTS = [[(7 * i * i + 3 * tokens) % 199 for i in range(tokens)] for tokens in (1, 2, 57, 64, 250)]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LLM]]:
    folder = tmp_path_factory.mktemp("exact")
    models = {
        "attention": (
            tiny_checkpoint(folder / "target", seed=1, head_dim=64, max_length=512),
            tiny_checkpoint(folder / "draft", layers=1, seed=1, head_dim=64, max_length=512),
        ),
        "hybrid": (
            tiny_hybrid(folder / "hybrid", seed=1, **ON_A_GPU),
            tiny_hybrid(folder / "hybrid-draft", layers=3, seed=1, **ON_A_GPU),
        ),
        "latent": (tiny_latent(folder / "latent", seed=1), tiny_latent(folder / "latent-draft", layers=1, seed=1)),
    }

    def built(name: str, backend: str, dtype: str, kv_dtype: str | None) -> Path:
        limits = {"length": 272, "prefill_chunk": 2 * CHUNK}
        target, draft = models.get(name.partition("-")[0], models["attention"])
        recipe = write_recipe(
            folder / f"{name}.toml", target=target, draft=draft, window=MOST, backend=backend, dtype=dtype, **limits
        )
        return build(Recipe.load(recipe, kv_dtype=kv_dtype), folder / name).folder

    with ExitStack() as stack:
        yield {
            name: stack.enter_context(LLM(built(name, *how), device="cpu", threads=2, prefix_caching=False))
            for name, how in BUNDLES.items()
        }


@pytest.fixture(scope="module")
def alone(opened: dict[str, LLM]) -> dict[str, list[list[TokenLogprobs]]]:
    """The logprobs of every prompt's text alone, without drafts."""
    return {name: [logprobs(llm, [(which, 0)])[0] for which in range(len(PROMPTS))] for name, llm in opened.items()}


def logprobs(llm: LLM, requests: list[tuple[int, int]]) -> list[list[TokenLogprobs]]:
    """Generate together for ``requests``: an index into PROMPTS and a draft window each."""
    params: list[dict[str, Any]] = [{"seed": which, "num_draft_tokens": window} for which, window in requests]
    outputs = llm.generate(
        [PROMPTS[which] for which, _ in requests],
        [
            SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True, logprobs=8, logprobs_mode="raw", **each)
            for each in params
        ],
    )
    of_outputs = [output.logprobs for output in outputs]
    assert all(each is not None and len(each) == TOKENS for each in of_outputs)
    return [each for each in of_outputs if each is not None]


@pytest.mark.parametrize("name", BUNDLES)
@pytest.mark.parametrize("window", [1, MOST])  # the others with neighbours below
def test_logits_have_the_same_bits_with_any_draft_window(
    opened: dict[str, LLM], alone: dict[str, list[list[TokenLogprobs]]], name: str, window: int
) -> None:
    opened[name].loop.planner.chunk = opened[name].loop.planner.chunk_while_decoding = 2 * CHUNK
    for which, expected in enumerate(alone[name]):
        assert logprobs(opened[name], [(which, window)]) == [expected], f"prompt {which}"
    assert opened[name].metrics.drafted > 0


@pytest.mark.parametrize("name", BUNDLES)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, MOST)), min_size=1, max_size=5),
    chunk=st.integers(1, CHUNK),
    while_decoding=st.integers(1, CHUNK),
)
def test_logits_have_the_same_bits_with_any_neighbours_and_chunks(
    opened: dict[str, LLM],
    alone: dict[str, list[list[TokenLogprobs]]],
    name: str,
    requests: list[tuple[int, int]],
    chunk: int,
    while_decoding: int,
) -> None:
    planner = opened[name].loop.planner
    planner.chunk, planner.chunk_while_decoding = chunk, while_decoding
    assert logprobs(opened[name], requests) == [alone[name][which] for which, _ in requests]
