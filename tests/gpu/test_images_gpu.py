"""Images on a CUDA device: logits as on a CPU, and drafts, neighbours and chunks change no text."""

from pathlib import Path

import pytest

from tandemrt import LLM, SamplingParams
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tests.gpu.rounds import paged
from tests.makers import tiny_vision, write_recipe
from tests.pictures import asked, picture, require_same_texts_without_drafts

NGRAM = 'kind = "ngram"\nnum_draft_tokens = 4\nngram_min = 1'
BOTH_WAYS = ("gemma3", "gemma4 both ways")  # prompt chunks have whole images
KINDS = ("qwen3_vl", "qwen3_5", "qwen2_5_vl", *BOTH_WAYS, "gemma4", "mistral3", "smolvlm", "lfm2_vl")


def bundle_of(folder: Path, kind: str, name: str, *, dtype: str, backend: str) -> Path:
    target = folder / "target"
    if not target.exists():
        tiny_vision(target, kind)
    recipe = write_recipe(
        folder / f"{name}.toml",
        target=target,
        dtype=dtype,
        backend=backend,
        drafting=NGRAM,
        length=500,
        prefill_chunk=70 if kind in BOTH_WAYS else 16,
    )
    return build(Recipe.load(recipe), folder / name).folder


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, "float32") for kind in KINDS), ("qwen3_vl", "float16")])
def test_logprobs_after_images_are_those_of_a_cpu(tmp_path: Path, kind: str, dtype: str) -> None:
    backends = {"cpu": ("float32", 'name = "onnxruntime-cpu"'), "gpu": (dtype, paged())}
    messages = asked("an" * 40, picture(1), "see ", picture(2, 90, 20), " and the end")
    limits = SamplingParams(temperature=0, max_tokens=12, logprobs=8, logprobs_mode="raw", ignore_eos=True)
    logprobs = []
    for name, (computed_in, backend) in backends.items():
        with LLM(bundle_of(tmp_path, kind, name, dtype=computed_in, backend=backend)) as llm:
            result = llm.chat(messages, limits)
            assert result.logprobs is not None
            logprobs.append([dict(token.top) for token in result.logprobs])
    if dtype == "float32":
        for on_cpu, on_gpu in zip(*logprobs, strict=True):
            assert on_gpu == pytest.approx(on_cpu, abs=0.02)
    else:  # later tokens may differ
        (on_cpu, *_), (on_gpu, *_) = logprobs
        common = on_cpu.keys() & on_gpu.keys()
        assert len(common) >= 6
        assert [on_gpu[token] for token in common] == pytest.approx([on_cpu[token] for token in common], abs=0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_and_neighbours_change_no_text_after_images(tmp_path: Path, kind: str) -> None:
    bundle = bundle_of(tmp_path, kind, "gpu", dtype="bfloat16", backend=paged())
    most = 1 if kind == "smolvlm" else 3  # its tiles take many tokens
    for overlap in (False, True):  # with it, copies in such short texts seldom pay
        with LLM(bundle, adaptive_draft_tokens=False, overlap=overlap) as llm:
            require_same_texts_without_drafts(llm, 24, most_images=most, accepts=not overlap, interrupted=False)
