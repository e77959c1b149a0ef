"""What a drafter that runs a model on the device works with."""

from dataclasses import dataclass

from tandemrt.runtime.backends.base import Engine
from tandemrt.runtime.caches.kv_cache import Cache
from tandemrt.runtime.drafters.target_ids import TargetIds
from tandemrt.runtime.round.buffers import RoundBuffers
from tandemrt.runtime.round.graphs import Graphs
from tandemrt.runtime.round.runs import PromptRuns
from tandemrt.runtime.round.state import SlotState


@dataclass(frozen=True)
class DraftResources:
    """What is opened and allocated for a drafter, and how large its rounds are.

    Attributes:
        engines: by their names in the manifest; which of them a drafter runs, it says.
        buffers: what the drafter shares with the target and verification.
        state: where slots stand and how they sample.
        cache: of the draft's own keys and values.
        graphs: run what is enqueued.
        runs: the prompts of a round over a paged cache, None over a linear one.
        slots: rows of a round at most.
        window: drafted tokens per row of a round at most.
        target_ids: as read_target_ids gives them.
    """

    engines: dict[str, Engine]
    buffers: RoundBuffers
    state: SlotState
    cache: Cache
    graphs: Graphs
    runs: PromptRuns | None
    slots: int
    window: int
    target_ids: TargetIds | None = None
