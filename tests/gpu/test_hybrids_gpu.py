"""Bundles of hybrid models on a CUDA device: speculation, batch mates, prompts and preemption change no text."""

from pathlib import Path
from typing import Any

import pytest

from tandemrt import LLM
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tests.gpu.here import skipped_without_equal_bits
from tests.gpu.rounds import by_graphs_and_eagerly, check_invisible, drive, output_of, paged, texts
from tests.makers import ON_A_GPU, on_a_gpu, tiny_checkpoint, tiny_hybrid, write_recipe

# As published: heads of 256 values with a gate, keys and values of 128.
PUBLISHED = {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
TEXTS = texts(12, words=lambda i: 5 * i % 30)


def bundle_of(folder: Path, *, dtype: str, draft: str = "hybrid", kind: str = "delta net", **sizes: int) -> Path:
    target = tiny_hybrid(folder / "target", kind, seed=1, **sizes)
    drafts: dict[str, dict[str, Any]] = {
        "hybrid": {"draft": tiny_hybrid(folder / "draft", kind, layers=3, seed=1, **sizes)},
        "attention": {"draft": tiny_checkpoint(folder / "draft", layers=1, seed=1, head_dim=64)},
        "target": {"draft": target},
        "ngram": {"drafting": 'kind = "ngram"\nnum_draft_tokens = 4\nngram_min = 1'},
    }
    how = {"window": 4} | drafts[draft] if draft != "ngram" else drafts[draft]
    recipe = write_recipe(folder / "r.toml", target=target, backend=paged(), dtype=dtype, prefill_chunk=64, **how)
    return build(Recipe.load(recipe), folder / "bundle").folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("delta net", ON_A_GPU),
        ("delta net", PUBLISHED),
        ("mamba", on_a_gpu("mamba")),
        ("mamba", {"mamba_d_state": 128, "mamba_n_groups": 1, "num_attention_heads": 1}),
        ("convolution", on_a_gpu("convolution")),
    ],
)
def test_speculation_and_batch_mates_change_no_text(
    tmp_path: Path, dtype: str, kind: str, sizes: dict[str, int]
) -> None:
    check_invisible(bundle_of(tmp_path, dtype=dtype, kind=kind, **sizes), TEXTS)


@pytest.mark.parametrize("draft", ["attention", "ngram"])
def test_other_drafts_change_no_text(tmp_path: Path, draft: str) -> None:
    bundle = bundle_of(tmp_path, dtype="bfloat16", draft=draft, **ON_A_GPU)
    found = []
    for window in (0, 4):
        with skipped_without_equal_bits(), LLM(bundle, num_draft_tokens=window) as llm:
            found.append([output.token_ids for output in drive(llm, TEXTS)])
    assert found[0] == found[1]


def test_drafts_of_the_target_itself_are_accepted(tmp_path: Path) -> None:
    """All but those after the end: the draft's state is the target's after every round."""
    bundle = bundle_of(tmp_path, dtype="bfloat16", draft="target", **ON_A_GPU)
    with skipped_without_equal_bits(), LLM(bundle) as llm:
        for output in drive(llm, TEXTS):
            drafted, accepted = output.speculation.num_draft_tokens, output.speculation.num_accepted_draft_tokens
            assert accepted >= 0.9 * drafted


def test_graphs_and_preemption_change_no_text(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, dtype="bfloat16", **ON_A_GPU)
    with skipped_without_equal_bits():
        by_graphs, eagerly = by_graphs_and_eagerly(bundle)
        assert by_graphs == eagerly
        with LLM(bundle) as llm:
            wanted = output_of(drive(llm, TEXTS))
    with LLM(bundle, cache_tokens=192) as llm:  # three blocks of 64 tokens
        assert output_of(drive(llm, TEXTS)) == wanted
        assert llm.metrics.preemptions > 0
