"""Speculation on a CUDA device changes no token: texts and logprobs equal autoregressive decoding on the CPU.

The dtype is float32, where texts this short have no scores that rounding could swap.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tandemrt import LLM, RequestOutput
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tests.engine.draft_kinds import EAGLE3 as HEAD
from tests.engine.test_fast_forward_drafts import WORDY
from tests.gpu.rounds import MIXED, Requests, answered, drive, output_of, paged, where_texts_part, where_windows_part
from tests.makers import VOCAB, tiny_checkpoint, write_recipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

# The target chooses among the two tokens that a head knows, so every second draft is accepted.
KNOWN = (HEAD.weights()["d2t"] + torch.arange(HEAD.draft_vocab)).tolist()
AMONG = {"logit_bias": dict.fromkeys(KNOWN, 30.0), "ignore_eos": True}
HEADED: Requests = [
    ("among two", {"temperature": 0.0, "max_tokens": 30, **AMONG}),
    ("of them " * 12, {"temperature": 0.8, "seed": 3, "max_tokens": 40, **AMONG}),
]
SCORED: Requests = [
    ("hello the world", {"temperature": 0.0, "logprobs": 2, "max_tokens": 20}),
    ("and the", {"temperature": 0.9, "seed": 5, "top_k": 9, "logprobs": 3, "presence_penalty": 1.0, "max_tokens": 20}),
    ("raw", {"temperature": 1.0, "seed": 6, "logprobs": 1, "logprobs_mode": "raw", "frequency_penalty": 1.0}),
]
ALL: Requests = [*MIXED, *HEADED, *WORDY, *SCORED]
LINEAR = 'name = "onnxruntime-cuda"\ncache = "linear"'
EAGLE3 = "eagle3 over a paged cache"
# Drafters. A model's vocabulary may be padded to another width than the target's.
DRAFTERS = (
    EAGLE3,
    "eagle3 over a linear cache",
    "a narrower model",
    "a wider model",
    "lookup",
    "fast-forward tokens alone",
)
OPTIONS: dict[str, dict[str, Any]] = {
    "with overlap": {},
    "in lockstep": {"overlap": False},
    "forced tokens with overlap": {"overlap": True, "fast_forward_drafts": True},
    "adaptive windows": {"adaptive_draft_tokens": True},
    "prompts in parts": {"prefill_chunk": 7},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_checkpoint(folder / "target", layers=3, seed=1, head_dim=32)
    tiny_checkpoint(folder / "narrower", vocab=VOCAB - 40, layers=1, seed=1, head_dim=32)
    tiny_checkpoint(folder / "wider", vocab=VOCAB + 40, layers=1, seed=1, head_dim=32)
    HEAD.save(folder / "head")
    return folder


def built(models: Path, drafter: str, dtype: str = "float32") -> Path:
    asked: dict[str, Any] = {"backend": LINEAR if "linear" in drafter else paged(), "prefill_chunk": 64}
    if "model" in drafter:
        asked["draft"] = models / drafter.split()[1]
    elif "eagle3" in drafter:
        asked["drafting"] = f'kind = "eagle3"\ncheckpoint = "{models / "head"}"\nnum_draft_tokens = 4'
    else:
        kind = 'kind = "ngram"\nnum_draft_tokens = 4\nngram_min = 1' if drafter == "lookup" else 'kind = "none"'
        asked["drafting"] = kind
    recipe = write_recipe(models / "recipe.toml", target=models / "target", dtype=dtype, length=200, **asked)
    return build(Recipe.load(recipe), models / f"{drafter} {dtype}").folder


@pytest.fixture(scope="module", params=DRAFTERS)
def bundle(request: pytest.FixtureRequest, models: Path) -> Path:
    return built(models, request.param)


@pytest.fixture(scope="module")
def plain(models: Path) -> Iterator[list[RequestOutput]]:
    """The outputs of autoregressive decoding on the CPU."""
    with LLM(built(models, "fast-forward tokens alone", "float32"), device="cpu", threads=2, num_draft_tokens=0) as llm:
        yield drive(llm, ALL)


def assert_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    parted = {
        str(ALL[index]): (at, len(theirs.token_ids))
        for index, (at, mine, theirs) in enumerate(
            zip(where_texts_part(outputs, expected), outputs, expected, strict=True)
        )
        if output_of([mine]) != output_of([theirs])
    }
    assert not parted
    for mine, theirs in zip(outputs, expected, strict=True):
        assert (mine.logprobs is None) == (theirs.logprobs is None)
        for ours, wanted in zip(mine.logprobs or [], theirs.logprobs or [], strict=True):
            assert ours.token == wanted.token
            assert ours.logprob == pytest.approx(wanted.logprob, abs=1e-3)
            assert dict(ours.top) == pytest.approx(dict(wanted.top), abs=1e-3)


@pytest.mark.parametrize("options", OPTIONS)
def test_texts_and_logprobs_equal_autoregressive_decoding_on_the_cpu(
    bundle: Path, plain: list[RequestOutput], options: str
) -> None:
    outputs, metrics = answered(bundle, ALL, **OPTIONS[options])
    print(f"accepted {metrics.accepted} of {metrics.steps}, forced {metrics.fast_forward_drafts}, {metrics.eager_runs}")
    assert_same(outputs, plain)
    if "linear" not in bundle.name:
        assert set(metrics.eager_runs) == {"prompts"}
    if "alone" not in bundle.name and metrics.steps > 100:  # adaptive windows may draft few tokens
        assert sum(metrics.accepted) > 0
    if OPTIONS[options].get("fast_forward_drafts"):
        assert metrics.fast_forward_drafts > 0


def test_without_drafts_texts_and_logprobs_equal_those_of_the_cpu(bundle: Path, plain: list[RequestOutput]) -> None:
    assert_same(answered(bundle, ALL, num_draft_tokens=0)[0], plain)


def test_a_bfloat16_head_differs_from_autoregressive_decoding_only_at_ties(models: Path) -> None:
    """Prompts attend through cuDNN. A draft window and a single token round differently: reported, and few."""
    parted = where_windows_part(built(models, EAGLE3, "bfloat16"), ALL)
    assert sum(at is None for at in parted) >= len(ALL) // 2
