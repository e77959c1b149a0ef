"""Parameters that are more than one request, or rows of their own, over a paged cache with graphs and overlap."""

import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tandemrt import LLM, SamplingParams
from tests.gpu.rounds import paged, tiny, where_texts_part

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

PROMPT = [(7 * i) % 256 for i in range(70)]
TAGS = {
    "type": "triggered_tags",
    "triggers": ["t"],
    "tags": [{"begin": "t", "content": {"type": "regex", "pattern": "[ab]{2,5}"}, "end": "!"}],
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("params") / "tiny"
    bundle = tiny(folder, backend=paged(), dtype="bfloat16", length=160)
    with LLM(bundle, synthetic_rule=True, adaptive_draft_tokens=False) as opened:
        yield opened


def test_of_several_outputs_one_computes_the_prompt(llm: LLM) -> None:
    asked = {"temperature": 1.0, "max_tokens": 30, "ignore_eos": True}
    several = llm.generate(PROMPT, SamplingParams(n=3, seed=5, cache_salt="a", **asked)).outputs
    alone = [llm.generate(PROMPT, SamplingParams(seed=5 + at, num_draft_tokens=0, **asked)) for at in range(3)]
    assert [output.num_cached_tokens for output in several] == [0, 64, 64]
    where_texts_part(several, alone)  # at ties, where they part at all
    assert [output.seed for output in several] == [5, 6, 7]


def test_a_prompts_logprobs_are_the_same_in_windows_as_one_by_one(llm: LLM) -> None:
    before = llm.metrics.fast_forward_drafts
    drafted, plain = (
        llm.generate(
            PROMPT,
            SamplingParams(prompt_logprobs=2, logprobs_mode="raw", max_tokens=2, seed=1, num_draft_tokens=window),
        )
        for window in (4, 0)
    )
    assert llm.metrics.fast_forward_drafts - before > 50
    logprobs = [np.array([each.logprob for each in output.prompt_logprobs or ()]) for output in (drafted, plain)]
    assert [each.token for each in drafted.prompt_logprobs or ()] == PROMPT[1:]
    print(f"largest difference {np.abs(logprobs[0] - logprobs[1]).max():.2g}")
    np.testing.assert_allclose(*logprobs, atol=0.05)


def test_structural_tags_are_held(llm: LLM) -> None:
    liked = {83: 6}  # t, so that tags begin
    asked = {"structured_outputs": {"structural_tag": {"format": TAGS}}, "max_tokens": 60, "logit_bias": liked}
    outputs = llm.generate(["tags"] * 4, [SamplingParams(seed=seed, **asked) for seed in range(4)])
    for output in outputs:
        tagged = output.text.split("t")[1:]
        assert all(re.match(r"[ab]{2,5}!", each) for each in tagged[:-1])
    print(f"{sum(output.text.count('t') for output in outputs)} tags")


@pytest.mark.parametrize("mean", [1.0, 3.0])
def test_synthetic_acceptance_is_near_its_mean(llm: LLM, mean: float) -> None:
    asked = {"rule": "synthetic", "synthetic_acceptance_length": mean, "max_tokens": 80, "ignore_eos": True}
    outputs = llm.generate(["a", "b"], SamplingParams(seed=1, temperature=1.0, **asked))
    lengths = [output.speculation.mean_acceptance_length for output in outputs]
    print(f"mean lengths {lengths}")  # lower where the draft proposes padding: every sixth id of this vocabulary is
    assert all(1 + 0.3 * (mean - 1) <= length <= 1 + 1.4 * (mean - 1) for length in lengths)
