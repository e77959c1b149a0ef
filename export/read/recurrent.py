"""Read the recurrent layers of hybrid models."""

from dataclasses import replace

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.layer import DeltaNet
from tandemrt.export.read.layer_kinds import hybrid_layers


def not_recurrent(fields: Fields, layers: int) -> None:
    """A model with attention in every layer."""


def delta_net(fields: Fields, layers: int) -> DeltaNet:
    """Qwen3.5: a gated delta net in the layers that ``layer_types`` calls linear_attention."""
    kinds = hybrid_layers(fields, layers)
    key_heads, value_heads = fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise BadCheckpoint(
            "config.json: linear_num_value_heads should be a multiple of linear_num_key_heads, got "
            f"{value_heads}, {key_heads}"
        )
    kernel = fields.integer("linear_conv_kernel_dim", 4, most=64)
    if kernel < 2:
        raise BadCheckpoint(f"config.json: linear_conv_kernel_dim should be at least 2, it is {kernel}")
    key_dim, value_dim = (fields.integer(f"linear_{kind}_head_dim", 128, most=65_536) for kind in ("key", "value"))
    return DeltaNet(kinds, key_heads, value_heads, key_dim, value_dim, kernel)


def joined_delta_net(fields: Fields, layers: int) -> DeltaNet:
    """Qwen3-Next: as Qwen3.5, with projections that are joined by key head."""
    return replace(delta_net(fields, layers), by_key_head=True)
