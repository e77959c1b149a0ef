"""Read the recurrent layers of hybrid models."""

import math
from dataclasses import replace

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.layer_kinds import hybrid_layers, named_layers
from tandemrt.export.read.recurrent_layers import DeltaNet, Mamba2, ShortConvolution

_MAMBA_FIELDS = (
    *("mamba_n_heads", "mamba_expand", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    *("mamba_conv_bias", "mamba_proj_bias", "time_step_limit"),
)
_INFINITY = {"__float__": "Infinity"}  # as transformers 5 writes it


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
    kernel = _kernel(fields, "linear_conv_kernel_dim", 4)
    key_dim, value_dim = (fields.integer(f"linear_{kind}_head_dim", 128, most=65_536) for kind in ("key", "value"))
    return DeltaNet(kinds, key_heads, value_heads, key_dim, value_dim, kernel)


def joined_delta_net(fields: Fields, layers: int) -> DeltaNet:
    """Qwen3-Next: as Qwen3.5, with projections that are joined by key head."""
    return replace(delta_net(fields, layers), by_key_head=True)


def short_convolution(fields: Fields, layers: int) -> ShortConvolution | None:
    """LFM2: the layers that ``layer_types`` calls conv, else all but those of ``full_attn_idxs``."""
    given = fields.get("full_attn_idxs", list(range(layers)))
    if not isinstance(given, list) or not all(type(at) is int for at in given):
        raise BadCheckpoint(f"config.json: full_attn_idxs should be a list of layers, it is {quoted(given)}")
    default = ["full_attention" if at in given else "conv" for at in range(layers)]
    kinds = named_layers(fields, layers, ("conv",), ("full_attention",), default)
    kernel, bias = _kernel(fields, "conv_L_cache", 3), fields.flag("conv_bias", False)
    return ShortConvolution(kinds, kernel, fields.integer("hidden_size"), bias) if any(kinds) else None


def granite_mamba2(fields: Fields, layers: int) -> Mamba2 | None:
    """Granite 4: the layers that ``layer_types`` calls mamba, or linear_attention."""
    names = ("mamba", "linear_attention"), ("attention", "full_attention")
    return _mamba2(fields, named_layers(fields, layers, *names, default=["mamba"] * layers))


def bamba_mamba2(fields: Fields, layers: int) -> Mamba2 | None:
    """Bamba: all layers but those of ``attn_layer_indices``."""
    given = fields.get("attn_layer_indices", [])
    if not isinstance(given, list) or not all(type(at) is int for at in given):
        raise BadCheckpoint(f"config.json: attn_layer_indices should be a list of layers, it is {quoted(given)}")
    fields.skip("layers_block_type", "layer_types")  # transformers derives them from attn_layer_indices
    return _mamba2(fields, tuple(at not in given for at in range(layers)))


def _mamba2(fields: Fields, kinds: tuple[bool, ...]) -> Mamba2 | None:
    if not any(kinds):
        fields.skip(*_MAMBA_FIELDS)
        return None
    heads, hidden = fields.integer("mamba_n_heads", 128), fields.integer("hidden_size")
    width, size = fields.integer("mamba_expand", 2) * hidden, fields.get("mamba_d_head", "auto")
    head_dim = width // heads if size == "auto" else fields.integer("mamba_d_head")
    if heads * head_dim != width:
        raise BadCheckpoint(
            f"config.json: mamba_n_heads times mamba_d_head should be mamba_expand times hidden_size, {width}, it is "
            f"{heads} times {head_dim}"
        )
    net = Mamba2(
        kinds,
        heads,
        head_dim,
        fields.integer("mamba_n_groups", 1),
        fields.integer("mamba_d_state", 256),
        _kernel(fields, "mamba_d_conv", 4),
        fields.flag("mamba_conv_bias", True),
        fields.flag("mamba_proj_bias", False),
    )
    return _checked(fields, net)


def _checked(fields: Fields, net: Mamba2) -> Mamba2:
    """Reject fields that change the recurrence."""
    limit = fields.get("time_step_limit", [0.0, math.inf])
    if limit not in ([0.0, math.inf], [0.0, _INFINITY]):
        raise BadCheckpoint(
            "config.json: time_step_limit should be 0 and infinity, the exporter does not implement other limits; it "
            f"is {quoted(limit)}"
        )
    if net.heads % net.groups:
        raise BadCheckpoint(
            f"config.json: the Mamba heads should be a multiple of their groups, got {net.heads}, {net.groups}"
        )
    return net


def _kernel(fields: Fields, name: str, default: int) -> int:
    kernel = fields.integer(name, default, most=64)
    if kernel < 2:
        raise BadCheckpoint(f"config.json: {name} should be at least 2, it is {kernel}")
    return kernel
