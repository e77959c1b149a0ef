"""Hybrid models on a CUDA device: speculation, batch mates, cached prefixes and preemption change no text."""

from pathlib import Path
from typing import Any

import pytest

from tandemrt import LLM
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.export.bundle.publish import publish
from tandemrt.export.quantize.compressed_tensors import SchemeName
from tests.engine.decoding import make_checkpoint
from tests.engine.test_hybrid_traffic import drafting, hybrid
from tests.gpu.here import needs_float8, skipped_without_equal_bits
from tests.gpu.rounds import (
    REPEATING,
    by_graphs_and_eagerly,
    check_invisible,
    drive,
    output_of,
    paged,
    texts,
    where_texts_part,
)
from tests.makers import ON_A_GPU, VOCAB, on_a_gpu, tiny_hybrid, tiny_tokenizer, write_recipe

# As published: heads of 256 values with a gate, keys and values of 128.
PUBLISHED = {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
TEXTS = texts(12, words=lambda i: 5 * i % 30)


def bundle_of(folder: Path, *, dtype: str, draft: str = "hybrid", kind: str = "delta net", **sizes: int) -> Path:
    target = tiny_hybrid(folder / "target", kind, seed=1, **sizes)
    drafts = {"hybrid": tiny_hybrid(folder / "draft", kind, layers=3, seed=1, **sizes), "target": target}
    return built(folder, dtype=dtype, target=target, draft=drafts[draft], window=4)


def built(folder: Path, *, dtype: str = "bfloat16", invariant: bool | None = None, **how: Any) -> Path:
    backend = paged() if invariant is None else f"{paged()}\nbatch_invariant = {str(invariant).lower()}"
    recipe = write_recipe(folder / "r.toml", backend=backend, dtype=dtype, **{"prefill_chunk": 64, **how})
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


@pytest.mark.parametrize("draft", ["attention", "ngram", "mtp", "eagle3", "pard", "dflash"])
def test_other_drafts_change_no_text(tmp_path: Path, draft: str) -> None:
    """Copies need no promise without overlap."""
    target = hybrid(tmp_path / "target", "paged delta net")
    bundle = built(tmp_path, target=target, drafting=drafting(tmp_path, "paged delta net", draft))
    texts = []
    for window in (0, 4):
        with skipped_without_equal_bits(), LLM(bundle, num_draft_tokens=window, overlap=draft != "ngram") as llm:
            texts.append([output.token_ids for output in drive(llm, [*REPEATING, *TEXTS])])
            assert bool(llm.metrics.drafted) == bool(window)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("case", ["qwen3_5_moe", "qwen3_next"])
def test_speculation_changes_no_text_of_experts_with_a_shared_one(tmp_path: Path, case: str) -> None:
    """The gate of a shared expert has one output. Copies need no promise without overlap."""
    sizes = {"vocab_size": VOCAB, "eos_token_id": 263, "max_position_embeddings": 512, "num_experts": 8}
    target = tiny_tokenizer(tmp_path / "target")
    make_checkpoint(case, target, sizes=sizes)
    drafts = drafting(tmp_path, case, "ngram")
    bundle = built(tmp_path, target=target, drafting=drafts, window=4, invariant=True)
    check_invisible(bundle, [*REPEATING, *TEXTS[:4]], overlap=False)


def test_kimi_linear_runs_in_graphs_and_speculation_changes_few_texts(tmp_path: Path) -> None:
    """Its latent attention is not batch-invariant, so texts of noise may part: most do not."""
    bundle = built(
        tmp_path,
        target=hybrid(tmp_path / "target", "kimi_linear"),
        drafting=drafting(tmp_path, "kimi_linear", "itself"),
    )
    by_graphs, eagerly = by_graphs_and_eagerly(bundle, TEXTS)
    assert by_graphs == eagerly
    with LLM(bundle, num_draft_tokens=0) as llm:
        plain = drive(llm, TEXTS)
    with LLM(bundle) as llm:
        outputs = drive(llm, TEXTS)
        assert sum(llm.metrics.accepted) > 0
    assert sum(at is None for at in where_texts_part(outputs, plain)) >= len(TEXTS) // 2


@needs_float8
@pytest.mark.parametrize("scheme", ["fp8", "int4"])
def test_quantized_weights_change_no_text(tmp_path: Path, scheme: SchemeName) -> None:
    sizes = {"hidden": 256, "intermediate_size": 256, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    whole = tiny_hybrid(tmp_path / "whole", seed=1, **sizes)
    publish(whole, tmp_path / "target", scheme)
    draft = tiny_hybrid(tmp_path / "draft", layers=3, seed=1, **sizes)
    check_invisible(built(tmp_path, target=tmp_path / "target", draft=draft, window=4, invariant=True), TEXTS)


@pytest.mark.parametrize("kind", ["delta net", "mamba", "convolution"])
def test_cached_prefixes_change_no_text(tmp_path: Path, kind: str) -> None:
    """Prompts share 150 tokens: two blocks, at whose end the first prompt leaves a copy of its states."""
    asked = [("q" * 150 + prompt, params) for prompt, params in TEXTS]
    folder = tmp_path / "target"
    target, draft = (tiny_hybrid(each, kind, seed=1, **on_a_gpu(kind)) for each in (folder, tmp_path / "draft"))
    bundle = built(tmp_path, target=target, draft=draft, window=4, length=400)
    outputs = []
    for cached in (False, True):
        with skipped_without_equal_bits(), LLM(bundle, prefix_caching=cached) as llm:
            first = drive(llm, asked[:1])
            outputs.append(output_of(first + drive(llm, asked[1:]) + drive(llm, asked)))
            assert (llm.metrics.cached >= 64 * 2 * len(asked)) == cached
    assert outputs[0] == outputs[1]


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
