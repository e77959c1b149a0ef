"""Write a checkpoint with random weights in any size, for tests of scale and speed.

    python -m tools.models.random_checkpoint OUT --family llama --size 8b --sparse

Names and shapes of the tensors are those of ``transformers``. The tokenizer is a filler. ``--sparse`` writes the
header, and a hole instead of the weights (they read as zeros), so an 8B checkpoint takes little disk.
"""

import json
import math
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

try:
    import torch
except ModuleNotFoundError:  # a bundle on a CPU runs without it
    sys.exit("random_checkpoint needs torch and transformers: pip install torch transformers")

from tools.models.filler_tokenizer import write_tokenizer

Dims = dict[str, Any]

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_FAMILY: dict[str, Dims] = {
    "llama": {"rope_parameters": _LLAMA3},
    "mistral": {"sliding_window": None, "head_dim": None},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "gpt_oss": {},  # the rest is its class's default
    "gemma4_text": {"final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
}


def _dims(vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, length: int) -> Dims:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": length,
    }


_MIN_TOKENIZER = 320  # ids of the filler tokenizer, at least
_TINY = _dims(97, 64, 96, 2, 4, 2, 256)
_SMALL = _dims(1024, 256, 512, 4, 4, 2, 16_384)
_SMOLLM2 = _dims(49_152, 576, 1536, 30, 9, 3, 8192) | {  # SmolLM2-135M
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "tie_word_embeddings": True,
}
_LLAMA_1B = _dims(128_256, 2048, 8192, 16, 32, 8, 131_072) | {  # Llama 3.2 1B
    "rope_parameters": _LLAMA3 | {"factor": 32.0},
    "tie_word_embeddings": True,
}
_MIXTURE = {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_30B_A3B = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_LAYERS_OF_QWEN3_5 = {  # and its heads: three of four layers are gated delta nets
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_35B_A3B = _LAYERS_OF_QWEN3_5 | {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
_35B_A3B |= {"shared_expert_intermediate_size": 512}
_HYBRID = {"head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32}
_HYBRID |= {"linear_value_head_dim": 32}
_MIXED_HYBRID = _MIXTURE | _HYBRID | {"shared_expert_intermediate_size": 64}
_OSS = {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32}
_FIVE_OF_SIX = {"layer_types": 10 * [*["sliding_attention"] * 5, "full_attention"]}  # of the last layers
_GEMMA4: Dims = {"head_dim": 32, "global_head_dim": 64, "num_global_key_value_heads": 1, "sliding_window": 64}
_GEMMA4 |= _FIVE_OF_SIX
_26B_A4B: Dims = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
_26B_A4B |= _FIVE_OF_SIX | {"num_global_key_value_heads": 2, "sliding_window": 1024}
_31B = _FIVE_OF_SIX | {"num_global_key_value_heads": 4, "sliding_window": 1024}
_SIZES: dict[tuple[str, str], Dims] = {
    ("llama", "8b"): _dims(128_256, 4096, 14_336, 32, 32, 8, 131_072),
    ("llama", "70b"): _dims(128_256, 8192, 28_672, 80, 64, 8, 131_072),
    ("mistral", "8b"): _dims(32_768, 4096, 14_336, 32, 32, 8, 32_768),
    ("qwen2", "8b"): _dims(152_064, 3584, 18_944, 28, 28, 4, 131_072),
    ("qwen3", "8b"): _dims(151_936, 4096, 12_288, 36, 32, 8, 40_960) | {"head_dim": 128},
    ("qwen3_moe", "30b-a3b"): _dims(151_936, 2048, 6144, 48, 32, 4, 40_960) | _30B_A3B,
    ("qwen3_5_text", "9b"): _dims(248_320, 4096, 12_288, 32, 16, 4, 262_144) | _LAYERS_OF_QWEN3_5,
    ("qwen3_5_moe_text", "35b-a3b"): _dims(248_320, 2048, 512, 40, 16, 2, 262_144) | _35B_A3B,
    ("gpt_oss", "20b"): _dims(201_088, 2880, 2880, 24, 64, 8, 131_072) | {"num_local_experts": 32},
    ("gpt_oss", "120b"): _dims(201_088, 2880, 2880, 36, 64, 8, 131_072) | {"num_local_experts": 128},
    ("gemma4_text", "26b-a4b"): _dims(262_144, 2816, 2112, 30, 16, 8, 262_144) | _26B_A4B,
    ("gemma4_text", "31b"): _dims(262_144, 5376, 21_504, 60, 32, 16, 262_144) | _31B,
    ("llama", "smollm2"): _SMOLLM2,
    ("llama", "1b"): _LLAMA_1B,
    ("llama", "small"): _SMALL,
    ("mistral", "small"): _SMALL,
    ("qwen2", "small"): _SMALL,
    ("qwen3", "small"): _SMALL | {"head_dim": 64},
    ("qwen3_moe", "small"): _SMALL | _MIXTURE,
    ("qwen3_5_text", "small"): _SMALL | _HYBRID,
    ("qwen3_5_moe_text", "small"): _SMALL | _MIXED_HYBRID,
    ("gpt_oss", "small"): _SMALL | _OSS,
    ("gemma4_text", "small"): _SMALL | _GEMMA4,
    ("llama", "tiny"): _TINY,
    ("mistral", "tiny"): _TINY,
    ("qwen2", "tiny"): _TINY,
    ("qwen3", "tiny"): _TINY | {"head_dim": 32},
    ("qwen3_moe", "tiny"): _TINY | _MIXTURE,
    ("qwen3_5_text", "tiny"): _TINY | _HYBRID,
    ("qwen3_5_moe_text", "tiny"): _TINY | _MIXED_HYBRID,
    ("gpt_oss", "tiny"): _TINY | _OSS,
    ("gemma4_text", "tiny"): _TINY | _GEMMA4,
}

_STORED = {
    torch.float32: ("F32", 4),
    torch.float16: ("F16", 2),
    torch.bfloat16: ("BF16", 2),
    torch.float8_e4m3fn: ("F8_E4M3", 1),
    torch.uint8: ("U8", 1),
    torch.int32: ("I32", 4),
    torch.int64: ("I64", 8),
}


# What multiplies values of unit variance: around 1.
GAINS = ("norm.weight", "norm_1.weight", "norm_2.weight", ".scale", ".per_expert_scale", ".layer_scalar")


class Family(StrEnum):
    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"
    QWEN3_5 = "qwen3_5_text"
    QWEN3_5_MOE = "qwen3_5_moe_text"
    GPT_OSS = "gpt_oss"
    GEMMA4 = "gemma4_text"


class Size(StrEnum):
    TINY = "tiny"
    SMALL = "small"
    SMOLLM2 = "smollm2"
    B1 = "1b"
    B8 = "8b"
    B9 = "9b"
    B20 = "20b"
    B26_A4B = "26b-a4b"
    B30_A3B = "30b-a3b"
    B31 = "31b"
    B35_A3B = "35b-a3b"
    B70 = "70b"
    B120 = "120b"


class Dtype(StrEnum):
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


def write_checkpoint(
    out: Path,
    family: Family,
    size: Size,
    *,
    layers: int | None = None,
    dtype: Dtype = Dtype.BFLOAT16,
    sparse: bool = False,
    seed: int = 0,
    **more: Any,
) -> int:
    """Write config.json, with the fields ``more``, and model.safetensors; return the bytes of the weights."""
    shapes = write_config(out, family, size, layers=layers, dtype=dtype, **more)
    stored = getattr(torch, dtype.value)
    header = safetensors_header(dict.fromkeys(shapes, stored), shapes)
    nbytes: int = sum(math.prod(shape) for shape in shapes.values()) * _STORED[stored][1]
    generator = torch.Generator().manual_seed(seed)
    with (out / "model.safetensors").open("wb") as stream:
        stream.write(header)
        if sparse:
            stream.truncate(len(header) + nbytes)
            return nbytes
        for name, shape in shapes.items():
            spread = torch.randn(shape, generator=generator) * (0.5 / math.sqrt(shape[-1]))
            values = (1 + spread if name.endswith(GAINS) else spread).to(stored)
            stream.write(values.view(torch.uint8).numpy().tobytes())
    return nbytes


def write_config(
    out: Path, family: Family, size: Size, *, layers: int | None = None, dtype: Dtype = Dtype.BFLOAT16, **more: Any
) -> dict[str, tuple[int, ...]]:
    """Write config.json into ``out``, with the fields ``more``; return the shape of every tensor of the model."""
    from transformers import AutoConfig, AutoModelForCausalLM  # a slow import that only the writer needs

    dims = _FAMILY[family.value] | _SIZES[family.value, size.value] | more
    if layers is not None:
        dims = dims | {"num_hidden_layers": layers}
    if "layer_types" in dims:
        dims = dims | {"layer_types": dims["layer_types"][-dims["num_hidden_layers"] :]}
    config = AutoConfig.for_model(family.value, **dims)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype.value
    out.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(out)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if family not in (Family.GPT_OSS, Family.GEMMA4):  # whose experts are published joined, as here
        shapes = _published(shapes)
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]  # tied to the embedding, so not stored
    return shapes


def _published(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of published checkpoints, sorted by name: one per expert.

    transformers joins the experts when it loads them.
    """
    if not any(name.endswith(".experts.gate_up_proj") for name in shapes):
        return shapes
    published: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith(".experts"):
            published[name] = shape
            continue
        kinds = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        for expert in range(shape[0]):
            each = shape[1] // len(kinds), shape[2]
            published |= {f"{stem}.{expert}.{kind}.weight": each for kind in kinds}
    return dict(sorted(published.items()))


def vocab_of(family: Family, size: Size) -> int:
    """Return the vocabulary size of the model."""
    return int(_SIZES[family.value, size.value]["vocab_size"])


def safetensors_header(dtypes: dict[str, torch.dtype], shapes: dict[str, tuple[int, ...]]) -> bytes:
    """Return the header of a safetensors file with these tensors in this order, without gaps."""
    entries, begin = {}, 0
    for name, shape in shapes.items():
        name_of, width = _STORED[dtypes[name]]
        end = begin + math.prod(shape) * width
        entries[name] = {"dtype": name_of, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


app = typer.Typer(add_completion=False)


@app.command()
def main(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    family: Annotated[Family, typer.Option(help="Architecture.")] = Family.LLAMA,
    size: Annotated[Size, typer.Option(help="Dimensions.")] = Size.TINY,
    layers: Annotated[int | None, typer.Option(help="Number of layers. Default: that of the size.", min=1)] = None,
    dtype: Annotated[Dtype, typer.Option(help="Stored dtype.")] = Dtype.BFLOAT16,
    sparse: Annotated[bool, typer.Option("--sparse", help="Write a hole instead of weights.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
) -> None:
    """Write a checkpoint folder with random weights and a tokenizer of the model's vocabulary size."""
    try:
        import transformers  # noqa: F401  # in the environment of the tests, not in that of the demo
    except ModuleNotFoundError:
        typer.echo("random_checkpoint needs torch and transformers: pip install torch transformers", err=True)
        raise typer.Exit(2) from None
    vocab = max(vocab_of(family, size), _MIN_TOKENIZER)
    nbytes = write_checkpoint(out, family, size, layers=layers, dtype=dtype, sparse=sparse, seed=seed, vocab_size=vocab)
    write_tokenizer(out, vocab)
    typer.echo(f"{out}: {family.value} {size.value}, {nbytes / 1e9:.2f} GB of {dtype.value} weights")


if __name__ == "__main__":
    app()
