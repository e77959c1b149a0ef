"""Write drafts in the format of ``speculators``: fields of their layers, and maps of their vocabulary."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def save(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    vocabulary: torch.Tensor,
    target: Any,
    layers: Mapping[str, Any],
    fields: Mapping[str, Any],
) -> None:
    """Write a folder in the format of ``speculators``: weights in float16, without the target's embedding.

    ``vocabulary``: ids of the target that are drafted, ascending. ``layers``: fields of config.json for the draft's
    layers, in addition to those shared with the target. ``fields``: fields for the draft.
    """
    config, vocabulary = target.config, vocabulary.cpu()
    known = torch.zeros(config.vocab_size, dtype=torch.bool)
    known[vocabulary] = True
    maps = {"d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": known}
    layer_config = {
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_parameters["rope_theta"], "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        **layers,
    }
    written = {
        **fields,
        "draft_vocab_size": len(vocabulary),
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_config,
    }
    write(folder, tensors, written, maps)


def write(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    maps: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a folder with config.json, with ``tensors`` in float16 and ``maps`` unchanged."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: each.detach().half().cpu().contiguous() for name, each in tensors.items()}
    save_file(weights | dict(maps or {}), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float16"}, indent=2) + "\n")
