"""The common part of draft head configs; a draft head drafts from the hidden states of one target."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.latent import Latent
from tandemrt.export.read.spec import ModelSpec

FAMILIES = ("llama", "qwen3")  # the supported families of a head's layers
SLIDING_FIELDS = ("sliding_window", "use_sliding_window", "layer_types", "max_window_layers")
# Fields of the ``speculators`` form that do not affect the graph, or that other code reads (quantization).
SPECULATORS_FIELDS = (
    *("speculators_model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    *("speculators_version", "speculators_config", "quantization_config"),
)
# Published architectures of drafts that are not read -> what is missing.
_OTHERS: Mapping[str, str] = {
    "DominoDraftModel": "its head has a recurrent net (prefix_gru)",
    "QwenDFlareDraftModel": "each of its layers mixes the target's states by weights of its own",
    "Gemma4DSparkModel": "its layers are those of Gemma 4",
    "KimiK3DSparkMLADraftModel": "its layers have latent attention",
    "Gemma4UnifiedAssistantForCausalLM": "its layers read the target's KV cache",
    "DeepSeekForCausalLMEagle3": "it has TorchSpec's own names; convert it for vLLM",
    "LlamaForCausalLMEagle4": "it is an EAGLE-4 head",
    "CosyVoice3Eagle3LlamaForCausalLM": "its target writes tokens of speech",
    "MedusaModel": "its heads predict further tokens from one state (Medusa)",
    "MLPSpeculatorPreTrainedModel": "its heads predict further tokens from one state (MLP speculator)",
    "EagleLlamaForCausalLM": "it is an EAGLE-1 or EAGLE-2 head, which reads the target's last state alone",
}


@dataclass(frozen=True)
class DraftHeadSpec:
    """A draft head with the layers ``layer``; its input vocabulary, ``vocab``, is the target's.

    ``features``: the target's layers whose inputs the head reads. ``target_hidden``: the target's hidden size.
    ``draft_vocab``: the number of tokens that the head can draft, which is the width of its logits. ``max_context``:
    the head's sliding window; a text may not be longer; None: no sliding window.
    """

    layer: ModelSpec
    features: tuple[int, ...]
    target_hidden: int
    draft_vocab: int
    max_context: int | None

    @property
    def head_dim(self) -> int:
        return self.layer.head_dim

    @property
    def head_dims(self) -> tuple[int, ...]:
        return self.layer.head_dims

    @property
    def latent(self) -> Latent | None:
        return self.layer.latent

    @property
    def vocab(self) -> int:
        """The size of the input vocabulary: the target's."""
        return self.layer.vocab

    @property
    def feature_width(self) -> int:
        """The width of the target's features per token."""
        return len(self.features) * self.target_hidden

    def sizes(self, *, capacity: int, dtype: str, cache: str) -> dict[str, Any]:
        """Return the arguments of contract.decoder, for ``capacity`` tokens per cache row, computing in ``dtype``."""
        layer = self.layer
        return {
            "layers": layer.layers,
            "kv_heads": layer.kv_heads,
            "head_dim": layer.head_dim,
            "capacity": capacity,
            "vocab": self.draft_vocab,
            "dtype": dtype,
            "cache": cache,
            "latent": layer.latent is not None and cache == "paged",
        }

    def require_fit(self, target: ModelSpec) -> None:
        """Raise BadCheckpoint, by name, if the head was trained for another target."""
        layer = self.layer
        if layer.vocab != target.vocab:
            raise mismatch("vocab_size", f"the target's, {target.vocab}", layer.vocab)
        if self.target_hidden != target.hidden:
            raise mismatch("target_hidden_size", f"the target's hidden_size, {target.hidden}", self.target_hidden)
        if self.draft_vocab > layer.vocab:
            raise mismatch("draft_vocab_size", f"at most the target's vocab_size, {target.vocab}", self.draft_vocab)


def require_tensors_fit(checkpoint: Checkpoint, spec: DraftHeadSpec) -> None:
    """Raise BadCheckpoint if the head's tensors show that it was trained for another target."""
    fusing, expected = checkpoint.tensors.get("fc.weight"), (spec.layer.hidden, spec.feature_width)
    if fusing is not None and fusing.shape != expected:
        raise BadCheckpoint(
            f"{checkpoint.folder}: tensor 'fc.weight' should be {list(expected)}, for {len(spec.features)} layers of a "
            f"target whose hidden_size is {spec.target_hidden}, it is {list(fusing.shape)}; choose a head that was "
            "trained for this target"
        )
    target_ids(checkpoint, spec)


