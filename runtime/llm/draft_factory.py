"""Make the drafter of a bundle from its opened parts."""

from collections.abc import Callable
from dataclasses import dataclass

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.contract.draft_kinds import NgramEntry, NoEntry
from tandemrt.runtime.caches.call_layout import CallLayout
from tandemrt.runtime.caches.kv_cache import KVCacheManager
from tandemrt.runtime.device.backends.base import Engine
from tandemrt.runtime.device.buffers import RoundBuffers
from tandemrt.runtime.device.graphs import Graphs
from tandemrt.runtime.device.slot_state import SlotState
from tandemrt.runtime.drafters.ngram import NgramDrafter
from tandemrt.runtime.drafters.none import NoDrafter
from tandemrt.runtime.engine_loop.models import Drafter


@dataclass(frozen=True)
class DraftParts:
    """The parts of an opened bundle that drafters are made of.

    Attributes:
        layout: the target's call layout.
        new_layout: makes another layout over the same caches.
    """

    bundle: Bundle
    engines: dict[str, Engine]
    buffers: RoundBuffers
    state: SlotState
    cache_manager: KVCacheManager
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


def make_drafter(parts: DraftParts) -> Drafter:
    """Return the drafter of a bundle; NoDrafter if drafting is off."""
    window = parts.buffers.window
    if not window:
        return NoDrafter()
    match parts.bundle.draft:
        case NoEntry():
            return NoDrafter()
        case NgramEntry() as entry:
            return NgramDrafter(parts.buffers, window=window, shortest=entry.ngram_min, longest=entry.ngram_max)
        case entry:
            from tandemrt.runtime.llm.neural_drafts import NEURAL_DRAFTERS  # a start without a model is quicker

            return NEURAL_DRAFTERS[entry.kind](parts, entry)
