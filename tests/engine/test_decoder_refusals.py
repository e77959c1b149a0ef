"""What the exporter refuses to build, by name."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe
from tandemrt.export.model.decoder import build_decoder
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec
from tests.engine.decoding import edit_config, make_checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    make_checkpoint("qwen3 tied with yarn", folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoint")


def export(folder, **options):
    checkpoint = Checkpoint.open(folder)
    options = {"dtype": "float32", "capacity": 40, "lowering": "length"} | options
    return build_decoder(ModelSpec.from_hf(checkpoint.config), checkpoint, **options)


def change_tensors(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_missing_tensor(folder):
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(BadCheckpoint, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing"):
        export(folder)


def test_a_tensor_of_the_wrong_shape(folder):
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(BadCheckpoint, match=r"'model\.norm\.weight' should have shape \[64\] .*, it has \[63\]"):
        export(folder)


def test_a_tensor_that_nothing_reads(folder):
    change_tensors(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": torch.ones(4)}))
    with pytest.raises(BadCheckpoint, match=r"no place in the model.*model\.layers\.0\.self_attn\.sinks"):
        export(folder)


def test_layers_beyond_those_the_config_names(folder):
    edit_config(folder, num_hidden_layers=1, layer_types=["full_attention"])
    with pytest.raises(BadCheckpoint, match=r"no place.*model\.layers\.1\..* and 10 more"):
        export(folder)


def test_a_quantized_tensor(folder):
    change_tensors(
        folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)})
    )
    with pytest.raises(BadCheckpoint, match=r"'model\.norm\.weight' should be .*float8_e4m3fn.*quantization_config"):
        export(folder)


def test_stored_rotary_frequencies_are_accepted_because_the_config_has_them(folder):
    change_tensors(
        folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    )
    export(folder)


def test_a_stored_lm_head_must_equal_the_embedding_it_is_tied_to(folder):
    same = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": same.clone()}))
    export(folder)
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": same + 1}))
    with pytest.raises(BadCheckpoint, match=r"'lm_head\.weight' is 'model\.embed_tokens\.weight'.*differ"):
        export(folder)


def test_a_cache_longer_than_the_sliding_window(tmp_path):
    make_checkpoint("mistral tied", tmp_path)
    export(tmp_path, capacity=40)
    with pytest.raises(BadCheckpoint, match="sliding_window is 40 and the capacity 41"):
        export(tmp_path, capacity=41)


@pytest.mark.parametrize(
    ("option", "value"), [("dtype", "float64"), ("lowering", "sliding"), ("capacity", 0), ("capacity", -1)]
)
def test_options_out_of_range(folder, option, value):
    with pytest.raises(BadRecipe, match=f"{option} must be .*; got {value!r}"):
        export(folder, **{option: value})
