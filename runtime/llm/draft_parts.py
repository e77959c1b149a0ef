"""The opened parts of a bundle that drafters are made of."""

from collections.abc import Callable
from dataclasses import dataclass

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.runtime.caches.call_layout import CallLayout
from tandemrt.runtime.caches.kv_cache import Cache, KVCacheManager
from tandemrt.runtime.device.backends.base import Engine
from tandemrt.runtime.device.buffers import RoundBuffers
from tandemrt.runtime.device.graphs import Graphs
from tandemrt.runtime.device.slot_state import SlotState


@dataclass(frozen=True)
class DraftParts:
    """Engines, buffers, caches and layouts for a drafter.

    Attributes:
        target_cache: the KV cache of the target.
        layout: the target's call layout.
        new_layout: makes another layout over the same caches.
    """

    bundle: Bundle
    engines: dict[str, Engine]
    buffers: RoundBuffers
    state: SlotState
    cache_manager: KVCacheManager
    target_cache: Cache
    graphs: Graphs
    layout: CallLayout
    new_layout: Callable[[], CallLayout]

    @property
    def chunk(self) -> int:
        """Maximum prompt tokens of a call over a linear cache."""
        return self.bundle.limits.prefill_chunk

    @property
    def max_length(self) -> int:
        """Maximum length of a text for the draft model, in tokens."""
        length: int = self.bundle.manifest.specs["draft"]["max_length"]
        return length
