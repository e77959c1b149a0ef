"""Image processors and towers of published checkpoints are read, field by field."""

import json
from pathlib import Path

import pytest

from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.vision.towers import read_tower
from tests.plain.published_images import PUBLISHED

TOWER_ALONE = ("gemma-4-26B-A4B",)  # the text part is in tests/plain/published_variants.py


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_checkpoint_reads_images(tmp_path: Path, name: str) -> None:
    files, tokens, read = PUBLISHED[name]
    for file, content in files.items():
        (tmp_path / f"{file}.json").write_text(json.dumps(content))
    added = [{"content": text, "id": token} for text, token in tokens.items()]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    config = files["config"]
    hidden = config.get("text_config", config)["hidden_size"]
    if name not in TOWER_ALONE:
        assert ModelSpec.from_hf(config).hidden == hidden
    spec = read_tower(Checkpoint(tmp_path, config, {}, ()), hidden)
    assert (spec.layers, spec.entry.most_tokens(10**6), spec.taps) == read
