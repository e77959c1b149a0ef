"""Opened drafts that read their target's features: their checkpoint, the tensors shared with the target, and graphs."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tandemrt.engines.bundle.manifest import EngineName
from tandemrt.engines.contract.dtypes import COMPUTE
from tandemrt.engines.recipe.backends import CPU, CUDA
from tandemrt.engines.recipe.models import HeadDraft
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe, quoted
from tandemrt.export.bundle.draft_kinds import FEATURE_DRAFTS, FeatureDraft, GraphSizes, Spec
from tandemrt.export.graph.graph import Graph
from tandemrt.export.graph.lowering import Lowering, supported_lowering
from tandemrt.export.model.draft_vocabulary import EMBEDDING, LM_HEAD
from tandemrt.export.quantize.dequantize import dequantized_entry
from tandemrt.export.quantize.writer import copied, write_safetensors
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor, read_header
from tandemrt.export.read.draft_heads import mismatch, require_tensors_fit, target_ids
from tandemrt.export.read.mtp import QuantizedWeights
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.quantization.scheme import Quantization
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tensors import with_graph_names

LM_HEAD_WEIGHT = f"{LM_HEAD}.weight"


@dataclass(frozen=True)
class DraftHead:
    """An opened draft head or block draft. Fields are as in Model.

    ``borrowed`` holds tensors of the target's checkpoint, by the draft's names: the embedding and lm_head, or all
    tensors of an MTP layer except its quantized weights, which are in ``quantized``.
    """

    role: EngineName
    kind: FeatureDraft
    source: Checkpoint
    checkpoint: Checkpoint
    spec: Spec
    dtype: str
    borrowed: Mapping[str, StoredTensor]
    quantized: QuantizedWeights = field(default_factory=dict)

    @property
    def compute(self) -> str:
        """The dtype that the engine computes in."""
        return self.dtype

    @property
    def kv_dtype(self) -> str:
        """See Model.kv_dtype. The cache of a head is never quantized."""
        return self.dtype

    @property
    def packed(self) -> bool:
        """See Model.packed. Tensors from the target's checkpoint are copied separately."""
        return self.checkpoint is not self.source

    @property
    def quantization(self) -> Quantization | None:
        """See Model.quantization."""
        return read_quantization(self.checkpoint.config, self.checkpoint.folder)

    @classmethod
    def open(cls, section: HeadDraft, target: Checkpoint, spec: ModelSpec, *, dtype: str, length: int) -> "DraftHead":
        """Read the checkpoint of a draft; ``spec`` is the spec of its ``target``, ``dtype`` the target's compute dtype.

        Raises BadCheckpoint, or BadRecipe if ``length`` or the number of draft tokens is too large for the draft.
        """
        checkpoint = Checkpoint.open(section.checkpoint)
        kind = FEATURE_DRAFTS[section.kind]
        head, own, quantized = kind.read(section, checkpoint, spec)
        most, what = head.layer.max_length, "the length that the draft's config.json gives"
        if head.max_context is not None and head.max_context < most:
            most, what = head.max_context, "the head's sliding window, which tools count in different ways"
        if length > most:
            raise BadRecipe(f"limits.length must not exceed {what}, {most}; got {length}; lower limits.length")
        borrowed = _borrowed(kind, own, head, target, spec)
        opened = cls("draft", kind, checkpoint, own, head, dtype, borrowed, quantized)
        require_tensors_fit(own, head)
        opened.require_quantization()
        return opened

    def require_quantization(self) -> None:
        """Raise BadCheckpoint, by name, unless quantized weights are float8 with a scale per output or per tensor."""
        quantization = self.quantization
        if quantization is None:
            return
        if quantization.is_packed or quantization.has_group_scales:
            what = "weights of 4 bits" if quantization.is_packed else "scales of blocks"
            raise BadCheckpoint(
                f"{self.source.folder}: a head that comes quantized must be in float8 with a scale per channel or "
                f"tensor, it has {what} ({quantization.method}); make one with tandemrt export quantize --scheme fp8"
            )
        if LM_HEAD_WEIGHT in self.borrowed and quantization.scheme(LM_HEAD) is not None:
            raise BadCheckpoint(
                f"{self.source.folder}: config.json: quantization_config must leave out {LM_HEAD!r}, which this head "
                "takes from its target as it is; name it in ignore"
            )

    def notes(self) -> list[str]:
        """Return notes about unused layers and dequantized weights, one line each."""
        notes = [f"draft: {note}" for note in self.kind.notes(self.spec)]
        return notes + [f"draft: {len(self.quantized)} quantized weights became {self.dtype}"] * bool(self.quantized)

    @property
    def entry(self) -> dict[str, Any]:
        """See Model.entry."""
        vocab = {"vocab": self.spec.draft_vocab} if self.spec.draft_vocab < self.spec.vocab else {}
        return {**self.kind.entry(self.spec), **vocab}

    def cache_notes(self) -> list[str]:
        """See Model.cache_notes."""
        quantization = read_quantization(self.source.config, self.source.folder)  # an MTP layer's own has none
        return [] if quantization is None else quantization.notes_on_unused_cache_scales(self.kv_dtype)

    def spec_json(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self.spec)))
        return result

    def with_borrowed(self, folder: Path) -> "DraftHead":
        """Return the draft with its borrowed tensors copied to ``folder``; graphs only refer to files next to them."""
        file = folder / "borrowed.safetensors"
        stored = {tensor.name: tensor for tensor in self.borrowed.values()}
        tensors, dtype = self.source.tensors, self.dtype
        dequantized = [
            dequantized_entry(name, module, tensors, scheme, dtype) for name, (module, scheme) in self.quantized.items()
        ]
        write_safetensors(file, [*(copied(tensor) for tensor in stored.values()), *dequantized])
        written = read_header(file)
        sources = {name: tensor.name for name, tensor in self.borrowed.items()} | {
            name: name for name in self.quantized
        }
        tensors = {name: written[source] for name, source in sources.items()}
        return replace(self, checkpoint=replace(self.checkpoint, tensors={**self.checkpoint.tensors, **tensors}))

    def target_ids(self) -> npt.NDArray[np.int32] | None:
        """Return the target ids of a reduced draft vocabulary, ascending, or None. Raises BadCheckpoint."""
        ids = target_ids(self.checkpoint, self.spec)
        return None if ids is None or len(ids) == self.spec.vocab else np.sort(ids).astype(np.int32)

    def graphs(self, recipe: Recipe, lowering: Lowering) -> list[Graph]:
        """Return the graphs of the draft, in the order in which they are built."""
        sizes = GraphSizes(self.dtype, recipe.capacity, recipe.cache, supported_lowering(lowering, self.spec.layer))
        return self.kind.graphs(self.spec, self.checkpoint, sizes)

    def require_lowering(self, lowering: Lowering) -> None:
        """Raise BadRecipe if the draft has no graphs in ``lowering``."""
        if supported_lowering(lowering, self.spec.layer) not in self.kind.lowerings:
            raise BadRecipe(
                f"a block draft or an assistant needs backend.name {CPU!r}, with heads of a multiple of 16 values, or "
                f"{CUDA!r} with a paged cache; got heads of {self.spec.head_dim} over cache "
                f"{'paged' if lowering == 'paged' else 'linear'!r}; choose another backend or draft"
            )


