"""Opened models of a recipe: the target and, if there is one, the draft model."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tandemrt.engines.bundle.manifest import EngineName
from tandemrt.engines.contract.dtypes import BITS, FLOAT8, KV_DTYPES
from tandemrt.engines.recipe.models import ModelDraft, Target
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe
from tandemrt.export.bundle.draft_kinds import MODEL_DRAFTS
from tandemrt.export.bundle.opened_head import DraftHead
from tandemrt.export.model.lowerings import STRATEGIES
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.quantization.scheme import Quantization
from tandemrt.export.read.shard import Shard
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tokenizer import CheckpointTokenizer
from tandemrt.plugins.onnxruntime.custom_operators import has_kernels


@dataclass(frozen=True)
class Model:
    """A checkpoint and its spec. ``role`` is ``target`` or ``draft``, its section in the recipe.

    ``source`` is the checkpoint that the recipe names; ``checkpoint`` is the one that the graph points into: the same,
    or rewritten by the build (``packed``). ``compute`` is the compute dtype, ``dtype`` the recipe's, and ``kv_dtype``
    the dtype of its cache. ``by_operators``: the project's operators multiply quantized weights; they support float8
    weights with a scale per output, but no group scales. ``dequantize``: the recipe asks to write quantized weights as
    unquantized ones. ``shards``: the parts of the ranks of a tensor-parallel target; none: one process runs the model.
    ``on_cpu``: the bundle is for a CPU. ``entry``: fields of the manifest's draft entry that a draft's checkpoint has.
    """

    role: EngineName
    source: Checkpoint
    checkpoint: Checkpoint
    spec: ModelSpec
    vocabulary: CheckpointTokenizer
    dtype: str
    compute: str
    kv_dtype: str
    by_operators: bool = False
    dequantize: bool = False
    shards: tuple[Shard, ...] = ()
    on_cpu: bool = False
    entry: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tiled(self) -> bool:
        """Whether unquantized weights are for the operator tiled_matmul: on a CPU with a compiler for its kernel."""
        return self.on_cpu and self.compute == "float32" and has_kernels()

    @property
    def tiles(self) -> str | None:
        """The dtype of the scales of weights of 4 or 8 bits on a GPU; None: the weights are for a CPU."""
        return self.compute if self.by_operators else None

    @property
    def interleaved(self) -> bool:
        """Whether low-bit weights are for the operator low_bit_int8_matmul: on a CPU with a compiler for its kernel."""
        return self.on_cpu_in_float32 and has_kernels()

    @property
    def on_cpu_in_float32(self) -> bool:
        """Whether onnxruntime multiplies quantized weights on a CPU, with unquantized values in float32."""
        return not self.by_operators and self.compute == "float32"

    @property
    def packed(self) -> bool:
        """Whether the build rewrites the weights: quantizes or repacks them, or converts group scales."""
        quantization = self.quantization
        if self.dequantize:
            return self.stored_quantization is not None
        return self.dtype in BITS or (quantization is not None and (quantization.is_packed or self.rewrites_float8))

    @property
    def rounds_again(self) -> bool:
        """Whether weights stored in more bits than the dtype are rounded to it: a draft's, which no text shows."""
        return self.role == "draft" and self.on_cpu

    @property
    def blocks_become_channels(self) -> bool:
        """Whether group scales must be converted to scales per output, because the matmuls do not support them."""
        quantization = self.quantization
        return (
            self.by_operators and self.dtype not in BITS and quantization is not None and quantization.has_group_scales
        )

    @property
    def rewrites_float8(self) -> bool:
        """Whether float8 weights must be written otherwise: those with group scales, and those of experts."""
        quantization = self.quantization
        return self.blocks_become_channels or (
            self.by_operators
            and self.spec.experts is not None
            and self.dtype not in BITS
            and quantization is not None
            and quantization.has_float8
            and not quantization.is_packed
        )

    @property
    def low_bit_matmuls(self) -> bool:
        """Whether a GPU multiplies weights of 4 or 8 bits."""
        quantization = self.quantization
        return self.by_operators and (self.dtype in BITS or (quantization is not None and quantization.is_packed))

    @property
    def quantization(self) -> Quantization | None:
        """How the weights that the graph reads are quantized in the checkpoint; None: all weights are unquantized."""
        stored = self.stored_quantization
        return stored.dequantized() if stored is not None and self.dequantize else stored

    @property
    def stored_quantization(self) -> Quantization | None:
        """How the checkpoint stores quantized weights, whether or not the build dequantizes them."""
        return read_quantization(self.source.config, self.source.folder)

    def cache_notes(self) -> list[str]:
        """Return notes for the build's report about the dtype and scales of keys and values, one line each."""
        quantization = self.quantization
        if self.kv_dtype == FLOAT8:
            scaled = quantization is not None and quantization.float8_cache
            scales = "the checkpoint's scales" if scaled else "scales of 1: the checkpoint has none"
            return [f"keys and values are held in {FLOAT8}, with {scales}"]
        return [] if quantization is None else quantization.notes_on_unused_cache_scales(self.kv_dtype)

    @classmethod
    def open(cls, role: EngineName, recipe: Recipe) -> "Model":
        """Read the checkpoint of a recipe's section. Raises BadCheckpoint, or BadRecipe if the length limit exceeds the
        model's.

        A draft may have a shorter length; it drafts nothing after that length. open_models rejects models that the
        recipe's backend does not support.
        """
        section: Target | ModelDraft = recipe.target
        dtype, kv_dtype, length = str(recipe.target.dtype), recipe.target.kv_dtype, recipe.limits.length
        if role == "draft":
            assert isinstance(recipe.draft, ModelDraft)
            section, dtype, kv_dtype = recipe.draft, str(recipe.draft_dtype), recipe.draft_kv_dtype
        folder = section.checkpoint
        checkpoint = Checkpoint.open(folder)
        entry = MODEL_DRAFTS[section.kind](checkpoint) if isinstance(section, ModelDraft) else {}
        spec = ModelSpec.from_hf(checkpoint.config, ignored=section.ignore_config_fields, length=length)
        vocabulary = CheckpointTokenizer.open(folder)
        if vocabulary.size > spec.vocab:
            rule = f"the tokenizer must not have more ids than the logits are wide ({spec.vocab})"
            raise BadCheckpoint(f"{role}.checkpoint {folder}: {rule}; it has {vocabulary.size}; resize the embeddings")
        if length > spec.max_length and role == "target":
            rule = f"limits.length must not exceed the length that the target's config.json gives, {spec.max_length}"
            raise BadRecipe(f"{rule}; got {length}; lower limits.length")
        by_operators, compute = STRATEGIES[recipe.backend.lowering].scaled_matmuls, recipe.computed_in(dtype)
        model = cls(
            role,
            checkpoint,
            checkpoint,
            spec,
            vocabulary,
            dtype,
            compute,
            compute,
            by_operators,
            dequantize=section.dequantize,
            on_cpu=recipe.backend.device == "cpu",
            entry=entry,
        )
        if section.dequantize and model.stored_quantization is None:
            raise BadRecipe(f"{role}.dequantize needs a checkpoint with quantized weights; {folder} has none. Drop it")
        quantization = model.quantization
        if kv_dtype in KV_DTYPES or (
            kv_dtype is None and recipe.cache == "paged" and quantization and quantization.float8_cache
        ):
            return replace(model, kv_dtype=FLOAT8)
        return model

    def spec_json(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self.spec)))
        return result


Draft = Model | DraftHead
Models = tuple[Model] | tuple[Model, Draft]  # the target and, optionally, the draft
