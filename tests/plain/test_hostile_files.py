"""Any content of the files that a build or an opening reads gives a TandemError or the correct result."""

import copy
import json
import os
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import DIGEST, MAX_BYTES, Manifest, _digest
from tandemrt.engines.recipe.recipe import Recipe, locate
from tandemrt.engines.text.tokenizer import open_tokenizer
from tandemrt.engines.validation.errors import BadBundle, BadCheckpoint, BadRecipe, TandemError
from tandemrt.export.bundle.build import build
from tandemrt.export.bundle.opening import open_models
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.vision.processor import json_of
from tandemrt.export.read.vision.towers import TOWERS
from tests.makers import tiny_checkpoint, write_recipe
from tests.plain import test_dflash2_spec, test_dflash_spec, test_dspark_spec, test_eagle3_spec
from tests.plain.test_bundle import write_bundle
from tests.plain.test_families import PUBLISHED

MISSING = object()
VALUES = (MISSING, None, True, -1, 0, 2**63, 10**400, 0.5, "x", "", [], [1], ["x"], {}, {"x": 1}, [[]], "\x00")
NESTED = "[" * 100_000


def places(value: Any, *path: str | int) -> Iterator[tuple[str | int, ...]]:
    """Yield the places in a JSON value, with the first three items of each list."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, child in value.items():
            yield from places(child, *path, key)
    elif isinstance(value, list):
        for index, child in enumerate(value[:3]):
            yield from places(child, *path, index)


def changed(data: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """Return ``data`` with another value at a place. It shares with ``data`` what is not on the way there."""
    result, (key, *rest) = copy.copy(data), path
    if rest:
        result[key] = changed(data[key], tuple(rest), value)
    elif value is not MISSING:
        result[key] = value
    else:
        del result[key]
    return result


def rewrite(file: Path, text: str) -> None:
    """Replace a file, which takes a fiftieth of the time of writing over it: ext4 flushes then."""
    file.unlink()
    file.write_text(text)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recipe and a checkpoint with every file that a build reads: rope parameters, stop tokens, layer list."""
    folder = tmp_path_factory.mktemp("hostile")
    checkpoint = tiny_checkpoint(folder / "target")
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "mscale": 1.0}}
    config |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [263], "temperature": 0.7}))
    return write_recipe(folder / "hostile.toml", target=checkpoint)


def read_all(recipe: Path) -> None:
    """Read a checkpoint as a build does, and open the tokenizer as the runtime does."""
    asked = Recipe.load(recipe)
    [model] = open_models(asked)
    stops = model.vocabulary.stop_ids(model.checkpoint.config)
    assert asked.reasoning is not None
    model.vocabulary.delimiters(asked.reasoning, stops)
    tokenizer, _ = open_tokenizer(model.checkpoint.folder, model.spec.vocab)
    assert tokenizer.decode(tokenizer.encode("the text")) == "the text"


def test_any_value_anywhere_in_a_published_config_is_read_or_rejected() -> None:
    for config, _ in PUBLISHED.values():
        written = json.loads(config)
        for path in places(written):
            for value in ("x", 2**63, 10**400, [[]], {"x": 1}):
                with suppress(TandemError):
                    ModelSpec.from_hf(changed(written, path, value))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("head", [test_eagle3_spec, test_dflash_spec, test_dflash2_spec, test_dspark_spec])
def test_any_value_anywhere_in_the_config_of_a_draft_head_is_read_or_rejected(head: ModuleType, flat: bool) -> None:
    config = replace(head.HEAD, flat=flat).config()
    head.read(config)
    for path in places(config):
        for value in (-1, "x", 2**63, [[]], {"x": 1}):
            with suppress(TandemError):
                head.read(changed(config, path, value))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_any_value_anywhere_in_a_checkpoint_is_read_or_rejected(recipe: Path, name: str) -> None:
    file = recipe.parent / "target" / name
    written = file.read_text()
    refused = read = 0
    read_all(recipe)
    try:
        for path in places(json.loads(written)):
            for value in VALUES:
                rewrite(file, json.dumps(changed(json.loads(written), path, value)))
                try:
                    read_all(recipe)
                    read += 1
                except (BadCheckpoint, BadBundle, BadRecipe):
                    refused += 1
        file.write_text(NESTED)
        with pytest.raises(TandemError, match="JSON"):
            read_all(recipe)
    finally:
        file.write_text(written)
    assert min(refused, read) > 3


def test_any_value_anywhere_in_a_recipe_is_read_or_rejected(recipe: Path, tmp_path: Path) -> None:
    data = tomllib.loads(recipe.read_text())
    file = tmp_path / "recipe.toml"
    file.touch()
    refused = 0
    for path in places(data):
        for value in VALUES:
            if value is None or value is MISSING:  # TOML has no null
                continue
            rewrite(file, as_toml(changed(data, path, value)))
            try:
                Recipe.load(file)
            except BadRecipe:
                refused += 1
    assert refused > 100


def test_the_layers_of_a_tower_are_counted_before_they_are_listed() -> None:
    fields = Fields({"depth": 10**9, "fullatt_block_indexes": []}, "vision_config")
    with pytest.raises(BadCheckpoint, match="depth should be an integer of at most 10000, it is 1000000000"):
        TOWERS["Qwen2_5_VLForConditionalGeneration"](cast("Any", None), fields, 32)


def test_settings_of_images_that_are_nested_too_deeply_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "preprocessor_config.json"
    file.write_text(NESTED)
    with pytest.raises(BadCheckpoint, match="should be JSON"):
        json_of(file)


