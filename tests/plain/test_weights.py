"""References to external weights in a graph: their location, and whether two references are the same tensor."""

import json
from pathlib import Path

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
