"""Read the properties by which layers of one model differ in shape: Gemma 4, MiMo V2, Step 3.5, LFM3."""

from collections.abc import Mapping
from typing import Any

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields, is_number
from tandemrt.export.read.layer import UNIFORM, ClampedSwiglu, Heads, LayerInputs, OutputGate, Scales, Skip, Variants
from tandemrt.export.read.layer_kinds import Windows, without_mtp


def uniform_layers(fields: Fields, heads: Heads, windows: Windows) -> Variants:  # noqa: ARG001
    """Layers of one shape."""
    return UNIFORM


def gemma4_layers(fields: Fields, heads: Heads, windows: Windows) -> Variants:
    """Gemma 4: wider heads in full layers, layers without keys, and an input of each layer for every token."""
    sliding = windows[1]
    as_keys = fields.flag("attention_k_eq_v", False)
    full = _full_heads(fields, heads, sliding, as_keys)
    sharing = _count(fields, "num_kv_shared_layers", 0)
    first = len(sliding) - sharing
    if sharing and (first < 1 or set(sliding[:first]) != set(sliding)):
        raise BadCheckpoint(
            "config.json: num_kv_shared_layers should leave a layer of each kind in layer_types that has keys and "
            f"values, it is {sharing} of {len(sliding)} layers"
        )
    double = fields.flag("use_double_wide_mlp", False)
    return Variants(
        heads=tuple(heads if slides else full for slides in sliding),
        values_are_keys=as_keys,
        value_norm=True,
        sharing=sharing,
        sharing_intermediate=fields.integer("intermediate_size") * (2 if double else 1),
        inputs=_inputs(fields),
        scaled=True,
    )


def mimo_v2_layers(fields: Fields, heads: Heads, windows: Windows) -> Variants:
    """MiMo V2: twice the KV heads in sliding layers, which have sinks, and values smaller than keys."""
    kv, size = fields.integer("swa_num_key_value_heads", 2 * heads.kv), fields.integer("v_head_dim", 128)
    if kv != 2 * heads.kv or size > heads.dim:
        raise BadCheckpoint(
            f"config.json: swa_num_key_value_heads should be {2 * heads.kv}, twice num_key_value_heads, and v_head_dim "
            f"at most head_dim, {heads.dim}, they are {kv} and {size}"
        )
    for name, same in (
        *(("swa_head_dim", heads.dim), ("swa_v_head_dim", size), ("swa_num_attention_heads", heads.query)),
        *(("add_full_attention_sink_bias", False), ("add_swa_attention_sink_bias", True)),
    ):
        fields.only(name, same)
    scale = 1.0 if fields.data.get("attention_value_scale", 0.707) is None else None
    return Variants(
        heads=tuple(Heads(heads.query, kv, heads.dim) if slides else heads for slides in windows[1]),
        value_dim=size,
        value_scale=fields.number("attention_value_scale", 0.707) if scale is None else scale,
        sliding_sinks=True,
    )


def lfm3_attention(fields: Fields, heads: Heads, windows: Windows) -> Variants:  # noqa: ARG001
    """LFM3: a gate per head."""
    return Variants(gate=OutputGate() if fields.flag("use_attention_gate", True) else None)


def afmoe_attention(fields: Fields, heads: Heads, windows: Windows) -> Variants:  # noqa: ARG001
    """AFMoE: a gate per value."""
    return Variants(gate=OutputGate(per_value=True))


