"""Compose the drafter for each kind of draft that has a model of its own, from a draft head or model and a sampler."""

from dataclasses import replace

from tandemrt.engines.bundle.draft import (
    BlockEntry,
    DFlashEntry,
    DSparkEntry,
    Eagle3Entry,
    ModelEntry,
    MtpEntry,
    PardEntry,
    PEagleEntry,
)
from tandemrt.engines.contract.calls import most_query
from tandemrt.engines.contract.draft_kinds import DRAFT_LAYERS
from tandemrt.runtime.caches.kv_cache import make_cache
from tandemrt.runtime.drafters.block import BlockDrafter, MarkovBlockHead, MaskBlock, PlainBlockHead
from tandemrt.runtime.drafters.layers import LayersDrafter
from tandemrt.runtime.drafters.model import ModelDrafter
from tandemrt.runtime.drafters.pair_store import PairStore
from tandemrt.runtime.drafters.pairs import PairDrafter, ParallelHead, StepHead
from tandemrt.runtime.drafters.parallel import ParallelDrafter
from tandemrt.runtime.drafters.resources import DraftResources
from tandemrt.runtime.drafters.sampling import StepSampler, WindowSampler
from tandemrt.runtime.drafters.target_ids import read_target_ids
from tandemrt.runtime.engine_loop.models import Drafter
from tandemrt.runtime.llm.draft_factory import DraftParts

NeuralEntry = ModelEntry | PardEntry | Eagle3Entry | PEagleEntry | MtpEntry | DFlashEntry | DSparkEntry


def make_neural_drafter(parts: DraftParts, draft: NeuralEntry) -> Drafter:
    """Return the drafter of a draft with a model."""
    match draft:
        case ModelEntry():  # reads tokens; one run per drafted token
            return _model(parts)
        case PardEntry() as entry:  # reads tokens and mask tokens; one run per round
            return _pard(parts, entry)
        case Eagle3Entry():  # reads pairs (token, target state); one run per drafted token
            return _head(parts)
        case MtpEntry() as entry:  # the same
            return _head(parts) if entry.layers is None else _layers(parts, entry.layers)
        case PEagleEntry() as entry:  # reads pairs and mask tokens; one run per round
            return _parallel_head(parts, entry)
        case DFlashEntry() as entry:  # reads a block of mask tokens; one run per round
            return _block(parts, entry)
        case DSparkEntry() as entry:  # the same; one run of the Markov head per drafted token
            return _markov_block(parts, entry)


def _model(parts: DraftParts) -> Drafter:
    draft = _resources(parts)
    sampler, catch_up = StepSampler(draft), parts.new_layout()
    return ModelDrafter(draft, sampler, catch_up=catch_up, chunk=parts.chunk, max_length=parts.max_length)


def _pard(parts: DraftParts, entry: PardEntry) -> Drafter:
    draft = _resources(parts)
    return ParallelDrafter(draft, WindowSampler(draft), mask_token=entry.mask_token, max_length=parts.max_length)


def _head(parts: DraftParts) -> Drafter:
    draft, pairs = _pairs(parts)
    sampler = StepSampler(draft)
    return PairDrafter(draft, pairs, StepHead(draft, pairs, sampler), sampler, chunk=parts.chunk)


def _parallel_head(parts: DraftParts, entry: PEagleEntry) -> Drafter:
    draft, pairs = _pairs(parts)
    sampler = WindowSampler(draft)
    head = ParallelHead(draft, pairs, sampler, mask_token=entry.mask_token)
    return PairDrafter(draft, pairs, head, sampler, chunk=parts.chunk)


def _layers(parts: DraftParts, layers: int) -> Drafter:
    draft, pairs = _pairs(parts, kept=layers - 1)
    engines = [parts.engines[name] for name in DRAFT_LAYERS[1:layers]]
    further = [make_cache(each, draft.slots, parts.cache_manager) for each in engines]
    layouts = [draft.layout, *(parts.new_layout() for _ in further)]
    sampler, caches = StepSampler(draft), [draft.cache, *further]
    return LayersDrafter(draft, pairs, sampler, caches=caches, layouts=layouts, chunk=parts.chunk)


def _block(parts: DraftParts, entry: DFlashEntry) -> Drafter:
    draft = _resources(parts)
    sampler = WindowSampler(draft)
    return BlockDrafter(draft, PlainBlockHead(_tokens(draft, entry), sampler), sampler)


def _markov_block(parts: DraftParts, entry: DSparkEntry) -> Drafter:
    draft = _resources(parts)
    sampler = StepSampler(draft)
    return BlockDrafter(draft, MarkovBlockHead(draft, _tokens(draft, entry), sampler), sampler)


def _resources(parts: DraftParts) -> DraftResources:
    """The engines, buffers and new cache of the draft, with the target's layout."""
    draft, limits = parts.engines["draft"], parts.bundle.limits
    return DraftResources(
        parts.engines,
        parts.buffers,
        parts.state,
        make_cache(draft, limits.batch, parts.cache_manager),
        parts.graphs,
        parts.layout,
        slots=limits.batch,
        window=parts.buffers.window,
        target_ids=read_target_ids(parts.bundle),
    )


def _pairs(parts: DraftParts, *, kept: int = 0) -> tuple[DraftResources, PairStore]:
    """The resources of a draft head. It has its own layout, because its prompts are shifted by one token."""
    draft = replace(_resources(parts), layout=parts.new_layout())
    query = most_query(parts.bundle.draft.kind, draft.window)
    return draft, PairStore(draft, query=query, chunk=parts.chunk, kept=kept)


def _tokens(draft: DraftResources, entry: BlockEntry) -> MaskBlock:
    anchor = entry.sample_from_anchor
    return MaskBlock(draft, mask_token=entry.mask_token, size=entry.block, sample_from_anchor=anchor)
