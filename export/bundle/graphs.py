"""List the graphs of a recipe, with their files in the bundle and their contracts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import onnx_ir as ir

from tandemrt.engines.bundle.manifest import EngineName
from tandemrt.engines.contract import contract
from tandemrt.engines.contract.calls import most_query
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.recipe.models import ModelDraft
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.models import Draft, Model, Models
from tandemrt.export.bundle.opened_head import DraftHead
from tandemrt.export.graph.graph import Graph
from tandemrt.export.graph.lowering import Lowering, supported_lowering
from tandemrt.export.model.decoder import build_decoder
from tandemrt.export.model.weightless import build_adjust, build_propose, build_verify
from tandemrt.export.read.shard import Shard


def graphs(recipe: Recipe, models: Models) -> list[Graph]:
    """Return every graph of the bundle: decoders, adjust, verify, and propose if a model drafts."""
    target, drafts, lowering = models[0], models[1:], recipe.backend.lowering
    width = target.spec.vocab  # a draft model's logits are padded or cut to the target's width
    shard = target.shards[0] if target.shards else None
    return [
        _decoder(target, recipe, lowering, width, features=_features(drafts), shard=shard),
        *(graph for draft in drafts for graph in _draft(draft, recipe, lowering, width)),
        *weightless(recipe, models),
    ]


def weightless(recipe: Recipe, models: Models) -> list[Graph]:
    """Return the graphs that have no weights of ``models``: adjust, verify, and propose if a model drafts."""
    target, drafts, width = models[0], models[1:], models[0].spec.vocab
    return [
        _weightless("adjust", target, contract.adjust, build_adjust, width),
        _weightless("verify", target, contract.verify, build_verify, width, draft_probs=False),
        _weightless("verify_probs", target, contract.verify, build_verify, width, draft_probs=True),
        *(graph for draft in drafts for graph in _propose(draft, recipe, width)),
    ]


def _decoder(
    model: Model,
    recipe: Recipe,
    lowering: Lowering,
    width: int,
    *,
    features: tuple[int, ...] = (),
    shard: Shard | None = None,
) -> Graph:
    spec = model.spec
    sizes: dict[str, Any] = {"dtype": model.compute, "kv_dtype": model.kv_dtype}
    sizes |= {"capacity": recipe.capacity, "width": width}
    sizes["uncommitted"] = most_query(recipe.draft.kind, recipe.draft.num_draft_tokens)
    rank_spec = spec if shard is None else shard.spec(spec)
    shown = 0 if shard is not None and shard.rank else len(features)
    bindings = rank_spec.contract(**sizes, cache=recipe.cache, features=shown * spec.hidden)
    lowering = supported_lowering(lowering, spec)
    make = partial(build_decoder, spec, model.checkpoint, **sizes, lowering=lowering, features=features, shard=shard)
    return Graph(model.role, f"{model.role}/model.onnx", model.compute, bindings, make, lowering, shard)


def further_ranks(recipe: Recipe, models: Models) -> list[Graph]:
    """Return the target's graphs of ranks 1 and up. Only rank 0 passes features to a draft."""
    target, lowering, features = models[0], recipe.backend.lowering, _features(models[1:])
    return [
        _decoder(target, recipe, lowering, target.spec.vocab, features=features, shard=shard)
        for shard in target.shards[1:]
    ]


def _features(drafts: Sequence[Draft]) -> tuple[int, ...]:
    return next((draft.spec.features for draft in drafts if isinstance(draft, DraftHead)), ())


def _draft(draft: Draft, recipe: Recipe, lowering: Lowering, width: int) -> list[Graph]:
    if isinstance(draft, Model):
        return [_decoder(draft, recipe, lowering, _draft_vocab(draft, recipe, width))]
    return draft.graphs(recipe, lowering)


def _draft_vocab(draft: Draft, recipe: Recipe, width: int) -> int:
    """Return the number of tokens that the draft can propose, of the ``width`` of the target's logits."""
    if isinstance(draft, DraftHead):
        return draft.spec.draft_vocab
    return (recipe.draft.vocab if isinstance(recipe.draft, ModelDraft) else None) or width


def _propose(draft: Draft, recipe: Recipe, width: int) -> list[Graph]:
    vocab = _draft_vocab(draft, recipe, width)
    names: tuple[EngineName, EngineName] = ("propose", "propose_probs")
    return [
        _weightless(
            name, draft, contract.propose, build_propose, vocab, draft_probs=name == names[1], target_ids=vocab < width
        )
        for name in names
    ]


def _weightless(
    name: EngineName,
    model: Draft,
    bindings: Callable[..., Contract],
    build: Callable[..., ir.Model],
    width: int,
    **options: bool,
) -> Graph:
    arguments = {"vocab": width, "dtype": model.compute, **options}
    return Graph(name, f"{name}.onnx", model.compute, bindings(**arguments), partial(build, **arguments))
