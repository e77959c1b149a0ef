"""Write a checkpoint of the Llama family as GGUF, the format of llama.cpp and OpenVINO."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import gguf
import ml_dtypes  # noqa: F401  # bfloat16 for numpy
import numpy as np
from safetensors import safe_open

Form = Literal["F32", "F16", "Q8_0", "Q4_1"]


def write_gguf(checkpoint: Path, out: Path, form: Form) -> None:
    """Write the model of ``checkpoint``: matrices in ``form``, vectors in float32.

    Raises ValueError for other families than Llama.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"a GGUF file is written for llama models alone, received {config['model_type']}")
    writer = gguf.GGUFWriter(out, "llama")
    _add_model(writer, checkpoint.name, config, form)
    _add_tokenizer(writer, json.loads((checkpoint / "tokenizer.json").read_text()), config)
    for name, array in _tensors(checkpoint, config):
        kind = gguf.GGMLQuantizationType[form if array.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(checkpoint: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                array = opened.get_tensor(name).astype(np.float32)
                written = names.get_name(name, try_suffixes=(".weight",))
                assert written is not None, name
                if count := heads.get(written.split(".")[-2]):  # rotary embedding rotates adjacent pairs, not halves
                    array = array.reshape(count, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
                yield written, np.ascontiguousarray(array)


def _add_model(writer: Any, name: str, config: dict[str, Any], form: Form) -> None:
    heads, rope = config["num_attention_heads"], config.get("rope_parameters") or {}
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if form == "F32" else f"MOSTLY_{form}"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    added = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    ids = {index: token for token, index in (tokenizer["model"]["vocab"] | added).items()}
    tokens = [ids.get(index, f"[unused{index}]") for index in range(config["vocab_size"])]
    merges = [each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]]
    end = config.get("eos_token_id")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in added else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges(merges or ["Ġ {"])  # readers require one; filler tokenizers have its token
    writer.add_eos_token_id(end if isinstance(end, int) else max(added.values(), default=0))
    writer.add_bos_token_id(config.get("bos_token_id") or 0)
