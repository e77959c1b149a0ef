"""Read the properties that differ between the layers of a model: sliding windows and rotary embedding."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields

Windows = tuple[int | None, tuple[bool, ...]]  # the size of the sliding window, and for each layer whether it has one
WindowReader = Callable[[Fields, int], Windows]
_OF_CHUNKS = {"chunked_attention", "full_attention"}
_INDEXED = {"indexed_attention", "deepseek_sparse_attention"}


def no_window(fields: Fields, layers: int) -> Windows:
    """Return no sliding window; reject configs that have one."""
    fields.only("sliding_window", None)
    fields.only("use_sliding_window", False)
    _require_uniform(fields, layers, None)
    return None, (False,) * layers


def indexed_as_full(fields: Fields, layers: int) -> Windows:
    """DeepSeek-V3.2: an index chooses keys; all of them for a short text (export/read/chunks.py)."""
    kinds = fields.get("layer_types", [])  # MTP layers may follow
    if not isinstance(kinds, list) or not {str(kind) for kind in kinds} <= _INDEXED:
        raise BadCheckpoint(
            f"config.json: layer_types should say {' or '.join(sorted(_INDEXED))} for every layer, it is "
            f"{quoted(kinds)}"
        )
    return None, (False,) * layers


def listed_full_attention(fields: Fields, layers: int) -> Windows:
    """MiniMax M2: ``attn_type_list``, with 1 for full attention; no sliding window."""
    kinds = fields.get("attn_type_list", [1] * layers)
    if kinds != [1] * layers:
        raise BadCheckpoint(
            f"config.json: attn_type_list should be 1, full attention, for all {layers} layers, it is {quoted(kinds)}"
        )
    return no_window(fields, layers)


def uniform_window(fields: Fields, layers: int) -> Windows:
    """Give every layer the sliding window; no layer if ``sliding_window`` is null."""
    window = None if fields.get("sliding_window") is None else fields.integer("sliding_window")
    fields.only("use_sliding_window", window is not None)
    _require_uniform(fields, layers, window)
    return window, (window is not None,) * layers


def listed_window(fields: Fields, layers: int) -> Windows:
    """Ministral: ``layer_types``, else all layers have the sliding window; none if ``sliding_window`` is null."""
    kinds = layer_types(fields, layers)
    if kinds is None:
        return uniform_window(fields, layers)
    return _window_of(fields, kinds), tuple(kinds)


def full_unless_listed(fields: Fields, layers: int) -> Windows:
    """Mellum and Step 3.5: ``layer_types``, else full attention in all layers."""
    kinds = layer_types(fields, layers) or [False] * layers
    return _window_of(fields, kinds), tuple(kinds)


def flint_windows(fields: Fields, layers: int) -> Windows:
    """Flint: ``layer_types``, else full attention in the first two layers, every fourth layer and the last."""
    kinds = layer_types(fields, layers)
    if kinds is None:
        kinds = [at > 1 and at % 4 != 1 and at != layers - 1 for at in range(layers)]
    return _window_of(fields, kinds), tuple(kinds)


def configured_window(fields: Fields, layers: int) -> Windows:
    """Qwen2 and Qwen3: ``layer_types``, else layers from ``max_window_layers`` on if ``use_sliding_window`` is set."""
    kinds = layer_types(fields, layers)
    on, first = fields.flag("use_sliding_window", False), fields.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise BadCheckpoint(f"config.json: max_window_layers should be an integer, it is {quoted(first)}")
    # Configs without layer_types give the first layer that has a window.
    sliding = kinds if kinds else [on and i >= first for i in range(layers)]
    return _window_of(fields, sliding), tuple(sliding)


def all_layers_window(fields: Fields, layers: int) -> Windows:
    """Qwen3-MoE: all layers if ``use_sliding_window`` is set, else none."""
    on = fields.flag("use_sliding_window", False)
    window = fields.integer("sliding_window") if on else None
    fields.skip("sliding_window")
    _require_uniform(fields, layers, window)
    return window, (on,) * layers


def alternating_windows(period: int, *, full: int = -1, named: str | None = None) -> WindowReader:
    """Return a reader of ``layer_types`` with a default: one full layer per ``period`` layers, the others slide.

    ``full``: the index of the full layer within a period. ``named``: the field of older configs for the period. Without
    a ``sliding_window`` all layers are full.
    """

    def read(fields: Fields, layers: int) -> Windows:
        kinds = layer_types(fields, layers)
        every: Any = fields.get(named, period) if named else period
        if fields.get("sliding_window") is None:
            kinds = kinds or [False] * layers
        if kinds is None:
            if not isinstance(every, int) or every < 1:
                raise BadCheckpoint(
                    f"config.json: {named} should be an integer where there are no layer_types, it is {quoted(every)}"
                )
            kinds = [i % every != full % every for i in range(layers)]
        return _window_of(fields, kinds), tuple(kinds)

    return read


def cohere2_moe_windows(fields: Fields, layers: int) -> Windows:
    """Command A with experts: ``layer_types``, else a pattern for the first dense layers, and one for the others."""
    kinds = layer_types(fields, layers)
    dense = fields.get("first_k_dense_replace", 0)
    first, other = (
        fields.integer(name, default)
        for name, default in (("prefix_dense_sliding_window_pattern", 1), ("sliding_window_pattern", 4))
    )
    if kinds is None:
        of_all = [(at, first) for at in range(dense)] + [(at, other) for at in range(layers - dense)]
        kinds = [(at + 1) % period != 0 for at, period in of_all]
    return _window_of(fields, kinds), tuple(kinds)


def ending_in_full(read: WindowReader) -> WindowReader:
    """Return ``read`` with a last layer that sees all tokens, whatever its kind (Gemma 4)."""

    def ending(fields: Fields, layers: int) -> Windows:
        window, sliding = read(fields, layers)
        return window, (*sliding[:-1], False)

    return ending


def chunked_as_full(fields: Fields, layers: int) -> Windows:
    """Llama 4: layers see one chunk, or everything; the same for a text of one chunk (export/read/chunks.py)."""
    kinds = fields.get("layer_types", ["full_attention"] * layers)
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= _OF_CHUNKS:
        raise BadCheckpoint(
            f"config.json: layer_types should name {' or '.join(sorted(_OF_CHUNKS))} for each of {layers} layers, it "
            f"is {quoted(kinds)}"
        )
    return None, (False,) * layers


def mimo_v2_windows(fields: Fields, layers: int) -> Windows:
    """MiMo V2: ``layer_types``, else ``hybrid_layer_pattern`` with 1 for a sliding window, else all but every sixth.

    ``sliding_window_size`` does not count the token itself.
    """
    kinds = layer_types(fields, layers)
    pattern = fields.get("hybrid_layer_pattern", [int(at > 0 and (at + 1) % 6 != 0) for at in range(layers)])
    if not isinstance(pattern, list) or len(pattern) < layers or any(x not in (0, 1) for x in pattern):
        raise BadCheckpoint(
            f"config.json: hybrid_layer_pattern should hold 0 or 1 for each of {layers} layers, it is {quoted(pattern)}"
        )
    window = fields.integer("sliding_window", 129)
    if fields.get("sliding_window_size") is not None:
        window = fields.integer("sliding_window_size") + 1
    return window, tuple(kinds or map(bool, pattern[:layers]))


def hybrid_window(fields: Fields, layers: int) -> Windows:
    """Return no sliding window for a hybrid model, whose layer_types ``hybrid_layers`` reads."""
    fields.only("sliding_window", None)
    fields.only("use_sliding_window", False)
    return None, (False,) * layers


def lfm3_windows(fields: Fields, layers: int) -> Windows:
    """LFM3: the layers that ``lfm3_layers`` calls sliding_attention."""
    kinds = [kind == "sliding_attention" for kind in lfm3_layers(fields, layers)]
    return _window_of(fields, kinds), tuple(kinds)


def lfm3_layers(fields: Fields, layers: int) -> list[str]:
    """Return ``layer_types``, else of four layers one sliding, after the first four, and one full (LFM3)."""
    conv, full, slides = "conv", "full_attention", "sliding_attention"
    kinds = fields.get("layer_types", [(slides if at else conv, conv, full, conv)[at % 4] for at in range(layers)])
    named_layers(fields, layers, (conv,), (full, slides), kinds)
    return list(kinds)


def hybrid_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it is recurrent: as in layer_types, else all but the last of each interval."""
    interval = fields.integer("full_attention_interval", 4)
    default = ["linear_attention" if (at + 1) % interval else "full_attention" for at in range(layers)]
    return named_layers(fields, layers, ("linear_attention",), ("full_attention",), default)


