"""Prompts with images: as transformers computes them, whole, in chunks, from the cache and under drafts."""

import base64
import io
import json
import math
import os
import random
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.contract.vision import VisionEntry
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe, BadRequest, QueueFull
from tandemrt.export.bundle.build import build
from tandemrt.export.bundle.opening import open_models
from tandemrt.export.bundle.vision import open_tower
from tandemrt.runtime.check import tower as tower_check
from tandemrt.runtime.check.reference import open_reference
from tandemrt.runtime.check.run import check_engines
from tandemrt.runtime.check.tower import check_tower, states_of
from tandemrt.runtime.device.backends.opening import open_engines
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.image_pixels import patches_of
from tandemrt.runtime.requests.images import Image as Patches
from tandemrt.runtime.requests.images import ImageReader, ImageSource
from tandemrt.runtime.requests.prompt import Chat
from tandemrt.runtime.requests.request import RequestOutput, StreamOutput
from tandemrt.runtime.requests.vision import TowerRunner
from tests.engine.draft_kinds import DFLASH, EAGLE3, two_known
from tests.engine.test_hybrid_heads import add_mtp
from tests.engine.test_paged_rounds import PAGED
from tests.makers import IMAGE_SETTINGS, IMAGE_TOKENS, tiny_checkpoint, tiny_tokenizer, tiny_vision, write_recipe
from tests.pictures import asked, drawn_request, picture, require_same_texts_without_drafts
from tests.waiting import PATIENCE_S, eventually

NGRAM = 'kind = "ngram"\nnum_draft_tokens = 4\nngram_min = 1'
IMAGE_TOKEN = 269
NUM_REQUESTS = int(os.environ.get("IMAGE_REQUESTS", "12"))
GREEDY = SamplingParams(
    temperature=0,
    max_tokens=12,
    logprobs=8,
    logprobs_mode="raw",
    ignore_eos=True,
    logit_bias={IMAGE_TOKEN: -100},  # transformers would want an image for it
)


def bundle(folder: Path, target: Path, name: str, **recipe: Any) -> Path:
    file = write_recipe(folder / f"{name}.toml", target=target, length=400, **recipe)
    return build(Recipe.load(file), folder / name).folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the command line."""
    return tmp_path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision(tmp_path_factory.mktemp("vision") / "target")


@pytest.fixture(scope="module")
def model(target: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(target, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def in_chunks(target: Path) -> Iterator[LLM]:
    """Opened with n-gram drafts and prompt chunks of 16 tokens, which end within images."""
    with LLM(bundle(target.parent, target, "chunks", drafting=NGRAM)) as llm:
        yield llm


@pytest.fixture(scope="module")
def whole(target: Path) -> Iterator[LLM]:
    with LLM(bundle(target.parent, target, "whole", drafting=NGRAM, prefill_chunk=400)) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafted(target: Path) -> Iterator[LLM]:
    """Opened with a draft model that reads text only."""
    draft = tiny_checkpoint(target.parent / "draft", layers=1)
    tiny_tokenizer(draft, extra=IMAGE_TOKENS)
    with LLM(bundle(target.parent, target, "drafted", draft=draft)) as llm:
        yield llm


@pytest.fixture(scope="module")
def paged(target: Path) -> Iterator[LLM]:
    """Opened on a CPU with the operators of a GPU's paged cache."""
    with LLM(bundle(target.parent, target, "paged", drafting=NGRAM, backend=PAGED), device="cpu", threads=1) as llm:
        yield llm


def expected_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int], images: Sequence[Image.Image]
) -> torch.Tensor:
    """float[output, vocab], by transformers alone, from the pictures and the tokens."""
    processor = Qwen2VLImageProcessorPil(**{k: v for k, v in IMAGE_SETTINGS.items() if k != "image_processor_type"})
    pixels = processor(images=[image.convert("RGB") for image in images], return_tensors="pt")
    ids = torch.tensor([[*prompt, *output]])
    types = (ids == IMAGE_TOKEN).int()
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=types, **pixels).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def require_equal_logprobs(result: RequestOutput, expected: torch.Tensor) -> None:
    assert result.logprobs is not None
    for at, token in enumerate(result.logprobs):
        for each, logprob in (*token.top, (token.token, token.logprob)):
            assert logprob == pytest.approx(float(expected[at, each]), abs=1e-4)


