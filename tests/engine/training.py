"""What the tests of training share: tiny models that drafts learn from."""

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def model(layers: int, seed: int) -> Any:
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    return shaken(Qwen3ForCausalLM(config).eval())


@torch.no_grad()
def shaken(module: Any) -> Any:
    """Weights that hide no mistake, and that float16 keeps."""
    for parameter in module.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter)).copy_(parameter.half())
    return module
