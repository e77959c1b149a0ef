"""Weights that several pieces of a bundle read: a GPU holds each once."""

from collections.abc import Iterator, Mapping

from tandemrt.engines.drafts import DRAFT_LAYERS
from tandemrt.engines.manifest import Engine, EngineName, SharedWeight
from tandemrt.export.model.draft_heads import DraftHead
from tandemrt.export.model.models import Model, Models
from tandemrt.export.read.checkpoint import StoredTensor
from tandemrt.export.read.mtp import MtpSpec
from tandemrt.export.read.tensors import named

_TABLE = "model.embed_tokens.weight"  # which a tied head scores by, too


def with_shared_weights(engines: Mapping[EngineName, Engine], models: Models) -> dict[EngineName, Engine]:
    """``engines``, those in steps with the weights that their pieces share with one another or with the target."""
    found: dict[EngineName, dict[str, SharedWeight]] = {}
    for name, own, model, tensor in _shared(models):
        if engines[name].decoder is not None and tensor.dtype == engines[name].dtype and not tensor.transposed:
            weight = SharedWeight(
                file=f"{model.role}/{tensor.file.name}", offset=tensor.offset, dtype=tensor.dtype, shape=tensor.shape
            )
            found.setdefault(name, {})[own] = weight
    return {name: engine.model_copy(update={"shared": found.get(name, {})}) for name, engine in engines.items()}


def _shared(models: Models) -> Iterator[tuple[EngineName, str, Model, StoredTensor]]:
    """Engines, the weights as they call them, and where these lie: with which model, and in which file."""
    target, *drafts = models
    tensors = named(target.checkpoint, target.spec).tensors
    wanted = {_TABLE} if target.spec.tied else set()
    for draft in drafts:
        if isinstance(draft, DraftHead):
            for own, borrowed in draft.borrowed.items():
                if borrowed.name in (_TABLE, "lm_head.weight") and borrowed.name in tensors:
                    wanted.add(borrowed.name)
                    depth = draft.spec.depth if isinstance(draft.spec, MtpSpec) else 1
                    for layer in DRAFT_LAYERS[:depth]:
                        yield layer, own, target, tensors[borrowed.name]
        elif draft.spec.tied:
            yield "draft", _TABLE, draft, named(draft.checkpoint, draft.spec).tensors[_TABLE]
    for name in sorted(wanted):
        yield "target", name, target, tensors[name]
