"""What rounds cost on a CPU, from the sizes of weights: known before any round was timed."""

from dataclasses import dataclass

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.plugins.onnxruntime.custom_operators import lacks_avx512

# Of a scored token, in rounds without any: 0.14 and 0.25 for models of 0.5 and 1.5 billion weights. With AVX2 alone the
# former takes 57 ms for one token, 128 for 5 and 295 for 17 (docs/data/lookup-runs.csv).
_ROW, _ROW_WITHOUT_AVX512 = 0.2, 0.39
# Of a token that a draft has missed, in drafted tokens: many are processed at once.
_MISSED, _MISSED_WITHOUT_AVX512 = 0.1, 0.2
_LARGE = 1 << 25  # bytes of weights; smaller ones may stay in a cache, and their calls take longer than their rows


@dataclass(frozen=True)
class HostCosts:
    """Costs in one unit, of which only ratios are used.

    Attributes:
        weights: bytes of the draft's weights per byte of the target's; 0 for a draft without a model.
        at_once: whether the draft proposes all tokens in one call.
        row: cost of a scored token.
        missed: of a token that the draft has missed, in drafted tokens.
    """

    weights: float
    at_once: bool
    row: float = _ROW
    missed: float = _MISSED

    @classmethod
    def of(cls, bundle: Bundle) -> "HostCosts":
        """Return the costs of a bundle's rounds."""
        target, draft = (_bytes(bundle, f"{engine}/") for engine in ("target", "draft"))
        traits = bundle.draft.traits
        costs = (_ROW, _MISSED)
        if target > _LARGE and lacks_avx512():
            costs = (_ROW_WITHOUT_AVX512, _MISSED_WITHOUT_AVX512)
        return cls(draft / target, traits.parallel or traits.block, *costs)

    @property
    def dear(self) -> bool:
        """Whether rows cost so much that drafts of a fixed length may lose to autoregressive decoding."""
        return self.row > _ROW

    def scoring(self, batch: int, window: int) -> float:
        """Return the cost of the target's call over ``window`` drafted tokens per row."""
        return 1 + self.row * batch * (window + 1)

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
