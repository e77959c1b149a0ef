"""Prompts with images in every family: as transformers computes them, in chunks, from the cache and under drafts."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText, Idefics3Processor, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tandemrt.engines.contract.vision import Tiles, VisionEntry
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.recipe.backends import OnnxRuntimeCpu
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.vision.towers import read_tower
from tandemrt.runtime.check.tower import check_tower
from tandemrt.runtime.device.backends.opening import open_engines
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.image_pixels import parts as image_parts
from tandemrt.runtime.requests.images import ImageReader, ImageSource, expanded
from tests.engine.test_images import GREEDY, IMAGE_TOKEN, NGRAM, bundle, require_equal_logprobs
from tests.engine.test_paged_rounds import PAGED
from tests.makers import IMAGE_TOKENS, LFM2_TOKENS, TILED, image_settings, tiny_vision
from tests.pictures import asked, normalized, picture, require_same_texts_without_drafts
from tests.plain.test_image_preprocessing import reader

IMAGES = [picture(1), picture(2, 90, 20)]
ON_CPU = 'name = "onnxruntime-cpu"'
BACKENDS = {"cpu": ON_CPU, "paged": PAGED, "mask": ON_CPU, "basic": ON_CPU}  # the last two: graphs for TensorRT


def of_qwen(images: Sequence[Image.Image], kind: str) -> dict[str, torch.Tensor]:
    return dict(processor(Qwen2VLImageProcessorPil, kind)(images=images, return_tensors="pt"))


def of_gemma4(images: Sequence[Image.Image], kind: str) -> dict[str, torch.Tensor]:
    read = processor(Gemma4ImageProcessorPil, kind)(images=images, return_tensors="pt")
    return {name: read[name] for name in ("pixel_values", "image_position_ids")}


def of_mistral(images: Sequence[Image.Image], kind: str) -> dict[str, torch.Tensor]:
    one = processor(PixtralImageProcessorPil, kind)
    return dict(one(images=images, patch_size={"height": 8, "width": 8}, return_tensors="pt"))  # of merged patches


def of_idefics3(images: Sequence[Image.Image], kind: str) -> dict[str, torch.Tensor]:
    return dict(processor(SmolVLMImageProcessorPil, kind)(images=[images], return_tensors="pt"))


def of_lfm2(images: Sequence[Image.Image], kind: str) -> dict[str, torch.Tensor]:
    """Without torchvision, transformers cannot read images for it. test_image_preprocessing compares their pixels."""
    settings = image_settings(kind)
    texts = {"before_tile": "image", "before_all": "image", "before_uncut": "image"}
    tiles = Tiles(side=settings["tile_size"], least=2, most=4, **texts)
    entry = VisionEntry(
        image_token=IMAGE_TOKEN,
        patch_values=1,
        patch_size=4,
        merge_size=2,
        resize="bounds",
        min_pixels=64 * settings["min_image_tokens"],
        max_pixels=64 * settings["max_image_tokens"],
        tiles=tiles,
        resample="bilinear",
        mean=tuple(settings["image_mean"]),
        std=tuple(settings["image_std"]),
    )
    parts = [part for image in images for part in reader(entry).read(ImageSource(image), lambda *_: None)]
    pixels, mask = torch.zeros(len(parts), 64, 48), torch.zeros(len(parts), 64, dtype=torch.int32)
    for at, part in enumerate(parts):
        squares = torch.tensor(normalized(part)).view(part.rows // 2, part.columns // 2, 2, 2, 3, 4, 4)
        patches = squares.permute(0, 2, 1, 3, 5, 6, 4).reshape(-1, 48)
        pixels[at, : len(patches)], mask[at, : len(patches)] = patches, 1
    shapes = torch.tensor([(part.rows, part.columns) for part in parts])
    return {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask}


def processor(of: Callable[..., Any], kind: str) -> Any:
    return of(**{name: value for name, value in image_settings(kind).items() if name != "image_processor_type"})


INPUTS: dict[str, Callable[[Sequence[Image.Image], str], dict[str, torch.Tensor]]] = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe"), of_qwen),
    **dict.fromkeys(("gemma4", "gemma4 both ways"), of_gemma4),
    "mistral3": of_mistral,
    **dict.fromkeys(("smolvlm", "idefics3"), of_idefics3),
    "lfm2_vl": of_lfm2,
}
ON = [
    *((kind, "cpu") for kind in INPUTS if kind not in ("smolvlm", "qwen3_vl")),
    ("smolvlm", "paged"),
    ("gemma4", "paged"),
    ("gemma4 both ways", "paged"),
    ("mistral3", "paged"),
    ("qwen3_vl", "mask"),
    ("qwen2_5_vl", "basic"),
]


def expected_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int], inputs: dict[str, torch.Tensor]
) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *output]])
    types = {} if model.config.model_type in ("mistral3", *TILED) else {"mm_token_type_ids": (ids == IMAGE_TOKEN).int()}
    with torch.no_grad():
        logits = model(input_ids=ids, **types, **inputs).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize(
    ("kind", "file", "changes", "reason"),
    [
        ("gemma3", "preprocessor_config.json", {"do_pan_and_scan": True}, "do_pan_and_scan is True"),
        ("gemma4", "config.json", {"num_key_value_heads": 1}, "num_key_value_heads is 1"),
        ("gemma4", "config.json", {"position_embedding_size": 139}, "position_embedding_size should be at least 140"),
        ("gemma4", "preprocessor_config.json", {"do_normalize": True}, "do_normalize is True"),
        ("gemma4", "preprocessor_config.json", {"pooling_kernel_size": 3}, "size should be the tower's"),
        (
            "mistral3",
            "config.json",
            {"rope_parameters": {"rope_type": "yarn"}},
            "should be of type axial",
        ),
        ("mistral3", "preprocessor_config.json", {"size": {"longest_edge": 50}}, "should be a multiple of 8 pixels"),
        ("idefics3", "config.json", {"image_size": 20}, "image_size should be 2 patches of 4 pixels or a multiple"),
        (
            "idefics3",
            "preprocessor_config.json",
            {"max_image_size": {"longest_edge": 32}},
            "that of the tower's images",
        ),
        ("idefics3", "preprocessor_config.json", {"size": {"longest_edge": 5000}}, "size should be from 34 to 4096"),
        ("idefics3", "preprocessor_config.json", {"do_image_splitting": False}, "do_image_splitting is False"),
        (
            "lfm2_vl",
            "preprocessor_config.json",
            {"tile_size": 40},
            "tile_size should be a multiple of 8, with at most 16",
        ),
        ("lfm2_vl", "preprocessor_config.json", {"min_tiles": 1}, "min_tiles should be at least 2"),
        ("lfm2_vl", "config.json", {"num_patches": 24}, "num_patches should be a square"),
        ("mistral3", "processor_config.json", {"image_end_token": "<end>"}, "the special token '<end>'"),
    ],
)
def test_parts_that_are_not_implemented_are_refused_by_name(
    checkpoints: dict[str, Path], tmp_path: Path, kind: str, file: str, changes: dict[str, Any], reason: str
) -> None:
    folder = changed(checkpoints[kind], tmp_path, file, changes)
    with pytest.raises(BadCheckpoint, match=reason):
        read_tower(Checkpoint.open(folder), 32)


SMOLVLM2_500M = (
    {
        "hidden_size": 768,
        "image_size": 512,
        "max_image_size": {"longest_edge": 512},
        "model_type": "smolvlm_vision",
        "num_attention_heads": 12,
        "patch_size": 16,
        "size": {"longest_edge": 2048},
        "tie_word_embeddings": False,
        "use_base_siglip": False,
    },
    {"scale_factor": 4},
    {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_resize": True,
        "image_processor_type": "SmolVLMImageProcessor",
        "max_image_size": {"longest_edge": 512},
        "processor_class": "SmolVLMProcessor",
        "rescale_factor": 0.00392156862745098,
        "size": {"longest_edge": 2048},
        "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}},
    },
)
LFM2_VL_450M = (
    {"model_type": "siglip2_vision_model", "num_patches": 256, "vision_use_head": False, "attention_dropout": 0.0},
    {"projector_hidden_size": 2560},
    {
        "do_resize": False,
        "do_center_crop": None,
        "encoder_patch_size": 16,
        "max_image_tokens": 256,
        "max_num_patches": 1024,
        "min_image_tokens": 64,
        "max_tiles": 10,
        "patch_size": 16,
        "return_row_col_info": True,
        "size": {"height": 512, "width": 512},
        "tile_size": 512,
    },
)


@pytest.mark.parametrize(
    ("kind", "published", "tokens"), [("idefics3", SMOLVLM2_500M, 64), ("lfm2_vl", LFM2_VL_450M, 256)]
)
def test_towers_of_published_configs_are_read(
    checkpoints: dict[str, Path], tmp_path: Path, kind: str, published: tuple[dict[str, Any], ...], tokens: int
) -> None:
    tower, outer, images = published
    folder = changed(checkpoints[kind], tmp_path, "preprocessor_config.json", images)
    checkpoint = Checkpoint.open(folder)
    spec = read_tower(replace(checkpoint, config={**checkpoint.config, **outer, "vision_config": tower}), 960)
    assert (spec.hidden, spec.layers, spec.heads, spec.intermediate) == (768, 12, 12, 3072)
    assert spec.entry.most_tokens(8192) == tokens
    assert spec.entry.tiles is not None
    assert spec.entry.tiles.side == 512


def changed(checkpoint: Path, tmp_path: Path, file: str, changes: dict[str, Any]) -> Path:
    """Return a copy of ``checkpoint`` with ``changes`` of a file; of config.json, those of the tower."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "target"))
    settings = json.loads((folder / file).read_text())
    (settings["vision_config"] if file == "config.json" else settings).update(changes)
    (folder / file).write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("towers")
    return {kind: tiny_vision(folder / kind, kind) for kind in ("gemma3", "gemma4", "mistral3", "idefics3", "lfm2_vl")}


