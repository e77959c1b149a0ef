"""Rotary position embedding: the frequencies of each scaling rule, rounded where ``transformers`` rounds.

The float32 roundings are part of the definition, because models were trained with them: those of an exponent change the
last four bits of a frequency. Powers are rounded exactly. torch's differ by one unit in the last place, one in forty.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.layer_kinds import without_mtp
from tandemrt.export.read.rope_scaling import llama3, longrope, powers, yarn

_YARN = {"deepseek_yarn": 0.1, "telechat3-yarn": 0.07}  # further names, with the factor of the sharper attention
_NAMES = ("rope_scaling", "rope_parameters", "rope_theta")  # rope_parameters overrides rope_scaling


@dataclass(frozen=True)
class RopeRules:
    """The rotary embedding that a family's name implies.

    ``default``: the parameters for a config without any; its theta is also the default for parameters without theta.
    ``partial``: the default fraction of a head that is rotated; None: the family rotates the complete head and has no
    such field. ``interleaved``: see Rope. ``local_theta``: layers with a sliding window have their own rule without
    scaling; the pair is the field of older configs with its theta, and the default theta. ``rotated_field``: the field
    with the number of rotated values, which replaces ``partial``. ``theta_factor``: the field with a factor of theta.
    """

    default: Mapping[str, Any] = field(default_factory=lambda: {"rope_theta": 10_000.0})
    partial: float | None = None
    interleaved: bool = False
    local_theta: tuple[str, float] | None = None
    rotated_field: str | None = None
    theta_factor: str | None = None


@dataclass(frozen=True)
class Rope:
    """A rotation rule: the ``frequencies`` in radians per position, float32, one for each rotated pair.

    ``magnitude`` multiplies the cosine and the sine table. A pair is two adjacent values if ``interleaved``, else value
    i of the first half and of the second half of the rotated values. ``extended_length``: the number of positions after
    YaRN, which configs often omit; 0: not extended. ``query_scale_beta``: queries at position p are multiplied by
    1 + beta * log(1 + p // ``query_scale_period``). ``sections``: the pairs that positions in time, height and width
    turn (M-RoPE), one after the other or ``mixed``; (): one position turns all of them.
    """

    kind: str
    theta: float
    frequencies: tuple[float, ...]
    magnitude: float = 1.0
    extended_length: int = 0
    interleaved: bool = False
    query_scale_beta: float = 0.0
    query_scale_period: int = 1
    sections: tuple[int, ...] = ()
    mixed: bool = False

    @property
    def rotated(self) -> int:
        """The number of rotated values of a head; these are the first ones."""
        return 2 * len(self.frequencies)

    @property
    def rows(self) -> tuple[int, ...]:
        """For each pair of ``sections``, the row of positions that turns it: 0 time, 1 height, 2 width."""
        if not self.mixed:
            return tuple(row for row, pairs in enumerate(self.sections) for _ in range(pairs))
        rows = [0] * sum(self.sections)
        for row, pairs in enumerate(self.sections[1:], 1):
            rows[row : 3 * pairs : 3] = [row] * len(rows[row : 3 * pairs : 3])
        return tuple(rows)

    @classmethod
    def from_hf(
        cls,
        config: Fields,
        head_dim: int,
        max_length: int,
        *,
        rules: RopeRules = RopeRules(),
        length: int | None = None,
    ) -> "Rope":
        """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (earlier versions).

        ``length``: the length of the longest text, which selects the factors of longrope; None: ``max_length``. Raises
        BadCheckpoint for a rule other than default, linear, llama3, yarn, longrope, proportional and dynamic, and for
        unknown parameters.
        """
        return _read(config, _parameters(config, rules), head_dim, max_length, rules, length or max_length)


def ropes(
    config: Fields,
    head_dims: tuple[int, int],
    max_length: int,
    rules: RopeRules,
    length: int | None,
    sliding: tuple[bool, ...],
) -> tuple[Rope, Rope | None]:
    """Return the rule of all layers, and the rule of layers with a sliding window if it differs, else None.

    ``head_dims``: the sizes of heads of full and of sliding layers. ``sliding``: the layers with a sliding window.
    """
    if rules.local_theta is None:
        return Rope.from_hf(config, head_dims[0], max_length, rules=rules, length=length), None
    local: Mapping[str, Any] = {}
    if isinstance(config.get("rope_theta"), list):
        parameters = _listed(config, rules, sliding)
    else:
        parameters = _parameters(config, rules)
        local = {"rope_theta": config.number(*rules.local_theta)}
    if "full_attention" in parameters or "sliding_attention" in parameters:
        local = {**local, **_object(config, parameters.get("sliding_attention", {}))}
        parameters = {"rope_theta": parameters["rope_theta"], **_object(config, parameters.get("full_attention", {}))}
    rope, other = (
        _read(config, part, head_dim, max_length, rules, length or max_length)
        for part, head_dim in zip((parameters, local), head_dims, strict=True)
    )
    return rope, other if other != rope else None


def _listed(config: Fields, rules: RopeRules, sliding: tuple[bool, ...]) -> dict[str, Any]:
    """Step 3.5: ``rope_theta`` and ``partial_rotary_factors`` with a value per layer; only full layers are scaled."""
    layers, theta = len(sliding), rules.default["rope_theta"]
    parameters: dict[str, Any] = {"rope_theta": theta, "full_attention": {}, "sliding_attention": {}}
    lists = (("rope_theta", "rope_theta", theta), ("partial_rotary_factors", "partial_rotary_factor", rules.partial))
    for listed, name, default in lists:
        values = without_mtp(config, config.get(listed, [default] * layers), layers)
        for kind, slides in (("full_attention", False), ("sliding_attention", True)):
            of_kind = list(values) if isinstance(values, list) and len(values) == layers else []
            of_kind = [value for value, each in zip(of_kind, sliding, strict=False) if each == slides]
            if not isinstance(values, list) or len(values) != layers or any(each != of_kind[0] for each in of_kind):
                raise BadCheckpoint(
                    f"{config.where}: {listed} should have a value for each of {layers} layers, equal in layers of the "
                    f"same kind, it is {quoted(values)}"
                )
            parameters[kind][name] = of_kind[0] if of_kind else default
    if config.get("rope_scaling") is not None:
        parameters["full_attention"] |= _object(config, config.get("rope_scaling"))
    return parameters


def _parameters(config: Fields, rules: RopeRules) -> dict[str, Any]:
    values = {name: config.get(name) for name in _NAMES}
    if rules.theta_factor is not None:
        values["rope_theta"] = rules.default["rope_theta"] * config.number(rules.theta_factor, 1.0)
    if all(value is None for value in values.values()):
        return dict(rules.default)
    theta = values.pop("rope_theta")
    merged = {"rope_theta": rules.default["rope_theta"] if theta is None else theta}
    for section in values.values():
        merged |= {} if section is None else _object(config, section)
    return merged


def _object(config: Fields, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise BadCheckpoint(f"{config.where}: rope_parameters should be an object, it is {quoted(value)}")
    return dict(value)


@np.errstate(all="ignore")  # a config's numbers can be extreme
def _read(
    config: Fields, parameters: Mapping[str, Any], head_dim: int, max_length: int, rules: RopeRules, length: int
) -> Rope:
    fields = Fields(parameters, f"{config.where}, rope_parameters")
    stated = fields.get("rope_type", fields.get("type", "default"))
    kind = "yarn" if isinstance(stated, str) and stated in _YARN else stated
    fields.skip("type")
    # A proportional rule has frequencies for the complete head, of which the last ones are 0.
    rotated = head_dim if kind == "proportional" else _rotated(config, fields, head_dim, rules)
    theta = fields.number("rope_theta", rules.default["rope_theta"])
    waves = powers(theta, rotated)
    kept = np.reciprocal(waves)
    plain = Rope(
        "default" if kind == "mrope" else kind,
        theta,
        (),
        interleaved=rules.interleaved,
        sections=_sections(fields.get("mrope_section")),
        mixed=fields.get("mrope_interleaved") is True,
    )
    match kind:
        case "default" | "mrope":
            frequencies = kept
        case "proportional":
            pairs = int(_share(fields) * head_dim // 2)
            frequencies = np.pad(kept[:pairs], (0, head_dim // 2 - pairs)) / np.float32(fields.number("factor", 1.0))
        case "linear":
            frequencies = kept / np.float32(fields.number("factor"))
        case "llama3":
            frequencies = llama3(fields, kept, max_length)
        case "yarn" if "short_factor" not in parameters:
            try:
                frequencies, magnitude, extended_length = yarn(
                    fields, kept, theta, max_length, sharpening=_YARN.get(stated, 0.1)
                )
            except (ArithmeticError, TypeError, ValueError) as error:
                raise BadCheckpoint(
                    f"{fields.where}: the values must make sense for yarn, they give: {error}"
                ) from error
            plain = replace(plain, magnitude=magnitude, extended_length=extended_length, **_query_scale(fields))
        case "longrope" | "su" | "yarn":
            frequencies, magnitude = longrope(config, fields, waves, max_length, length)
            plain = replace(plain, kind="longrope", magnitude=magnitude)
        case "dynamic" if fields.get("alpha") is not None:  # theta is scaled once, for any length
            base = theta * fields.number("alpha") ** (rotated / (rotated - 2))
            frequencies = np.reciprocal(powers(base, rotated))
            for name, value in (("factor", 1.0), ("mscale", 1.0), ("mscale_all_dim", 1.0)):
                fields.only(name, value)
            fields.skip("beta_fast", "beta_slow")
        case "dynamic":  # theta grows with texts longer than the original length, which is the limit of requests
            frequencies = kept
            fields.number("factor")
            fields.only("original_max_position_embeddings", max_length)
        case _:
            raise BadCheckpoint(
                f"{fields.where}: rope_type is {quoted(kind)}, which the exporter does not implement; "
                "supported: default, linear, llama3, yarn, longrope, proportional, dynamic"
            )
    fields.finish()
    return replace(plain, frequencies=tuple(frequencies.tolist()))


def _sections(value: Any) -> tuple[int, ...]:
    """Return three sections; () for any other value, because positions of text do not depend on sections."""
    three = isinstance(value, list) and len(value) == 3 and all(type(pairs) is int and pairs >= 0 for pairs in value)
    return tuple(value) if three else ()


def _share(fields: Fields) -> float:
    """Return the part of a head that has frequencies above 0."""
    share = fields.number("partial_rotary_factor", 1.0)
    if share > 1:
        raise BadCheckpoint(f"{fields.where}: partial_rotary_factor should be at most 1, it is {quoted(share)}")
    return share


def _rotated(config: Fields, fields: Fields, head_dim: int, rules: RopeRules) -> int:
    """Return the number of rotated values of a head."""
    if rules.partial is None:
        config.only("partial_rotary_factor", 1.0)
        fields.only("partial_rotary_factor", 1.0)
        return head_dim
    factor = fields.number("partial_rotary_factor", config.number("partial_rotary_factor", rules.partial))
    rotated = int(head_dim * factor)
    if rules.rotated_field is not None and config.get(rules.rotated_field) is not None:
        rotated = config.integer(rules.rotated_field)
        factor = rotated / head_dim
    if factor > 1 or rotated < 2 or rotated % 2:
        raise BadCheckpoint(
            f"{config.where}: partial_rotary_factor should rotate an even number of the {head_dim} values of a head, "
            f"it is {quoted(factor)}"
        )
    return rotated


def _query_scale(fields: Fields) -> dict[str, Any]:
    """Ministral 3: the scaling of queries by their position (llama_4_scaling_beta)."""
    fields.skip("max_position_embeddings")
    beta = fields.get("llama_4_scaling_beta", 0.0)
    if not beta:
        return {}
    return {
        "query_scale_beta": fields.number("llama_4_scaling_beta"),
        "query_scale_period": fields.integer("original_max_position_embeddings"),
    }
