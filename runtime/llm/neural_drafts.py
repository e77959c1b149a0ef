"""Compose the drafter for each kind of draft that has a model of its own, from a draft head or model and a sampler."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tandemrt.engines.contract.calls import most_query
from tandemrt.engines.contract.draft_kinds import (
    DRAFT_LAYERS,
    BlockEntry,
    FeatureEntry,
    ModelEntry,
    MtpEntry,
    PardEntry,
    PEagleEntry,
)
from tandemrt.runtime.caches.kv_cache import Cache, make_cache
from tandemrt.runtime.drafters.assistant import AssistantDrafter, TargetRows
from tandemrt.runtime.drafters.block import BlockDrafter, MarkovBlockHead, MaskBlock, PlainBlockHead
from tandemrt.runtime.drafters.layers import LayersDrafter
from tandemrt.runtime.drafters.model import ModelDrafter
from tandemrt.runtime.drafters.pair_store import PairStore
from tandemrt.runtime.drafters.pairs import PairDrafter, ParallelHead, StepHead
from tandemrt.runtime.drafters.parallel import ParallelDrafter
from tandemrt.runtime.drafters.resources import DraftResources
from tandemrt.runtime.drafters.sampling import StepSampler, WindowSampler
from tandemrt.runtime.drafters.target_ids import read_target_ids
from tandemrt.runtime.engine_loop.drafter import Drafter
from tandemrt.runtime.llm.draft_parts import DraftParts


def _model(parts: DraftParts, _: ModelEntry) -> Drafter:
    draft = _resources(parts)
    sampler, catch_up = StepSampler(draft), parts.new_layout()
    return ModelDrafter(draft, sampler, catch_up=catch_up, chunk=parts.chunk, max_length=parts.max_length)


def _pard(parts: DraftParts, entry: PardEntry) -> Drafter:
    draft = _resources(parts)
    return ParallelDrafter(draft, WindowSampler(draft), mask_token=entry.mask_token, max_length=parts.max_length)


def _head(parts: DraftParts, _: FeatureEntry) -> Drafter:
    draft, pairs = _pairs(parts)
    sampler = StepSampler(draft)
    return PairDrafter(draft, pairs, StepHead(draft, pairs, sampler), sampler, chunk=parts.chunk)


def _parallel_head(parts: DraftParts, entry: PEagleEntry) -> Drafter:
    draft, pairs = _pairs(parts)
    sampler = WindowSampler(draft)
    head = ParallelHead(draft, pairs, sampler, mask_token=entry.mask_token)
    return PairDrafter(draft, pairs, head, sampler, chunk=parts.chunk)


def _mtp(parts: DraftParts, entry: MtpEntry) -> Drafter:
    if entry.layers is None:
        return _head(parts, entry)
    layers = entry.layers
    draft, pairs = _pairs(parts, kept=layers - 1)
    engines = [parts.engines[name] for name in DRAFT_LAYERS[1:layers]]
    further = [make_cache(each, draft.slots, parts.cache_manager) for each in engines]
    layouts = [draft.layout, *(parts.new_layout() for _ in further)]
    sampler, caches = StepSampler(draft), [draft.cache, *further]
    return LayersDrafter(draft, pairs, sampler, caches=caches, layouts=layouts, chunk=parts.chunk)


def _assistant(parts: DraftParts, _: FeatureEntry) -> Drafter:
    draft = _resources(parts, TargetRows(parts.target_cache, parts.engines["draft"]))
    return AssistantDrafter(draft, StepSampler(draft))


def _block(parts: DraftParts, entry: BlockEntry) -> Drafter:
    draft = _resources(parts)
    sampler = WindowSampler(draft)
    return BlockDrafter(draft, PlainBlockHead(_tokens(draft, entry), sampler), sampler)


def _markov_block(parts: DraftParts, entry: BlockEntry) -> Drafter:
    draft = _resources(parts)
    sampler = StepSampler(draft)
    return BlockDrafter(draft, MarkovBlockHead(draft, _tokens(draft, entry), sampler), sampler)


def _resources(parts: DraftParts, cache: Cache | None = None) -> DraftResources:
    """The engines and buffers of the draft, with the target's layout, and with ``cache`` or a new one."""
    draft, limits = parts.engines["draft"], parts.bundle.limits
    return DraftResources(
        parts.engines,
        parts.buffers,
        parts.state,
        make_cache(draft, limits.batch, parts.cache_manager) if cache is None else cache,
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


NEURAL_DRAFTERS: Mapping[str, Callable[[DraftParts, Any], Drafter]] = {
    "model": _model,  # reads tokens; one run per drafted token
    "pard": _pard,  # reads tokens and mask tokens; one run per round
    "eagle3": _head,  # reads pairs (token, target state); one run per drafted token
    "mtp": _mtp,  # the same
    "assistant": _assistant,  # reads a token, a target state and the target's KV cache; one run per drafted token
    "peagle": _parallel_head,  # reads pairs and mask tokens; one run per round
    "dflash": _block,  # reads a block of mask tokens; one run per round
    "dflash2": _markov_block,  # the same; one run of the selector per drafted token
    "dspark": _markov_block,  # the same; one run of the Markov head per drafted token
}
