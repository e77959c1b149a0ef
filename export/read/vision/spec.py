"""The sizes of a vision tower, and the names of its tensors."""

from dataclasses import dataclass
from typing import Literal

from tandemrt.engines.contract.vision import VisionEntry
from tandemrt.export.read.layer import Activation


@dataclass(frozen=True)
class TowerNames:
    """Names of a tower's tensors; those of a layer follow ``layer`` and its number. ``qkv``: one weight, or three.

    ``norms``: of the inputs of attention and MLP, and then of their outputs if these are normed, too. ``mlp``: up and
    down, or gate, up and down. ``merger``: what the merger has, in the order of its use. ``head_norms``: of the queries
    and keys of each head; (): there are none. ``first_norm``: of embedded patches; "": there is none.
    """

    patches: str
    layer: str
    norms: tuple[str, ...]
    qkv: tuple[str, ...]
    out: str
    mlp: tuple[str, ...]
    merger: tuple[str, ...]
    positions: str = ""
    head_norms: tuple[str, ...] = ()
    first_norm: str = ""


@dataclass(frozen=True)
class VisionSpec:
    """A tower: a transformer over patches, and a merger of neighbouring patches into tokens of the decoder.

    ``out``: values of such a token. ``merger_eps``: of the merger's own norm; None: ``norm_eps``. ``frames``: of a
    patch; those of a still image are equal; 0: patches have no such dimension. ``colours_last``: a patch has the
    colours of a pixel next to each other. ``positions``: rows of the table of learned positions, or of both tables,
    by column and by row, if the entry has no grid; 0: none. ``rope``: how heads are rotated by row and column:
    "halves" as a whole, with equal frequencies for both; "alternating" as a whole, with every other frequency;
    "parts" in two parts, the first by column; None: not at all. ``window_layers``: those that attend within
    windows. ``taps``: layers whose streams have mergers of their own (DeepStack). ``unscaled``: scores of queries,
    which are normed, are not divided by the root of a head's size. ``clipped``: inputs and outputs of matmuls are
    clipped to stored bounds. ``standardized``: means of squares are shifted and scaled by stored values.
    ``image_attention``: layers of the decoder in which the tokens of an image attend to each other.
    """

    names: TowerNames
    hidden: int
    intermediate: int
    layers: int
    heads: int
    out: int
    activation: Activation
    merger: Literal["joined", "mean", "pooled", "matmul"]
    entry: VisionEntry
    norm_eps: float = 1e-6
    merger_eps: float | None = None
    rms_norms: bool = False
    biases: bool = True
    patch_bias: bool = True
    merger_bias: bool = True
    frames: int = 0
    colours_last: bool = False
    positions: int = 0
    rope: Literal["halves", "alternating", "parts"] | None = None
    rope_theta: float = 10_000.0
    window_layers: tuple[int, ...] = ()
    taps: tuple[int, ...] = ()
    unscaled: bool = False
    clipped: bool = False
    standardized: bool = False
    image_attention: Literal["none", "all", "sliding"] = "none"

    @property
    def pixels(self) -> int:
        """Colours of a patch."""
        return 3 * self.entry.patch_size**2

    @property
    def levels(self) -> int:
        """Mergers: the last one, and one for each tap."""
        return 1 + len(self.taps)
