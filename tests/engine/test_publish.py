"""``export quantize``: what it writes is what the library of the format reads, and means what it says."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tandemrt.cli import app
from tandemrt.engines.errors import BadCheckpoint, BadRequest
from tandemrt.export.quantize.publish import publish
from tandemrt.export.quantize.stored import read_blocks, read_matrix
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.quantization.config import read_quantization
from tests.engine.decoding import make_checkpoint
from tests.engine.narrow import SIZES
from tests.makers import tiny_checkpoint

SCHEMES = ("fp8", "int4")


@pytest.fixture(scope="module", params=SCHEMES)
def published(request, tmp_path_factory):
    """The scheme, and what was written of a checkpoint in several files."""
    folder = tmp_path_factory.mktemp("published")
    make_checkpoint("qwen2", folder / "whole", torch.bfloat16, sizes=SIZES, max_shard_size="400KB")
    assert len(list((folder / "whole").glob("*.safetensors"))) > 1
    return request.param, publish(folder / "whole", folder / "narrow", request.param, group=64)


def test_products_of_the_layers_are_quantized_and_nothing_else(published):
    scheme, report = published
    before, after = (Checkpoint.open(report.folder.parent / name) for name in ("whole", "narrow"))
    products = {name.removesuffix(".weight") for name in before.tensors if "_proj.weight" in name}
    assert set(report.errors) == products
    kinds = ("weight", "weight_scale") if scheme == "fp8" else ("weight_packed", "weight_scale", "weight_shape")
    kept = {name for name in before.tensors if name.removesuffix(".weight") not in products}
    assert set(after.tensors) == kept | {f"{name}.{kind}" for name in products for kind in kinds}
    assert [file.name for file in after.files] == [file.name for file in before.files]
    assert report.after < report.before


def test_the_table_of_errors_says_what_is_stored(published):
    scheme, report = published
    whole, narrow = (Checkpoint.open(report.folder.parent / name) for name in ("whole", "narrow"))
    how = read_quantization(narrow.config, narrow.folder)
    for module, error in report.errors.items():
        if scheme == "fp8":
            found = read_matrix(module, narrow.tensors, how.scheme(module))
        else:
            found = read_blocks(module, narrow.tensors, how.scheme(module)).restored
        weight = read_matrix(module, whole.tensors, None)
        assert np.linalg.norm(found - weight) / np.linalg.norm(weight) == pytest.approx(error, rel=1e-4)
        assert (0.02 if scheme == "fp8" else 0.07) < error < (0.03 if scheme == "fp8" else 0.12)


def test_the_command_writes_a_whole_checkpoint_and_says_what_it_cost(tmp_path):
    whole = tiny_checkpoint(tmp_path / "whole")
    out = tmp_path / "narrow"
    said = CliRunner().invoke(app, ["export", "quantize", str(whole), "--scheme", "fp8", "--out", str(out)])
    assert said.exit_code == 0, said.output
    assert "down_proj" in said.output
    kept = {file.name for file in whole.iterdir()}
    assert {file.name for file in out.iterdir()} == kept
    assert (out / "tokenizer.json").read_bytes() == (whole / "tokenizer.json").read_bytes()


def refused(folder: Path, **changes: object) -> None:
    publish(folder, **{"out": folder.parent / "out", "scheme": "int4", "group": 32} | changes)


def test_what_cannot_be_done_is_refused_by_name_and_leaves_nothing(tmp_path):
    whole = tiny_checkpoint(tmp_path / "whole")
    with pytest.raises(BadRequest, match="group must be one of 32, 64, 128; got 16"):
        refused(whole, group=16)
    with pytest.raises(
        BadCheckpoint, match="down_proj: has 64 inputs, which is no multiple of 128; choose another --group"
    ):
        refused(whole, group=128)
    with pytest.raises(BadRequest, match="out must be free or an empty folder"):
        refused(whole, out=whole)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    refused(whole)
    with pytest.raises(BadCheckpoint, match=r"quantized already \(compressed-tensors\)"):
        refused(tmp_path / "out", out=tmp_path / "again")


def test_a_checkpoint_without_a_weight_to_quantize_is_refused_and_nothing_is_written(tmp_path):
    whole = tiny_checkpoint(tmp_path / "whole")
    tensors = load_file(whole / "model.safetensors")
    save_file({f"text.{name}": tensor for name, tensor in tensors.items()}, whole / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"must have products to quantize, .*; got \['text\.lm_head"):
        refused(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
