"""The models of a recipe: the target, and one section per kind of draft."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationInfo, field_validator, model_validator

from tandemrt.engines.contract.draft_sampling import DraftSampling
from tandemrt.engines.validation.errors import clipped, quoted
from tandemrt.engines.validation.records import Section, reject

Dtype = Literal["float32", "float16", "bfloat16", "int8", "int4"]
KvDtype = Literal["float8_e4m3", "float32", "float16", "bfloat16"]
Text = Annotated[str, StringConstraints(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]
NumDraftTokens = Annotated[int, Field(ge=1, le=16)]


class _WithCheckpoint(Section):
    """A section with a checkpoint folder.

    ``ignore_config_fields``: fields of config.json that the exporter does not support and may ignore.
    """

    checkpoint: Annotated[Path, Field(strict=False)]
    ignore_config_fields: Texts = ()

    @field_validator("checkpoint")
    @classmethod
    def _relative_to_the_recipe(cls, value: Path, info: ValidationInfo) -> Path:
        try:
            return (info.context["folder"] / value).resolve() if info.context else value
        except (OSError, RuntimeError, ValueError) as error:  # too long, a cycle of links, a zero byte
            raise reject(f"must be a folder that can be read; got {quoted(str(value))}: {clipped(error)}") from None


class Target(_WithCheckpoint):
    """The target model.

    ``kv_dtype``: dtype of keys and values in the cache; None: the checkpoint's, else the compute dtype.
    ``dequantize``: the build writes quantized weights of the checkpoint as unquantized ones in ``dtype``.
    """

    dtype: Dtype = "float32"
    kv_dtype: KvDtype | None = None
    dequantize: bool = False


class _SampledDraft(_WithCheckpoint, DraftSampling):
    """A draft model that samples its tokens."""


class _OwnDtypes(_SampledDraft):
    """A draft that is a model of its own, with its own compute and cache dtypes.

    ``dtype`` None: the target's. ``kv_dtype`` None: float8 if the recipe sets it for the target, else the dtype of the
    draft's checkpoint, else the compute dtype. ``dequantize``: see Target.
    """

    dtype: Dtype | None = None
    kv_dtype: KvDtype | None = None
    dequantize: bool = False


class ModelDraft(_OwnDtypes):
    """A smaller model with the target's vocabulary."""

    kind: Literal["model"]
    num_draft_tokens: NumDraftTokens = 4


class Eagle3Draft(_SampledDraft):
    """An EAGLE-3 head that drafts from the target's hidden states, in the target's compute dtype."""

    kind: Literal["eagle3"]
    num_draft_tokens: NumDraftTokens = 4


class PEagleDraft(_SampledDraft):
    """A P-EAGLE head: drafts the whole draft window in one call from the target's hidden states.

    It has the target's compute dtype.
    """

    kind: Literal["peagle"]
    num_draft_tokens: NumDraftTokens = 5


class MtpDraft(_SampledDraft):
    """MTP layers (multi-token prediction) that draft from the target's last hidden states.

    ``checkpoint``: the target's, or a checkpoint of the layers alone. They have the target's compute dtype.
    """

    kind: Literal["mtp"]
    num_draft_tokens: NumDraftTokens = 3


class DFlashDraft(_SampledDraft):
    """A block draft: reads the target's hidden states and drafts the whole draft window in one call.

    It has the target's compute dtype.
    """

    kind: Literal["dflash"]
    num_draft_tokens: NumDraftTokens = 7


class DSparkDraft(_SampledDraft):
    """A block draft, as DFlashDraft, whose tokens a Markov head samples one after the other."""

    kind: Literal["dspark"]
    num_draft_tokens: NumDraftTokens = 7


class PardDraft(_OwnDtypes):
    """A smaller model that predicts the whole draft window in one call; its config.json has ``pard_token``."""

    kind: Literal["pard"]
    num_draft_tokens: NumDraftTokens = 8


HeadDraft = Eagle3Draft | PEagleDraft | MtpDraft | DFlashDraft | DSparkDraft  # they read the target's hidden states


class NgramDraft(Section):
    """Copies drafts from the request's own tokens, after the longest repeated run of ngram_min to ngram_max tokens."""

    kind: Literal["ngram"]
    num_draft_tokens: NumDraftTokens = 4
    ngram_min: Annotated[int, Field(ge=1)] = 2
    ngram_max: Annotated[int, Field(ge=1)] = 4

    @model_validator(mode="after")
    def _ordered(self) -> "NgramDraft":
        if self.ngram_min > self.ngram_max:
            values = f"{quoted(self.ngram_min)} > {quoted(self.ngram_max)}"
            raise reject(f"ngram_min must not exceed ngram_max; got {values}. Lower ngram_min or raise ngram_max")
        return self


class NoDraft(Section):
    """Only fast-forward tokens are drafted, at most ``num_draft_tokens`` per round; 0: autoregressive decoding."""

    kind: Literal["none"]
    num_draft_tokens: Annotated[int, Field(ge=0, le=16)] = 4