IMAGES = {
    "one": [picture(1)],
    "wide and tall": [picture(2, 90, 20), picture(3, 16, 80)],
    "the same twice": [picture(4), picture(4)],
    "one pixel": [picture(5).crop((0, 0, 1, 1))],
}


@pytest.mark.parametrize("case", IMAGES)
@pytest.mark.parametrize("opened", ["in_chunks", "whole", "drafted", "paged"])
def test_logprobs_after_images_equal_those_of_transformers(
    request: pytest.FixtureRequest, model: PreTrainedModel, opened: str, case: str
) -> None:
    llm, images = request.getfixturevalue(opened), IMAGES[case]
    parts = [part for at, image in enumerate(images) for part in (f"see the {at} ", image)]
    messages = asked("an" * 40, *parts, " and the end")
    first = llm.chat(messages, GREEDY)
    expected = expected_logprobs(model, first.prompt_token_ids, first.token_ids, images)
    require_equal_logprobs(first, expected)
    cached = llm.chat(messages, GREEDY)
    assert cached.num_cached_tokens > 0
    assert cached.token_ids == first.token_ids
    require_equal_logprobs(cached, expected)


def test_an_image_of_the_same_size_is_not_taken_for_another_one(in_chunks: LLM, model: PreTrainedModel) -> None:
    images = [picture(10), picture(11)]
    results = [in_chunks.chat(asked("an" * 60, image, "the" * 60), GREEDY) for image in images]
    cached = results[1].num_cached_tokens
    assert 0 < cached <= results[1].prompt_token_ids.index(IMAGE_TOKEN)
    for result, image in zip(results, images, strict=True):
        require_equal_logprobs(result, expected_logprobs(model, result.prompt_token_ids, result.token_ids, [image]))


def test_images_of_earlier_turns_are_found_in_the_cache(in_chunks: LLM, model: PreTrainedModel) -> None:
    turns = asked(picture(20), "a" * 50)
    in_chunks.chat(turns, GREEDY)
    turns += [{"role": "assistant", "content": "the answer"}, *asked("and ", picture(21), "then?")]
    result = in_chunks.chat(turns, GREEDY)
    assert result.num_cached_tokens >= 64
    images = [picture(20), picture(21)]
    require_equal_logprobs(result, expected_logprobs(model, result.prompt_token_ids, result.token_ids, images))


