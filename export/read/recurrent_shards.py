"""How the ranks of a tensor-parallel target split recurrent layers: by heads, or by the channels of a convolution.

A rank has the states of its heads. Mamba-2's keys and queries belong to groups of heads; a group is on every rank that
has some of its heads, like a KV head.
"""

from collections.abc import Mapping
from dataclasses import replace

from tandemrt.export.read.recurrent_layers import (
    DeltaNet,
    KimiDelta,
    Mamba2,
    NormOverRanks,
    RecurrentLayers,
    ShortConvolution,
)

# Consecutive rows of a tensor, and the number of equal parts in them, such as heads.
Section = tuple[int, int]
_EVEN = 2  # channels, which kernels of convolutions read in pairs


def part_of(net: RecurrentLayers, rank: int, ranks: int) -> RecurrentLayers:
    """Return the sizes of the part of a layer that ``rank`` of ``ranks`` has."""
    if isinstance(net, ShortConvolution):
        return replace(net, channels=net.channels // ranks)
    if isinstance(net, DeltaNet):
        return replace(net, key_heads=net.key_heads // ranks, value_heads=net.value_heads // ranks)
    if isinstance(net, KimiDelta):
        return replace(net, heads=net.heads // ranks)
    over = NormOverRanks(rank, ranks, net.groups) if net.norm is not None and net.groups < ranks else None
    return replace(net, heads=net.heads // ranks, groups=max(1, net.groups // ranks), norm_over_ranks=over)


def sections_of(net: RecurrentLayers) -> Mapping[str, tuple[Section, ...]]:
    """Return the sections of each tensor that is split by rows, by its name in the layer without "weight" or "bias"."""
    if isinstance(net, ShortConvolution):
        channels = (net.channels, net.channels)
        return {"in_proj": (channels,) * 3, "conv1d": (channels,)}
    if isinstance(net, DeltaNet):
        return _of_delta_net(net)
    if isinstance(net, KimiDelta):
        values, heads = (net.mixed, net.heads), (net.heads, net.heads)
        wide = ("q_proj", "k_proj", "v_proj", "f_b_proj", "g_b_proj", "q_conv1d", "k_conv1d", "v_conv1d", "dt_bias")
        return dict.fromkeys(wide, (values,)) | {"b_proj": (heads,), "A_log": (heads,)}
    values, heads, keys = (net.mixed, net.heads), (net.heads, net.heads), (net.groups * net.state_dim, net.groups)
    sections: dict[str, tuple[Section, ...]] = {
        "in_proj": (values, values, keys, keys, heads),  # gates, values, keys, queries, step sizes
        "conv1d": (values, keys, keys),
        "norm": (values,),
    }
    return sections | dict.fromkeys(("A_log", "D", "dt_bias"), (heads,))


def obstacle(net: RecurrentLayers, ranks: int) -> str | None:
    """Return why ``ranks`` cannot split a layer; None: they can."""
    if isinstance(net, ShortConvolution):
        if net.channels % (ranks * _EVEN):
            return f"its {net.channels} channels of a convolution do not give {ranks} ranks an even number each"
        return None
    heads = net.key_heads if isinstance(net, DeltaNet) else net.heads
    if heads % ranks:
        kind = "key heads" if isinstance(net, DeltaNet) else "heads"
        return f"the {heads} {kind} of its recurrent layers are no multiple of {ranks}"
    if not isinstance(net, Mamba2):
        return None
    if net.groups % ranks and ranks % net.groups:
        return f"the {net.groups} groups of its recurrent layers are neither a multiple nor a divisor of {ranks}"
    if net.norm == "before the gate" and net.groups < ranks:
        return f"its recurrent layers norm {net.groups} groups of heads before the gate, which are fewer than {ranks}"
    return None


def _of_delta_net(net: DeltaNet) -> Mapping[str, tuple[Section, ...]]:
    keys = (net.key_heads * net.key_dim, net.key_heads)
    values, heads = (net.mixed, net.value_heads), (net.value_heads, net.value_heads)
    sections: dict[str, tuple[Section, ...]] = {
        "in_proj_qkv": (keys, keys, values),
        "in_proj_qkvz": ((net.channels + net.mixed, net.key_heads),),  # ordered by key head
        "in_proj_ba": ((2 * net.value_heads, net.key_heads),),
        "conv1d": (keys, keys, values),
    }
    sections |= dict.fromkeys(("q_proj", "k_proj", "q_conv1d", "k_conv1d"), (keys,))
    sections |= dict.fromkeys(("v_proj", "v_conv1d", "in_proj_z"), (values,))
    return sections | dict.fromkeys(("in_proj_a", "in_proj_b", "A_log", "dt_bias"), (heads,))
