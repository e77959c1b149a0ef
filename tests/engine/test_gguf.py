"""GGUF files are read as checkpoints: equal tensors, equal configs, the file's own tokenizer."""

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from tandemrt import LLM, SamplingParams
from tandemrt.engines.options.build_listener import SILENT
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.bundle.gguf import GgufCheckpoint, gguf_file
from tandemrt.export.quantize.gguf.checkpoint import ALL_KEPT, read_gguf, write_gguf_checkpoint
from tandemrt.export.quantize.gguf.reader import BoundedReader
from tandemrt.export.quantize.gguf.special_tokens import special_tokens
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tokenizer import CheckpointTokenizer
from tandemrt.export.read.values import read_values
from tests.engine.decoding import VOCAB, Decoder, expected_logits, make_checkpoint
from tests.engine.gguf_files import converted, write_gguf
from tests.families.cases import WINDOW
from tests.listeners import Recorded
from tests.makers import tiny_checkpoint

LENGTH = 30
_EXPERTS = {"rope_freq_base": 500.0, "expert_count": 6, "expert_used_count": 3}
_LATENT = {
    "rope_freq_base": 500.0,
    "kv_lora_rank": 512,
    "rope_dimension_count": 64,
    "leading_dense_block_count": 1,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_shared_count": 2,
    "expert_feed_forward_length": 24,
    "expert_weights_scale": 2.5,
    "rope_scaling_type": gguf.RopeScalingType.YARN,
    "rope_scaling_factor": 4.0,
    "rope_scaling_orig_ctx_len": 20,
    "rope_scaling_yarn_log_mul": 0.0707,
}
_GRANITE = {"attention_scale": 0.1, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0}
# Case of the decoder tests -> its GGUF name and further keys.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("llama", {"rope_freq_base": 10_000.0}),
    "llama with llama3 scaling": ("llama", {"rope_freq_base": 500.0}),
    "qwen2": ("qwen2", {"rope_freq_base": 10_000.0}),
    "qwen3": ("qwen3", {"rope_freq_base": 10_000.0}),
    "mixtral": ("llama", {"rope_freq_base": 1_000_000.0, "expert_count": 4, "expert_used_count": 2}),
    "qwen2_moe": (
        "qwen2moe",
        _EXPERTS | {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 32},
    ),
    "qwen3_moe": ("qwen3moe", _EXPERTS | {"expert_feed_forward_length": 24}),
    "gpt_oss": (
        "gpt-oss",
        _EXPERTS
        | {"expert_feed_forward_length": 40, "sliding_window": WINDOW, "rope_scaling_factor": 4.0}
        | {"rope_scaling_type": gguf.RopeScalingType.YARN, "rope_scaling_orig_ctx_len": 20}
        | {"rope_scaling_yarn_beta_fast": 32.0, "rope_scaling_yarn_beta_slow": 1.0},
    ),
    "olmoe": ("olmoe", _EXPERTS),
    "deepseek_v2 lite": (
        "deepseek2",
        _LATENT | {"expert_gating_func": gguf.ExpertGatingFuncType.SOFTMAX, "key_length": 88, "value_length": 20},
    ),
    "deepseek_v3": (
        "deepseek2",
        _LATENT
        | {"expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID, "expert_weights_norm": True, "q_lora_rank": 20}
        | {"key_length": 576, "value_length": 512, "key_length_mla": 88, "value_length_mla": 20, "head_count_kv": 1}
        | {"expert_group_count": 4, "expert_group_used_count": 2, "rope_scaling_yarn_log_mul": 0.1},
    ),
    "granitemoeshared": ("granitemoe", _EXPERTS | _GRANITE | {"expert_shared_feed_forward_length": 24}),
    "gemma2": (
        "gemma2",
        {
            "rope_freq_base": 500.0,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": ("gemma3", {"rope_freq_base": 500.0, "sliding_window": WINDOW}),
}
# Parts of layers with experts, which GGUF stores under other names or in other tensors.
_PARTS_OF_EXPERTS = re.compile(r"\.(experts|block_sparse_moe|shared_mlp|router|mlp\.gate)\.")


def write_case(case: str, folder: Path, kind: str = "F32", **sizes: Any) -> tuple[Path, Any, dict[str, np.ndarray]]:
    """Write a tiny model as GGUF. Returns the file, the model of transformers, and the values of its tensors."""
    name, keys = CASES[case]
    if name == "gemma3":  # as the converter knows it: five sliding layers of six, the local theta, no scaling
        sizes |= {"layer_types": ["sliding_attention"] * 2, "query_pre_attn_scalar": 16}
        sizes |= {
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": theta}
                for kind, theta in (("full_attention", 500.0), ("sliding_attention", 10_000.0))
            }
        }
    implied = {"gemma2": {"query_pre_attn_scalar": 16}, "gpt-oss": {"swiglu_limit": 7.0}}  # by the family
    sizes |= implied.get(name, {})
    (folder / "hf").mkdir()
    model = make_checkpoint(case, folder / "hf", sizes=sizes)
    file = folder / "model.gguf"
    return file, model, write_gguf(folder / "hf", file, name, kind, **keys)


@pytest.mark.parametrize("case", [case for case in CASES if "scaling" not in case])
def test_a_file_gives_the_tensors_and_the_logits_of_its_model(tmp_path: Path, case: str) -> None:
    file, model, values = write_case(case, tmp_path)
    checkpoint = converted(file, tmp_path / "found")
    tensors = {name: read_values(tensor) for name, tensor in checkpoint.tensors.items()}
    dense = {name: expected for name, expected in values.items() if not _PARTS_OF_EXPERTS.search(name)}
    assert set(dense) == {name for name in tensors if not _PARTS_OF_EXPERTS.search(name)}
    for name, expected in dense.items():
        np.testing.assert_allclose(tensors[name], expected, atol=1e-6 if name.endswith("norm.weight") else 0, rtol=0)
    text = [(7 * at) % VOCAB for at in range(LENGTH)]
    logits = Decoder(tmp_path / "found", "mask" if dense == values else "grouped", batch=1)([text], [0])[0]
    np.testing.assert_allclose(logits.numpy(), expected_logits(model, text).numpy(), atol=1e-4, rtol=0)


def test_factors_of_rotary_frequencies_are_read(tmp_path: Path) -> None:
    """Files of Llama 3.1 store the factors of its rule as a tensor."""
    file, model, _ = write_case("llama with llama3 scaling", tmp_path)
    ours = ModelSpec.from_hf(json.loads((tmp_path / "hf" / "config.json").read_text())).rope
    plain = 1.0 / 500.0 ** (np.arange(len(ours.frequencies)) / len(ours.frequencies))
    factors = (plain / np.array(ours.frequencies)).astype(np.float32)
    reader, writer = gguf.GGUFReader(file), gguf.GGUFWriter(tmp_path / "factors.gguf", "llama")
    for name, field in reader.fields.items():
        if name.startswith("llama."):
            writer.add_key_value(name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.add_tensor("rope_freqs.weight", factors)
    writer.add_vocab_size(VOCAB)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    converted(tmp_path / "factors.gguf", tmp_path / "found")
    text = [(7 * at) % VOCAB for at in range(LENGTH)]
    logits = Decoder(tmp_path / "found", "grouped", batch=1)([text], [0])[0]
    np.testing.assert_allclose(logits.numpy(), expected_logits(model, text).numpy(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_weights_in_16_bits_stay_as_they_are(tmp_path: Path, kind: str) -> None:
    file, _, values = write_case("llama tied", tmp_path, kind, intermediate_size=96)
    checkpoint = converted(file, tmp_path / "found")
    assert read_quantization(checkpoint.config, checkpoint.folder) is None
    for name, expected in values.items():
        np.testing.assert_array_equal(read_values(checkpoint.tensors[name]).astype(np.float32), expected)


@pytest.mark.parametrize(
    "kind",
    [
        *("Q2_K", "Q3_K", "IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS"),
        *("TQ1_0", "TQ2_0"),
    ],
)
def test_a_type_without_a_matmul_is_dequantized_as_the_package_gguf_does(tmp_path: Path, kind: str) -> None:
    gguf_type = gguf.GGMLQuantizationType[kind]
    values, nbytes = gguf.GGML_QUANT_SIZES[gguf_type]
    # Scales of any bytes are finite.
    blocks = np.random.default_rng(3).integers(0, 100, (4, 2 * nbytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(2 * values)
    writer.add_head_count(4)
    writer.add_context_length(64)
    writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=gguf_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = converted(tmp_path / "model.gguf", tmp_path / "found")
    stored = read_values(checkpoint.tensors["model.layers.0.mlp.up_proj.weight"])
    np.testing.assert_array_equal(stored, gguf.quants.dequantize(blocks, gguf_type))


def test_a_model_of_several_files_is_read_by_its_folder_or_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEMRT_CACHE", str(tmp_path / "cache"))
    original = tiny_checkpoint(tmp_path / "hf")
    write_gguf(original, tmp_path / "whole.gguf", "qwen3", "Q4_0")
    parts = tmp_path / "parts"
    parts.mkdir()
    write_gguf(original, parts / "model.gguf", "qwen3", "Q4_0", most_tensors=9)
    files = sorted(parts.glob("*.gguf"))
    assert [file.name for file in files][::2] == ["model-00001-of-00003.gguf", "model-00003-of-00003.gguf"]
    folder = GgufCheckpoint(gguf_file(parts) or parts, ALL_KEPT).unpacked(SILENT)
    whole = GgufCheckpoint(tmp_path / "whole.gguf", ALL_KEPT).unpacked(SILENT)
    for name in ("config.json", "tokenizer.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    joined, expected = (load_file(each / "model.safetensors") for each in (folder, whole))
    assert joined.keys() == expected.keys()
    assert all(np.array_equal(joined[name], expected[name]) for name in joined)
    assert read_gguf(files[1]).config == read_gguf(tmp_path / "whole.gguf").config

    write_gguf(original, parts / "other.gguf", "qwen3")
    assert gguf_file(parts) is None
    files[1].unlink()
    with pytest.raises(BadCheckpoint, match=r"it is one of 3 parts, model-00002-of-00003.gguf should be next to it"):
        GgufCheckpoint(files[0], ALL_KEPT).unpacked(SILENT)
    files[1].write_bytes(files[0].read_bytes())
    with pytest.raises(BadCheckpoint, match="its parts should hold"):
        read_gguf(files[0])


def test_the_vision_part_of_a_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEMRT_CACHE", str(tmp_path / "cache"))
    folder, original = tmp_path / "model", tiny_checkpoint(tmp_path / "hf")
    folder.mkdir()
    write_gguf(original, folder / "text.gguf", "qwen3")
    writer = gguf.GGUFWriter(folder / "mmproj-text-f16.gguf", "clip")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(BadCheckpoint, match=r"mmproj-text-f16.gguf: it is the vision part of a model, images are not"):
        read_gguf(folder / "mmproj-text-f16.gguf")
    heard = Recorded()
    assert gguf_file(folder) == folder / "text.gguf"
    GgufCheckpoint(folder / "text.gguf", ALL_KEPT).unpacked(heard)
    assert heard.titles == ["Unpack text.gguf without mmproj-text-f16.gguf: images are not supported"]
    assert gguf_file(tmp_path / "hf") is None


def test_the_tokenizer_comes_from_the_file(tmp_path: Path) -> None:
    original = tiny_checkpoint(tmp_path / "hf")
    write_gguf(original, tmp_path / "model.gguf", "qwen3")
    write_gguf_checkpoint(tmp_path / "model.gguf", tmp_path / "found", ALL_KEPT)
    ours, theirs = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (tmp_path / "found", original))
    for text in ("the quick and the dead", '{"a": 1}', "<think>hm</think>", "é\n\n  x"):
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids


def test_every_token_that_ends_a_text_is_a_stop_token(tmp_path: Path) -> None:
    """Files of instruct models name the end of a document as EOS, and the end of an answer by its key or its text."""
    original = tiny_checkpoint(tmp_path / "hf")
    ids = Tokenizer.from_file(str(original / "tokenizer.json")).token_to_id
    turn_end, message_end = ids("a"), ids("b")
    write_gguf(
        original, tmp_path / "model.gguf", "qwen3", eos_token_id=0, eot_token_id=turn_end, eom_token_id=message_end
    )
    write_gguf_checkpoint(tmp_path / "model.gguf", tmp_path / "found", ALL_KEPT)
    config = json.loads((tmp_path / "found" / "config.json").read_text())
    expected = [0, turn_end, message_end, ids("<|endoftext|>"), ids("<|im_end|>")]
    assert config["eos_token_id"] == expected
    assert sorted(CheckpointTokenizer.open(tmp_path / "found").stop_ids(config)) == sorted(expected)


def test_a_file_without_end_tokens_names_none() -> None:
    assert special_tokens({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.bos_token_id": 3}) == {"bos_token_id": 3}


def test_a_file_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEMRT_CACHE", str(tmp_path / "cache"))
    write_gguf(tiny_checkpoint(tmp_path / "hf"), tmp_path / "model.gguf", "qwen3")
    assert gguf_file(tmp_path) == tmp_path / "model.gguf" == gguf_file(tmp_path / "model.gguf")
    assert gguf_file(tmp_path / "hf") is None
    heard = Recorded()
    first = GgufCheckpoint(tmp_path / "model.gguf", ALL_KEPT).unpacked(heard)
    assert GgufCheckpoint(tmp_path / "model.gguf", ALL_KEPT).unpacked(heard) == first
    assert heard.titles == ["Unpack model.gguf"]
    os.utime(tmp_path / "model.gguf", ns=(0, 1))  # replaced by a file of the same size
    assert GgufCheckpoint(tmp_path / "model.gguf", ALL_KEPT).unpacked(heard) != first
    assert heard.titles == ["Unpack model.gguf"] * 2


def test_a_file_is_a_model_name_and_speculation_changes_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEMRT_CACHE", str(tmp_path / "cache"))
    kinds = {"model.embed_tokens.weight": "Q6_K", "model.layers.0.self_attn.v_proj.weight": "Q5_1"}
    kinds |= {f"model.layers.{at}.mlp.experts.down_proj.weight": "Q6_K" for at in (0, 1)}
    checkpoint = tiny_checkpoint(tmp_path / "hf", hidden=256, head_dim=64, experts=4)
    experts = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256}
    write_gguf(checkpoint, tmp_path / "model.gguf", "qwen3moe", "Q4_K", kinds=kinds, **experts)
    params = SamplingParams(max_tokens=24, seed=3, temperature=1.0)
    texts = []
    for drafts in (4, 0):
        with LLM(tmp_path / "model.gguf", num_draft_tokens=drafts) as llm:
            texts.append([out.token_ids for out in llm.generate(["a a a b a a a b", "the quick"], params)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        ("mamba", None, "general.architecture should be one of llama, .*, it is 'mamba'"),
        ("llama", "add_expert_shared_count", "keys that are not read: 'llama.expert_shared_count'"),
        ("llama", "add_value_length", "llama.attention.value_length should be 16"),
        ("deepseek2", None, "attention.key_length should be a number, it is 'wide'"),
    ],
)
def test_unsupported_files_are_rejected_by_name(tmp_path: Path, name: str, key: str | None, message: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", name)
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    if name == "deepseek2":
        writer.add_string("deepseek2.attention.key_length", "wide")
    if key is not None:
        getattr(writer, key)(3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(BadCheckpoint, match=message):
        read_gguf(tmp_path / "model.gguf")


def test_a_file_that_cannot_be_read_is_no_unwritable_cache(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"absent.gguf: should be a file that can be read: No such file"):
        write_gguf_checkpoint(tmp_path / "absent.gguf", tmp_path / "out", ALL_KEPT)


def test_a_damaged_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(BadCheckpoint, match="should be a GGUF file"):
        read_gguf(tmp_path / "model.gguf")


def file_of_arrays(file: Path, *heads: tuple[int, int], values: bytes = b"") -> Path:
    """Write a GGUF file with one key: nested arrays of the types and counts ``heads``."""
    key = b"general.x"
    head = struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(key)) + key + struct.pack("<I", 9)
    file.write_bytes(head + b"".join(struct.pack("<IQ", *each) for each in heads) + values)
    return file


@pytest.mark.parametrize("depth", [2, 5000])
def test_nested_arrays_are_rejected(tmp_path: Path, depth: int) -> None:
    file = file_of_arrays(tmp_path / "a.gguf", *[(9, 1)] * (depth - 1), (0, 1), values=b"\1")
    with pytest.raises(BadCheckpoint, match="an array should hold values, it holds arrays"):
        read_gguf(file)


def test_the_arrays_of_a_file_have_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of_arrays(tmp_path / "a.gguf", (0, 3_000_000), values=bytes(3_000_000))
    with pytest.raises(BadCheckpoint, match="at most 2097152 items, they hold 3000000 or more; download it again"):
        read_gguf(file)
    monkeypatch.setattr("tandemrt.export.quantize.gguf.reader.MAX_ITEMS", 3)
    with pytest.raises(BadCheckpoint, match=r"general\.architecture should be one of"):  # the next rule
        read_gguf(file_of_arrays(tmp_path / "b.gguf", (0, 3), values=bytes(3)))
    with pytest.raises(BadCheckpoint, match="at most 3 items, they hold 4 or more"):
        read_gguf(file_of_arrays(tmp_path / "b.gguf", (0, 4), values=bytes(4)))


@pytest.mark.parametrize("endianess", list(gguf.GGUFEndian))
def test_metadata_is_that_of_the_package_gguf(tmp_path: Path, endianess: gguf.GGUFEndian) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama", endianess=endianess)
    writer.add_token_list(["a", "", "é" * 300])
    writer.add_token_scores([0.5, -1000.0])
    writer.add_array("general.flags", [True, False])
    writer.add_uint32("general.number", 7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = (
        {name: field.contents() for name, field in reader(tmp_path / "a.gguf").fields.items()}
        for reader in (BoundedReader, gguf.GGUFReader)
    )
    assert ours == theirs
    assert ours["tokenizer.ggml.tokens"] == ["a", "", "é" * 300]


@pytest.mark.parametrize(("kind", "count"), [(8, 2), (8, 1), (5, 2)])
def test_a_file_that_ends_in_an_array_is_rejected(tmp_path: Path, kind: int, count: int) -> None:
    text = struct.pack("<Q", 3) + b"ab" if count == 1 else struct.pack("<Q", 0)
    with pytest.raises(BadCheckpoint, match="it ends in the middle of an array; download it again"):
        read_gguf(file_of_arrays(tmp_path / "a.gguf", (kind, count), values=text if kind == 8 else bytes(7)))
