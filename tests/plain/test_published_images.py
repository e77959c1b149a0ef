"""Image processors and towers of published checkpoints are read, field by field, as published_towers.txt says.

`python -m tests.plain.test_published_images` writes that file, see test_published_specs.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.vision.spec import VisionSpec
from tandemrt.export.read.vision.towers import read_tower
from tests.plain.published_images import PUBLISHED
from tests.plain.test_published_specs import summary

TOWER_ALONE = ("gemma-4-26B-A4B",)  # the text part is in tests/plain/published_variants.py
FILE = Path(__file__).parent / "published_towers.txt"
EXPECTED = dict(line.split(": ", 1) for line in FILE.read_text().splitlines())


def tower_of(folder: Path, name: str, **changes: int) -> VisionSpec:
    """The tower of a published checkpoint, with ``changes`` in its config."""
    files, tokens, _ = PUBLISHED[name]
    for file, content in files.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
    added = [{"content": text, "id": token} for text, token in tokens.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    config = files["config"]
    config = config | {"vision_config": config["vision_config"] | changes} if changes else config
    return read_tower(Checkpoint(folder, config, {}, ()), config.get("text_config", config)["hidden_size"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_checkpoint_reads_images(tmp_path: Path, name: str) -> None:
    files, _, read = PUBLISHED[name]
    config = files["config"]
    if name not in TOWER_ALONE:
        assert ModelSpec.from_hf(config).hidden == config.get("text_config", config)["hidden_size"]
    spec = tower_of(tmp_path, name)
    assert (spec.layers, spec.entry.most_tokens(10**6), spec.taps) == read
    assert summary(spec) == EXPECTED.get(name)


def test_a_head_of_a_tower_has_a_multiple_of_four_values(tmp_path: Path) -> None:
    assert tower_of(tmp_path, "Qwen3-VL-8B", hidden_size=16 * 68).hidden == 16 * 68
    for odd in (70, 71):
        with pytest.raises(BadCheckpoint, match="a multiple of 4 values for each of 16 attention heads"):
            tower_of(tmp_path, "Qwen3-VL-8B", hidden_size=16 * odd)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        for name in PUBLISHED:
            (Path(folder) / name).mkdir()
        towers = {name: tower_of(Path(folder) / name, name) for name in PUBLISHED}
    FILE.write_text("".join(f"{name}: {summary(tower)}\n" for name, tower in towers.items()))
