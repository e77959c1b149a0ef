"""The demo models: a Qwen3 target, a draft a twentieth of its size, and a hybrid of Qwen3.5; one vocabulary."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CHECKPOINTS = Path(__file__).parent / "checkpoints"
TARGET, DRAFT, HYBRID = CHECKPOINTS / "target", CHECKPOINTS / "draft", CHECKPOINTS / "hybrid"

TARGET_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
DRAFT_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


# The draft's sizes where it has a part. Two delta nets, where Qwen3.5 has three before each full attention: all weights
# of the demo have 16 MB.
HYBRID_SHAPE: dict[str, Any] = DRAFT_SHAPE | {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
}


def create(shape: dict[str, int], tokenizer: Any, seed: int) -> Any:
    """Return a freshly initialized Qwen3 model in float32."""
    torch.manual_seed(seed)
    return _with_ends(Qwen3ForCausalLM(Qwen3Config(**shape, **_common(tokenizer))), tokenizer)


def create_hybrid(tokenizer: Any, seed: int) -> Any:
    """Return a freshly initialized Qwen3.5 model in float32."""
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(**HYBRID_SHAPE, **_common(tokenizer))
    return _with_ends(Qwen3_5ForCausalLM(config), tokenizer)


def _common(tokenizer: Any) -> dict[str, Any]:
    """Return the fields that the configs share. The vocabulary is the tokenizer's, padded to a multiple of 64."""
    return {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _with_ends(model: Any, tokenizer: Any) -> Any:
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    return model


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write an ordinary Hugging Face folder with weights in float16."""
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load(folder: Path, device: str = "cpu") -> tuple[Any, Any]:
    """Return (model, tokenizer) of a saved folder: float16 weights, converted to float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)