def _borrowed(
    kind: FeatureDraft, checkpoint: Checkpoint, head: Spec, target: Checkpoint, spec: ModelSpec
) -> dict[str, StoredTensor]:
    """Return the target's tensors that the draft shares: the embedding, and the lm_head for the full vocabulary."""
    wanted = {EMBEDDING: "model.embed_tokens.weight"}
    if kind.scores_all_tokens and head.draft_vocab == head.vocab:
        wanted[LM_HEAD_WEIGHT] = "model.embed_tokens.weight" if spec.tied else "lm_head.weight"
    wanted = {name: source for name, source in wanted.items() if name not in checkpoint.tensors}
    if EMBEDDING in wanted and head.layer.hidden != spec.hidden and not kind.reads_cache:
        raise mismatch("hidden_size", f"the target's, {spec.hidden}, whose embedding it reads", head.layer.hidden)
    plain = {
        EMBEDDING: kind.reads_cache or spec.scales.embedding == 1.0,
        LM_HEAD_WEIGHT: spec.scales.logits == 1.0 and not spec.scales.logits_softcap,
    }
    for name in wanted:
        if not plain[name]:
            raise BadCheckpoint(
                f"{checkpoint.folder}: a head without {name!r} takes the target's, which this target scales "
                f"({quoted(dataclasses.asdict(spec.scales))}); whether the head does is unknown; choose a head with "
                "a tensor of its own"
            )
    stored = with_graph_names(target, spec).tensors
    for name, source in wanted.items():
        if source not in stored or stored[source].dtype not in COMPUTE:
            actual = "quantized" if source not in stored else stored[source].dtype
            raise BadCheckpoint(
                f"{checkpoint.folder}: a head without {name!r} takes the target's {source!r}, which should be "
                f"{', '.join(COMPUTE)}, it is {actual}; choose a head with a tensor of its own"
            )
    own = checkpoint.tensors if kind.borrows_layers else {}
    return {**own, **{name: stored[source] for name, source in wanted.items()}}
