"""How much text fits a GPU: what a manifest says, held against what the caches of a bundle really take."""

import json
import re
import shutil
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tandemrt import LLM
from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.digest import holds_weights
from tandemrt.engines.validation.errors import BadCheckpoint, BadRequest
from tandemrt.export.bundle.capacity import SHARE, fitting, memory_from_text
from tandemrt.export.bundle.plan import plan
from tests.makers import write_recipe


def test_a_token_takes_what_the_caches_of_all_models_have_for_it(tiny_bundle: Path) -> None:
    manifest = Bundle.read(tiny_bundle).manifest
    fits = fitting(manifest, 10**9)
    with LLM(tiny_bundle, threads=1) as llm:
        caches = [llm.loop.target.cache, *llm.loop.drafter.caches]
        nbytes = sum(tensor.nbytes for cache in caches for tensor in cache.rows(0, 4).values() if tensor.dim() == 4)
    assert nbytes == fits.token * manifest.limits.capacity * manifest.limits.batch
    assert fits.tokens == (int(SHARE * 10**9) - manifest.weights - fits.rounds) // fits.token
    assert fits.requests == fits.tokens // 128, "105 tokens are two blocks of 64"


def test_memory_that_the_weights_fill_has_no_capacity(tiny_bundle: Path) -> None:
    manifest = Bundle.read(tiny_bundle).manifest
    assert (fitting(manifest, manifest.weights).tokens, fitting(manifest, manifest.weights).requests) == (0, 0)


def test_over_several_gpus_the_target_and_its_cache_are_split(run, tiny_bundle: Path) -> None:
    manifest = Bundle.read(tiny_bundle).manifest
    one, two = fitting(manifest, 10**9), fitting(manifest, 10**9, 2)
    embedding = 320 * 32 * 4
    draft = sum(file.size for name, file in manifest.files.items() if name.startswith("draft/") and holds_weights(name))
    assert two.weights == draft + embedding + -(-(one.weights - draft - embedding) // 2)
    assert two.token == one.token - 2 * 2 * 16 * 4, "of two layers, one of two KV heads"
    code, out, _ = run("export", "inspect", str(tiny_bundle), "--gpu", "80GB", "--gpus", "2")
    assert code == 0
    assert "The first of 2 GPUs of 80.0 GB, 90% of it" in out
    for options, message in (
        (("--gpu", "1GB", "--gpus", "3"), "--gpus: must be 1, 2, 4, 8"),
        (("--gpus", "2"), "--gpu"),
    ):
        code, _, error = run("export", "inspect", str(tiny_bundle), *options)
        assert code != 0
        assert message in error


def test_inspect_reports_what_fits(run, tiny_bundle: Path) -> None:
    code, out, _ = run("export", "inspect", str(tiny_bundle), "--json", "--gpu", "24GiB")
    assert (code, json.loads(out)["fits"]["memory"]) == (0, 24 << 30)
    _, out, _ = run("export", "inspect", str(tiny_bundle), "--gpu", "80GB")
    assert "A GPU of 80.0 GB, 90% of it" in out
    assert "tokens that fit" in out


def test_a_checkpoint_and_a_recipe_are_planned_before_they_are_built(run, tiny_bundle: Path, tmp_path: Path) -> None:
    folder, manifest = tiny_bundle.parent / "target", Bundle.read(tiny_bundle).manifest
    by_recipe = plan(str(tiny_bundle.parent / "tiny.toml"), 10**9)
    caches = [cache for name, cache in manifest.caches if name == "target"]
    assert by_recipe.token == sum(prod(each.resolve({"batch": 1})) for each in caches) * 4 // manifest.limits.capacity
    assert by_recipe.rounds == manifest.limits.batch * (manifest.limits.num_draft_tokens + 1) * manifest.vocab * 4
    assert by_recipe.weights == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert by_recipe.tokens == (int(SHARE * 10**9) - by_recipe.weights - by_recipe.rounds) // by_recipe.token
    code, out, _ = run("export", "inspect", str(folder), "--gpu", "1GB", "--json")
    assert (code, json.loads(out)["token"]) == (0, by_recipe.token // 2), "without a recipe in bfloat16"
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": 2000000000}}')
    _, out, _ = run("export", "inspect", str(tmp_path), "--gpu", "1GB")
    assert re.search(r"weights, as they are stored +2.0 GB", out)
    assert re.search(r"tokens that fit +0\s", out)
    index.write_text('{"metadata": {"total_size": "2 GB"}}')
    for model, message in (
        (str(tmp_path), "metadata.total_size must be a number of bytes, got '2 GB'"),
        ("qwen3.6-35b-a3b", "its target 'Qwen/Qwen3.6-35B-A3B' must be here; download its config.json"),
    ):
        code, _, error = run("export", "inspect", model, "--gpu", "80GB")
        assert code != 0
        assert message in error.replace("\n", " ")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("null", "metadata must be an object, got None"),
        ("[5]", r"metadata must be an object, got \[5\]"),
        ('"5"', "metadata must be an object, got '5'"),
        ('{"total_size": true}', "metadata.total_size must be a number of bytes, got True"),
        ("{}", "metadata.total_size must be a number of bytes, got None"),
    ],
)
def test_an_index_without_a_number_of_bytes_is_rejected(
    folder: Path, tmp_path: Path, metadata: str, message: str
) -> None:
    shutil.copyfile(folder / "target/config.json", tmp_path / "config.json")
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"metadata": {metadata}}}')
    with pytest.raises(BadCheckpoint, match=f"{message}; download it again"):
        plan(str(tmp_path), 10**9)


