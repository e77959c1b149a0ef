"""The maker of agreeing pairs: the draft foresees the target as often as it says, with transformers as the judge."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.engines.recipe.recipe import Reasoning
from tandemrt.engines.text.vocabulary import vocabulary_from_tokenizer
from tandemrt.export.quantize.stored_weights import read_low_bit
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.quantization.scheme import FULL_DIM
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tensors import with_graph_names
from tandemrt.export.read.tokenizer import CheckpointTokenizer
from tandemrt.export.read.values import read_values
from tandemrt.runtime.grammars.library import GrammarLibrary
from tests.plain.constraints import compiled_by
from tools.models.filler_tokenizer import write_tokenizer
from tools.models.quantized_weights import WeightFormat
from tools.models.random_checkpoint import Dtype, Family, Size
from tools.models.random_pair import write_pair


def tokens_a_round(folder: Path) -> float:
    """Of four drafts, by the share of samples that target and draft have in common; checks the spread of the logits."""
    models = [AutoModelForCausalLM.from_pretrained(folder / name).eval() for name in ("target", "draft")]
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 1024, (8, 128), generator=generator)
    noise = -(-torch.rand(8, 64, 1024, generator=generator).clamp(1e-7).log()).log()
    with torch.no_grad():
        logits = [model(tokens).logits[:, -64:] for model in models]
    assert all(2.5 < float(each.std()) < 3.5 for each in logits)
    draws = [(each / 0.7 + noise).argmax(-1) for each in logits]
    same = float((draws[0] == draws[1]).float().mean())
    return sum(same**i for i in range(5))


def test_two_models_agree_as_often_as_requested(tmp_path, capsys):
    write_pair(tmp_path, Size.SMALL, device="cpu", dtype=Dtype.FLOAT32, acceptance=3.0, shard_bytes=3_000_000)
    assert "tokens a round" in capsys.readouterr().out
    assert tokens_a_round(tmp_path) == pytest.approx(3.0, abs=0.3)
    assert len(Checkpoint.open(tmp_path / "target").files) > 1


def test_a_pair_with_a_large_scale_rarely_agrees(tmp_path):
    write_pair(tmp_path, Size.SMALL, device="cpu", dtype=Dtype.FLOAT32, acceptance=None, scale=10.0)
    assert tokens_a_round(tmp_path) < 1.3


@pytest.mark.parametrize("acceptance", [1.0, 5.1])
def test_an_acceptance_that_no_scale_gives_is_refused(tmp_path, acceptance):
    with pytest.raises(ValueError, match=f"at most window \\+ 1 = 5, got {acceptance}"):
        write_pair(tmp_path, Size.SMALL, device="cpu", acceptance=acceptance)


def test_a_size_too_small_for_a_tokenizer_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="must be at least 278, got 97"):
        write_pair(tmp_path / "out", Size.TINY, device="cpu", acceptance=None)
    assert not (tmp_path / "out").exists()


def test_the_same_seed_gives_the_same_files(tmp_path):
    for name in ("one", "two"):
        write_pair(tmp_path / name, Size.SMALL, device="cpu", acceptance=None, scale=0.1, seed=3)
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()]
    assert len(files) == 8
    assert all((tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes() for file in files)


def test_a_filler_tokenizer_has_every_id_and_serves_grammars(tmp_path):
    size = 5000
    opened = CheckpointTokenizer.open(write_tokenizer(tmp_path, size))
    assert opened.size == len(opened.tokenizer.get_vocab()) == size
    assert opened.stop_ids({}) == (size - 3,)
    reasoning = Reasoning(think_start="<think>", think_ends=("</think>",), forced_end="</think>")
    assert opened.delimiters(reasoning).think_start.ids == (size - 2,)
    vocabulary = vocabulary_from_tokenizer(AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer, size)
    library = GrammarLibrary(vocabulary, stop_ids=opened.stop_ids({}), timeout_s=60)
    compiled = compiled_by(library, StructuredOutputs(regex="[a-z]+")).result()
    library.close()
    matcher = compiled.matcher((size - 3,))
    letters = [i for i, token in enumerate(vocabulary.tokens) if token.isalpha() and token.islower()]
    assert len(letters) > size / 3
    assert all(matcher.fork().accept(token) for token in letters[::50])


def test_a_vocabulary_too_small_for_all_bytes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be at least 278, got 100"):
        write_tokenizer(tmp_path, 100)


def test_skewed_routers_prefer_some_experts(tmp_path):
    options = {"dtype": Dtype.FLOAT32, "family": Family.QWEN3_MOE, "acceptance": None, "scale": 1.0}
    write_pair(tmp_path, Size.SMALL, device="cpu", router_skew=1.0, **options)
    tensors = Checkpoint.open(tmp_path / "target").tensors
    for layer in range(4):
        weights = read_values(tensors[f"model.layers.{layer}.mlp.gate.weight"])
        sizes = np.log(weights.std(axis=1) * weights.shape[1] ** 0.5)
        assert 0.4 < sizes.std() < 1.8


def test_matmuls_may_be_stored_in_4_bits(tmp_path):
    for weight_format in (WeightFormat.UNQUANTIZED, WeightFormat.INT4):
        options = {"dtype": Dtype.FLOAT32, "acceptance": None, "scale": 0.1, "weight_format": weight_format}
        write_pair(tmp_path / weight_format, Size.SMALL, device="cpu", **options)
    unquantized, quantized = (
        Checkpoint.open(tmp_path / weight_format / "target")
        for weight_format in (WeightFormat.UNQUANTIZED, WeightFormat.INT4)
    )
    quantization = read_quantization(quantized.config, quantized.folder)
    for module in ("lm_head", "model.layers.1.mlp.down_proj"):
        weight = read_values(unquantized.tensors[f"{module}.weight"])
        dequantized = read_low_bit(module, quantized.tensors, quantization.scheme(module)).dequantized
        assert np.abs(dequantized - weight).max() < 0.1 * np.abs(weight).max()
        assert dequantized.std() == pytest.approx(weight.std(), rel=0.02)
    assert quantized.tensors["model.embed_tokens.weight"].dtype == "float32"


def test_experts_of_gpt_oss_may_be_stored_in_mxfp4(tmp_path):
    for weight_format in (WeightFormat.UNQUANTIZED, WeightFormat.MXFP4):
        options = {"family": Family.GPT_OSS, "layers": 2, "dtype": Dtype.FLOAT32, "acceptance": None}
        write_pair(tmp_path / weight_format, Size.SMALL, device="cpu", weight_format=weight_format, **options)
    unquantized, quantized = (
        Checkpoint.open(tmp_path / weight_format / "target")
        for weight_format in (WeightFormat.UNQUANTIZED, WeightFormat.MXFP4)
    )
    quantization = read_quantization(quantized.config, quantized.folder)
    tensors = with_graph_names(quantized, ModelSpec.from_hf(quantized.config)).tensors
    for kind in ("gate_up_proj", "down_proj"):
        experts, module = "model.layers.1.mlp.experts", f"model.layers.1.mlp.experts.7.{kind}"
        weight = read_values(unquantized.tensors[f"{experts}.{kind}"])[7].T
        dequantized = read_low_bit(module, tensors, quantization.scheme(module)).dequantized
        assert np.abs(dequantized - weight).max() <= np.abs(weight).max() / 4
        assert dequantized.std() == pytest.approx(weight.std(), rel=0.02)
    assert {"model.layers.1.self_attn.q_proj.weight", "lm_head.weight"} <= set(quantized.tensors)


def test_matmuls_may_be_stored_in_float8_by_channel(tmp_path):
    write_pair(
        tmp_path,
        Size.SMALL,
        device="cpu",
        dtype=Dtype.FLOAT32,
        acceptance=None,
        scale=0.1,
        weight_format=WeightFormat.FP8,
    )
    checkpoint = Checkpoint.open(tmp_path / "target")
    scheme = read_quantization(checkpoint.config, checkpoint.folder).scheme("lm_head")
    assert (scheme.group_shape, scheme.inputs) == ((1, FULL_DIM), "token")
    assert checkpoint.tensors["model.embed_tokens.weight"].dtype == "float32"
    for name, tensor in checkpoint.tensors.items():
        if f"{name}_scale" in checkpoint.tensors:
            assert tensor.dtype == "float8_e4m3fn"
            assert float(abs(read_values(tensor).astype("float32")).max()) == 448
