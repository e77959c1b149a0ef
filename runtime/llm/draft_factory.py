"""Make the drafter of a bundle from its opened parts, and its lookup in the text."""

from functools import partial

from tandemrt.engines.contract.draft_kinds import NgramEntry
from tandemrt.runtime.drafters.none import NoDrafter
from tandemrt.runtime.drafters.text_lookup import TextLookup
from tandemrt.runtime.engine_loop.costs import RoundCosts
from tandemrt.runtime.engine_loop.drafter import Drafter
from tandemrt.runtime.llm.draft_parts import DraftParts
from tandemrt.runtime.llm.host_costs import HostCosts

_SIZES_WITH_DRAFTER = (3, 32)  # fewest and most tokens that a match compares


def make_drafter(parts: DraftParts) -> Drafter:
    """Return the drafter of a bundle; NoDrafter if drafting is off."""
    entry = parts.bundle.draft
    if not parts.buffers.window or not entry.engines:
        return NoDrafter()
    from tandemrt.runtime.llm.neural_drafts import NEURAL_DRAFTERS  # a start without a model is quicker

    return NEURAL_DRAFTERS[entry.kind](parts, entry)


def make_lookup(parts: DraftParts, option: bool | None, costs: HostCosts | RoundCosts) -> TextLookup | None:
    """Return the lookup of drafts in the text, or None without one.

    ``option``: RuntimeOptions.lookup. ``costs``: of rounds, HostCosts on a CPU.
    """
    entry = parts.bundle.draft
    wanted = isinstance(costs, HostCosts) if option is None else option  # not shown to lose nothing on a GPU
    if not parts.buffers.window or entry.kind == "none" or (entry.engines and not wanted):
        return None
    if isinstance(costs, HostCosts):
        lookup = partial(
            TextLookup,
            cost=lambda round_, window: costs.scoring(round_.batch, window),
            draft_cost=lambda round_, tokens: costs.drafting(round_.batch, tokens),
        )
    else:  # the calls of a round have one shape, whatever its rows copy
        lookup = partial(
            TextLookup,
            cost=lambda round_, window: costs.estimate(round_.batch, round_.window if window else 0),
        )
    if isinstance(entry, NgramEntry):
        return lookup(entry.ngram_min, entry.ngram_max)
    return lookup(*_SIZES_WITH_DRAFTER, with_drafter=True, rejection=bool(option))