def laguna_layers(fields: Fields, heads: Heads, windows: Windows) -> Variants:
    """Laguna: a softplus as gate, per head or per value, and a number of query heads for each layer."""
    kinds = {True: False, "per-head": False, "per-element": True}
    fields.only("gating", *kinds)
    counts, layers = fields.get("num_attention_heads_per_layer"), len(windows[1])
    if counts is not None and (
        not isinstance(counts, list)
        or len(counts) != layers
        or not all(type(count) is int and count > 0 and count % heads.kv == 0 for count in counts)
    ):
        raise BadCheckpoint(
            f"config.json: num_attention_heads_per_layer should hold a multiple of num_key_value_heads, {heads.kv}, "
            f"for each of {layers} layers, it is {quoted(counts)}"
        )
    gate = OutputGate(per_value=kinds[fields.get("gating", True)], function="softplus")
    of_layers = None if counts is None else tuple(Heads(count, heads.kv, heads.dim) for count in counts)
    return Variants(heads=of_layers, gate=gate)


def step_layers(fields: Fields, heads: Heads, windows: Windows) -> Variants:
    """Step 3.5: other query heads in sliding layers, a gate per head, and bounds of activations in listed layers."""
    sliding, query = windows[1], heads.query
    section = fields.get("attention_other_setting", {})
    if not isinstance(section, Mapping):
        raise BadCheckpoint(f"config.json: attention_other_setting should be an object, it is {quoted(section)}")
    other = Fields(section, "config.json, attention_other_setting")
    for name, same in (
        *(("attention_type", "sliding_attention"), ("num_attention_groups", heads.kv)),
        *(("head_dim", heads.dim), ("true_head_dim", heads.dim)),
    ):
        other.only(name, same)
    query = fields.integer("num_sliding_attention_heads", other.integer("num_attention_heads", heads.query))
    other.finish()
    if query % heads.kv:
        raise BadCheckpoint(
            f"config.json: the attention heads of sliding layers should be a multiple of num_key_value_heads, got "
            f"{query}, {heads.kv}"
        )
    saved = _saved_layers(fields)  # transformers saves the number a second time, by layer
    expected = {str(at): {"num_attention_heads": query} for at, slides in enumerate(sliding) if slides}
    if saved is not None and saved != expected:
        raise BadCheckpoint(
            f"config.json: per_layer_config should give num_attention_heads {query} to the sliding layers, it is "
            f"{quoted(saved)}"
        )
    return Variants(
        heads=tuple(Heads(query, heads.kv, heads.dim) if slides else heads for slides in sliding),
        gate=OutputGate(),
        expert_clamps=_clamps(fields, "swiglu_limits", len(sliding)),
        mlp_clamps=_clamps(fields, "swiglu_limits_shared", len(sliding)),
    )


def solar_skips(fields: Fields, layers: int) -> tuple[Skip, ...]:
    """Solar: the streams before the layers bskcn_1 and bskcn_2 are mixed into those before bskcn_3 and bskcn_4."""
    lists = [fields.get(f"bskcn_{at}", []) for at in range(1, 5)]
    weights = fields.get("bskcn_tv", [1.0, 1.0])
    numbers = isinstance(weights, list) and len(weights) == 2 and all(map(is_number, weights))
    if not numbers or not all(isinstance(listed, list) and all(type(at) is int for at in listed) for listed in lists):
        raise BadCheckpoint(
            f"config.json: bskcn_1 to bskcn_4 should list layers, and bskcn_tv hold two numbers, they are "
            f"{quoted(lists)} and {quoted(weights)}"
        )
    skips = []
    for sources, targets in ((lists[0], lists[2]), (lists[1], lists[3])):
        for target in sorted(targets):
            earlier = [source for source in sources if source <= target]
            if not earlier or not 0 < target < layers:
                raise BadCheckpoint(
                    f"config.json: a layer of bskcn_3 or bskcn_4 should have an earlier one in bskcn_1 or bskcn_2, and "
                    f"be one of {layers}, it is {target}"
                )
            skips.append(Skip(max(earlier), target, float(weights[1])))  # the first weight is for training
    return tuple(skips)


def gemma4_scales(fields: Fields, head_dim: int, hidden: int) -> Scales:  # noqa: ARG001
    """Return the scales of Gemma 4: queries are normed, so scores are not scaled."""
    capped = fields.get("final_logit_softcapping") is not None
    cap = fields.number("final_logit_softcapping") if capped else 0.0
    return Scales(attention=1.0, embedding=hidden**0.5, logits_softcap=cap)


