"""What differs from layer to layer: sliding windows and rotary embedding, as the families' configs say it."""

from collections.abc import Callable, Sequence
from typing import Any

from tandemrt.engines.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields

Windows = tuple[int | None, tuple[bool, ...]]  # the sliding window, if any layer has one, and for each layer whether
WindowReader = Callable[[Fields, int], Windows]


def no_window(fields: Fields, layers: int) -> Windows:
    """A family without sliding windows."""
    fields.only("sliding_window", None)
    fields.only("use_sliding_window", False)
    _require_uniform(fields, layers, None)
    return None, (False,) * layers


def one_window(fields: Fields, layers: int) -> Windows:
    """All layers slide, or none where ``sliding_window`` is null."""
    window = None if fields.get("sliding_window") is None else fields.integer("sliding_window")
    fields.only("use_sliding_window", window is not None)
    _require_uniform(fields, layers, window)
    return window, (window is not None,) * layers


def switched_window(fields: Fields, layers: int) -> Windows:
    """Of Qwen2 and Qwen3: ``layer_types``, or from ``max_window_layers`` on where ``use_sliding_window`` is on."""
    kinds = layer_types(fields, layers)
    on, first = fields.flag("use_sliding_window", False), fields.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise BadCheckpoint(f"config.json: max_window_layers should be a whole number, it is {quoted(first)}")
    # Configs from before layer_types say it by the first layer that has one.
    sliding = kinds if kinds else [on and i >= first for i in range(layers)]
    return _window_of(fields, sliding), tuple(sliding)


def all_or_none(fields: Fields, layers: int) -> Windows:
    """Of Qwen3-MoE: all layers where ``use_sliding_window`` is on."""
    on = fields.flag("use_sliding_window", False)
    window = fields.integer("sliding_window") if on else None
    fields.skip("sliding_window")
    _require_uniform(fields, layers, window)
    return window, (on,) * layers


def every(period: int, *, full: int = -1, named: str | None = None) -> WindowReader:
    """``layer_types``; without them one layer in ``period`` is full, the one at ``full``, and the others slide.

    ``named`` is the field of older configs for the period. Without a ``sliding_window`` all layers are full.
    """

    def read(fields: Fields, layers: int) -> Windows:
        kinds = layer_types(fields, layers)
        said: Any = fields.get(named, period) if named else period
        if fields.get("sliding_window") is None:
            kinds = kinds or [False] * layers
        if kinds is None:
            if not isinstance(said, int) or said < 1:
                raise BadCheckpoint(
                    f"config.json: {named} should be a whole number where there are no layer_types, it is "
                    f"{quoted(said)}"
                )
            kinds = [i % said != full % said for i in range(layers)]
        return _window_of(fields, kinds), tuple(kinds)

    return read


def layer_types(fields: Fields, layers: int) -> list[bool] | None:
    """For each layer whether layer_types gives it a sliding window; None if the config does not say."""
    kinds = fields.get("layer_types")
    if not isinstance(kinds, list | None):
        raise BadCheckpoint(f"config.json: layer_types should be a list, it is {quoted(kinds)}")
    if kinds is None:
        return None
    strange = sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"})
    if strange or len(kinds) != layers:
        raise BadCheckpoint(
            f"config.json: layer_types should name full_attention or sliding_attention for each of {layers} layers, "
            f"it has {len(kinds)} entries and {quoted(strange) if strange else 'no others'}"
        )
    return [kind == "sliding_attention" for kind in kinds]


def _window_of(fields: Fields, sliding: Sequence[bool]) -> int | None:
    fields.skip("sliding_window")  # whatever it says where no layer slides
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
    """Every layer rotates queries and keys."""
    return (True,) * layers


def named_rotary(fields: Fields, layers: int, windows: Windows) -> tuple[bool, ...]:  # noqa: ARG001
    """Of SmolLM3: ``no_rope_layers``, where 1 says that a layer rotates; or every layer but one in an interval."""
    interval = fields.integer("no_rope_layer_interval", 4)
    said = fields.get("no_rope_layers", [int((i + 1) % interval != 0) for i in range(layers)])
    if not isinstance(said, list) or len(said) < layers or any(x not in (0, 1) for x in said):
        raise BadCheckpoint(
            f"config.json: no_rope_layers should hold 0 or 1 for each of {layers} layers, it is {quoted(said)}"
        )
    return tuple(bool(x) for x in said[:layers])


def sliding_rotary(fields: Fields, layers: int, windows: Windows) -> tuple[bool, ...]:
    """Of EXAONE 4: where there is a sliding window, only layers that slide rotate."""
    return (True,) * layers if fields.get("sliding_window") is None else windows[1]
