"""Make the drafter of a bundle from its opened parts, and its lookup in the text."""

from tandemrt.engines.contract.draft_kinds import NgramEntry
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.runtime.drafters.none import NoDrafter
from tandemrt.runtime.drafters.text_lookup import TextLookup
from tandemrt.runtime.engine_loop.drafter import Drafter
from tandemrt.runtime.llm.draft_parts import DraftParts

_SIZES_BESIDE_MODEL = (3, 32)  # fewest and most tokens that a match compares
_ROW_COST_ON_HOST = (
    0.2  # of a scored token, in rounds without any: 0.14 and 0.25 for models of 0.5 and 1.5 billion weights
)


def make_drafter(parts: DraftParts) -> Drafter:
    """Return the drafter of a bundle; NoDrafter if drafting is off."""
    entry = parts.bundle.draft
    if not parts.buffers.window or not entry.engines:
        return NoDrafter()
    from tandemrt.runtime.llm.neural_drafts import NEURAL_DRAFTERS  # a start without a model is quicker

    return NEURAL_DRAFTERS[entry.kind](parts, entry)


def make_lookup(parts: DraftParts, *, beside_model: bool) -> TextLookup | None:
    """Return the lookup of drafts in the text, or None without one. ``beside_model``: whether a draft model has one."""
    entry = parts.bundle.draft
    if not parts.buffers.window:
        return None
    # On a GPU the calls of a round have one shape, whatever its rows copy.
    row_cost = _ROW_COST_ON_HOST if device_of(parts.state.newest.device).on_host else 0.0
    if isinstance(entry, NgramEntry):
        return TextLookup(entry.ngram_min, entry.ngram_max, row_cost=row_cost)
    return (
        TextLookup(*_SIZES_BESIDE_MODEL, beside_model=True, row_cost=row_cost)
        if entry.engines and beside_model
        else None
    )
