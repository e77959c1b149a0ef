"""The maker of random checkpoints writes what transformers would."""

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tandemrt.engines.text.tokenizer import open_tokenizer
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec
from tools.models.random_checkpoint import Dtype, Family, Size, app, write_checkpoint


@pytest.mark.parametrize("family", list(Family))
def test_transformers_finds_every_tensor_and_no_other(tmp_path, family):
    write_checkpoint(tmp_path, family, Size.TINY, dtype=Dtype.FLOAT16, layers=3)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.float16
    spec = ModelSpec.from_hf(Checkpoint.open(tmp_path).config)
    assert (spec.family, spec.layers) == (family.value, 3)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_checkpoint(tmp_path / name, Family.QWEN3, Size.TINY, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_a_sparse_file_has_the_size_of_its_weights_and_takes_no_disk_space(tmp_path):
    nbytes = write_checkpoint(tmp_path, Family.MISTRAL, Size.B8, sparse=True)
    file = (tmp_path / "model.safetensors").stat()
    assert 14e9 < nbytes < file.st_size
    assert file.st_blocks * 512 < 1e6
    assert len(Checkpoint.open(tmp_path).tensors) == 32 * 9 + 3


def test_the_command_writes_a_tokenizer_of_the_models_size(tmp_path):
    result = CliRunner().invoke(app, [str(tmp_path), "--family", "qwen3"])
    assert result.exit_code == 0, result.output
    vocab = ModelSpec.from_hf(Checkpoint.open(tmp_path).config).vocab
    tokenizer, _ = open_tokenizer(tmp_path, vocab)
    assert tokenizer.backend.get_vocab_size() == vocab


def test_the_command_names_a_missing_package_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = CliRunner().invoke(app, [str(tmp_path / "new")])
    assert (result.exit_code, result.output) == (
        2,
        "random_checkpoint needs torch and transformers: pip install torch transformers\n",
    )
    assert not (tmp_path / "new").exists()
