"""Positions in time, height and width (M-RoPE) are an input of a decoder, of the same meaning in every lowering."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.model.support import unsupported
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec
from tests.engine.decoding import Decoder
from tests.engine.test_families import CAPACITY, texts, with_images

BEFORE, HEIGHT, WIDTH, AFTER = 9, 3, 5, 12  # tokens of text, an image, tokens of text
CHUNK = 13  # ends within the image, after an odd number of tokens
FIRST_POSITION_AFTER = BEFORE + max(HEIGHT, WIDTH)


def around_an_image() -> torch.Tensor:
    """int64[3, tokens]: the positions of Qwen2-VL."""
    before, after = torch.arange(BEFORE).expand(3, -1), torch.arange(AFTER).expand(3, -1) + FIRST_POSITION_AFTER
    grid = torch.stack(torch.meshgrid(torch.tensor([0]), torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij"))
    return torch.cat([before, grid.flatten(1) + BEFORE, after], dim=1)


def logits_in_two_calls(decoder: Decoder, text: list[int], positions: torch.Tensor) -> torch.Tensor:
    logits = []
    for begin, end in ((0, CHUNK), (CHUNK, len(text))):
        part = positions[:, begin:end]
        decoder.caches["positions"] = (part if decoder.paged else part[:, None]).contiguous()
        logits.append(decoder([text[begin:end]], [begin])[0])
    return torch.cat(logits)


@pytest.mark.parametrize("case", ["qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v"])
def test_every_lowering_rotates_by_the_positions_of_an_image_as_transformers_does(tmp_path: Path, case: str) -> None:
    model = with_images(case)
    model.save_pretrained(tmp_path)
    positions = around_an_image()
    text = texts()[0][: positions.shape[1]]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([text]), position_ids=positions[:, None]).logits[0].float()
        of_text = model(input_ids=torch.tensor([text])).logits[0].float()
    assert not torch.allclose(expected, of_text, atol=1e-2)  # the positions matter
    spec = ModelSpec.from_hf(Checkpoint.open(tmp_path).config)
    lowerings: list[Lowering] = ["grouped", "paged", "mask", "length", "basic"]
    for lowering in lowerings:
        if unsupported(spec, lowering, CAPACITY) is not None:
            continue
        decoder = Decoder(tmp_path, lowering, batch=1, capacity=CAPACITY, position_rows=3)
        logits = logits_in_two_calls(decoder, text, positions)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        plain = Decoder(tmp_path, lowering, batch=1, capacity=CAPACITY)([text], [0])[0]
        of_equal_rows = logits_in_two_calls(decoder, text, torch.arange(len(text)).expand(3, -1))
        torch.testing.assert_close(of_equal_rows, plain, atol=1e-5, rtol=0)


def test_a_prompt_chunk_of_odd_length_without_logits_takes_its_positions(tmp_path: Path) -> None:
    """The grouped lowering pads it by a token, and its positions with it."""
    model = with_images("qwen3_vl")
    model.save_pretrained(tmp_path)
    positions = around_an_image()
    text = texts()[0][: positions.shape[1]]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([text]), position_ids=positions[:, None]).logits[0].float()
    decoder = Decoder(tmp_path, "grouped", batch=1, capacity=CAPACITY, position_rows=3)
    decoder.caches["positions"] = positions[:, None, :CHUNK].contiguous()
    call, _ = decoder.bind(torch.tensor([text[:CHUNK]]), [0], torch.zeros(1, 0, dtype=torch.int64))
    call.run()
    decoder.caches["positions"] = positions[:, None, CHUNK:].contiguous()
    torch.testing.assert_close(decoder([text[CHUNK:]], [CHUNK])[0], expected[CHUNK:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("sections", [(), (3, 3, 3)])
def test_positions_need_sections_that_cover_the_rotated_pairs(tmp_path: Path, sections: tuple[int, ...]) -> None:
    with_images("qwen2_vl").save_pretrained(tmp_path)
    spec = ModelSpec.from_hf(Checkpoint.open(tmp_path).config)
    wrong = replace(spec, position_rows=3, rope=replace(spec.rope, sections=sections))
    assert "mrope_section should be three sections of 8 pairs" in str(unsupported(wrong, "grouped", CAPACITY))
    assert unsupported(replace(spec, position_rows=3), "grouped", CAPACITY) is None
