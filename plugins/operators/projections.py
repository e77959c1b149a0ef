"""The order of the projected values of ``linear_attention``, and of its ring of recent tokens."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Projections:
    """The order of a layer's projected values.

    ``*_at`` is where a part begins; ``update_at`` -1: there is no update, and so no delta rule. ``by_key_head``:
    queries, keys, values and gates take turns by key head, as do decays and updates; otherwise each part lies in one
    piece. ``decays``: one per value head, or one per key channel of each.

    The ring has the channels of the convolution in their order here, each part in one piece, then decays and updates.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    decays: int
    query_at: int
    key_at: int
    value_at: int
    decay_at: int
    update_at: int
    gate_at: int
    by_key_head: int = 0

    @property
    def has_update(self) -> bool:
        """Whether the layer follows the delta rule."""
        return self.update_at >= 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Values of each part per key head."""
        values, updates = self.value_heads * self.value_dim, self.value_heads if self.has_update else 0
        totals = self.key_heads * self.key_dim, self.key_heads * self.key_dim, values, self.decays, updates, values
        return tuple(total // self.key_heads for total in totals)

    @property
    def first(self) -> tuple[int, ...]:
        """Where each part begins; 0 for an update that is not there."""
        return self.query_at, self.key_at, self.value_at, self.decay_at, max(self.update_at, 0), self.gate_at

    @property
    def stride(self) -> tuple[int, ...]:
        """Values from one key head of a part to the next."""
        if not self.by_key_head:
            return self.sizes
        query, key, value, decay, update, gate = self.sizes
        mixed, gates = query + key + value + gate, decay + update
        return mixed, mixed, mixed, gates, gates, mixed

    @property
    def pitch(self) -> int:
        """Projected values of a token."""
        return self.key_heads * sum(self.sizes)

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.key_heads * sum(self.sizes[:3])

    @property
    def width(self) -> int:
        """Values of a token in the ring."""
        return self.key_heads * sum(self.sizes[:5])

    @cached_property
    def columns(self) -> tuple[npt.NDArray[np.int64], ...]:
        """The projected columns of each part."""
        heads = np.arange(self.key_heads)[:, None]
        parts = zip(self.first, self.stride, self.sizes, strict=True)
        return tuple((first + heads * stride + np.arange(size)).reshape(-1) for first, stride, size in parts)

    @cached_property
    def ring(self) -> npt.NDArray[np.int64]:
        """The projected columns of a token, in the order of the ring."""
        channels = sorted(range(3), key=lambda part: self.first[part])
        return np.concatenate([self.columns[part] for part in (*channels, 3, 4)])