def _saved_layers(fields: Fields) -> Any:
    """Return ``per_layer_config``; transformers writes zeros before numbers of layers, so that all are equally long."""
    saved = fields.get("per_layer_config")
    return {str(at).lstrip("0") or "0": each for at, each in saved.items()} if isinstance(saved, dict) else saved


def _clamps(fields: Fields, name: str, layers: int) -> tuple[ClampedSwiglu | None, ...]:
    """Return the bounds of activations by layer; 0 and null bound nothing."""
    limits = without_mtp(fields, fields.get(name, [None] * layers), layers)
    if (
        not isinstance(limits, list)
        or len(limits) != layers
        or not all(each is None or (is_number(each) and each >= 0) for each in limits)
    ):
        raise BadCheckpoint(
            f"config.json: {name} should hold a number of at least 0, or null, for each of {layers} layers, it is "
            f"{quoted(limits)}"
        )
    return tuple(ClampedSwiglu(1.0, float(each), offset=0.0, clamped_after=True) if each else None for each in limits)


def _full_heads(fields: Fields, heads: Heads, sliding: tuple[bool, ...], as_keys: bool) -> Heads:
    """Return the heads of full layers: from ``global_*`` fields, or as transformers 5 saves them, layer by layer."""
    saved = _saved_layers(fields)
    if saved is None:
        sizes = {"head_dim": fields.integer("global_head_dim", 512, most=65_536)}
        kv_heads = fields.get("num_global_key_value_heads")
        if as_keys and kv_heads is not None:
            sizes["num_key_value_heads"] = fields.integer("num_global_key_value_heads")
    else:
        fields.skip("global_head_dim", "num_global_key_value_heads")
        layers = [str(layer) for layer, slides in enumerate(sliding) if not slides]
        each = list(saved.values()) if isinstance(saved, dict) else []
        if not each or set(saved) != set(layers) or any(one != each[0] for one in each) or type(each[0]) is not dict:
            raise BadCheckpoint(
                f"config.json: per_layer_config should have equal objects for the full layers, {', '.join(layers)}, it "
                f"is {quoted(saved)}"
            )
        inner = Fields(each[0], "config.json, per_layer_config")
        sizes = {"head_dim": inner.integer("head_dim", heads.dim, most=65_536)}
        sizes["num_key_value_heads"] = inner.integer("num_key_value_heads", heads.kv)
        inner.finish()
    full = Heads(heads.query, sizes.get("num_key_value_heads", heads.kv), sizes["head_dim"])
    if full.query % full.kv or full.dim % 2:
        raise BadCheckpoint(
            "config.json: num_global_key_value_heads should divide num_attention_heads, and global_head_dim should be "
            f"even, they are {full.kv} and {full.dim}"
        )
    return full


def _inputs(fields: Fields) -> LayerInputs | None:
    """Return the inputs per layer; None if their width is 0."""
    vocab, rows = fields.integer("vocab_size"), fields.integer("vocab_size_per_layer_input", 262_144)
    if not _count(fields, "hidden_size_per_layer_input", 256):
        return None
    if rows < vocab:
        raise BadCheckpoint(
            f"config.json: vocab_size_per_layer_input should be at least vocab_size, {vocab}, it is {rows}"
        )
    padding = fields.get("pad_token_id", 0)
    if type(padding) is not int or not 0 <= padding < rows:
        raise BadCheckpoint(f"config.json: pad_token_id should be a token id below {rows}, it is {quoted(padding)}")
    return LayerInputs(fields.integer("hidden_size_per_layer_input", 256), rows, padding)


def _count(fields: Fields, name: str, default: int) -> int:
    """Return an integer of at least 0."""
    return 0 if fields.get(name, default) == 0 else fields.integer(name, default)