def test_a_plan_ignores_the_fields_that_the_recipe_names(folder: Path, tmp_path: Path) -> None:
    target = shutil.copytree(folder / "target", tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"trained_by": "us"}))
    recipe = write_recipe(tmp_path / "r.toml", target=target)
    with pytest.raises(BadCheckpoint, match="'trained_by'"):
        plan(str(recipe), 10**9)
    recipe.write_text(recipe.read_text().replace("[draft]", 'ignore_config_fields = ["trained_by"]\n[draft]'))
    assert plan(str(recipe), 10**9).tokens > 0


def test_a_recipe_for_several_gpus_is_not_planned_as_one(folder: Path, tmp_path: Path) -> None:
    backend = 'name = "onnxruntime-cuda"\ntensor_parallel = 2'
    recipe = write_recipe(tmp_path / "r.toml", target=folder / "target", backend=backend)
    with pytest.raises(BadRequest, match=r"backend\.tensor_parallel must be 1 to plan for a GPU, it is 2; build the"):
        plan(str(recipe), 10**9)


@pytest.mark.parametrize("model", ["target", "tiny.toml"])
def test_gpus_of_what_is_not_built_are_rejected_by_name(run: Any, folder: Path, model: str) -> None:
    code, _, error = run("export", "inspect", str(folder / model), "--gpu", "80GB", "--gpus", "2")
    assert code != 0
    assert "--gpus: must come with a bundle, received 2 for" in error.replace("\n", " ")


@pytest.fixture(scope="module")
def folder(tiny_bundle: Path) -> Path:
    return tiny_bundle.parent


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * 10**9),
        ("1.5GB", 15 * 10**8),
        ("1.5 GiB", 3 << 29),
        ("512MB", 512 * 10**6),
        (" 0.125MiB ", 1 << 17),
    ],
)
def test_a_memory_is_read_with_its_unit_and_fraction(text: str, size: int) -> None:
    assert memory_from_text(text) == size


@pytest.mark.parametrize("text", ["", "80", "GB", "80 TB", "0GB", "-1GB", "٣GB"])
def test_a_text_that_is_no_memory_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="--gpu: must be a memory such as 80GB or 24GiB"):
        memory_from_text(text)
