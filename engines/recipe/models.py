"""The models of a recipe: the target and the draft, whose kinds are in engines/contract/draft_kinds.py."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationInfo, field_validator, model_validator

from tandemrt.engines.contract.draft_kinds import DRAFT_KINDS, HeadKind, ModelKind
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
    ``images``: whether the bundle has the checkpoint's vision tower; None: if the exporter can build it.
    """

    dtype: Dtype = "float32"
    kv_dtype: KvDtype | None = None
    dequantize: bool = False
    images: bool | None = None


class _WithKind(_WithCheckpoint, DraftSampling):
    """A draft with a checkpoint. Its kind has the default of ``num_draft_tokens``."""

    @model_validator(mode="before")
    @classmethod
    def _fill_num_draft_tokens(cls, data: Any) -> Any:
        traits = DRAFT_KINDS.get(str(data.get("kind"))) if isinstance(data, dict) else None
        return data if traits is None else {"num_draft_tokens": traits.num_draft_tokens, **data}


class ModelDraft(_WithKind):
    """A smaller model with the target's vocabulary. A *pard* draft predicts the whole draft window in one call.

    ``vocab``: the draft proposes only tokens with ids below it; None: all. ``dtype`` None: the target's. ``kv_dtype``
    None: float8 if the recipe sets it for the target, else the dtype of the draft's checkpoint, else the compute dtype.
    ``dequantize``: see Target.
    """

    dtype: Dtype | None = None
    kv_dtype: KvDtype | None = None
    dequantize: bool = False
    vocab: Annotated[int, Field(ge=1)] | None = None
    kind: ModelKind
    num_draft_tokens: NumDraftTokens


class HeadDraft(_WithKind):
    """A draft head or block draft: it reads the target's hidden states and has the target's compute dtype.

    ``checkpoint``: the head's; for MTP layers the target's, or a checkpoint of the layers alone.
    """

    kind: HeadKind
    num_draft_tokens: NumDraftTokens


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


Draft = ModelDraft | HeadDraft | NgramDraft | NoDraft
