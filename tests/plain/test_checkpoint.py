"""Opening a checkpoint folder: reading headers, and errors before any weight is read."""

import json
import struct

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.quantize.typed_tensors import scales_of
from tandemrt.export.read.checkpoint import DTYPES, Checkpoint, read_header

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.ones(5, np.float16),
    "c": np.zeros((0, 4), np.int8),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def with_header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_tensor_offsets_count_from_the_start_of_the_file(folder):
    checkpoint = Checkpoint.open(folder)
    content = (folder / "model.safetensors").read_bytes()
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.files == (folder / "model.safetensors",)
    assert checkpoint.tensors.keys() == TENSORS.keys()
    for name, array in TENSORS.items():
        tensor = checkpoint.tensors[name]
        assert (tensor.dtype, tensor.shape, tensor.nbytes) == (array.dtype.name, array.shape, array.nbytes)
        assert content[tensor.offset : tensor.offset + tensor.nbytes] == array.tobytes()


def test_tensors_of_every_dtype_have_the_size_that_safetensors_writes(folder):
    stored = {name: torch.zeros(2, 3, dtype=getattr(torch, name)) for name, _ in DTYPES.values()}
    safetensors.torch.save_file(stored, folder / "model.safetensors")
    sizes = {name: (tensor.dtype, tensor.nbytes) for name, tensor in Checkpoint.open(folder).tensors.items()}
    assert sizes == {name: (name, tensor.nbytes) for name, tensor in stored.items()}


def test_scales_of_padding_may_have_any_value_and_others_are_above_0(folder):
    for at, message in ((3, None), (2, "'scale' should hold scales, finite and above 0")):
        scales = np.ones((2, 4), np.float32)
        scales[1, at] = 0
        save_file({"scale": scales}, folder / "model.safetensors")
        tensors = Checkpoint.open(folder).tensors
        if message is None:
            assert scales_of(tensors, "scale", (2, 4), used=3).tolist() == [[1] * 3] * 2
        else:
            with pytest.raises(BadCheckpoint, match=message):
                scales_of(tensors, "scale", (2, 4), used=3)


def test_shards_are_read_through_the_index(folder):
    (folder / "model.safetensors").unlink()
    save_file({"a": TENSORS["a"]}, folder / "one.safetensors")
    save_file({"b": TENSORS["b"]}, folder / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = Checkpoint.open(folder)
    assert [file.name for file in checkpoint.files] == ["one.safetensors", "two.safetensors"]
    assert {name: tensor.file.name for name, tensor in checkpoint.tensors.items()} == index["weight_map"]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "one.safetensors", "b": "gone.safetensors"}}, "gone.safetensors is missing"),
        ({"weight_map": {"a": "one.safetensors", "z": "one.safetensors"}}, "'z' should be in one.safetensors"),
        ({"weight_map": {"a": "../one.safetensors"}}, r"in the index's folder, it names '\.\./one"),
        ({"weight_map": {"a": 3}}, "weight_map should map"),
        ({"weight_map": {}}, "weight_map should map"),
        ({}, "weight_map should map"),
    ],
)
def test_an_invalid_index_is_rejected(folder, index, message):
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadCheckpoint, match=message):
        Checkpoint.open(folder)


def test_an_index_with_the_wrong_shard_is_rejected(folder):
    (folder / "model.safetensors").unlink()
    save_file({"a": TENSORS["a"]}, folder / "one.safetensors")
    save_file({"b": TENSORS["b"]}, folder / "two.safetensors")
    index = {"weight_map": {"a": "two.safetensors", "b": "one.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadCheckpoint, match=r"tensor 'a' should be in two.safetensors, which does not hold it"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(BadCheckpoint, match=f"{name} is missing"):
        Checkpoint.open(folder)


def test_a_missing_folder_is_rejected(tmp_path):
    with pytest.raises(BadCheckpoint, match=r"nowhere is not a folder"):
        Checkpoint.open(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "[1]", "", "\xff"])
def test_a_config_must_be_a_json_object(folder, text):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(BadCheckpoint, match=r"config\.json: should hold"):
        Checkpoint.open(folder)


@given(st.integers(0, len(save(TENSORS)) - 1))
def test_a_file_truncated_at_any_byte_is_rejected(tmp_path_factory, length):
    file = tmp_path_factory.mktemp("truncated") / "model.safetensors"
    file.write_bytes(save(TENSORS)[:length])
    with pytest.raises(BadCheckpoint, match="truncated"):
        read_header(file)


@given(st.integers(0, len(save(TENSORS)) - 1), st.integers(1, 255))
def test_a_changed_byte_never_moves_a_tensor_out_of_the_file(tmp_path_factory, place, change):
    content = bytearray(save(TENSORS))
    content[place] ^= change
    file = tmp_path_factory.mktemp("changed") / "model.safetensors"
    file.write_bytes(content)
    try:
        tensors = read_header(file)
    except BadCheckpoint:
        return
    assert all(8 < t.offset <= t.offset + t.nbytes <= len(content) for t in tensors.values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            with_header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 9),
            "longer than its header",
        ),
        (
            with_header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, b"\0" * 12),
            "'a' should begin at",
        ),
        (with_header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"\0" * 4), "should take 8 bytes"),
        (with_header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}), "should take"),
        (
            with_header({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"\0"),
            "'a' should have a known dtype",
        ),
        (with_header({"a": {"dtype": "F32", "shape": [2]}}), "'a' should have a known dtype"),
        (with_header({"a": 7}), "'a' should have a known dtype"),
        (with_header(b"not json"), "should hold JSON"),
        (with_header([]), "should hold a JSON object"),
        (struct.pack("<Q", 1 << 60) + b"{}", "the header should be 1152921504606846976 bytes long"),
    ],
)
def test_an_inconsistent_header_is_rejected(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=message):
        read_header(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "shape", "dtypes", "stored"),
    [
        ("a", (2, 3), ("float32",), None),
        ("a", (2, 3), ("float16", "float32"), None),
        ("b", (5,), ("float16", "float32"), None),
        ("c", (0, 4), ("int8",), None),
        ("a", (2, 3), ("float16",), r"float32\[2, 3\]"),
        ("a", (2, 3), ("float16", "int64"), r"float32\[2, 3\]"),
        ("a", (2, 3), (), r"float32\[2, 3\]"),
        ("a", (3, 2), ("float32",), r"float32\[2, 3\]"),
        ("a", (6,), ("float32",), r"float32\[2, 3\]"),
        ("b", (4,), ("float16",), r"float16\[5\]"),
        ("b", (6,), ("float16",), r"float16\[5\]"),
        ("c", (4, 0), ("int8",), r"int8\[0, 4\]"),
        ("z", (2, 3), ("float32",), "missing"),
    ],
)
def test_a_tensor_is_read_only_with_its_own_shape_and_dtype(folder, name, shape, dtypes, stored):
    checkpoint = Checkpoint.open(folder)
    if stored is None:
        np.testing.assert_array_equal(checkpoint.read(name, shape, dtypes), TENSORS[name], strict=True)
    else:
        with pytest.raises(BadCheckpoint, match=rf"tensor '{name}' should be .*, it is {stored}$"):
            checkpoint.read(name, shape, dtypes)


def test_a_tensor_without_elements_may_begin_where_the_next_one_does(tmp_path):
    header = {
        "whole": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "empty": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]},
    }
    (tmp_path / "model.safetensors").write_bytes(with_header(header, b"\0" * 4))
    assert {name: tensor.nbytes for name, tensor in read_header(tmp_path / "model.safetensors").items()} == {
        "whole": 4,
        "empty": 0,
    }