@pytest.mark.parametrize("size", [(96, 60), (40, 90), (20, 20)])
def test_prompts_with_tiles_are_those_of_idefics3(checkpoints: dict[str, Path], size: tuple[int, int]) -> None:
    folder = checkpoints["idefics3"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    images = processor(Idefics3ImageProcessorPil, "idefics3")
    written = IMAGE_TOKENS[2]
    theirs = Idefics3Processor(images, tokenizer, image_seq_len=16)
    theirs.image_token, theirs.image_token_id = written, IMAGE_TOKEN
    text, image = f"see {written} and {written}\nthe", picture(1, *size)
    expected = theirs(text=text, images=[[image, image]], add_special_tokens=False)["input_ids"][0]
    assert ids_of(folder, text, [image, image]) == expected


@pytest.mark.parametrize("thumbnail", [True, False])
@pytest.mark.parametrize("size", [(96, 60), (40, 90), (20, 20)])
def test_prompts_with_tiles_are_those_of_lfm2_vl(
    checkpoints: dict[str, Path], tmp_path: Path, size: tuple[int, int], thumbnail: bool
) -> None:
    folder = changed(checkpoints["lfm2_vl"], tmp_path, "preprocessor_config.json", {"use_thumbnail": thumbnail})
    entry, image = read_tower(Checkpoint.open(folder), 32).entry, picture(1, *size)
    grid, parts = image_parts(image, entry)
    begin, end, thumbnail_token = LFM2_TOKENS[:3]
    names = {"image_token": IMAGE_TOKENS[2], "image_start_token": begin, "image_end_token": end}
    theirs: Any = SimpleNamespace(**names, image_thumbnail_token=thumbnail_token)
    counts = 9, (parts[-1].width // 8) * (parts[-1].height // 8)
    rows, columns = (max(1, count) for count in grid)
    written = Lfm2VlProcessor._build_image_tokens(theirs, rows, columns, *counts, thumbnail, True)
    expected = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(f"see {written}the").ids
    assert ids_of(folder, f"see {IMAGE_TOKENS[2]}the", [image]) == expected


def ids_of(folder: Path, text: str, images: Sequence[Image.Image]) -> list[int]:
    entry = read_tower(Checkpoint.open(folder), 32).entry
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    reads = ImageReader(entry, RuntimeOptions(), tokenizer)
    parts = [reads.read(ImageSource(image), lambda *_: None) for image in images]
    return expanded(tokenizer.encode(reads.with_image_tokens(text), add_special_tokens=False).ids, parts, entry)[0]


@pytest.mark.parametrize(("kind", "backend"), ON)
def test_logprobs_after_images_equal_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, backend: str
) -> None:
    if backend in ("mask", "basic"):
        monkeypatch.setattr(OnnxRuntimeCpu, "lowering", backend)
    folder = tiny_vision(tmp_path / "target", kind)
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    recipe = {"drafting": NGRAM, "backend": BACKENDS[backend], "prefill_chunk": 70}
    with LLM(bundle(tmp_path, folder, "family", **recipe), device="cpu", threads=1) as llm:
        messages = asked("an" * 40, IMAGES[0], "see ", IMAGES[1], " and the end")
        for cached in (False, True):
            result = llm.chat(messages, GREEDY)
            assert (result.num_cached_tokens > 0) is cached
            inputs = INPUTS[kind](IMAGES, kind)
            require_equal_logprobs(result, expected_logprobs(model, result.prompt_token_ids, result.token_ids, inputs))
        if kind in ("gemma4 both ways", "mistral3"):
            require_same_texts_without_drafts(llm, 4)
        assert llm.bundle.manifest.vision is not None
        vision = open_engines(llm.bundle, torch.device("cpu"), 1, ["vision"])["vision"]
        (checked,) = check_tower(llm.bundle, llm.bundle.manifest.vision, vision, 1)
        assert checked.verdict == "pass"
