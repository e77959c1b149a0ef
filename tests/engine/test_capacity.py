"""How much text fits a GPU: what a manifest says, held against what the caches of a bundle really take."""

import json
from pathlib import Path

import pytest

from tandemrt import LLM
from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.digest import holds_weights
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.export.bundle.capacity import SHARE, fitting, memory_from_text


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
