"""``export quantize``: what it writes is what the library of the format reads, and means what it says."""

import json
from io import RawIOBase
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint, BadRequest
from tandemrt.export.bundle.build import build
from tandemrt.export.bundle.publish import publish
from tandemrt.export.quantize.stored_weights import read_low_bit, read_matrix
from tandemrt.export.quantize.writer import Entry, _Blocks, write_safetensors
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.quantization.config import read_quantization
from tests.command_line import app
from tests.engine.decoding import make_checkpoint
from tests.engine.quantized import SIZES
from tests.makers import tiny_checkpoint, tiny_hybrid, write_recipe

SCHEMES = ("fp8", "int4")


@pytest.fixture(scope="module", params=SCHEMES)
def published(request, tmp_path_factory):
    """The scheme, and what was written of a checkpoint in several files."""
    folder = tmp_path_factory.mktemp("published")
    make_checkpoint("qwen2", folder / "unquantized", torch.bfloat16, sizes=SIZES, max_shard_size="400KB")
    assert len(list((folder / "unquantized").glob("*.safetensors"))) > 1
    return request.param, publish(folder / "unquantized", folder / "quantized", request.param, group=64)


def test_progress_begins_before_the_first_weight_and_ends_with_the_last(tmp_path):
    seen: list[tuple[int, int]] = []
    publish(tiny_checkpoint(tmp_path / "a"), tmp_path / "b", "fp8", progress=lambda _, *counts: seen.append(counts))
    assert seen == [(count, 14) for count in range(15)], "7 matmuls in each of two layers"


def test_a_writer_reports_before_the_first_tensor_and_after_each(tmp_path):
    parts = [Entry(name, "float32", (500_000,), lambda: [bytes(10**6)] * 2) for name in "ab"]
    seen: list[tuple[str, int, int]] = []
    write_safetensors(tmp_path / "two.safetensors", parts, progress=lambda *report: seen.append(report))
    assert seen == [("MB", done, 4) for done in (0, 2, 4)]