@pytest.mark.parametrize("content", [f"x = {NESTED}", "x = 1" + "0" * 5000, "x = \x00", "", "[[", b"\xff"])
def test_a_recipe_that_is_not_toml_is_rejected(tmp_path: Path, content: str | bytes) -> None:
    file = tmp_path / "recipe.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadRecipe, match="recipe"):
        Recipe.load(file)


def test_any_value_anywhere_in_a_manifest_is_read_or_rejected(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "sample")
    file = bundle.folder / "bundle.json"
    data = json.loads(file.read_text())
    refused = 0
    for path in places(data):
        for value in VALUES:
            forged = changed(data, path, value)
            forged.pop(DIGEST, None)
            rewrite(file, json.dumps(forged | {DIGEST: _digest(forged)}))  # with the digest that a build writes
            try:
                manifest = Manifest.read(bundle.folder)
            except BadBundle:
                refused += 1
                continue
            assert Manifest.model_validate_json(json.dumps(manifest.model_dump(mode="json"))) == manifest
    assert refused > 300
    file.write_text(NESTED)
    with pytest.raises(BadBundle, match="must be JSON"):
        Manifest.read(bundle.folder)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
def test_a_manifest_that_is_no_regular_file_is_rejected_and_not_read(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "bundle.json"
    if kind == "pipe":
        os.mkfifo(file)
    else:
        (tmp_path / "real.json").write_text("{}")
        file.symlink_to("/dev/zero" if kind == "device" else tmp_path / "real.json")
    with pytest.raises(BadBundle, match=r"bundle\.json must be a regular file; it is a link, pipe or device"):
        Bundle.open(tmp_path)


def test_a_manifest_of_an_enormous_size_is_rejected_and_not_read(tmp_path: Path) -> None:
    with (tmp_path / "bundle.json").open("wb") as file:
        file.truncate(MAX_BYTES + 1)  # a sparse file
    with pytest.raises(BadBundle, match=f"must have at most {MAX_BYTES} bytes; it has {MAX_BYTES + 1}"):
        Bundle.open(tmp_path)


@pytest.mark.parametrize(
    ("path", "value", "accepted"),
    [
        (("vocab",), 1 << 24, True),
        (("vocab",), (1 << 24) + 1, False),
        (("vocab",), 1 << 31, False),
        (("reasoning", "think_start", "text"), "<" * 4096, True),
        (("reasoning", "think_start", "text"), "<" * 4097, False),
        (("reasoning", "think_ends"), [{"text": "</", "ids": [1]}] * 64, True),
        (("reasoning", "think_ends"), [{"text": "</", "ids": [1]}] * 65, False),
    ],
)
def test_sizes_in_a_manifest_are_bounded(tmp_path: Path, path: tuple[str, ...], value: Any, accepted: bool) -> None:
    bundle = write_bundle(tmp_path / "sample")
    file = bundle.folder / "bundle.json"
    data = json.loads(file.read_text())
    data["reasoning"] = {"think_start": {"text": "<", "ids": [1]}, "think_ends": [{"text": ">", "ids": [2]}]}
    data["reasoning"] |= {"forced_end": {"text": ">", "ids": [2]}, "implicit_ends": []}
    forged = changed(data, path, value)
    forged.pop(DIGEST, None)
    file.write_text(json.dumps(forged | {DIGEST: _digest(forged)}))
    if accepted:
        assert Manifest.read(bundle.folder).vocab
        return
    with pytest.raises(BadBundle, match=rf"{path[0]}.*must (be|have) at most"):
        Manifest.read(bundle.folder)


@pytest.mark.parametrize(("ends", "accepted"), [(64, True), (65, False), (100_000, False)])
def test_the_number_of_reasoning_ends_in_a_recipe_is_bounded(tmp_path: Path, ends: int, accepted: bool) -> None:
    texts = json.dumps([f"</{number}>" for number in range(ends)])
    (tmp_path / "recipe.toml").write_text(
        f'name = "x"\n[target]\ncheckpoint = "c"\n[reasoning]\nthink_start = "<t>"\n'
        f'think_ends = {texts}\nforced_end = "</0>"\n'
    )
    if accepted:
        assert len(Recipe.load(tmp_path / "recipe.toml").reasoning.think_ends) == ends
        return
    with pytest.raises(BadRecipe, match=r"reasoning\.think_ends: must have at most 64"):
        Recipe.load(tmp_path / "recipe.toml")


@pytest.mark.parametrize("kind", ["loop", "long", "zero"])
def test_invalid_paths_are_rejected(tmp_path: Path, recipe: Path, kind: str) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    path = {"loop": str(loop / "x"), "long": "x" * 5000, "zero": "x\x00y"}[kind]
    with pytest.raises(BadBundle, match="bundle must be a folder"):
        Bundle.open(path)
    with pytest.raises(BadRecipe, match="recipe"):
        Recipe.load(path)
    with pytest.raises(BadRecipe, match="recipe must be a TOML file"):
        locate(path)
    with pytest.raises(BadBundle, match=r"^out must be|^nothing was built"):
        build(Recipe.load(recipe), tmp_path / path)
    text = recipe.read_text().replace(str(recipe.parent / "target"), path.replace("\x00", "\\u0000"))
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises((BadRecipe, BadCheckpoint, BadBundle)):
        build(Recipe.load(tmp_path / "recipe.toml"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def as_toml(data: dict[str, Any]) -> str:
    """Return ``data`` as TOML with inline tables: JSON with "=" between keys and values."""
    return "\n".join(f"{json.dumps(key)} = {_inline(value)}" for key, value in data.items())


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_inline(child)}" for key, child in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return json.dumps(value)
