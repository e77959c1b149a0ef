"""What a recipe's checkpoints are opened as: the target, and what drafts for it."""

import dataclasses
import json
from dataclasses import dataclass, replace
from typing import Any

from tandemrt.engines.dtypes import BITS, FLOAT8, KV_DTYPES
from tandemrt.engines.errors import BadCheckpoint, BadRecipe, quoted
from tandemrt.engines.manifest import EngineName
from tandemrt.engines.recipe import ModelDraft, PardDraft, Recipe, Target
from tandemrt.export.model.draft_heads import DraftHead
from tandemrt.export.model.lowerings import STRATEGIES, attention_of
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.quantization.scheme import Quantization
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tokenizer import CheckpointTokenizer


@dataclass(frozen=True)
class Model:
    """A checkpoint and what was read from it. ``role`` is ``target`` or ``draft``, its section in the recipe.

    ``source`` is the checkpoint as the recipe names it, ``checkpoint`` what the graph points into: the same, or what
    was made of it (``packed``). ``compute`` is the dtype that the engine computes in, ``dtype`` the recipe's, and
    ``kv_dtype`` what its cache holds. ``by_operators``: products with narrow weights are operators of the project,
    which in float8 take a scale per output, none of blocks.
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

    @property
    def tiles(self) -> str | None:
        """The dtype of the scales of weights in 4 bits for products on a GPU; None: they are for a CPU."""
        return self.compute if self.by_operators else None

    @property
    def packed(self) -> bool:
        """Whether a build writes the weights anew: in other integers, in another order of those they come in, or with
        a scale per output instead of blocks."""
        found = self.quantization
        return self.dtype in BITS or (found is not None and (found.comes_packed or self.blocks_become_channels))

    @property
    def blocks_become_channels(self) -> bool:
        """Whether weights come with scales of blocks, and products take none."""
        found = self.quantization
        return self.by_operators and self.dtype not in BITS and found is not None and found.comes_in_blocks

    @property
    def int4_products(self) -> bool:
        """Whether some products on a GPU are by weights in 4 bits."""
        found = self.quantization
        return self.by_operators and (self.dtype == "int4" or (found is not None and found.comes_packed))

    @property
    def quantization(self) -> Quantization | None:
        """How the checkpoint says that its weights come; None: as numbers of their own."""
        return read_quantization(self.source.config, self.source.folder)

    def cache_notes(self) -> list[str]:
        """What somebody who builds should know of the keys and values, a line each."""
        found = self.quantization
        if self.kv_dtype == FLOAT8:
            scaled = found is not None and found.float8_cache
            scales = "the checkpoint's scales" if scaled else "scales of 1: the checkpoint has none"
            return [f"keys and values are held in {FLOAT8}, with {scales}"]
        return [] if found is None else found.notes_on_unused_cache_scales(self.kv_dtype)

    @classmethod
    def open(cls, role: EngineName, recipe: Recipe) -> "Model":
        """Read the checkpoint of a recipe's section. Raises BadCheckpoint, or BadRecipe if texts are too long for it.

        A draft may be made for shorter texts: behind its own length it does not draft. What the recipe's backend does
        not do is not refused here; see open_models.
        """
        section: Target | ModelDraft | PardDraft = recipe.target
        dtype, kv_dtype, length = str(recipe.target.dtype), recipe.target.kv_dtype, recipe.limits.length
        if role == "draft":
            assert isinstance(recipe.draft, ModelDraft | PardDraft)
            section, dtype, kv_dtype = recipe.draft, str(recipe.draft_dtype), recipe.draft_kv_dtype
        folder = section.checkpoint
        checkpoint = Checkpoint.open(folder)
        spec = ModelSpec.from_hf(checkpoint.config, ignored=section.ignore_config_fields, length=length)
        vocabulary = CheckpointTokenizer.open(folder)
        if vocabulary.size > spec.vocab:
            rule = f"the tokenizer must not have more ids than the logits are wide ({spec.vocab})"
            raise BadCheckpoint(f"{role}.checkpoint {folder}: {rule}; it has {vocabulary.size}; resize the embeddings")
        if length > spec.max_length and role == "target":
            rule = f"limits.length must not exceed the length that the target's config.json gives, {spec.max_length}"
            raise BadRecipe(f"{rule}; got {length}; lower limits.length")
        by_operators, compute = STRATEGIES[attention_of(recipe)].scaled_products, recipe.computed_in(dtype)
        model = cls(role, checkpoint, checkpoint, spec, vocabulary, dtype, compute, compute, by_operators)
        said = model.quantization
        if kv_dtype in KV_DTYPES or (kv_dtype is None and recipe.cache == "paged" and said and said.float8_cache):
            return replace(model, kv_dtype=FLOAT8)
        return model

    def spec_json(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self.spec)))
        return result


Draft = Model | DraftHead
Models = tuple[Model] | tuple[Model, Draft]  # the target, then what drafts, if anything does


def mask_token(checkpoint: Checkpoint) -> int:
    """The id that a draft which foresees a window at once takes for a token to come. Raises BadCheckpoint."""
    token, vocab = checkpoint.config.get("pard_token"), checkpoint.config.get("vocab_size")
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < int(vocab or 0):
        raise BadCheckpoint(
            f"{checkpoint.folder}: config.json: pard_token should be an id below vocab_size, {vocab}, it is "
            f"{quoted(token)}; choose a checkpoint that PARD trained, or draft.kind = 'model'"
        )
    return token