def named_layers(
    fields: Fields, layers: int, recurrent: Collection[str], attention: Collection[str], default: list[str] | None
) -> tuple[bool, ...]:
    """Return for each layer whether layer_types gives it a name of ``recurrent``, not of ``attention``."""
    kinds, known = fields.get("layer_types", default), (*recurrent, *attention)
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise BadCheckpoint(
            f"config.json: layer_types should name {' or '.join(known)} for each of {layers} layers, it is "
            f"{quoted(kinds)}"
        )
    return tuple(kind in recurrent for kind in kinds)


def layer_types(fields: Fields, layers: int) -> list[bool] | None:
    """Return for each layer whether layer_types gives it a sliding window; None if there are no layer_types."""
    kinds = without_mtp(fields, fields.get("layer_types"), layers)
    if not isinstance(kinds, list | None):
        raise BadCheckpoint(f"config.json: layer_types should be a list, it is {quoted(kinds)}")
    if kinds is None:
        return None
    unknown = sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != layers:
        raise BadCheckpoint(
            f"config.json: layer_types should name full_attention or sliding_attention for each of {layers} layers, "
            f"it has {len(kinds)} entries and {quoted(unknown) if unknown else 'no others'}"
        )
    return [kind == "sliding_attention" for kind in kinds]


