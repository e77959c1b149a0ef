"""The two demo models: Qwen3 architecture, one vocabulary, a target and a draft a twentieth of its size."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

CHECKPOINTS = Path(__file__).parent / "checkpoints"
TARGET, DRAFT = CHECKPOINTS / "target", CHECKPOINTS / "draft"

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


def create(shape: dict[str, int], tokenizer: Any, seed: int) -> Any:
    """Return a freshly initialized model in float32. Its vocabulary is the tokenizer's, padded to a multiple of 64."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        **shape,
        vocab_size=-(-len(tokenizer) // 64) * 64,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
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
