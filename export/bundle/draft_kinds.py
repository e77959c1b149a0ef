"""Kinds of drafts with a checkpoint: readers, fields of the manifest, and graph builders per kind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

import onnx_ir as ir

from tandemrt.engines.contract import contract
from tandemrt.engines.contract.contract import CacheKind
from tandemrt.engines.contract.draft_kinds import DRAFT_LAYERS
from tandemrt.engines.recipe.models import HeadDraft
from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe, quoted
from tandemrt.export.graph.graph import Graph
from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.model.assistant import build_assistant
from tandemrt.export.model.dflash import LOWERINGS, build_context, build_dflash
from tandemrt.export.model.dflash2 import build_dflash2, build_selector
from tandemrt.export.model.eagle3 import build_eagle3, build_fuse
from tandemrt.export.model.markov import build_markov
from tandemrt.export.model.mtp import build_mtp, build_state_norm
from tandemrt.export.read.assistant import AssistantSpec
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.dflash import DFlashSpec
from tandemrt.export.read.dflash2 import DFlash2Spec
from tandemrt.export.read.dspark import DSparkSpec
from tandemrt.export.read.eagle3 import Eagle3Spec
from tandemrt.export.read.mtp import MtpSpec, QuantizedWeights
from tandemrt.export.read.spec import ModelSpec

Spec = Eagle3Spec | MtpSpec | AssistantSpec | DFlashSpec


class ReadDraft(NamedTuple):
    """A parsed draft checkpoint: its spec, its tensors by graph names, and its quantized weights."""

    spec: Spec
    checkpoint: Checkpoint
    quantized: QuantizedWeights


class GraphSizes(NamedTuple):
    """Arguments that all graphs of one draft share."""

    dtype: str
    capacity: int
    cache: CacheKind
    lowering: Lowering

    @property
    def contract(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "capacity": self.capacity, "cache": self.cache}

    @property
    def build(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "capacity": self.capacity, "lowering": self.lowering}


@dataclass(frozen=True)
class FeatureDraft:
    """A kind of draft that reads its target's features.

    Attributes:
        read: reads the checkpoint of a recipe's section for a target. Raises BadCheckpoint or BadRecipe.
        graphs: the graphs of the draft, in the order in which they are built.
        entry: fields of the manifest's draft entry that follow from the spec.
        notes: notes for the build's report, one line each.
        lowerings: supported lowerings.
        scores_all_tokens: a draft over the full vocabulary uses the target's lm_head if it has none of its own.
        borrows_layers: all tensors of its graphs come from the target's checkpoint (MTP).
        reads_cache: it reads the target's KV cache, and its embeddings, as wide and scaled as there.
    """

    read: Callable[[Any, Checkpoint, ModelSpec], ReadDraft]
    graphs: Callable[[Any, Checkpoint, GraphSizes], list[Graph]]
    entry: Callable[[Any], dict[str, Any]] = lambda _spec: {}
    notes: Callable[[Any], list[str]] = lambda _spec: []
    lowerings: tuple[Lowering, ...] = get_args(Lowering)
    scores_all_tokens: bool = False
    borrows_layers: bool = False
    reads_cache: bool = False


def _read_eagle3(section: HeadDraft, checkpoint: Checkpoint, target: ModelSpec, *, parallel: bool) -> ReadDraft:
    ignored = section.ignore_config_fields
    return ReadDraft(Eagle3Spec.from_hf(checkpoint.config, target, ignored=ignored, parallel=parallel), checkpoint, {})


def _eagle3_graphs(spec: Eagle3Spec, checkpoint: Checkpoint, sizes: GraphSizes) -> list[Graph]:
    draft = partial(build_eagle3, spec, checkpoint, **sizes.build)
    fuse = partial(build_fuse, spec, checkpoint, dtype=sizes.dtype, lowering=sizes.lowering)
    bindings = spec.contract(**sizes.contract)
    return [
        Graph("draft", "draft/model.onnx", sizes.dtype, bindings, draft, sizes.lowering),
        Graph("fuse", "draft/fuse.onnx", sizes.dtype, _fuse_contract(spec, sizes), fuse),
    ]


def _read_mtp(section: HeadDraft, checkpoint: Checkpoint, target: ModelSpec) -> ReadDraft:
    ignored = section.ignore_config_fields
    return ReadDraft(
        *MtpSpec.from_checkpoint(checkpoint, target, num_draft_tokens=section.num_draft_tokens, ignored=ignored)
    )


def _mtp_graphs(spec: MtpSpec, checkpoint: Checkpoint, sizes: GraphSizes) -> list[Graph]:
    bindings = spec.contract(**sizes.contract)
    layers = []
    for at, name in enumerate(DRAFT_LAYERS[: spec.depth]):
        file = f"draft/{'model' if at == 0 else name}.onnx"
        draft = partial(build_mtp, spec, checkpoint, at=at, **sizes.build)
        layers.append(Graph(name, file, sizes.dtype, bindings, draft, sizes.lowering))
    fuse = partial(build_state_norm, spec, checkpoint, dtype=sizes.dtype)
    return [*layers, Graph("fuse", "draft/fuse.onnx", sizes.dtype, _fuse_contract(spec, sizes), fuse)]


def _read_assistant(section: HeadDraft, checkpoint: Checkpoint, target: ModelSpec) -> ReadDraft:
    ignored = section.ignore_config_fields
    return ReadDraft(AssistantSpec.from_hf(checkpoint.config, target, ignored=ignored), checkpoint, {})


def _assistant_graphs(spec: AssistantSpec, checkpoint: Checkpoint, sizes: GraphSizes) -> list[Graph]:
    draft = partial(build_assistant, spec, checkpoint, **sizes.build)
    bindings = spec.contract(**sizes.contract)
    return [Graph("draft", "draft/model.onnx", sizes.dtype, bindings, draft, sizes.lowering)]


def _read_block(
    section: HeadDraft, checkpoint: Checkpoint, target: ModelSpec, *, of: type[DFlashSpec] = DFlashSpec
) -> ReadDraft:
    spec = of.from_hf(checkpoint.config, target, ignored=section.ignore_config_fields)
    if section.num_draft_tokens > spec.max_draft_tokens:
        rule = f"must not exceed {spec.max_draft_tokens}, what a block of {spec.block_size} predicts"
        raise BadRecipe(f"draft.num_draft_tokens {rule}; got {section.num_draft_tokens}; lower draft.num_draft_tokens")
    return ReadDraft(spec, checkpoint, {})


def _dflash_graphs(
    spec: DFlashSpec, checkpoint: Checkpoint, sizes: GraphSizes, build: Callable[..., ir.Model] = build_dflash
) -> list[Graph]:
    draft = partial(build, spec, checkpoint, **sizes.build)
    write = partial(build_context, spec, checkpoint, **sizes.build)
    bindings, context = spec.contract(**sizes.contract), spec.context(**sizes.contract)
    return [
        Graph("draft", "draft/model.onnx", sizes.dtype, bindings, draft, sizes.lowering),
        Graph("context", "draft/context.onnx", sizes.dtype, context, write, sizes.lowering),
    ]


def _dspark_graphs(spec: DSparkSpec, checkpoint: Checkpoint, sizes: GraphSizes) -> list[Graph]:
    return [*_dflash_graphs(spec, checkpoint, sizes), _markov_graph(spec, checkpoint, sizes, build_markov)]


def _dflash2_graphs(spec: DFlash2Spec, checkpoint: Checkpoint, sizes: GraphSizes) -> list[Graph]:
    block = _dflash_graphs(spec, checkpoint, sizes, build_dflash2)
    return [*block, _markov_graph(spec, checkpoint, sizes, build_selector)]


def _markov_graph(
    spec: DSparkSpec | DFlash2Spec, checkpoint: Checkpoint, sizes: GraphSizes, build: Callable[..., ir.Model]
) -> Graph:
    bindings = spec.markov(dtype=sizes.dtype)
    return Graph(
        "markov", "draft/markov.onnx", sizes.dtype, bindings, partial(build, spec, checkpoint, dtype=sizes.dtype)
    )


def _pard_entry(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the id of the mask token. Raises BadCheckpoint."""
    token, vocab = checkpoint.config.get("pard_token"), checkpoint.config.get("vocab_size")
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < int(vocab or 0):
        raise BadCheckpoint(
            f"{checkpoint.folder}: config.json: pard_token should be an id below vocab_size, {vocab}, it is "
            f"{quoted(token)}; choose a checkpoint that PARD trained, or draft.kind = 'model'"
        )
    return {"mask_token": token}


