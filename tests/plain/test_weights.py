"""References to external weights in a graph: their location, and whether two references are the same tensor."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.graph.builder import GraphBuilder
from tandemrt.export.graph.weights import Weights
from tandemrt.export.read.checkpoint import Checkpoint

LARGE = (9 << 20,)  # 36 MiB of float32


def opened(folder: Path, **files: dict[str, np.ndarray]) -> tuple[Weights, GraphBuilder]:
    """Return the weights of a checkpoint whose shards are ``files``."""
    index = {}
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
        index |= dict.fromkeys(tensors, f"{name}.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    builder = GraphBuilder("weights")
    return Weights(Checkpoint.open(folder), builder, "float32"), builder


@pytest.mark.parametrize("at", [0, LARGE[0] - 1])
def test_a_difference_at_any_byte_is_found(tmp_path: Path, at: int) -> None:
    embedding = np.zeros(LARGE, np.float32)
    head = embedding.copy()
    weights, _ = opened(tmp_path, one={"embedding": embedding, "head": head})
    weights.same("head", "embedding")
    head[at] = 1
    weights, _ = opened(tmp_path, one={"embedding": embedding, "head": head})
    with pytest.raises(BadCheckpoint, match=r"'head' is 'embedding' .* the stored tensors differ"):
        weights.same("head", "embedding")


def test_adjacent_tensors_of_one_file_are_joined_and_those_of_two_files_never(tmp_path: Path) -> None:
    gate, last, tail = (np.full((2, 4), value, np.float32) for value in (1, 2, 3))
    weights, builder = opened(tmp_path, one={"gate": gate, "last": last}, two={"head": tail, "tail": tail})
    tensors = weights.checkpoint.tensors
    # Both files begin alike, so an offset alone does not locate a tensor.
    assert tensors["gate"].offset + tensors["gate"].nbytes == tensors["tail"].offset
    weights.stacked(["gate", "last"], [2, 2], (4,))
    assert (list(builder.initializers), builder.nodes) == (["gate+last"], [])
    weights.stacked(["gate", "tail"], [2, 2], (4,))
    assert list(builder.initializers) == ["gate+last", "gate", "tail"]
    assert [node.op_type for node in builder.nodes] == ["Concat"]


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},  # as NVFP4 of GLM-5 and MiniMax M2
        {  # as Kimi-K2.5
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": ["lm_head", "re:.*self_attn.*"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
                }
            },
        },
    ],
    ids=lambda config: config["quant_method"],
)
def test_a_router_that_no_pattern_names_is_unquantized_if_its_weight_is(tmp_path: Path, config: dict[str, Any]) -> None:
    plain, packed = np.zeros((4, 32), np.float32), np.zeros((4, 16), np.uint8)
    layer = "model.layers.3.mlp"
    tensors = {f"{layer}.gate.weight": plain, f"{layer}.experts.0.up_proj.weight": packed}
    opened(tmp_path, one=tensors | {f"{layer}.shared_expert_gate.weight": plain[:1]})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    weights = Weights(Checkpoint.open(tmp_path), GraphBuilder("weights"), "float32")
    expert = weights.scheme(f"{layer}.experts.0.up_proj")
    assert expert is not None
    assert expert.packed
    assert weights.scheme(f"{layer}.gate") is weights.scheme(f"{layer}.shared_expert_gate") is None
    opened(tmp_path, one={f"{layer}.gate.weight": packed})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    assert Weights(Checkpoint.open(tmp_path), GraphBuilder("weights"), "float32").scheme(f"{layer}.gate") == expert
