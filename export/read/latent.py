"""Read latent attention (DeepSeek-V2): keys and values of all heads are matmuls of one vector per token."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.layer import Scales


@dataclass(frozen=True)
class Latent:
    """The widths of latent attention.

    ``query_rank``: of the latent vector that queries are made from; None: queries are made from the hidden state.
    ``rank``: of the latent vector of keys and values, which the cache holds. A head of a query or key has ``plain``
    values without rotary embedding and ``rotated`` values with it; all heads share the rotated values of a key. A head
    of a value has ``value`` values. ``bias``: the matmuls to latent vectors have biases.
    """

    query_rank: int | None
    rank: int
    plain: int
    rotated: int
    value: int
    bias: bool

    @property
    def cached(self) -> int:
        """The number of cached values per token: a rotated key and a latent vector."""
        return self.rotated + self.rank


def not_latent(fields: Fields) -> None:
    """A model with a key and a value per head."""


def latent(fields: Fields) -> Latent:
    """Read the widths of DeepSeek's configs."""
    for derived in ("head_dim", "qk_head_dim", "num_key_value_heads"):  # they follow from the widths
        fields.skip(derived)
    return Latent(
        None if fields.get("q_lora_rank") is None else fields.integer("q_lora_rank"),
        fields.integer("kv_lora_rank", 512),
        fields.integer("qk_nope_head_dim", 128),
        fields.integer("qk_rope_head_dim", 64),
        fields.integer("v_head_dim", 128),
        fields.flag("attention_bias", False),
    )


def minicpm3_latent(fields: Fields) -> Latent:
    """MiniCPM 3: without a width of values, heads share the hidden state."""
    width = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    return replace(latent(fields), value=fields.integer("v_head_dim", width))


def latent_scales(fields: Fields, head_dim: int, hidden: int) -> Scales:  # noqa: ARG001
    """Return the scale of attention scores; with YaRN, ``mscale_all_dim`` sharpens them."""
    scaling: dict[str, object] = {}
    for name in ("rope_scaling", "rope_parameters"):
        part = fields.get(name)
        scaling |= part if isinstance(part, Mapping) else {}
    share, factor = scaling.get("mscale_all_dim") or 0, scaling.get("factor") or 1.0
    if not all(isinstance(each, int | float) and each >= 0 for each in (share, factor)):
        raise BadCheckpoint(
            f"{fields.where}: mscale_all_dim and factor should be numbers, they are {quoted([share, factor])}"
        )
    assert isinstance(share, int | float)
    assert isinstance(factor, int | float)
    sharper = 0.1 * share * math.log(factor) + 1.0 if share and factor > 1 else 1.0
    return Scales(attention=head_dim**-0.5 * sharper**2)