@given(sizes=st.lists(st.sampled_from([0, 4, 4 << 20, (4 << 20) + 4, 9 << 20]), max_size=4), data=st.data())
@settings(max_examples=10)
def test_a_writer_fills_whole_blocks_except_the_last(sizes, data):
    """Linux caches such a file in huge pages. The stream may write less than it is given."""
    written: list[bytes] = []

    class Stream(RawIOBase):
        def write(self, view):
            taken = data.draw(st.sampled_from([len(view), max(1, len(view) // 2)]))
            written.append(bytes(view[:taken]))
            return taken

    blocks = _Blocks(Stream())
    for at, size in enumerate(sizes):
        blocks.write(bytes([at]) * size)
    assert not sum(map(len, written)) % (4 << 20)
    blocks.flush()
    assert b"".join(written) == b"".join(bytes([at]) * size for at, size in enumerate(sizes))


def test_matmuls_of_the_layers_are_quantized_and_nothing_else(published):
    scheme, report = published
    before, after = (Checkpoint.open(report.folder.parent / name) for name in ("unquantized", "quantized"))
    matmuls = {name.removesuffix(".weight") for name in before.tensors if "_proj.weight" in name}
    assert set(report.errors) == matmuls
    kinds = ("weight", "weight_scale") if scheme == "fp8" else ("weight_packed", "weight_scale", "weight_shape")
    kept = {name for name in before.tensors if name.removesuffix(".weight") not in matmuls}
    assert set(after.tensors) == kept | {f"{name}.{kind}" for name in matmuls for kind in kinds}
    assert [file.name for file in after.files] == [file.name for file in before.files]
    assert report.after < report.before


@pytest.mark.parametrize("kind", ["delta net", "mamba"])
def test_a_quantized_hybrid_can_be_built_and_lists_what_stays_unquantized(tmp_path, kind):
    whole = tiny_hybrid(tmp_path / "whole", kind, layers=2)
    report = publish(whole, tmp_path / "quantized", "fp8")
    recipe = write_recipe(tmp_path / "r.toml", target=report.folder)
    build(Recipe.load(recipe), tmp_path / "bundle")
    if kind == "delta net":  # decays and updates have few outputs
        names = {name.rpartition(".")[2] for name in report.errors if "linear_attn" in name}
        assert names == {"in_proj_qkv", "in_proj_z", "out_proj"}
        config = json.loads((report.folder / "config.json").read_text())
        of_layer = "model.layers.0.linear_attn"
        assert config["quantization_config"]["ignore"] == [f"{of_layer}.in_proj_a", f"{of_layer}.in_proj_b", "lm_head"]


def test_the_table_of_errors_equals_those_of_the_stored_weights(published):
    scheme, report = published
    unquantized, quantized = (Checkpoint.open(report.folder.parent / name) for name in ("unquantized", "quantized"))
    how = read_quantization(quantized.config, quantized.folder)
    for module, error in report.errors.items():
        if scheme == "fp8":
            dequantized = read_matrix(module, quantized.tensors, how.scheme(module))
        else:
            dequantized = read_low_bit(module, quantized.tensors, how.scheme(module)).dequantized
        weight = read_matrix(module, unquantized.tensors, None)
        assert np.linalg.norm(dequantized - weight) / np.linalg.norm(weight) == pytest.approx(error, rel=1e-4)
        assert (0.02 if scheme == "fp8" else 0.07) < error < (0.03 if scheme == "fp8" else 0.12)


def test_the_report_and_the_index_name_the_files_and_their_sizes(published):
    _, report = published
    unquantized = report.folder.parent / "unquantized"
    for folder, size in ((unquantized, report.before), (report.folder, report.after)):
        files = [*folder.glob("*.safetensors")]
        assert len(files) > 1
        assert sum(file.stat().st_size for file in files) == size
    index = json.loads((report.folder / "model.safetensors.index.json").read_text())
    stored = {tensor.name: tensor.file.name for tensor in Checkpoint.open(report.folder).tensors.values()}
    assert index == {"metadata": {"total_size": report.after}, "weight_map": stored}


def test_the_command_writes_a_complete_checkpoint_and_reports_its_error(tmp_path):
    whole = tiny_checkpoint(tmp_path / "unquantized")
    out = tmp_path / "quantized"
    said = CliRunner().invoke(app, ["export", "quantize", str(whole), "--scheme", "fp8", "--out", str(out)])
    assert said.exit_code == 0, said.output
    assert "down_proj" in said.output
    kept = {file.name for file in whole.iterdir()}
    assert {file.name for file in out.iterdir()} == kept
    assert (out / "tokenizer.json").read_bytes() == (whole / "tokenizer.json").read_bytes()


def refused(folder: Path, **changes: object) -> None:
    publish(folder, **{"out": folder.parent / "out", "scheme": "int4", "group": 32} | changes)


def test_impossible_options_are_refused_by_name_and_leave_nothing(tmp_path):
    whole = tiny_checkpoint(tmp_path / "unquantized")
    with pytest.raises(BadRequest, match="group must be one of 32, 64, 128; got 16"):
        refused(whole, group=16)
    with pytest.raises(
        BadCheckpoint, match="down_proj: has 64 inputs, which is no multiple of 128; choose another --group"
    ):
        refused(whole, group=128)
    with pytest.raises(BadRequest, match="out must be free or an empty folder"):
        refused(whole, out=whole)
    assert [path.name for path in tmp_path.iterdir()] == ["unquantized"]
    refused(whole)
    with pytest.raises(BadCheckpoint, match=r"quantized already \(compressed-tensors\)"):
        refused(tmp_path / "out", out=tmp_path / "again")


def test_a_checkpoint_without_a_weight_to_quantize_is_refused_and_nothing_is_written(tmp_path):
    whole = tiny_checkpoint(tmp_path / "unquantized")
    tensors = load_file(whole / "model.safetensors")
    save_file({f"text.{name}": tensor for name, tensor in tensors.items()}, whole / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"must have matmuls to quantize, .*; got \['text\.lm_head"):
        refused(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["unquantized"]
