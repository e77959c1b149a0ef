"""What rounds cost on a CPU, from the sizes of weights: known before any round was timed."""

from dataclasses import dataclass

from tandemrt.engines.bundle.bundle import Bundle

_ROW = 0.2  # of a scored token, in rounds without any: 0.14 and 0.25 for models of 0.5 and 1.5 billion weights


@dataclass(frozen=True)
class HostCosts:
    """Costs in one unit, of which only ratios are used.

    Attributes:
        weights: bytes of the draft's weights per byte of the target's; 0 for a draft without a model.
        at_once: whether the draft proposes all tokens in one call.
    """

    weights: float
    at_once: bool

    @classmethod
    def of(cls, bundle: Bundle) -> "HostCosts":
        """Return the costs of a bundle's rounds."""
        target, draft = (_bytes(bundle, f"{engine}/") for engine in ("target", "draft"))
        traits = bundle.draft.traits
        return cls(draft / target, traits.parallel or traits.block)

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