def without_mtp(fields: Fields, listed: Any, layers: int) -> Any:
    """Return a list with an entry per layer without the entries of MTP layers, which may follow (Step 3.5)."""
    further = fields.get("num_nextn_predict_layers", 0)
    return listed[:layers] if isinstance(listed, list) and len(listed) - layers == further else listed


def _window_of(fields: Fields, sliding: Sequence[bool]) -> int | None:
    fields.skip("sliding_window")  # without effect if no layer slides
    return fields.integer("sliding_window") if any(sliding) else None


def _require_uniform(fields: Fields, layers: int, window: int | None) -> None:
    kinds = layer_types(fields, layers)
    if kinds not in (None, [window is not None] * layers):
        raise BadCheckpoint(
            f"config.json: layer_types should say {'sliding' if window else 'full'}_attention for every layer of this "
            f"family with sliding_window {quoted(fields.get('sliding_window'))}, it is "
            f"{quoted(fields.get('layer_types'))}"
        )


RotaryReader = Callable[[Fields, int, Windows], tuple[bool, ...]]


def all_rotary(fields: Fields, layers: int, windows: Windows) -> tuple[bool, ...]:  # noqa: ARG001
    """Rotate queries and keys in every layer."""
    return (True,) * layers


def listed_rotary(fields: Fields, layers: int, windows: Windows) -> tuple[bool, ...]:  # noqa: ARG001
    """SmolLM3: ``no_rope_layers``, with 1 for layers that rotate; by default all but the last of each interval."""
    interval = fields.integer("no_rope_layer_interval", 4)
    rotates = fields.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(rotates, list) or len(rotates) < layers or any(x not in (0, 1) for x in rotates):
        raise BadCheckpoint(
            f"config.json: no_rope_layers should hold 0 or 1 for each of {layers} layers, it is {quoted(rotates)}"
        )
    return tuple(bool(x) for x in rotates[:layers])


def rotary_by_theta(fields: Fields, layers: int, windows: Windows) -> tuple[bool, ...]:  # noqa: ARG001
    """Granite with sliding windows: ``layer_rope_theta``, with 0 for layers that do not rotate."""
    thetas = fields.get("layer_rope_theta")
    if thetas is None:
        return (True,) * layers
    theta = fields.data.get("rope_theta", (fields.data.get("rope_parameters") or {}).get("rope_theta", 10_000.0))
    if not isinstance(thetas, list) or len(thetas) != layers or not all(each in (0, theta) for each in thetas):
        raise BadCheckpoint(
            f"config.json: layer_rope_theta should be a list with rope_theta, {quoted(theta)}, or 0 for each layer, it "
            f"is {quoted(thetas)}; other frequencies per layer are not supported"
        )
    return tuple(each != 0 for each in thetas)


def no_rotary(fields: Fields, layers: int, windows: Windows) -> tuple[bool, ...]:  # noqa: ARG001
    return (False,) * layers


def configured_rotary(fields: Fields, layers: int, windows: Windows) -> tuple[bool, ...]:  # noqa: ARG001
    """Granite 4: ``position_embedding_type``, rope or nope; absent: nope."""
    fields.only("position_embedding_type", "nope", "rope")
    return (fields.get("position_embedding_type", "nope") == "rope",) * layers


def rotary_if_configured(fields: Fields, layers: int, windows: Windows) -> tuple[bool, ...]:  # noqa: ARG001
    """OLMo Hybrid: all layers rotate if there are rope_parameters, or the fields of older configs."""
    names = ("rope_parameters", "rope_scaling", "rope_theta")
    parameters = fields.get("rope_parameters")
    rotates = any(fields.data.get(name) is not None for name in names)
    return (rotates and not (isinstance(parameters, dict) and parameters.get("rope_theta", 1) is None),) * layers


def cohere2_moe_rotary(fields: Fields, layers: int, windows: Windows) -> tuple[bool, ...]:
    """Command A with experts: sliding layers rotate, and dense layers whose pattern has no sliding one."""
    kinds, dense = fields.get("mlp_layer_types"), fields.get("first_k_dense_replace", 0)
    if fields.get("prefix_dense_sliding_window_pattern", 1) != 1:
        return windows[1]
    is_dense = [kind == "dense" for kind in kinds] if kinds else [at < dense for at in range(layers)]
    return tuple(slides or prefix for slides, prefix in zip(windows[1], is_dense, strict=True))


def sliding_rotary(fields: Fields, layers: int, windows: Windows) -> tuple[bool, ...]:
    """EXAONE 4: only sliding layers rotate; all layers rotate if there is no sliding window."""
    return (True,) * layers if fields.get("sliding_window") is None else windows[1]
