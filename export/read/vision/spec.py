"""The sizes of a vision tower."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tandemrt.engines.contract.vision import VisionEntry
from tandemrt.export.read.checkpoint import StoredTensor
from tandemrt.export.read.layer import Activation
from tandemrt.export.read.vision.kinds import TowerKind


@dataclass(frozen=True)
class VisionSpec:
    """A tower: a transformer over patches, and a merger of neighbouring patches into tokens of the decoder.

    ``out``: values of such a token. ``merger_eps``: of the merger's norm; None: ``norm_eps``. ``merger_hidden``: of the
    merger's MLP; None: as many as the joined patches have. ``frames``: of a patch; those of a still image are equal; 0:
    patches have no such dimension. ``positions``: rows of the table of learned positions, or of both tables, by column
    and by row, if the entry has no grid; 0: none. ``window_layers``: those that attend within windows. ``taps``: layers
    whose streams have mergers of their own (DeepStack). ``clipped``: inputs and outputs of matmuls are clipped to
    stored bounds. ``standardized``: means of squares are shifted and scaled by stored values. ``image_attention``:
    layers of the decoder in which the tokens of an image attend to each other.
    """

    kind: TowerKind
    hidden: int
    intermediate: int
    layers: int
    heads: int
    out: int
    activation: Activation
    entry: VisionEntry
    norm_eps: float = 1e-6
    merger_eps: float | None = None
    merger_bias: bool = True
    merger_hidden: int | None = None
    frames: int = 0
    positions: int = 0
    rope_theta: float = 10_000.0
    window_layers: tuple[int, ...] = ()
    taps: tuple[int, ...] = ()
    clipped: bool = False
    standardized: bool = False
    image_attention: Literal["none", "all", "sliding"] = "none"

    @property
    def levels(self) -> int:
        """Mergers: the last one, and one for each tap."""
        return 1 + len(self.taps)

    def matmuls(self, tensors: Mapping[str, StoredTensor]) -> list[str]:
        """Return the modules of ``tensors`` whose weights are matrices that Linear multiplies by."""
        others = (f"{self.kind.patches}.weight", self.kind.positions)
        weights = [name for name, tensor in tensors.items() if len(tensor.shape) == 2 and name not in others]
        return [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
