"""Quantizing weights to 8 and 4 bits: the written tensors, their error, and bit-identical tokens in any batch."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tandemrt import LLM, SamplingParams
from tandemrt.engines.bundle.digest import combined_digest, file_digest
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.bundle.build import build
from tandemrt.export.graph.low_bit_format import LowBitFormat, packed_tensor_name
from tandemrt.export.quantize.checkpoint import QuantizedCheckpoint, write_quantized
from tandemrt.export.quantize.groups import GROUP_SIZE, nibbles, quantize
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec
from tandemrt.runtime.check.run import check_engines
from tests.engine.decoding import VOCAB, Decoder, expected_logits, make_checkpoint
from tests.makers import tiny_checkpoint, write_recipe

SIZES = {"max_position_embeddings": 256, "hidden_size": 320, "intermediate_size": 600, "num_attention_heads": 20}


def write(folder: Path, out: Path, bits: int = 8) -> QuantizedCheckpoint:
    checkpoint = Checkpoint.open(folder)
    out.mkdir()
    shutil.copy(folder / "config.json", out)
    return write_quantized(checkpoint, ModelSpec.from_hf(checkpoint.config), out, bits)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        (LowBitFormat(4, GROUP_SIZE), "float32"),
        (LowBitFormat(4, GROUP_SIZE, tiles="float16"), "float16"),
        (LowBitFormat(8, GROUP_SIZE, tiles="bfloat16"), "bfloat16"),
        (LowBitFormat(4, GROUP_SIZE, tiles="float16", floats=True), "uint8"),
        (LowBitFormat(8, GROUP_SIZE, tiles="float16", floats=True), "float32"),
    ],
)
def test_scales_in_tiles_have_the_dtype_of_the_tiles(form: LowBitFormat, dtype: str) -> None:
    assert form.shapes(2, GROUP_SIZE)["scales"][0] == dtype


@pytest.fixture(scope="module", params=[("llama tied", 8), ("qwen2", 8), ("qwen2", 4)], ids=lambda p: f"{p[0]}, {p[1]}")
def written(request, tmp_path_factory):
    """The model, its checkpoint folder, the checkpoint written to its subfolder "quantized", and the number of bits."""
    case, bits = request.param
    folder = tmp_path_factory.mktemp("checkpoint")
    model = make_checkpoint(case, folder, sizes=SIZES)
    return model, folder, write(folder, folder / "quantized", bits), bits


@given(
    rows=st.integers(1, 5), inner=st.integers(1, 3 * GROUP_SIZE), seed=st.integers(0, 99), size=st.floats(1e-20, 1e20)
)
def test_a_value_is_rounded_to_the_nearest_step_of_its_group(rows, inner, seed, size):
    matrix = (np.random.default_rng(seed).standard_normal((rows, inner)) * size).astype(np.float32)
    blocks = quantize(matrix, LowBitFormat(8, GROUP_SIZE))
    assert blocks.integers.shape == (rows, -(-inner // GROUP_SIZE), GROUP_SIZE)
    assert blocks.scales.shape == blocks.integers.shape[:2]
    steps = np.repeat(blocks.scales, GROUP_SIZE, axis=1)[:, :inner]
    assert (np.abs(blocks.dequantized - matrix) <= 0.51 * steps).all()
    meant = ((blocks.integers.astype(np.float32) - 128) * blocks.scales[:, :, None]).reshape(rows, -1)[:, :inner]
    np.testing.assert_array_equal(meant, blocks.dequantized)


@given(rows=st.integers(1, 5), inner=st.integers(1, 3 * GROUP_SIZE), seed=st.integers(0, 99), size=st.floats(1e-9, 1e9))
def test_the_4_bit_scale_search_never_increases_a_groups_error(rows, inner, seed, size):
    matrix = (np.random.default_rng(seed).standard_normal((rows, inner)) * size).astype(np.float32)
    padded = np.zeros((rows, -(-inner // GROUP_SIZE) * GROUP_SIZE), np.float32)
    padded[:, :inner] = matrix
    whole = padded.reshape(rows, -1, GROUP_SIZE)
    step = np.abs(whole).max(axis=2, keepdims=True) / 7
    plain = np.rint(whole / step) * step
    quantized = quantize(matrix, LowBitFormat(4, GROUP_SIZE))
    chosen = (quantized.integers.astype(np.float32) - 8) * quantized.scales[:, :, None]
    errors = [np.square(each - whole, dtype=np.float64).sum(axis=2) for each in (chosen, plain)]
    assert (errors[0] <= errors[1] * (1 + 1e-4)).all()
    assert quantized.integers.max() <= 15


@pytest.mark.parametrize(("bits", "zero"), [(8, 128), (4, 8)])
def test_a_group_of_zeros_stays_zero(bits, zero):
    blocks = quantize(np.zeros((1, GROUP_SIZE), np.float32), LowBitFormat(bits, GROUP_SIZE))
    assert (blocks.integers == zero).all()
    assert not blocks.scales.any()
    assert not blocks.dequantized.any()


@given(values=st.lists(st.integers(0, 15), min_size=1, max_size=9))
def test_nibbles_pack_the_first_integer_in_the_low_half(values):
    packed = nibbles(np.array([values], np.uint8))[0]
    assert [byte >> half & 15 for byte in packed.tolist() for half in (0, 4)][: len(values)] == values


def test_only_matmul_weights_are_quantized(written):
    model, folder, quantized, bits = written
    before, after = Checkpoint.open(folder).tensors, quantized.checkpoint.tensors
    tied = model.config.tie_word_embeddings
    matmuls = {name for name in before if "_proj.weight" in name} | (
        {"model.embed_tokens.weight"} if tied else {"lm_head.weight"}
    )
    kept = set(before) - matmuls | {"model.embed_tokens.weight"}
    assert set(after) == kept | {
        packed_tensor_name(name, f"int{bits}", kind) for name in matmuls for kind in ("integers", "scales")
    }
    assert (0.001 if bits == 8 else 0.05) < quantized.error < (0.01 if bits == 8 else 0.1)


def test_logits_stay_close_to_those_of_unquantized_weights(written):
    model, folder, _, bits = written
    tokens = torch.randint(0, VOCAB, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = expected_logits(model, tokens)
    logits = Decoder(folder / "quantized", "grouped", batch=1)([tokens], [0])[0]
    assert (logits - expected).norm() < (0.05 if bits == 8 else 0.3) * expected.norm()


def test_a_token_has_the_same_bits_in_any_window_and_batch(written):
    _, folder, _, _ = written
    rows, length = 8, 64
    texts = torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1)).tolist()

    def scored(batch: int, window: int) -> torch.Tensor:
        decode = Decoder(folder / "quantized", "grouped", batch=batch, capacity=80)
        parts = [decode([t[at : at + window] for t in texts[:batch]], [at] * batch) for at in range(0, length, window)]
        return torch.cat(parts, dim=1)[0]

    alone = scored(1, 1)
    for batch, window in ((1, 2), (1, 8), (1, 64), (2, 1), (3, 1), (5, 1), (8, 1), (8, 4), (8, 8)):
        assert torch.equal(scored(batch, window), alone), (batch, window)


def test_a_matmul_weight_that_is_no_float_matrix_is_rejected_by_name(tmp_path):
    make_checkpoint("qwen2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=rf"'{name}' should be a matrix of float32.*int8"):
        write(tmp_path, tmp_path / "int8")


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_bundle_is_built_from_an_ordinary_checkpoint_and_speculates_invisibly(tmp_path, dtype):
    target = tiny_checkpoint(tmp_path / "target", seed=1)
    draft = tiny_checkpoint(tmp_path / "draft", layers=1, seed=1)
    recipe = Recipe.load(write_recipe(tmp_path / "r.toml", target=target, draft=draft), dtype=dtype)
    report = build(recipe, tmp_path / "out")
    assert [note.split(" changed")[0] for note in report.notes] == [f"target: {dtype}", f"draft: {dtype}"]
    weights = report.manifest.files["target/model.safetensors"].size
    assert weights < 0.5 * (target / "model.safetensors").stat().st_size

    digests = {name: file_digest(target / name) for name in ("model.safetensors", "config.json")}
    assert report.manifest.provenance.checkpoints["target"] == combined_digest(digests)  # the recipe's checkpoint

    texts = []
    for window in (0, 4):
        with LLM(tmp_path / "out", threads=1, num_draft_tokens=window) as llm:
            prompts = ["hello the world", "json", "a long prompt " * 4]
            outputs = llm.generate(prompts, SamplingParams(temperature=0.8, seed=3, max_tokens=24))
            texts.append([output.token_ids for output in outputs])
            if window and dtype == "int8":  # rounded inputs have another tolerance
                with llm.loop.streams.active():
                    target = {"target": llm.loop.target.engines["target"]}
                    result = next(iter(check_engines(llm.bundle, target, 1)))
                assert (result.check, result.verdict) == ("logits of target", "pass"), result.result
    assert texts[0] == texts[1]
