"""Make the drafter of a bundle from its opened parts, and its lookup in the text."""

from functools import partial

from tandemrt.engines.contract.draft_kinds import NgramEntry
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.runtime.drafters.none import NoDrafter
from tandemrt.runtime.drafters.text_lookup import TextLookup
from tandemrt.runtime.engine_loop.costs import RoundCosts
from tandemrt.runtime.engine_loop.drafter import Drafter
from tandemrt.runtime.llm.draft_parts import DraftParts
from tandemrt.runtime.requests.round import Round

_SIZES_WITH_DRAFTER = (3, 32)  # fewest and most tokens that a match compares
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


def make_lookup(parts: DraftParts, option: bool | None, costs: RoundCosts) -> TextLookup | None:
    """Return the lookup of drafts in the text, or None without one.

    ``option``: RuntimeOptions.lookup. ``costs``: of rounds on a device whose calls have few shapes.
    """
    entry = parts.bundle.draft
    if not parts.buffers.window:
        return None

    def cost_on_host(round_: Round, window: int) -> float:
        return 1 + _ROW_COST_ON_HOST * round_.batch * (window + 1)

    def draft_cost_on_host(round_: Round, tokens: int) -> float:
        if entry.traits.parallel or entry.traits.block:
            return weights * cost_on_host(round_, tokens - 1)
        return weights * cost_on_host(round_, 0) * tokens

    def cost(round_: Round, window: int) -> float:
        """The calls of a round have one shape, whatever its rows copy."""
        return costs.estimate(round_.batch, round_.window if window else 0)

    on_host = device_of(parts.state.newest.device).on_host
    if isinstance(entry, NgramEntry):
        return TextLookup(entry.ngram_min, entry.ngram_max, cost=cost_on_host if on_host else cost)
    if not entry.engines or option is False:
        return None
    lookup = partial(TextLookup, *_SIZES_WITH_DRAFTER, with_drafter=True, rejection=bool(option))
    if not on_host:
        return lookup(cost=cost)
    weights = _weights(parts, "draft") / _weights(parts, "target")
    return lookup(cost=cost_on_host, draft_cost=draft_cost_on_host)


def _weights(parts: DraftParts, engine: str) -> int:
    """Return the bytes of the weights of a decoder, which its time on a CPU follows."""
    files = parts.bundle.manifest.files
    return sum(file.size for name, file in files.items() if name.startswith(f"{engine}/"))
