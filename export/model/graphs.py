"""The graphs a recipe asks for: which ones, where they lie in the bundle, and the contract each must meet."""

from collections.abc import Callable
from functools import partial
from typing import Any

import onnx_ir as ir

from tandemrt.engines import contract
from tandemrt.engines.contract import Contract
from tandemrt.engines.manifest import EngineName
from tandemrt.engines.recipe import Recipe
from tandemrt.export.model.decoder import build_decoder
from tandemrt.export.model.draft_heads import DraftHead
from tandemrt.export.model.graph import Graph
from tandemrt.export.model.heads import build_adjust, build_propose, build_verify
from tandemrt.export.model.lowerings import Lowering, fitting
from tandemrt.export.model.models import Draft, Model, Models


def graphs(recipe: Recipe, models: Models, attention: Lowering) -> list[Graph]:
    """Every graph of the bundle: decoders, adjusted logits, verification, and drafting when a model drafts."""
    target, drafts = models[0], models[1:]
    width = target.spec.vocab  # a draft model's logits are padded to it, or cut where they are padding
    features = [draft.spec.features for draft in drafts if isinstance(draft, DraftHead)]
    return [
        _decoder(target, recipe, attention, width, *features),
        *(graph for draft in drafts for graph in _draft(draft, recipe, attention, width)),
        _head("adjust", target, contract.adjust, build_adjust, width),
        _head("verify", target, contract.verify, build_verify, width, draft_probs=False),
        _head("verify_probs", target, contract.verify, build_verify, width, draft_probs=True),
        *(graph for draft in drafts for graph in _propose(draft, width)),
    ]


def _propose(draft: Draft, width: int) -> list[Graph]:
    known = draft.spec.draft_vocab if isinstance(draft, DraftHead) else width
    names: tuple[EngineName, EngineName] = ("propose", "propose_probs")
    return [
        _head(
            name, draft, contract.propose, build_propose, known, draft_probs=name == names[1], target_ids=known < width
        )
        for name in names
    ]


def _decoder(model: Model, recipe: Recipe, attention: Lowering, width: int, features: tuple[int, ...] = ()) -> Graph:
    spec = model.spec
    sizes: dict[str, Any] = {"dtype": model.compute, "kv_dtype": model.kv_dtype}
    sizes |= {"capacity": recipe.capacity, "width": width}
    bindings = spec.contract(**sizes, cache=recipe.cache, features=len(features) * spec.hidden)
    make = partial(
        build_decoder, spec, model.checkpoint, **sizes, attention=fitting(attention, spec), features=features
    )
    return Graph(model.role, f"{model.role}/model.onnx", model.compute, bindings, make)


def _draft(draft: Draft, recipe: Recipe, attention: Lowering, width: int) -> list[Graph]:
    if isinstance(draft, Model):
        return [_decoder(draft, recipe, attention, width)]
    return draft.graphs(recipe, attention)


def _head(
    name: EngineName,
    model: Draft,
    bindings: Callable[..., Contract],
    build: Callable[..., ir.Model],
    width: int,
    **options: bool,
) -> Graph:
    arguments = {"vocab": width, "dtype": model.compute, **options}
    return Graph(name, f"{name}.onnx", model.compute, bindings(**arguments), partial(build, **arguments))
