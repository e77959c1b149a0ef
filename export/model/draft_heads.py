"""Heads that draft from their target's states: their checkpoints, what they take of the target's, and their graphs."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tandemrt.engines import contract
from tandemrt.engines.drafts import DRAFT_LAYERS
from tandemrt.engines.dtypes import COMPUTE
from tandemrt.engines.errors import BadCheckpoint, BadRecipe, quoted
from tandemrt.engines.manifest import EngineName
from tandemrt.engines.recipe import DFlashDraft, DSparkDraft, HeadDraft, MtpDraft, PEagleDraft, Recipe
from tandemrt.export.model.dflash import LOWERINGS, build_context, build_dflash
from tandemrt.export.model.draft_vocabulary import EMBEDDING, LM_HEAD
from tandemrt.export.model.eagle3 import build_eagle3, build_fuse
from tandemrt.export.model.graph import Graph
from tandemrt.export.model.lowerings import Lowering, fitting
from tandemrt.export.model.markov import build_markov
from tandemrt.export.model.mtp import build_mtp, build_state_norm
from tandemrt.export.quantize.whole import whole
from tandemrt.export.quantize.writer import copied, write_safetensors
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor, read_header
from tandemrt.export.read.dflash import DFlashSpec
from tandemrt.export.read.dspark import DSparkSpec
from tandemrt.export.read.eagle3 import Eagle3Spec
from tandemrt.export.read.heads import misfit, require_tensors_fit, target_ids
from tandemrt.export.read.mtp import MtpSpec, Narrow
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.quantization.scheme import Quantization
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tensors import named

Spec = Eagle3Spec | MtpSpec | DFlashSpec
LM_HEAD_WEIGHT = f"{LM_HEAD}.weight"


@dataclass(frozen=True)
class DraftHead:
    """The checkpoint of a head; otherwise as Model. ``borrowed``: tensors of its target, by the head's own names; of a
    layer that comes with its target, all that it needs, but ``narrow``: its weights that come quantized."""

    role: EngineName
    source: Checkpoint
    checkpoint: Checkpoint
    spec: Spec
    dtype: str
    borrowed: Mapping[str, StoredTensor]
    narrow: Narrow = field(default_factory=dict)

    @property
    def compute(self) -> str:
        """The dtype that the engine computes in."""
        return self.dtype

    @property
    def kv_dtype(self) -> str:
        """See Model.kv_dtype. Nothing is rounded, whatever scales a checkpoint has."""
        return self.dtype

    @property
    def packed(self) -> bool:
        """See Model.packed. What comes with the target is copied by itself."""
        return self.checkpoint is not self.source

    @property
    def quantization(self) -> Quantization | None:
        """See Model.quantization."""
        return read_quantization(self.checkpoint.config, self.checkpoint.folder)

    @classmethod
    def open(cls, section: HeadDraft, target: Checkpoint, spec: ModelSpec, *, dtype: str, length: int) -> "DraftHead":
        """Read the head's checkpoint; ``spec`` is that of its ``target``, ``dtype`` what that computes in.

        Raises BadCheckpoint, or BadRecipe if ``length`` is too long for it or its window for the head.
        """
        checkpoint = Checkpoint.open(section.checkpoint)
        head, own, narrow = _read(section, checkpoint, spec)
        most, what = head.layer.max_length, "the length that the draft's config.json gives"
        if head.reach is not None and head.reach < most:
            most, what = head.reach, "the head's sliding window, which tools count in different ways"
        if length > most:
            raise BadRecipe(f"limits.length must not exceed {what}, {most}; got {length}; lower limits.length")
        if isinstance(head, DFlashSpec) and section.window > head.longest_window:
            rule = f"draft.window must not exceed what a block of {head.block} foresees, {head.longest_window} tokens"
            raise BadRecipe(f"{rule}; got {section.window}; lower draft.window")
        found = cls("draft", checkpoint, own, head, dtype, _borrowed(own, head, target, spec), narrow)
        require_tensors_fit(own, head)
        found.require_quantization()
        return found

    def require_quantization(self) -> None:
        """Raise BadCheckpoint, by name, unless what comes quantized is in float8, a scale per output or tensor."""
        found = self.quantization
        if found is None:
            return
        if found.comes_packed or found.comes_in_blocks:
            what = "weights of 4 bits" if found.comes_packed else "scales of blocks"
            raise BadCheckpoint(
                f"{self.source.folder}: a head that comes quantized must be in float8 with a scale per channel or "
                f"tensor, it has {what} ({found.method}); make one with tandemrt export quantize --scheme fp8"
            )
        if LM_HEAD_WEIGHT in self.borrowed and found.scheme(LM_HEAD) is not None:
            raise BadCheckpoint(
                f"{self.source.folder}: config.json: quantization_config must leave out {LM_HEAD!r}, which this head "
                "takes from its target as it is; name it in ignore"
            )

    def notes(self) -> list[str]:
        """What is left out or made anew, a line each."""
        several = []
        if isinstance(self.spec, MtpSpec) and self.spec.depth < self.spec.published:
            published, depth = self.spec.published, self.spec.depth
            several = [f"draft: of {published} layers that predict further on, the first {depth} are used"]
        return several + [f"draft: {len(self.narrow)} quantized weights became {self.dtype}"] * bool(self.narrow)

    def cache_notes(self) -> list[str]:
        """See Model.cache_notes."""
        found = read_quantization(self.source.config, self.source.folder)  # an MTP layer's own has none
        return [] if found is None else found.notes_on_unused_cache_scales(self.kv_dtype)

    def spec_json(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self.spec)))
        return result

    def with_borrowed(self, folder: Path) -> "DraftHead":
        """The head with what it takes of its target in a file in ``folder``: a graph may only point to what lies
        beside it."""
        file = folder / "borrowed.safetensors"
        stored = {tensor.name: tensor for tensor in self.borrowed.values()}
        tensors, dtype = self.source.tensors, self.dtype
        made = [whole(name, module, tensors, scheme, dtype) for name, (module, scheme) in self.narrow.items()]
        write_safetensors(file, [*(copied(tensor) for tensor in stored.values()), *made])
        written = read_header(file)
        sources = {name: tensor.name for name, tensor in self.borrowed.items()} | {name: name for name in self.narrow}
        tensors = {name: written[source] for name, source in sources.items()}
        return replace(self, checkpoint=replace(self.checkpoint, tensors={**self.checkpoint.tensors, **tensors}))

    def target_ids(self) -> npt.NDArray[np.int32] | None:
        """The target's ids of the tokens that its logits are of, ascending; None: of all. Raises BadCheckpoint."""
        ids = target_ids(self.checkpoint, self.spec)
        return None if ids is None or len(ids) == self.spec.vocab else np.sort(ids).astype(np.int32)

    def graphs(self, recipe: Recipe, attention: Lowering) -> list[Graph]:
        """What drafts and what makes it of the target's features, in the order in which they are built."""
        spec, checkpoint, dtype = self.spec, self.checkpoint, self.dtype
        sizes: dict[str, Any] = {"dtype": dtype, "capacity": recipe.capacity}
        bindings, lowering = spec.contract(**sizes, cache=recipe.cache), fitting(attention, spec.layer)
        how = {**sizes, "attention": lowering}
        if isinstance(spec, DFlashSpec):
            context = spec.context(**sizes, cache=recipe.cache)
            found = [
                Graph("draft", "draft/model.onnx", dtype, bindings, partial(build_dflash, spec, checkpoint, **how)),
                Graph("context", "draft/context.onnx", dtype, context, partial(build_context, spec, checkpoint, **how)),
            ]
            if isinstance(spec, DSparkSpec):
                markov = partial(build_markov, spec, checkpoint, dtype=dtype)
                found.append(Graph("markov", "draft/markov.onnx", dtype, spec.markov(dtype=dtype), markov))
            return found
        fused = contract.fuse(features=spec.feature_width, hidden=spec.layer.hidden, dtype=dtype)
        if isinstance(spec, MtpSpec):
            drafts = [partial(build_mtp, spec, checkpoint, at=at, **how) for at in range(spec.depth)]
            fuse = partial(build_state_norm, spec, checkpoint)
        else:
            drafts = [partial(build_eagle3, spec, checkpoint, **how)]
            fuse = partial(build_fuse, spec, checkpoint, attention=lowering)
        files = ("model.onnx", *(f"{name}.onnx" for name in DRAFT_LAYERS[1:]))
        layers = zip(DRAFT_LAYERS, files, drafts, strict=False)
        return [
            *(Graph(name, f"draft/{file}", dtype, bindings, draft) for name, file, draft in layers),
            Graph("fuse", "draft/fuse.onnx", dtype, fused, partial(fuse, dtype=dtype)),
        ]

    def require_lowering(self, attention: Lowering) -> None:
        """Raise BadRecipe if the head has no graphs in the form that a recipe asks for."""
        lowering = fitting(attention, self.spec.layer)
        if isinstance(self.spec, DFlashSpec) and lowering not in LOWERINGS:
            raise BadRecipe(
                "a block draft needs backend.name 'onnxruntime-cpu', with heads of a multiple of 16 values, or "
                f"'onnxruntime-cuda' with a paged cache; got heads of {self.spec.head_dim} over cache "
                f"{'paged' if attention == 'paged' else 'linear'!r}; choose another backend or draft"
            )


