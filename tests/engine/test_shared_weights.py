"""Weights used by several sessions are loaded once: those that a draft shares with its target, and a tied lm_head."""

import json
import mmap
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tandemrt import LLM
from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import EngineEntry, SharedWeight
from tandemrt.engines.contract.contract import adjust
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadBundle
from tandemrt.export.bundle.build import build
from tandemrt.export.read.checkpoint import read_header
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.device.backends.onnxruntime.shared_weights import SharedWeights
from tests.engine.draft_kinds import DFLASH, KINDS, SIZES, Target
from tests.engine.test_drafts import answers, recipe_of
from tests.engine.test_invisible import output_of
from tests.engine.test_paged_rounds import PAGED
from tests.makers import tiny_checkpoint, write_recipe

REQUESTS = [("among two", {"temperature": 0.7, "seed": 3, "max_tokens": 12, "ignore_eos": True})]
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def built(tmp_path: Path, kind: str, form: str = "paged") -> Path:
    target = tiny_checkpoint(tmp_path / "target", **SIZES)
    KINDS[kind].save(tmp_path / "draft", Target(target))
    target = tmp_path / "draft" if KINDS[kind].with_target else target
    return build(recipe_of(kind, tmp_path, target, tmp_path / "draft", form), tmp_path / "bundle").folder


@pytest.mark.parametrize(
    ("kind", "borrowed"),
    [("eagle3", {"embed_tokens.weight": TABLE}), ("mtp", {"embed_tokens.weight": TABLE, HEAD: HEAD})],
)
def test_weights_shared_by_draft_and_target_are_one_weight(tmp_path: Path, kind: str, borrowed: dict[str, str]) -> None:
    """The copy in the draft's own file is not read."""
    bundle = built(tmp_path, kind)
    manifest = Bundle.open(bundle).manifest
    shared = {name: manifest.engines[name].shared for name in ("target", "draft", "fuse")}
    assert shared["draft"] == {own: shared["target"][name] for own, name in borrowed.items()}
    assert set(shared["target"]) == set(borrowed.values())
    assert not shared["fuse"]
    with LLM(bundle, device="cpu", threads=1) as llm:
        expected = [(output_of(output), output.speculation) for output in answers(llm, REQUESTS)]
    file = bundle / "draft" / "borrowed.safetensors"
    with file.open("r+b") as stream:
        for tensor in (read_header(file)[name] for name in borrowed.values()):
            stream.seek(tensor.offset)
            stream.write(bytes(tensor.nbytes))
    with LLM(bundle, device="cpu", threads=1) as llm:
        assert [(output_of(output), output.speculation) for output in answers(llm, REQUESTS)] == expected


def test_a_tied_embedding_and_lm_head_are_one_weight(tmp_path: Path) -> None:
    """In a draft model as in its target, which are two checkpoints."""
    for name in ("target", "draft"):
        config = tiny_checkpoint(tmp_path / name, **SIZES) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
        weights = load_file(config.parent / "model.safetensors")
        del weights[HEAD]
        save_file(weights, config.parent / "model.safetensors")
    drafting = f'kind = "model"\ncheckpoint = "{tmp_path / "draft"}"'
    recipe = Recipe.load(
        write_recipe(tmp_path / "tied.toml", target=tmp_path / "target", drafting=drafting, backend=PAGED, length=256)
    )
    engines = Bundle.open(build(recipe, tmp_path / "bundle").folder).manifest.engines
    assert [engines[name].shared[TABLE].file.split("/")[0] for name in ("target", "draft")] == ["target", "draft"]


@pytest.mark.parametrize(("size", "whole"), [(28, True), (27, False), (3, False), (0, False)])
def test_a_truncated_file_is_rejected(tmp_path: Path, size: int, whole: bool) -> None:
    (tmp_path / "target.bin").write_bytes(bytes(size))
    weight = SharedWeight(file="target.bin", offset=4, dtype="float32", shape=(2, 3))
    engine = EngineEntry(
        file="target.onnx",
        backend="onnxruntime-cpu",
        built_for="cpu",
        dtype="float32",
        contract=adjust(vocab=96, dtype="float32"),
        shared={TABLE: weight},
    )
    weights = SharedWeights(tmp_path, torch.device("cpu"))
    if whole:
        assert weights.of(engine)[TABLE].shape() == [2, 3]
    else:
        with pytest.raises(BadBundle, match=r"target\.bin: is shorter than its manifest requires; build"):
            weights.of(engine)


def test_an_uncut_graph_shares_what_kernels_read_where_it_is_mapped(tmp_path: Path) -> None:
    engines = Bundle.open(built(tmp_path, "dflash", "linear")).manifest.engines
    assert DFLASH.draft_vocab < DFLASH.vocab
    assert {weight.file for weight in engines["target"].shared.values()} == {"target/tiles.safetensors"}
    assert TABLE not in engines["target"].shared
    assert not engines["verify"].shared


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_of_tiles_is_mapped_once_and_whole(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")  # another test may have the bundle open
    file = bundle / "target" / "tiles.safetensors"
    with LLM(bundle, device="cpu", threads=1):
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        mapped = [tuple(int(at, 16) for at in line[0].split("-")) for line in lines if line[-1] == str(file)]
    assert [-(-(end - begin) // mmap.PAGESIZE) for begin, end in mapped] == [-(-file.stat().st_size // mmap.PAGESIZE)]
