"""The ``draft`` entry of a manifest: one record per kind of draft, discriminated by ``kind``."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tandemrt.engines.contract.draft_kinds import (
    DRAFT_KINDS,
    DRAFT_LAYERS,
    MAX_BLOCK_DRAFT,
    DraftKind,
    DraftTraits,
    max_block_drafts,
)
from tandemrt.engines.contract.draft_sampling import DraftSampling
from tandemrt.engines.validation.errors import quoted
from tandemrt.engines.validation.records import Record, reject

Count = Annotated[int, Field(ge=1)]
MaskToken = Annotated[int, Field(ge=0)]  # a token id that the draft is fed in place of each token to predict


class _Entry(Record):
    kind: DraftKind

    @property
    def traits(self) -> DraftTraits:
        return DRAFT_KINDS[self.kind]

    @property
    def engines(self) -> tuple[str, ...]:
        """Engines that the draft needs in addition to the target's and to those that verify."""
        return self.traits.engines

    @property
    def lookahead(self) -> int:
        """Tokens after a KV cache block that the contents of the block depend on."""
        return self.traits.lookahead

    @property
    def default_sampling(self) -> DraftSampling:
        """How the draft samples for requests that set none of SamplingParams.draft_*."""
        return self if isinstance(self, DraftSampling) else DraftSampling()


class ModelEntry(_Entry, DraftSampling):
    """An independent draft model with the target's vocabulary."""

    kind: Literal["model"]


class PardEntry(_Entry, DraftSampling):
    """A draft model that predicts the whole draft window in one call."""

    kind: Literal["pard"]
    mask_token: MaskToken


class FeatureEntry(_Entry, DraftSampling):
    """A draft that reads the target's hidden states.

    ``vocab``: width of the draft's logits where the draft covers a part of the target's vocabulary; the bundle's
    TARGET_IDS file has the ids. None: the draft covers the whole vocabulary.
    """

    vocab: Count | None = None


class Eagle3Entry(FeatureEntry):
    kind: Literal["eagle3"]


class PEagleEntry(FeatureEntry):
    """An EAGLE head that predicts the whole draft window in one call."""

    kind: Literal["peagle"]
    mask_token: MaskToken


class MtpEntry(FeatureEntry):
    """MTP layers. ``layers``: how many of them draft one token each; None: one layer drafts every token."""

    kind: Literal["mtp"]
    layers: Annotated[int, Field(ge=2, le=len(DRAFT_LAYERS))] | None = None

    @property
    def engines(self) -> tuple[str, ...]:
        return (*self.traits.engines, *DRAFT_LAYERS[1 : self.layers or 1])

    @property
    def lookahead(self) -> int:
        return self.layers or self.traits.lookahead


class BlockEntry(FeatureEntry):
    """A block draft: one call of ``block`` tokens, the newest token followed by masks.

    ``sample_from_anchor``: the newest token predicts a token too.
    """

    mask_token: MaskToken
    block: Annotated[int, Field(ge=2, le=MAX_BLOCK_DRAFT)]
    sample_from_anchor: bool = False

    @property
    def max_draft_tokens(self) -> int:
        """Tokens that one call predicts."""
        return max_block_drafts(self.block, sample_from_anchor=self.sample_from_anchor)


class DFlashEntry(BlockEntry):
    kind: Literal["dflash"]


class DSparkEntry(BlockEntry):
    """A block draft whose tokens a Markov head samples one after the other."""

    kind: Literal["dspark"]


class NgramEntry(_Entry):
    """Drafts are copied from the request's own tokens, after a repeated run of ngram_min to ngram_max tokens."""

    kind: Literal["ngram"]
    ngram_min: Count
    ngram_max: Count

    @model_validator(mode="after")
    def _ordered(self) -> "NgramEntry":
        if self.ngram_min > self.ngram_max:
            raise reject(f"ngram_min must not exceed ngram_max; got {quoted((self.ngram_min, self.ngram_max))}")
        return self


class NoEntry(_Entry):
    """No drafter: only fast-forward tokens are drafted."""

    kind: Literal["none"]


MaskedEntry = PardEntry | PEagleEntry | BlockEntry
DraftEntry = Annotated[
    ModelEntry | PardEntry | Eagle3Entry | PEagleEntry | MtpEntry | DFlashEntry | DSparkEntry | NgramEntry | NoEntry,
    Field(discriminator="kind"),
]
