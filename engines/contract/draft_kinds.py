"""The kinds of drafts: one row per kind, with what it needs of a bundle and of a round, and its entry in the manifest.

A recipe's section for each kind is in engines/recipe/models.py: a kind with a model needs none of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tandemrt.engines.contract.draft_sampling import DraftSampling
from tandemrt.engines.validation.errors import quoted
from tandemrt.engines.validation.records import Record, reject

ModelKind = Literal["model", "pard"]  # a model of its own
# Reads the target's hidden states.
HeadKind = Literal["eagle3", "peagle", "mtp", "assistant", "dflash", "dflash2", "dspark"]

# Engines of MTP layers: each drafts one token. The first has the name that every other draft model has.
DRAFT_LAYERS: tuple[Literal["draft", "draft_2", "draft_3", "draft_4"], ...] = ("draft", "draft_2", "draft_3", "draft_4")
MAX_BLOCK_DRAFT = 17  # tokens of a block draft's call: the newest token and one mask per token of the longest window

Count = Annotated[int, Field(ge=1)]
MaskToken = Annotated[int, Field(ge=0)]  # a token id that the draft is fed in place of each token to predict


@dataclass(frozen=True)
class DraftTraits:
    """A kind of draft: its entry in the manifest, and its requirements.

    Attributes:
        entry: the record of the manifest's ``draft``.
        engines: engines in addition to the target's and to those that verify.
        num_draft_tokens: the default in a recipe for a draft with a checkpoint.
        features: the target outputs hidden states of its layers for the draft.
        reads_cache: the draft reads the target's KV cache.
        masks: the draft is fed a mask token in place of each token to predict.
        parallel: one call per round, over the tokens that the previous round emitted followed by masks.
        block: one call per round, over the newest token followed by masks; the call always has the length of the
            draft's block.
        layers: most engines that draft one token each.
        skips_undrafted: the draft's cache has no tokens of a request without drafts.
        lookahead: tokens after a KV cache block that the contents of the block depend on.
    """

    entry: type["_Entry"]
    engines: tuple[str, ...] = ()
    num_draft_tokens: int = 4
    features: bool = False
    reads_cache: bool = False
    masks: bool = False
    parallel: bool = False
    block: bool = False
    layers: int = 1
    skips_undrafted: bool = False
    lookahead: int = 0

    @property
    def samples(self) -> bool:
        """Whether the draft has a distribution to sample from."""
        return bool(self.engines)


class _Entry(Record):
    """The manifest's ``draft``."""

    kind: str

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
    def description(self) -> str:
        """The draft in the words of ``export inspect``."""
        return self.kind

    @property
    def draft_vocab(self) -> int | None:
        """Width of the draft's logits if they cover a part of the target's vocabulary."""
        return None

    @property
    def default_sampling(self) -> DraftSampling:
        """How the draft samples for requests that set none of SamplingParams.draft_*."""
        return self if isinstance(self, DraftSampling) else DraftSampling()


class SampledEntry(_Entry, DraftSampling):
    """A draft with logits, from which its tokens are sampled.

    ``vocab``: width of the draft's logits where the draft covers a part of the target's vocabulary; the bundle's
    TARGET_IDS file has the ids. None: the draft covers the whole vocabulary.
    """

    vocab: Count | None = None

    @property
    def draft_vocab(self) -> int | None:
        return self.vocab


class ModelEntry(SampledEntry):
    """An independent draft model with the target's vocabulary."""

    kind: Literal["model"]


class PardEntry(SampledEntry):
    """A draft model that predicts the whole draft window in one call."""

    kind: Literal["pard"]
    mask_token: MaskToken


class FeatureEntry(SampledEntry):
    """A draft that reads the target's hidden states."""


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


class AssistantEntry(FeatureEntry):
    """A Gemma 4 assistant, which reads the target's KV cache, too. Its contract names the layers."""

    kind: Literal["assistant"]


class BlockEntry(FeatureEntry):
    """A block draft: one call of ``block`` tokens, the newest token followed by masks.

    The tokens of a *dspark* draft are sampled one after the other, by a Markov head, and those of *dflash2* by a
    selector among the most likely ones.
    ``sample_from_anchor``: the newest token predicts a token too.
    """

    kind: Literal["dflash", "dflash2", "dspark"]
    mask_token: MaskToken
    block: Annotated[int, Field(ge=2, le=MAX_BLOCK_DRAFT)]
    sample_from_anchor: bool = False

    @property
    def max_draft_tokens(self) -> int:
        """Tokens that one call predicts."""
        return max_block_drafts(self.block, sample_from_anchor=self.sample_from_anchor)


class NgramEntry(_Entry):
    """Drafts are copied from the request's own tokens, after a repeated run of ngram_min to ngram_max tokens."""

    kind: Literal["ngram"]
    ngram_min: Count
    ngram_max: Count

    @property
    def description(self) -> str:
        return f"ngram, {self.ngram_min} to {self.ngram_max} tokens"

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
    ModelEntry | PardEntry | Eagle3Entry | PEagleEntry | MtpEntry | AssistantEntry | BlockEntry | NgramEntry | NoEntry,
    Field(discriminator="kind"),
]

_MODEL = ("draft", "propose", "propose_probs")
_HEAD = ("fuse", *_MODEL)
DRAFT_KINDS: Mapping[str, DraftTraits] = {
    "model": DraftTraits(ModelEntry, _MODEL, skips_undrafted=True),
    "eagle3": DraftTraits(Eagle3Entry, _HEAD, features=True, lookahead=1),
    "peagle": DraftTraits(PEagleEntry, _HEAD, 5, features=True, masks=True, parallel=True, lookahead=1),
    "mtp": DraftTraits(MtpEntry, _HEAD, 3, features=True, layers=len(DRAFT_LAYERS), lookahead=1),
    # The state of a text's last token is in no cache, so a cached prefix ends before that token.
    "assistant": DraftTraits(AssistantEntry, _MODEL, features=True, reads_cache=True, lookahead=1),
    "pard": DraftTraits(PardEntry, _MODEL, 8, masks=True, parallel=True),
    "dflash": DraftTraits(BlockEntry, ("context", *_MODEL), 7, features=True, masks=True, block=True),
    "dflash2": DraftTraits(BlockEntry, ("context", "markov", *_MODEL), 7, features=True, masks=True, block=True),
    "dspark": DraftTraits(BlockEntry, ("context", "markov", *_MODEL), 7, features=True, masks=True, block=True),
    "ngram": DraftTraits(NgramEntry),
    "none": DraftTraits(NoEntry),
}


def max_block_drafts(block: int, *, sample_from_anchor: bool) -> int:
    """Return the tokens that a block draft with a call of ``block`` tokens predicts.

    Each mask predicts one token. The newest token (the anchor) predicts one with ``sample_from_anchor``.
    """
    return block if sample_from_anchor else block - 1