def _parallel_entry(spec: Eagle3Spec) -> dict[str, Any]:
    return {"mask_token": spec.mask_token}


def _mtp_entry(spec: MtpSpec) -> dict[str, Any]:
    return {"layers": spec.depth} if spec.depth > 1 else {}


def _mtp_notes(spec: MtpSpec) -> list[str]:
    unused = spec.depth < spec.published
    return [f"of {spec.published} layers that predict further on, the first {spec.depth} are used"] * unused


def _block_entry(spec: DFlashSpec) -> dict[str, Any]:
    return {"mask_token": spec.mask_token, "block": spec.block_size, "sample_from_anchor": spec.sample_from_anchor}


def _fuse_contract(spec: Eagle3Spec | MtpSpec, sizes: GraphSizes) -> contract.Contract:
    return contract.fuse(features=spec.feature_width, hidden=spec.layer.hidden, dtype=sizes.dtype)


# Models of their own, which are exported like a target: the fields of the manifest's draft entry from their checkpoint.
MODEL_DRAFTS: Mapping[str, Callable[[Checkpoint], dict[str, Any]]] = {"model": lambda _: {}, "pard": _pard_entry}

_BLOCK_DRAFT: dict[str, Any] = {"entry": _block_entry, "lowerings": tuple(LOWERINGS), "scores_all_tokens": True}
FEATURE_DRAFTS: Mapping[str, FeatureDraft] = {
    "eagle3": FeatureDraft(partial(_read_eagle3, parallel=False), _eagle3_graphs),
    "peagle": FeatureDraft(partial(_read_eagle3, parallel=True), _eagle3_graphs, _parallel_entry),
    "mtp": FeatureDraft(_read_mtp, _mtp_graphs, _mtp_entry, _mtp_notes, scores_all_tokens=True, borrows_layers=True),
    "assistant": FeatureDraft(_read_assistant, _assistant_graphs, lowerings=("grouped", "paged"), reads_cache=True),
    "dflash": FeatureDraft(_read_block, _dflash_graphs, **_BLOCK_DRAFT),
    "dflash2": FeatureDraft(partial(_read_block, of=DFlash2Spec), _dflash2_graphs, **_BLOCK_DRAFT),
    "dspark": FeatureDraft(partial(_read_block, of=DSparkSpec), _dspark_graphs, **_BLOCK_DRAFT),
}
