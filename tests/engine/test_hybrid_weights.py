"""Quantized checkpoints of hybrid models on a CPU: every matmul of every layer is quantized, but for routers.

The config lists routers under their names in the checkpoint. `make test-hybrids` runs all families.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandemrt.export.read.checkpoint import Checkpoint
from tests.engine.decoding import VOCAB, Decoder, edit_config, make_checkpoint
from tests.engine.quantized import Stored, float8, integers, pack, packed
from tests.families.cases import FAMILIES

HYBRIDS = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "lfm2_moe", "lfm3", "bamba", "falcon_h1", "nemotron_h"]
HYBRIDS += ["olmo_hybrid"]
SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "moe_latent_size": 32}
SIZES |= {"shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32}
SIZES |= {"shared_intermediate_size": 64}
UNQUANTIZED = (".gate", ".shared_expert_gate", "embed_tokens", "embeddings", "lm_head")
TEXT = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()


class Format(NamedTuple):
    """A format of compressed-tensors: the tensors that it stores for a weight, and the weight that they mean."""

    name: str
    weights: dict[str, Any]
    quantize: Callable[[torch.Tensor], tuple[Stored, torch.Tensor]]
    error: float  # of the logits, relative to their norm; recurrent layers amplify the rounding of inputs


def in_float8(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    values, scale, meant = float8(weight, (1, 0))
    return {"weight": values, "weight_scale": scale}, meant


def in_4_bits(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    values, scale, zero = integers(weight, 32, False, 4)
    stored = pack("compressed-tensors", values, scale, zero, zeros=False, bits=4)
    return stored, (values - zero.repeat_interleave(32, 1)) * scale.repeat_interleave(32, 1)


FLOAT8 = Format(
    "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}, in_float8, 1e-6
)
INT4 = Format("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, in_4_bits, 0.3)
CASES = [("nemotron_h", FLOAT8), ("qwen3_5", INT4), ("granite 4 dense", INT4)]  # Granite joins gate and up
if os.environ.get("HYBRID_REQUESTS"):
    CASES = [(case, stored_as) for case in HYBRIDS for stored_as in (FLOAT8, INT4)]
    CASES += [("granite 4 dense", FLOAT8), ("granite 4 dense", INT4), ("kimi_linear", FLOAT8)]


@pytest.mark.parametrize(
    ("case", "stored_as"), CASES, ids=lambda value: value if isinstance(value, str) else value.name
)
def test_quantized_matmuls_give_the_logits_of_their_weights(tmp_path: Path, case: str, stored_as: Format) -> None:
    meant, quantized = tmp_path / "meant", tmp_path / "quantized"
    present = FAMILIES[case]().to_dict()
    sizes = {name: size for name, size in SIZES.items() if present.get(name)}
    make_checkpoint(case, meant, sizes=sizes | ({"hidden_size": 128} if case == "bamba" else {}))
    rewrite(meant, quantized, stored_as)
    checkpoint = Checkpoint.open(quantized)
    if stored_as.name == "pack-quantized":
        checkpoint, quantized = packed(quantized), quantized / "packed"
    expected = Decoder(meant, "grouped", batch=1, capacity=64)([TEXT], [0])[0]
    with mock.patch.object(Checkpoint, "open", return_value=checkpoint):
        logits = Decoder(quantized, "grouped", batch=1, capacity=64)([TEXT], [0])[0]
    assert (logits - expected).norm() < stored_as.error * expected.norm()


def rewrite(meant: Path, quantized: Path, how: Format) -> None:
    """Store all matmul weights of ``meant`` in ``quantized``, and what they mean in ``meant``."""
    tensors, stored = load_file(meant / "model.safetensors"), dict[str, torch.Tensor]()
    unquantized: list[str] = []
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if tensor.dim() != 2 or module == name or module.endswith(UNQUANTIZED):
            stored[name] = tensor
            unquantized += [module] if tensor.dim() == 2 else []
            continue
        parts, tensors[name] = how.quantize(tensor)
        stored |= {f"{module}.{kind}": part.contiguous() for kind, part in parts.items()}
    quantized.mkdir()
    save_file(tensors, meant / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    (quantized / "config.json").write_text((meant / "config.json").read_text())
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **how.weights}, "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": how.name, "config_groups": {"all": group}}
    edit_config(quantized, quantization_config=config | {"ignore": unquantized})
