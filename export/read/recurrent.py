"""Read the recurrent layers of hybrid models."""

import math
from dataclasses import replace
from typing import Literal

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields, is_number
from tandemrt.export.read.layer_kinds import hybrid_layers, lfm3_layers, named_layers
from tandemrt.export.read.recurrent_layers import DeltaNet, KimiDelta, Mamba2, ShortConvolution

_MAMBA_FIELDS = (
    *("mamba_n_heads", "mamba_expand", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    *("mamba_conv_bias", "mamba_proj_bias", "time_step_limit"),
)
_NEMOTRON_BLOCKS = {
    "M": "mamba",
    "*": "attention",
    "E": "moe",
    "-": "mlp",
    "linear_attention": "mamba",
    "mamba": "mamba",
    "full_attention": "attention",
    "attention": "attention",
    "moe": "moe",
    "mlp": "mlp",
}
_INFINITY = {"__float__": "Infinity"}  # as transformers 5 writes it
_LARGEST = 1e308  # as Nemotron 3 Ultra writes it; no float32 is larger


def not_recurrent(fields: Fields, layers: int) -> None:
    """A model with attention in every layer."""


def delta_net(fields: Fields, layers: int) -> DeltaNet:
    """Qwen3.5: a gated delta net in the layers that ``layer_types`` calls linear_attention."""
    kinds = hybrid_layers(fields, layers)
    key_heads, value_heads = fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32)
    kernel = _kernel(fields, "linear_conv_kernel_dim", 4)
    key_dim, value_dim = (fields.integer(f"linear_{kind}_head_dim", 128, most=65_536) for kind in ("key", "value"))
    return _shared_evenly(DeltaNet(kinds, key_heads, value_heads, key_dim, value_dim, kernel))


def joined_delta_net(fields: Fields, layers: int) -> DeltaNet:
    """Qwen3-Next: as Qwen3.5, with projections that are joined by key head."""
    return replace(delta_net(fields, layers), projections="by key head")


def olmo_delta_net(fields: Fields, layers: int) -> DeltaNet:
    """OLMo Hybrid: queries, keys and values have a weight each; the rate of the delta rule may be doubled."""
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    key_heads, value_heads = (fields.integer(f"linear_num_{kind}_heads", heads) for kind in ("key", "value"))
    key_dim = fields.integer("linear_key_head_dim", int(0.75 * hidden / key_heads), most=65_536)
    net = DeltaNet(
        hybrid_layers(fields, layers),
        key_heads,
        value_heads,
        key_dim,
        fields.integer("linear_value_head_dim", 2 * key_dim, most=65_536),
        _kernel(fields, "linear_conv_kernel_dim", 4),
        projections="separate",
        update_scale=2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0,
        norm_eps=1e-5,  # whatever the epsilon of other norms is
    )
    return _shared_evenly(net)


def kimi_delta(fields: Fields, layers: int) -> KimiDelta:
    """Kimi Linear: the layers of ``kda_layers``, counted from 1; as transformers saves it, those of ``layer_types``."""
    default = ["full_attention" if at and at % 4 == 0 else "linear_attention" for at in range(layers)]
    names, inner = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"), fields
    if (section := fields.get("linear_attn_config")) is not None:
        if not isinstance(section, dict):
            raise BadCheckpoint(f"config.json: linear_attn_config should be an object, it is {quoted(section)}")
        names, inner = ("num_heads", "head_dim", "short_conv_kernel_size"), Fields(section, "linear_attn_config")
        of_kinds = [inner.get(name, []) for name in ("kda_layers", "full_attn_layers")]
        listed = [at for kind in of_kinds if isinstance(kind, list) for at in kind]
        if any(type(at) is not int for at in listed) or sorted(listed) != list(range(1, layers + 1)):
            raise BadCheckpoint(
                "config.json: kda_layers and full_attn_layers should name each layer once, counted from 1, they are "
                f"{quoted(of_kinds)}"
            )
        default = ["linear_attention" if at + 1 in of_kinds[0] else "full_attention" for at in range(layers)]
    kinds = named_layers(fields, layers, ("linear_attention",), ("full_attention",), default)
    net = KimiDelta(kinds, inner.integer(names[0], 32), inner.integer(names[1], 128), _kernel(inner, names[2], 4))
    if inner is not fields:
        inner.finish()
    return net


def short_convolution(fields: Fields, layers: int) -> ShortConvolution | None:
    """LFM2: the layers that ``layer_types`` calls conv, else all but those of ``full_attn_idxs``."""
    attention_layers = fields.get("full_attn_idxs", list(range(layers)))
    if not isinstance(attention_layers, list) or not all(type(at) is int for at in attention_layers):
        raise BadCheckpoint(f"config.json: full_attn_idxs should be a list of layers, it is {quoted(attention_layers)}")
    default = ["full_attention" if at in attention_layers else "conv" for at in range(layers)]
    return _convolution(fields, named_layers(fields, layers, ("conv",), ("full_attention",), default), 3)


def lfm3_convolution(fields: Fields, layers: int) -> ShortConvolution | None:
    """LFM3: the layers that ``lfm3_layers`` calls conv."""
    return _convolution(fields, tuple(kind == "conv" for kind in lfm3_layers(fields, layers)), 7)


def _convolution(fields: Fields, layers: tuple[bool, ...], kernel: int) -> ShortConvolution | None:
    kernel, bias = _kernel(fields, "conv_L_cache", kernel), fields.flag("conv_bias", False)
    return ShortConvolution(layers, kernel, fields.integer("hidden_size"), bias) if any(layers) else None