def target_ids(checkpoint: Checkpoint, spec: DraftHeadSpec) -> npt.NDArray[np.int64] | None:
    """Return the target's id of every token that the head can draft, from ``d2t``; None if it can draft all tokens.

    Raises BadCheckpoint for ids outside of the target's vocabulary, for duplicates, and for a ``t2d`` that disagrees.
    """
    if "d2t" not in checkpoint.tensors:
        if spec.draft_vocab != spec.vocab:
            raise BadCheckpoint(
                f"{checkpoint.folder}: tensor 'd2t' is missing: a head of {spec.draft_vocab} tokens needs it to map "
                f"them to the target's {spec.vocab}"
            )
        return None
    stored = checkpoint.read("d2t", (spec.draft_vocab,), ("int64", "int32"))
    ids: npt.NDArray[np.int64] = stored.astype(np.int64) + np.arange(spec.draft_vocab)
    outside = ids[(ids < 0) | (ids >= spec.vocab)]
    if outside.size:
        rule = f"i + d2t[i] must be ids of the target, 0..{spec.vocab - 1}; d2t holds offsets, not ids"
        raise BadCheckpoint(f"{checkpoint.folder}: {rule}; it gives {outside[0]}")
    values, times = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        rule = "i + d2t[i] must be another id for every token of the draft"
        raise BadCheckpoint(f"{checkpoint.folder}: {rule}; {values[times > 1][0]} comes twice")
    if "t2d" in checkpoint.tensors:
        known = np.flatnonzero(checkpoint.read("t2d", (spec.vocab,), ("bool", "int64", "int32", "uint8")))
        if not np.array_equal(known, values):
            rule = "t2d must be true where i + d2t[i] points"
            raise BadCheckpoint(
                f"{checkpoint.folder}: {rule}; it names {len(known)} tokens, and "
                f"{len(np.intersect1d(known, values))} of them are among the {len(values)} of d2t"
            )
    return ids


def read_layers(
    config: Any, ignored: Collection[str] = (), families: Collection[str] = FAMILIES
) -> tuple[ModelSpec, int | None]:
    """Read the layers of a head, without sliding windows, and the sliding window that any of them has.

    Tools count the window of a head in different ways, but agree for texts that fit into it.
    """
    if not isinstance(config, Mapping):
        raise BadCheckpoint(f"config.json: transformer_layer_config should be an object, it is {quoted(config)}")
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list):
        raise BadCheckpoint(f"config.json: layer_types should be a list, it is {quoted(kinds)}")
    slides = "sliding_attention" in kinds if kinds else bool(config.get("use_sliding_window"))
    max_context = None
    if slides:
        window = config.get("sliding_window")
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise BadCheckpoint(f"config.json: sliding_window should be an integer, it is {quoted(window)}")
        max_context = window
    rest = {name: value for name, value in config.items() if name not in SLIDING_FIELDS}
    spec = ModelSpec.from_hf(rest, ignored=ignored)
    if spec.family not in families:
        raise BadCheckpoint(
            f"config.json: the layers of a head should be of {' or '.join(families)}, they are of {spec.family}"
        )
    return replace(spec, tied=False), max_context


def read_features(fields: Fields, name: str, target: ModelSpec, *, offset: int = 0) -> tuple[int, ...] | None:
    """Return the target's layers whose inputs the head reads, from the field ``name``; None if it is absent or empty.

    ``offset``: added to each layer of the field; 1 if the field lists layers by their outputs.
    """
    named = fields.get(name)
    if named in (None, []):
        return None
    layers = target.layers
    if not isinstance(named, list) or any(isinstance(each, bool) or not isinstance(each, int) for each in named):
        raise BadCheckpoint(f"{fields.where}: {name} should be a list of layers, it is {quoted(named)}")
    numbers = tuple(each + offset for each in named)
    if any(not 0 <= each < layers for each in numbers) or len(set(numbers)) < len(numbers):
        what = "outputs" if offset else "inputs"
        raise BadCheckpoint(
            f"{fields.where}: {name} should name different layers of the target by their {what}, "
            f"{-offset}..{layers - 1 - offset} (tools disagree on {layers - offset}, the last layer's output), it is "
            f"{quoted(named)}"
        )
    return numbers


def read_mask_token(fields: Fields, name: str) -> int:
    """Read the id of a mask token."""
    token = fields.get(name)
    if isinstance(token, bool) or not isinstance(token, int):
        raise BadCheckpoint(f"{fields.where}: {name} should be an id, it is {quoted(token)}")
    return token


def require_mask_token(token: int, spec: DraftHeadSpec) -> None:
    """Raise BadCheckpoint unless the mask token is in the vocabulary."""
    if not 0 <= token < spec.vocab:
        rule = f"mask_token_id should be an id below vocab_size, {spec.vocab}"
        raise BadCheckpoint(f"config.json: {rule}, it is {quoted(token)}")


def mismatch(name: str, rule: str, value: object) -> BadCheckpoint:
    return BadCheckpoint(
        f"config.json: {name} should be {rule}, it is {quoted(value)}; choose a head that was trained for this target"
    )


def other_draft(named: Any, known: str, what: str) -> BadCheckpoint:
    """Return the error for ``architectures`` that are not ``known`` ones of ``what``."""
    why = _OTHERS.get(str(named[0])) if isinstance(named, list) and len(named) == 1 else None
    if why is not None:
        return BadCheckpoint(f"config.json: {named[0]} is not read: {why}; choose another draft")
    return BadCheckpoint(f"config.json: architectures should be one of {known} for {what}, it is {quoted(named)}")
