"""Gemma 3 reads images: the tokens of an image attend to each other, so that no prompt chunk cuts one."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, Gemma3Processor, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.bundle.build import build
from tandemrt.export.bundle.opening import open_models
from tandemrt.export.bundle.vision import open_tower
from tandemrt.runtime.check.run import check_engines
from tandemrt.runtime.device.backends.opening import open_engines
from tandemrt.runtime.llm.llm import LLM
from tests.engine.test_images import GREEDY, IMAGE_TOKEN, NGRAM, NUM_REQUESTS, bundle, require_equal_logprobs
from tests.engine.test_paged_rounds import PAGED
from tests.makers import GEMMA3_SETTINGS, IMAGE_TOKENS, tiny_vision, write_recipe
from tests.pictures import asked, picture, require_same_texts_without_drafts

TOKENS = 16  # of an image
PROCESSOR = Gemma3ImageProcessorPil(**{name: value for name, value in GEMMA3_SETTINGS.items() if name[:5] != "image_p"})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision(tmp_path_factory.mktemp("gemma") / "target", "gemma3")


@pytest.fixture(scope="module")
def model(target: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(target, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def in_chunks(target: Path) -> Iterator[LLM]:
    """Opened with n-gram drafts and prompt chunks of the tokens of one image."""
    with LLM(bundle(target.parent, target, "chunks", drafting=NGRAM, prefill_chunk=TOKENS)) as llm:
        yield llm


@pytest.fixture(scope="module")
def whole(target: Path) -> Iterator[LLM]:
    with LLM(bundle(target.parent, target, "whole", drafting=NGRAM, prefill_chunk=400)) as llm:
        yield llm


def expected_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int], images: Sequence[Image.Image]
) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *output]])
    pixels = PROCESSOR(images=list(images), return_tensors="pt")["pixel_values"]
    types = (ids == IMAGE_TOKEN).int()
    with torch.no_grad():
        logits = model(ids, pixel_values=pixels, token_type_ids=types, attention_mask=torch.ones_like(ids)).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


@pytest.fixture(scope="module")
def paged(target: Path) -> Iterator[LLM]:
    """Over a paged cache, with prompt calls of two images at most."""
    folder = bundle(target.parent, target, "paged", drafting=NGRAM, backend=PAGED, prefill_chunk=2 * TOKENS)
    with LLM(folder, device="cpu") as llm:
        yield llm


@pytest.mark.parametrize("opened", ["in_chunks", "whole", "paged"])
@pytest.mark.parametrize("count", [1, 3])
def test_logprobs_after_images_equal_those_of_transformers(
    request: pytest.FixtureRequest, model: PreTrainedModel, opened: str, count: int
) -> None:
    llm, images = request.getfixturevalue(opened), [picture(seed, 30 * seed, 40) for seed in range(1, count + 1)]
    parts = [part for at, image in enumerate(images) for part in (f"see the {at} ", image)]
    messages = asked(f"{count}" + "an" * 40, *parts, " and the end")
    for cached in (False, True):
        result = llm.chat(messages, GREEDY)
        assert (result.num_cached_tokens > 0) is cached
        require_equal_logprobs(result, expected_logprobs(model, result.prompt_token_ids, result.token_ids, images))


def test_a_cached_prefix_may_end_within_an_image(in_chunks: LLM, model: PreTrainedModel) -> None:
    messages = asked("an" * 46, picture(7), "and " * 4, "the end")
    first, again = (in_chunks.chat(messages, GREEDY) for _ in range(2))
    begin = first.prompt_token_ids.index(IMAGE_TOKEN)
    assert begin < again.num_cached_tokens == 64 < begin + TOKENS
    require_equal_logprobs(again, expected_logprobs(model, again.prompt_token_ids, again.token_ids, [picture(7)]))


@pytest.mark.parametrize("opened", ["in_chunks", "paged"])
def test_speculation_and_neighbours_change_no_text_after_images(request: pytest.FixtureRequest, opened: str) -> None:
    require_same_texts_without_drafts(request.getfixturevalue(opened), NUM_REQUESTS)


def test_the_prompt_is_that_of_the_processor(in_chunks: LLM, target: Path) -> None:
    begin, end, image, _ = IMAGE_TOKENS
    tokens = {"boi_token": begin, "eoi_token": end, "image_token": image}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(target / "tokenizer.json"), extra_special_tokens=tokens)
    processor = Gemma3Processor(PROCESSOR, tokenizer, image_seq_length=TOKENS)
    text = f"<|im_end|>user:see {begin}and\n{begin}the<think>"
    expected = processor(text=text, images=[[picture(1), picture(2)]], add_special_tokens=False)["input_ids"]
    result = in_chunks.chat(asked("see ", picture(1), "and\n", picture(2), "the"), SamplingParams(max_tokens=1))
    assert list(result.prompt_token_ids) == expected[0]


@pytest.mark.parametrize(
    ("recipe", "kv_dtype", "reason"),
    [
        ({"prefill_chunk": TOKENS - 1}, None, "prefill_chunk should be at least the 16 tokens of an image"),
        ({"backend": PAGED}, "float8_e4m3", "which no kernel computes over a KV cache in float8"),
    ],
)
def test_where_tokens_of_an_image_cannot_see_each_other_text_alone_is_read(
    target: Path, tmp_path: Path, recipe: dict[str, str], kv_dtype: str | None, reason: str
) -> None:
    file = write_recipe(tmp_path / "r.toml", target=target, **recipe)  # type: ignore[arg-type]
    report = build(Recipe.load(file, kv_dtype=kv_dtype), tmp_path / "text")
    assert report.manifest.vision is None
    assert "images are not read, only text" in report.notes[0]
    assert reason in report.notes[0]
    file.write_text(file.read_text().replace("[draft]", "images = true\n[draft]"))
    with pytest.raises(BadCheckpoint, match=reason):
        build(Recipe.load(file, kv_dtype=kv_dtype), tmp_path / "bundle")


def test_tensorrt_reads_no_images_whose_tokens_attend_to_each_other(target: Path, tmp_path: Path) -> None:
    recipe = Recipe.load(write_recipe(tmp_path / "r.toml", target=target, backend='name = "tensorrt"', dtype="float16"))
    tower, (note,) = open_tower(recipe, open_models(recipe)[0])
    assert tower is None
    assert "which onnxruntime-cpu and onnxruntime-cuda compute, not tensorrt" in note


def test_every_check_passes(in_chunks: LLM) -> None:
    engines = open_engines(in_chunks.bundle, torch.device("cpu"), 1)
    results = list(check_engines(in_chunks.bundle, engines, threads=1))
    assert [result.check for result in results if result.verdict == "fail"] == []