def _read(section: HeadDraft, checkpoint: Checkpoint, target: ModelSpec) -> tuple[Spec, Checkpoint, Narrow]:
    """What a checkpoint says, and its tensors by the names that graphs ask for, those apart that come quantized."""
    ignored = section.ignore_config_fields
    if isinstance(section, MtpDraft):
        return MtpSpec.from_checkpoint(checkpoint, target, window=section.window, ignored=ignored)
    if isinstance(section, DSparkDraft):
        return DSparkSpec.from_hf(checkpoint.config, target, ignored=ignored), checkpoint, {}
    if isinstance(section, DFlashDraft):
        return DFlashSpec.from_hf(checkpoint.config, target, ignored=ignored), checkpoint, {}
    parallel = isinstance(section, PEagleDraft)
    return Eagle3Spec.from_hf(checkpoint.config, target, ignored=ignored, parallel=parallel), checkpoint, {}


def _borrowed(checkpoint: Checkpoint, head: Spec, target: Checkpoint, spec: ModelSpec) -> dict[str, StoredTensor]:
    """What the checkpoint leaves to the target: its embedding, and of a head that knows all tokens what scores them."""
    wanted = {EMBEDDING: "model.embed_tokens.weight"}
    if isinstance(head, MtpSpec | DFlashSpec) and head.draft_vocab == head.vocab:
        wanted[LM_HEAD_WEIGHT] = "model.embed_tokens.weight" if spec.tied else "lm_head.weight"
    wanted = {name: source for name, source in wanted.items() if name not in checkpoint.tensors}
    if EMBEDDING in wanted and head.layer.hidden != spec.hidden:
        raise misfit("hidden_size", f"the target's, {spec.hidden}, whose embedding it reads", head.layer.hidden)
    plain = {
        EMBEDDING: spec.scales.embedding == 1.0,
        LM_HEAD_WEIGHT: spec.scales.logits == 1.0 and not spec.scales.logits_softcap,
    }
    for name in wanted:
        if not plain[name]:
            raise BadCheckpoint(
                f"{checkpoint.folder}: a head without {name!r} takes the target's, which this target scales "
                f"({quoted(dataclasses.asdict(spec.scales))}); whether the head does is not known; choose a head with "
                "a tensor of its own"
            )
    stored = named(target, spec).tensors
    for name, source in wanted.items():
        if source not in stored or stored[source].dtype not in COMPUTE:
            found = "not whole" if source not in stored else stored[source].dtype
            raise BadCheckpoint(
                f"{checkpoint.folder}: a head without {name!r} takes the target's {source!r}, which should be "
                f"{', '.join(COMPUTE)}, it is {found}; choose a head with a tensor of its own"
            )
    own = checkpoint.tensors if isinstance(head, MtpSpec) else {}
    return {**own, **{name: stored[source] for name, source in wanted.items()}}
