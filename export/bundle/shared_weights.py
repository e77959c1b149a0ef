"""Find weights that several subgraphs of a bundle share, so that a device stores each of them once."""

from collections.abc import Collection, Iterator, Mapping

from tandemrt.engines.bundle.manifest import EngineEntry, EngineName, SharedWeight
from tandemrt.engines.contract.draft_kinds import DRAFT_LAYERS
from tandemrt.export.bundle.models import Model, Models
from tandemrt.export.bundle.opened_head import DraftHead
from tandemrt.export.read.checkpoint import StoredTensor
from tandemrt.export.read.tensors import with_graph_names

_TABLE = "model.embed_tokens.weight"  # a tied lm_head is the same tensor


def with_shared_weights(engines: Mapping[EngineName, EngineEntry], models: Models) -> dict[EngineName, EngineEntry]:
    """Return ``engines``, with the weights that subgraphs of cut decoders share with each other or with the target."""
    weights: dict[EngineName, dict[str, SharedWeight]] = {}
    for name, own, model, tensor in _shared(engines, models):
        if tensor is None or engines[name].decoder is None:  # an embedding in a few bits is several tensors
            continue
        if tensor.dtype == engines[name].dtype and not tensor.transposed:
            weight = SharedWeight(
                file=f"{model.role}/{tensor.file.name}", offset=tensor.offset, dtype=tensor.dtype, shape=tensor.shape
            )
            weights.setdefault(name, {})[own] = weight
    return {
        name: engine.model_copy(update={"shared": {**engine.shared, **weights.get(name, {})}})
        for name, engine in engines.items()
    }


def _shared(
    engines: Collection[EngineName], models: Models
) -> Iterator[tuple[EngineName, str, Model, StoredTensor | None]]:
    """Yield engine, weight name in the engine, and the model and stored tensor that hold the weight, if it is one."""
    target, *drafts = models
    tensors = with_graph_names(target.checkpoint, target.spec).tensors
    wanted = {_TABLE} if target.spec.tied else set()
    for draft in drafts:
        if isinstance(draft, DraftHead):
            for own, borrowed in draft.borrowed.items():
                if borrowed.name in (_TABLE, "lm_head.weight") and borrowed.name in tensors:
                    wanted.add(borrowed.name)
                    for layer in (name for name in DRAFT_LAYERS if name in engines):
                        yield layer, own, target, tensors[borrowed.name]
        elif draft.spec.tied:
            yield "draft", _TABLE, draft, with_graph_names(draft.checkpoint, draft.spec).tensors.get(_TABLE)
    for name in sorted(wanted):
        yield "target", name, target, tensors.get(name)
