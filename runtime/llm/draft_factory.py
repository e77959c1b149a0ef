"""Make the drafter of a bundle from its opened parts."""

from tandemrt.engines.contract.draft_kinds import NgramEntry, NoEntry
from tandemrt.runtime.drafters.ngram import NgramDrafter
from tandemrt.runtime.drafters.none import NoDrafter
from tandemrt.runtime.engine_loop.models import Drafter
from tandemrt.runtime.llm.draft_parts import DraftParts


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
