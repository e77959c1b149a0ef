"""What rounds cost on a CPU, from the sizes of weights: known before any round was timed."""

from dataclasses import dataclass

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.plugins.onnxruntime.custom_operators import multiplies_with_avx2

# Of a scored token, in rounds without any: 0.14 and 0.25 for models of 0.5 and 1.5 billion weights. With AVX2 alone the
# latter takes 54 ms for one token and 87 for 5, which is 0.18.
_ROW = 0.2
# Of a token that a draft has missed, in drafted tokens: many are processed at once. With AVX2 alone 38 tokens of the
# former take 176 ms, one 27.
_MISSED, _MISSED_WITH_AVX2 = 0.1, 0.2
_LARGE = 1 << 25  # bytes of weights; smaller ones may stay in a cache, and their calls take longer than their rows


@dataclass(frozen=True)
class HostCosts:
    """Costs in one unit, of which only ratios are used.

    Attributes:
        weights: bytes of the draft's weights per byte of the target's; 0 for a draft without a model.
        at_once: whether the draft proposes all tokens in one call.
        missed: of a token that the draft has missed, in drafted tokens.
        fixed_may_lose: whether drafts of a fixed length may lose to autoregressive decoding.
    """

    weights: float
    at_once: bool
    missed: float = _MISSED
    fixed_may_lose: bool = False

    @classmethod
    def of(cls, bundle: Bundle) -> "HostCosts":
        """Return the costs of a bundle's rounds."""
        target, draft = (_bytes(bundle, f"{engine}/") for engine in ("target", "draft"))
        traits = bundle.draft.traits
        if traits.reads_cache:  # of what it borrows, the target's embedding, a step reads one row
            draft -= _bytes(bundle, "draft/borrowed.")
        weights, at_once = draft / target, traits.parallel or traits.block
        if target > _LARGE and multiplies_with_avx2():
            return cls(weights, at_once, _MISSED_WITH_AVX2, fixed_may_lose=True)
        return cls(weights, at_once)

    def scoring(self, batch: int, window: int) -> float:
        """Return the cost of the target's call over ``window`` drafted tokens per row."""
        return 1 + _ROW * batch * (window + 1)

    def drafting(self, batch: int, tokens: int) -> float:
        """Return the cost of ``tokens`` drafted tokens per row."""
        if self.at_once:
            return self.weights * self.scoring(batch, tokens - 1)
        return self.weights * self.scoring(batch, 0) * tokens

    def token(self, window: int) -> float:
        """Return the cost of a drafted token of one row, relative to a round without drafts."""
        plain = self.scoring(1, 0)
        return (self.scoring(1, window) + self.drafting(1, window) - plain) / (window * plain)


def _bytes(bundle: Bundle, folder: str) -> int:
    return sum(file.size for name, file in bundle.manifest.files.items() if name.startswith(folder))
