"""Read the config of a Gemma 4 assistant: a draft head whose layers read the KV cache of its target."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tandemrt.engines.contract import contract
from tandemrt.engines.contract.contract import CacheKind, Contract
from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.draft_heads import DraftHeadSpec, other_draft
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.spec import ModelSpec

TOKEN_ORDERING = "masked_embedding.token_ordering"
_NAMED = "Gemma4AssistantForCausalLM"
_UNREAD = (
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "boi_token_id",
    "image_token_id",
    "audio_token_id",
)


@dataclass(frozen=True)
class AssistantSpec(DraftHeadSpec):
    """A head that reads the target's last state, and keys and values of two of its layers; it has none of its own.

    ``caches``: these layers with their KV heads and head size; ``layer.variants.sources`` says which of them each layer
    reads. ``embedding_scale``: of the target, whose embedding the head reads. ``centroids`` and ``active``: tokens are
    scored that belong to the ``active`` likeliest of ``centroids`` groups of equal size; 0: all tokens.
    """

    caches: tuple[tuple[int, tuple[int, int]], ...]
    embedding_scale: float
    centroids: int
    active: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: ModelSpec, *, ignored: Collection[str] = ()) -> "AssistantSpec":
        """Read a config. Raises BadCheckpoint, by name, for unknown fields and values that do not fit ``target``."""
        fields = Fields(config, "config.json")
        if (named := fields.get("architectures")) != [_NAMED]:
            raise other_draft(named, _NAMED, "a Gemma 4 assistant")
        fields.only("model_type", "gemma4_assistant")
        fields.only("tie_word_embeddings", True)
        fields.skip(*_UNREAD)
        hidden, ordered = fields.integer("backbone_hidden_size", 1536), fields.flag("use_ordered_embeddings", False)
        centroids, active = fields.integer("num_centroids", 2048), fields.integer("centroid_intermediate_top_k", 32)
        layers = fields.get("text_config")
        of_layers = [name for name in ignored if isinstance(layers, Mapping) and name in layers]
        layer, sources = _read_layers(layers, target, ignored=of_layers)
        fields.finish([name for name in ignored if name not in of_layers])
        if ordered and (layer.vocab % centroids or active > centroids):
            raise BadCheckpoint(
                f"config.json: num_centroids should divide vocab_size, {layer.vocab}, and be at least "
                f"centroid_intermediate_top_k, they are {centroids} and {active}"
            )
        heads = {source: target.heads_of(source) for source in sorted(set(sources))}
        caches = tuple((source, (each.kv, each.dim)) for source, each in heads.items())
        spec = cls(
            replace(layer, variants=replace(layer.variants, sources=tuple(layer.layers + each for each in sources))),
            features=(target.layers,),
            target_hidden=hidden,
            draft_vocab=layer.vocab,
            max_context=None,
            caches=caches,
            embedding_scale=target.scales.embedding,
            centroids=centroids if ordered else 0,
            active=active if ordered else 0,
        )
        spec.require_fit(target)
        return spec

    def contract(self, *, capacity: int, dtype: str, cache: CacheKind = "linear") -> Contract:
        """Return the bindings of the head; ``capacity`` and ``cache`` are those of the target."""
        sizes: dict[str, Any] = {"capacity": capacity, "vocab": self.draft_vocab, "dtype": dtype, "cache": cache}
        return contract.assistant(caches=dict(self.caches), hidden=self.target_hidden, **sizes)


def token_groups(checkpoint: Checkpoint, spec: AssistantSpec) -> npt.NDArray[np.int64]:
    """Return the tokens [centroids, tokens] of each group. Raises BadCheckpoint unless every token is in one."""
    stored = checkpoint.read(TOKEN_ORDERING, (spec.vocab,), ("int64", "int32")).astype(np.int64)
    if not np.array_equal(np.sort(stored), np.arange(spec.vocab)):
        raise BadCheckpoint(f"{checkpoint.folder}: {TOKEN_ORDERING} should have each token id below {spec.vocab} once")
    return stored.reshape(spec.centroids, -1)


def _read_layers(config: Any, target: ModelSpec, *, ignored: Collection[str]) -> tuple[ModelSpec, tuple[int, ...]]:
    """Return the head's layers, and the target's layer that each reads: the last of its kind that has a cache."""
    if not isinstance(config, Mapping) or not config.get("model_type") == target.family == "gemma4_text":
        raise BadCheckpoint(
            "config.json: text_config should describe layers of gemma4_text, for a target of this family, it is "
            f"{quoted(config)} for a target of {target.family}"
        )
    shared, layers = config.get("num_kv_shared_layers"), config.get("num_hidden_layers")
    if shared not in (layers, 0, None) or config.get("vocab_size_per_layer_input") not in (0, None):
        raise BadCheckpoint(
            f"config.json: num_kv_shared_layers should be num_hidden_layers, {quoted(layers)}, and "
            f"vocab_size_per_layer_input 0, they are {quoted(shared)} and "
            f"{quoted(config.get('vocab_size_per_layer_input'))}"
        )
    unread = ("num_kv_shared_layers", "vocab_size_per_layer_input", "final_logit_softcapping")  # logits are not capped
    known = {name: value for name, value in config.items() if name not in unread}
    layer = ModelSpec.from_hf(known, ignored=ignored)
    if layer.experts is not None or layer.variants.inputs is not None:
        raise BadCheckpoint("config.json: an assistant should have neither experts nor inputs of each layer, it has")
    sources = []
    for at, slides in enumerate(layer.sliding_layers):
        alike = [each for each in target.caching_layers if target.sliding_layers[each] == slides]
        fits = False
        if alike:
            mine, read = layer.heads_of(at), target.heads_of(alike[-1])
            fits = (mine.kv, mine.dim, layer.rope_of(at)) == (read.kv, read.dim, target.rope_of(alike[-1]))
        if not fits:
            raise BadCheckpoint(
                f"config.json: layer {at} should have the KV heads, their size and the rotary embedding of the last "
                f"{'sliding' if slides else 'full'} layer of the target that has a cache; choose another assistant"
            )
        sources.append(alike[-1])
    return replace(layer, tied=False), tuple(sources)