def granite_mamba2(fields: Fields, layers: int) -> Mamba2 | None:
    """Granite 4: the layers that ``layer_types`` calls mamba, or linear_attention."""
    names = ("mamba", "linear_attention"), ("attention", "full_attention")
    return _mamba2(fields, named_layers(fields, layers, *names, default=["mamba"] * layers))


def bamba_mamba2(fields: Fields, layers: int) -> Mamba2 | None:
    """Bamba: all layers but those of ``attn_layer_indices``."""
    attention_layers = fields.get("attn_layer_indices", [])
    if not isinstance(attention_layers, list) or not all(type(at) is int for at in attention_layers):
        raise BadCheckpoint(
            f"config.json: attn_layer_indices should be a list of layers, it is {quoted(attention_layers)}"
        )
    fields.skip("layers_block_type", "layer_types")  # transformers derives them from attn_layer_indices
    return _mamba2(fields, tuple(at not in attention_layers for at in range(layers)))


def falcon_mamba2(fields: Fields, layers: int) -> Mamba2:
    """Falcon-H1: Mamba-2 and attention in every layer, with a constant factor at every matmul."""
    fields.skip("mamba_expand")  # mamba_d_ssm is the width
    heads, bias = fields.integer("mamba_n_heads", 128), fields.flag("mamba_proj_bias", False)
    width = fields.integer("mamba_d_ssm", 1024)
    fields.only("mamba_d_head", width // heads, "auto")
    fields.only("projectors_bias", bias)
    norm: Literal["after the gate", "before the gate"] = (
        "before the gate" if fields.flag("mamba_norm_before_gate", True) else "after the gate"
    )
    gate, value, key, query, step = numbers(fields, "ssm_multipliers", 5)
    net = Mamba2(
        (True,) * layers,
        heads,
        width // heads,
        fields.integer("mamba_n_groups", 1),
        fields.integer("mamba_d_state", 256),
        _kernel(fields, "mamba_d_conv", 4),
        fields.flag("mamba_conv_bias", True),
        bias,
        norm if fields.flag("mamba_rms_norm", False) else None,
        with_attention=True,
        scales=(
            fields.number("ssm_in_multiplier", 1.0),
            (gate, value, key, query, step),
            fields.number("ssm_out_multiplier", 1.0),
        ),
    )
    return _checked(fields, net)


def nemotron_mamba2(fields: Fields, layers: int) -> Mamba2 | None:  # noqa: ARG001
    """Nemotron-H: the blocks that are called M, or linear_attention."""
    kinds = tuple(mixer == "mamba" for mixer, _ in nemotron_layers(fields))
    fields.only("mamba_hidden_act", "silu")
    fields.only("mamba_proj_bias", False)
    fields.skip("expand")  # the heads have the width
    fields.only("norm_eps", fields.get("layer_norm_epsilon"))
    net = Mamba2(
        kinds,
        fields.integer("mamba_num_heads", 128),
        fields.integer("mamba_head_dim", 64),
        fields.integer("n_groups", 8),
        fields.integer("ssm_state_size", 128),
        _kernel(fields, "conv_kernel", 4),
        fields.flag("use_conv_bias", True),
        fields.flag("use_bias", False),
    )
    return _checked(fields, net) if any(kinds) else None


def nemotron_layers(fields: Fields) -> tuple[tuple[str, str | None], ...]:
    """Return for each layer its mixer, mamba or attention, and what follows it: moe, mlp or None.

    A block of Nemotron-H has one part. A layer is a mixer, and the MLP or the experts after it if there are any.
    """
    blocks = fields.get("layers_block_type", fields.get("hybrid_override_pattern"))
    fields.skip("hybrid_override_pattern")
    kinds = [_NEMOTRON_BLOCKS.get(str(each)) for each in blocks] if isinstance(blocks, list | str) else [None]
    layers: list[tuple[str, str | None]] = []
    for kind in kinds:
        if kind in ("mamba", "attention"):
            layers.append((kind, None))
        elif kind is not None and layers and layers[-1][1] is None:
            layers[-1] = layers[-1][0], kind
        else:
            raise BadCheckpoint(
                "config.json: hybrid_override_pattern should name mixers, M or *, each perhaps with an MLP, - or E, "
                f"after it, it is {quoted(blocks)}"
            )
    if fields.get("num_hidden_layers", len(kinds)) != len(kinds):
        raise BadCheckpoint(
            f"config.json: num_hidden_layers should be the number of blocks, {len(kinds)}, it is "
            f"{quoted(fields.get('num_hidden_layers'))}"
        )
    return tuple(layers)


def nemotron_count(fields: Fields) -> int:
    return len(nemotron_layers(fields))


def nemotron_mlps(fields: Fields) -> tuple[bool, ...]:
    return tuple(mlp is not None for _, mlp in nemotron_layers(fields))


def numbers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    """Return a field of ``count`` numbers, which are 1 if it is absent."""
    values = fields.get(name, [1.0] * count)
    if not isinstance(values, list) or len(values) != count or not all(map(is_number, values)):
        raise BadCheckpoint(f"config.json: {name} should be {count} numbers, it is {quoted(values)}")
    return tuple(map(float, values))


def _shared_evenly(net: DeltaNet) -> DeltaNet:
    if net.value_heads % net.key_heads:
        raise BadCheckpoint(
            "config.json: linear_num_value_heads should be a multiple of linear_num_key_heads, got "
            f"{net.value_heads}, {net.key_heads}"
        )
    return net


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
    if limit not in ([0.0, math.inf], [0.0, _INFINITY], [0.0, _LARGEST]):
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
