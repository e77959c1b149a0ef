"""Prompts with images in every family: as transformers computes them, in chunks, from the cache and under drafts."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.vision.towers import read_tower
from tandemrt.runtime.check.tower import check_tower
from tandemrt.runtime.device.backends.opening import open_engines
from tandemrt.runtime.llm.llm import LLM
from tests.engine.test_images import GREEDY, IMAGE_TOKEN, NGRAM, bundle, require_equal_logprobs
from tests.engine.test_paged_rounds import PAGED
from tests.makers import image_settings, tiny_vision
from tests.pictures import asked, picture, require_same_texts_without_drafts

IMAGES = [picture(1), picture(2, 90, 20)]
BACKENDS = {"cpu": 'name = "onnxruntime-cpu"', "paged": PAGED}


def of_qwen(images: Sequence[Image.Image], kind: str) -> dict[str, torch.Tensor]:
    return dict(processor(Qwen2VLImageProcessorPil, kind)(images=images, return_tensors="pt"))


def of_gemma4(images: Sequence[Image.Image], kind: str) -> dict[str, torch.Tensor]:
    read = processor(Gemma4ImageProcessorPil, kind)(images=images, return_tensors="pt")
    return {name: read[name] for name in ("pixel_values", "image_position_ids")}


def of_mistral(images: Sequence[Image.Image], kind: str) -> dict[str, torch.Tensor]:
    one = processor(PixtralImageProcessorPil, kind)
    return dict(one(images=images, patch_size={"height": 8, "width": 8}, return_tensors="pt"))  # of merged patches


def processor(of: Callable[..., Any], kind: str) -> Any:
    return of(**{name: value for name, value in image_settings(kind).items() if name != "image_processor_type"})


INPUTS: dict[str, Callable[[Sequence[Image.Image], str], dict[str, torch.Tensor]]] = {
    **dict.fromkeys(("qwen3_vl_moe", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe"), of_qwen),
    **dict.fromkeys(("gemma4", "gemma4 both ways"), of_gemma4),
    "mistral3": of_mistral,
}
ON = [
    *((kind, "cpu") for kind in INPUTS),
    ("gemma4", "paged"),
    ("mistral3", "paged"),
]


def expected_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int], inputs: dict[str, torch.Tensor]
) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *output]])
    types = {} if model.config.model_type == "mistral3" else {"mm_token_type_ids": (ids == IMAGE_TOKEN).int()}
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
        ("mistral3", "processor_config.json", {"image_end_token": "<end>"}, "the special token '<end>'"),
    ],
)
def test_parts_that_are_not_implemented_are_refused_by_name(
    checkpoints: dict[str, Path], tmp_path: Path, kind: str, file: str, changes: dict[str, Any], reason: str
) -> None:
    folder = Path(shutil.copytree(checkpoints[kind], tmp_path / "target"))
    settings = json.loads((folder / file).read_text())
    (settings["vision_config"] if file == "config.json" else settings).update(changes)
    (folder / file).write_text(json.dumps(settings))
    with pytest.raises(BadCheckpoint, match=reason):
        read_tower(Checkpoint.open(folder), 32)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("towers")
    return {kind: tiny_vision(folder / kind, kind) for kind in ("gemma3", "gemma4", "mistral3")}


@pytest.mark.parametrize(("kind", "backend"), ON)
def test_logprobs_after_images_equal_those_of_transformers(tmp_path: Path, kind: str, backend: str) -> None:
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