def test_a_salt_keeps_the_states_of_an_image_to_its_prompts(in_chunks: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = TowerRunner._computed, list[str | None]()

    def computed(runner: TowerRunner, image: Any) -> torch.Tensor:
        seen.append(image.salt)
        return real(runner, image)

    monkeypatch.setattr(TowerRunner, "_computed", computed)
    messages = asked(picture(22), "then?")
    texts = {in_chunks.chat(messages, GREEDY.over({"cache_salt": salt})).text for salt in ("a", "b", "a")}
    assert (len(texts), seen) == (1, ["a", "b"])


@pytest.mark.parametrize("opened", ["in_chunks", "drafted", "paged"])
def test_speculation_and_neighbours_change_no_text_after_images(request: pytest.FixtureRequest, opened: str) -> None:
    require_same_texts_without_drafts(request.getfixturevalue(opened), NUM_REQUESTS)


def encoded(image: Image.Image, kind: str = "PNG", **save: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **save)
    return file.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def test_paths_bytes_arrays_and_data_urls_are_the_same_image(in_chunks: LLM, tmp_path: Path) -> None:
    image = picture(30)
    file = tmp_path / "picture.png"
    file.write_bytes(encoded(image))
    sources = [image, file, file.read_bytes(), np.asarray(image), data_url(file.read_bytes())]
    parts = [{"type": "image", "image": source} for source in sources]
    parts.append({"type": "image_url", "image_url": {"url": data_url(file.read_bytes()), "detail": "auto"}})
    texts = {
        tuple(in_chunks.chat([{"role": "user", "content": [part, {"type": "text", "text": "?"}]}], GREEDY).token_ids)
        for part in parts
    }
    assert len(texts) == 1


def test_low_detail_is_512_pixels_squared(in_chunks: LLM) -> None:
    assert in_chunks.bundle.manifest.vision is not None
    entry = in_chunks.bundle.manifest.vision.model_copy(update={"max_pixels": 2048**2})
    reader = ImageReader(entry, RuntimeOptions(), in_chunks.tokenizer.backend)
    url, sizes = data_url(encoded(picture(1, 1024, 800))), []
    for detail in ("auto", "high", "low"):
        part = {"type": "image_url", "image_url": {"url": url, "detail": detail}}
        _, (source,) = reader.take([{"role": "user", "content": [part]}])
        (image,) = reader.read(source, lambda _, function, *arguments: function(*arguments))
        sizes.append((image.columns * entry.patch_size, image.rows * entry.patch_size))
    assert sizes == [(1024, 800), (1024, 800), (576, 448)]


def test_images_of_a_prompt_are_read_at_once_and_stay_in_order(in_chunks: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def together(image: Image.Image, entry: VisionEntry) -> Any:
        both.wait(PATIENCE_S)
        return patches_of(image, entry)

    messages = asked(picture(1), "and", picture(2))
    alone = in_chunks.chat(messages, GREEDY)
    monkeypatch.setattr("tandemrt.runtime.requests.images.patches_of", together)
    assert in_chunks.chat(messages, GREEDY).token_ids == alone.token_ids


def test_an_image_that_is_twice_in_a_prompt_is_read_once(in_chunks: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    url, low = ({"url": data_url(encoded(picture(1))), "detail": detail} for detail in ("high", "low"))
    shown, other = picture(2), picture(2)
    parts = [{"type": "image_url", "image_url": source} for source in (url, low, url)]
    parts += [{"type": "image", "image": source} for source in (shown, other, shown)]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
    expected, reads, read = in_chunks.chat(messages, GREEDY), [], ImageReader.read

    def noted(reader: ImageReader, source: ImageSource, *arguments: Any, **options: Any) -> Any:
        reads.append(source)
        return read(reader, source, *arguments, **options)

    monkeypatch.setattr(ImageReader, "read", noted)
    result = in_chunks.chat(messages, GREEDY)
    assert [source.low for source in reads] == [False, True, False, False]
    assert (result.prompt_token_ids, result.token_ids) == (expected.prompt_token_ids, expected.token_ids)


def test_no_image_is_begun_after_the_time_for_all_of_them(in_chunks: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = asked(picture(1), "and", picture(2))
    limits = SamplingParams(max_tokens=1)
    in_chunks.chat(messages, limits)
    monkeypatch.setattr(in_chunks._admission._prompts, "_timeout_s", 1e-5)
    with pytest.raises(BadRequest, match=r"prompt_timeout_s\), after which 1 of 2 were read"):
        in_chunks.chat(messages, limits)


def test_images_of_requests_that_have_not_ended_count_against_a_limit(whole: LLM) -> None:
    prompt, ended, long = Chat(asked(picture(1, 90, 60), "?")), threading.Event(), SamplingParams(ignore_eos=True)
    with LLM(whole.bundle.folder, max_image_memory=1) as llm:

        def listen(item: StreamOutput) -> None:
            if item.output is not None:
                ended.set()

        llm.submit(prompt, long, listen)
        with pytest.raises(QueueFull, match=r"use \d+ of 1 bytes \(max_image_memory\), and these need \d+"):
            llm.submit(prompt, long, listen)
        assert ended.wait(30)

        def accepted() -> bool:
            try:
                llm.submit(prompt, GREEDY, listen)
            except QueueFull:
                return False
            return True

        assert eventually(accepted)


def test_the_command_line_reads_images(run: Any, in_chunks: LLM, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    picture(30).save(file)
    command = ("run", str(in_chunks.bundle.folder), "see", "--max-tokens", "8")
    code, out, err = run(*command, "--image", str(file), "--image", str(file), "--json")
    assert code == 0, err
    limits = SamplingParams(temperature=0, max_tokens=8)
    assert json.loads(out)["token_ids"] == in_chunks.chat(asked(picture(30), picture(30), "see"), limits).token_ids
    code, _, err = run(*command, "--image", str(file), "--raw")
    assert (code, "must not come with --image" in err) == (2, True)


HUGE = encoded(Image.new("1", (9000, 9000)))  # 81 megapixels in 10 kB
ANIMATED = encoded(picture(0), "GIF", save_all=True, append_images=[picture(1)])
REFUSED = {
    "cut off": (encoded(picture(1, 300, 200))[:-400], "could not be decoded"),
    "a bomb": (HUGE, r"at most 50000000 pixels \(max_image_pixels\), received 9000 x 9000"),
    "no image": (b"GIF89a but no more", "must be a PNG, JPEG, WEBP or GIF file"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "must be a PNG, JPEG, WEBP or GIF file"),
    "animated": (ANIMATED, "must be a single image"),
    "a line": (encoded(Image.new("RGB", (900, 4))), "at most 200 times"),
    "too many bytes": (bytes(21 << 20), "at most 20971520 bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_is_no_good_image_is_refused(in_chunks: LLM, case: str) -> None:
    data, reason = REFUSED[case]
    for source in (data, data_url(data)):
        with pytest.raises(BadRequest, match=reason):
            in_chunks.chat([{"role": "user", "content": [{"type": "image", "image": source}]}], GREEDY)


def test_an_image_is_refused_where_pillow_is_not_installed(in_chunks: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(BadRequest, match=r"image: needs Pillow, .*: pip install '\.\[images\]'"):
        in_chunks.chat([{"role": "user", "content": [{"type": "image", "image": HUGE}]}], GREEDY)


@pytest.mark.parametrize(
    ("content", "params", "reason"),
    [
        ([{"type": "image", "image": "/etc/hostname"}], {}, "must be a data URL"),
        ([{"type": "image_url", "image_url": {"url": "https://127.0.0.1/a.png"}}], {}, "are not fetched"),
        (
            [{"type": "image_url", "image_url": {"url": "data:,", "detail": "tiny"}}],
            {},
            "detail: must be auto, high or low",
        ),
        ([{"type": "image_url", "image_url": {"url": "data:image/png,abc"}}], {}, "base64"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}], {}, "must hold base64"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,\ud800"}}], {}, "must hold base64"),
        ([{"type": "image", "url": "x"}], {}, "url: is no field"),
        (
            [{"type": "video", "video": "x"}],
            {},
            "supports text and images, no audio",
        ),
        ([{"type": "image", "image": picture(1)}] * 17, {}, "at most 16 images"),
        ([{"type": "image", "image": picture(1)}], {"prompt_logprobs": 1}, "prompt_logprobs: a prompt with images"),
        ([{"type": "image", "image": picture(1)}], {"truncate_prompt_tokens": 9}, "truncate_prompt_tokens: a prompt"),
        ([{"type": "image", "image": picture(1, 90, 60)}] * 16, {}, "leave room for an output"),
    ],
)
def test_requests_with_images_that_cannot_run_are_refused(
    in_chunks: LLM, content: list[Any], params: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadRequest, match=reason):
        in_chunks.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=2, **params))


def test_a_bundle_reads_text_only_where_the_recipe_says_so(target: Path, tmp_path: Path) -> None:
    file = write_recipe(tmp_path / "text.toml", target=target)
    file.write_text(file.read_text().replace("[draft]", "images = false\n[draft]"))
    with LLM(build(Recipe.load(file), tmp_path / "text").folder) as llm:
        assert llm.bundle.manifest.vision is None
        for messages in (asked(picture(1)), [{"role": "user", "content": [{"type": "image"}]}]):
            with pytest.raises(BadRequest, match="this model supports text only"):
                llm.chat(messages, GREEDY)


@pytest.mark.parametrize(
    ("file", "changes", "reason"),
    [
        ("preprocessor_config.json", {"resample": 0}, "resample is 0"),
        ("preprocessor_config.json", {"do_pad": True}, "do_pad is True"),
        ("preprocessor_config.json", {"image_processor_type": "Other"}, "image_processor_type is 'Other'"),
        ("preprocessor_config.json", {"crop_pct": 0.9}, "does not support the field.s. 'crop_pct'"),
        ("preprocessor_config.json", {"patch_size": 8}, "patch_size should be the tower's, 4"),
        ("config.json", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("config.json", {"window_size": 4}, "does not support the field.s. 'window_size'"),
        ("config.json", {"deepstack_visual_indexes": [2, 9]}, "should be layers below 3"),
        ("config.json", {"out_hidden_size": 64}, "should be that of the text part, 32"),
    ],
)
def test_parts_of_a_tower_that_are_not_implemented_are_refused_by_name(
    target: Path, tmp_path: Path, file: str, changes: dict[str, Any], reason: str
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(target, folder)
    settings = json.loads((folder / file).read_text())
    (settings["vision_config"] if file == "config.json" else settings).update(changes)
    (folder / file).write_text(json.dumps(settings))
    recipe = write_recipe(tmp_path / "wrong.toml", target=folder)
    report = build(Recipe.load(recipe), tmp_path / "text")
    assert report.manifest.vision is None
    assert re.search(f"images are not read, only text.*{reason}", report.notes[0])
    recipe.write_text(recipe.read_text().replace("[draft]", "images = true\n[draft]"))
    with pytest.raises(BadCheckpoint, match=reason):
        build(Recipe.load(recipe), tmp_path / "bundle")


def test_a_backend_that_reads_no_images_says_so(target: Path, tmp_path: Path) -> None:
    backend = 'name = "onnxruntime-cuda"\ncache = "linear"'
    file = write_recipe(tmp_path / "images.toml", target=target, backend=backend, dtype="float16")
    recipe = Recipe.load(file)
    tower, (note,) = open_tower(recipe, open_models(recipe)[0])
    assert tower is None
    reason = f"not by this recipe's backend, {recipe.backend.name}; leave target.images out"
    assert "only text (target.images): images are read by onnxruntime-cpu, by onnxruntime-cuda with a paged" in note
    assert reason in note
    file.write_text(file.read_text().replace("[draft]", "images = true\n[draft]"))
    with pytest.raises(BadRecipe, match=reason):
        build(Recipe.load(file), tmp_path / "bundle")


@pytest.fixture(scope="module", params=["int4", "float16"])
def in_few_bits(request: pytest.FixtureRequest, target: Path) -> Iterator[LLM]:
    with LLM(bundle(target.parent, target, request.param, dtype=request.param, drafting=NGRAM)) as llm:
        yield llm


def test_a_target_of_fewer_bits_reads_images_under_drafts(in_few_bits: LLM) -> None:
    draw = random.Random(5)
    requests = [drawn_request(draw) for _ in range(6)]
    for messages, params in requests:
        drafted, alone = (
            in_few_bits.chat(messages, params.model_copy(update={"num_draft_tokens": count})) for count in (4, 0)
        )
        assert [output.token_ids for output in drafted.outputs] == [output.token_ids for output in alone.outputs]


@pytest.mark.parametrize("in_few_bits", ["int4"], indirect=True)
def test_a_tower_beside_a_target_of_few_bits_has_weights_in_int8(whole: LLM, in_few_bits: LLM) -> None:
    bundles = (whole.bundle, in_few_bits.bundle)
    sizes = [sum(f.size for name, f in each.manifest.files.items() if name.startswith("vision/")) for each in bundles]
    assert sizes[1] < sizes[0] / 3
    entry = whole.bundle.manifest.vision
    assert entry is not None
    engines = [open_engines(each, torch.device("cpu"), 1, ["vision"])["vision"] for each in bundles]
    expected, states = (states_of(engine, Patches.of_pixels(np.asarray(picture(1)), entry)) for engine in engines)
    assert 0 < (states - expected).abs().max() < 0.03 * expected.abs().max()
    (result,) = check_tower(in_few_bits.bundle, entry, engines[1], 1)
    assert result.verdict == "pass"


def test_an_mtp_layer_drafts_after_images(tmp_path: Path) -> None:
    folder = tiny_vision(tmp_path / "target", "qwen3_5")
    add_mtp(folder)
    drafting = f'kind = "mtp"\ncheckpoint = "{folder}"\nnum_draft_tokens = 4'
    with LLM(bundle(tmp_path, folder, "mtp", drafting=drafting)) as llm:
        require_same_texts_without_drafts(llm, NUM_REQUESTS)


@pytest.mark.parametrize(("kind", "head"), [("eagle3", EAGLE3), ("dflash", DFLASH)])
def test_a_head_that_reads_states_drafts_after_images(target: Path, tmp_path: Path, kind: str, head: Any) -> None:
    folder = replace(head, max_length=400).save(tmp_path / "head")
    drafting = f'kind = "{kind}"\ncheckpoint = "{folder}"\nnum_draft_tokens = 4'
    with LLM(bundle(tmp_path, target, kind, drafting=drafting)) as llm:
        require_same_texts_without_drafts(llm, NUM_REQUESTS, two_known(folder))
        plain = SamplingParams(max_tokens=24, temperature=0, logit_bias=dict.fromkeys(two_known(folder), 30.0))
        assert llm.chat(asked("see ", picture(1), "end"), plain).speculation.num_accepted_draft_tokens > 0


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bfloat16", "BFLOAT16"), ("float16", "BFLOAT16"), ("float32", "FLOAT")]
)
def test_a_tower_multiplies_and_attends_in_bfloat16_beside_a_target_of_16_bits(
    target: Path, tmp_path: Path, dtype: str, expected: str
) -> None:
    recipe = Recipe.load(write_recipe(tmp_path / "r.toml", target=target, backend=PAGED, dtype=dtype, length=400))
    tower, _ = open_tower(recipe, open_models(recipe)[0])
    assert tower is not None
    embedding, *nodes = [
        node for node in tower.graph(100).make().graph if node.op_type in ("MultiHeadAttention", "MatMul")
    ]
    assert {value.dtype.name for value in embedding.inputs} == {"FLOAT"}
    assert {value.dtype.name for node in nodes for value in node.inputs if value is not None} == {expected}


@pytest.mark.parametrize("opened", ["in_chunks", "paged"])
def test_every_check_passes(request: pytest.FixtureRequest, opened: str) -> None:
    bundle = request.getfixturevalue(opened).bundle
    results = list(check_engines(bundle, open_engines(bundle, torch.device("cpu"), 1), threads=1))
    assert [result for result in results if result.verdict == "fail"] == []
    (tower,) = [result for result in results if result.check == "states of images"]
    assert tower.numbers["tokens"] == 1 + 2 * 5 + 6 * 4


def test_the_check_finds_a_tower_that_computes_other_states(in_chunks: LLM) -> None:
    bundle, engine = in_chunks.bundle, open_engines(in_chunks.bundle, torch.device("cpu"), 1, ["vision"])["vision"]

    class Shifted:
        device, contract = engine.device, engine.contract

        def bind(self, tensors: dict[str, Any]) -> Any:
            return engine.bind({**tensors, "positions": tensors["positions"] // 2})

    assert bundle.manifest.vision is not None
    (result,) = check_tower(bundle, bundle.manifest.vision, Shifted(), 1)  # type: ignore[arg-type]
    assert result.verdict == "fail"


@pytest.mark.parametrize(("image", "value"), [(0, 0.0), (2, math.nan)])
def test_the_check_finds_a_tower_with_wrong_states_of_a_single_image(
    in_chunks: LLM, monkeypatch: pytest.MonkeyPatch, image: int, value: float
) -> None:
    bundle, engine = in_chunks.bundle, open_engines(in_chunks.bundle, torch.device("cpu"), 1, ["vision"])["vision"]
    runs: list[int] = []

    class OneWrong:
        device, contract = engine.device, engine.contract

        def bind(self, tensors: dict[str, Any]) -> Any:
            bound = engine.bind(tensors)

            def run() -> None:
                bound.run()
                if len(runs) == image:
                    tensors["image_states"].fill_(value)
                runs.append(image)

            return SimpleNamespace(run=run)

    monkeypatch.setattr(tower_check, "_TOLERANCE", 0.2)
    assert bundle.manifest.vision is not None
    (result,) = check_tower(bundle, bundle.manifest.vision, OneWrong(), 1)  # type: ignore[arg-type]
    assert (result.verdict, len(runs)) == ("fail", 3)


def test_the_check_on_a_gpu_allows_what_the_towers_own_roundings_change(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = Bundle.open(bundle(tmp_path, target, "gpu", backend=PAGED, dtype="bfloat16"))
    entry = checked.manifest.vision
    assert entry is not None
    monkeypatch.setattr(tower_check, "device_of", lambda _: SimpleNamespace(on_host=False))
    rounded = open_reference(checked, "vision", 1, {}, rounded=True)
    (result,) = check_tower(checked, entry, rounded, 1)
    assert result.verdict == "pass"
    assert 2e-3 < float(result.numbers["relative"]) < 2e-2
    assert 2e-2 <= float(result.numbers["tolerance"]) < 5e-2
    monkeypatch.setattr(
        tower_check, "states_of", lambda engine, image: states_of(engine, image) * (1 + 0.05 * (engine is rounded))
    )
    assert next(check_tower(checked, entry, rounded, 1)).verdict == "fail"


def test_inspect_says_what_images_need(run: Any, in_chunks: LLM) -> None:
    code, out, err = run("export", "inspect", str(in_chunks.bundle.folder), "--gpu", "1GB")
    assert code == 0, err
    assert "24 tokens of 8 x 8 pixels" in out
    assert re.search(r"memory of the tower +[\d.]+ KB of weights, about 73.7 KB for this image", out)
    assert re.search(r"memory of its states +9.2 KB", out)
