"""What checkpoints of heads have in common, which draft from the states of one target, whatever their kind."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tandemrt.engines.errors import BadCheckpoint, quoted
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.spec import ModelSpec

FAMILIES = ("llama", "qwen3")  # of the layers
SLIDING = ("sliding_window", "use_sliding_window", "layer_types", "max_window_layers")
# Of a config as ``speculators`` writes it: what has no bearing on the graph, or is read elsewhere (quantization).
FRAME = (
    *("speculators_model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    *("speculators_version", "speculators_config", "quantization_config"),
)


@dataclass(frozen=True)
class HeadSpec:
    """A head. ``layer`` are its layers; its ``vocab`` is the target's.

    ``features`` are the layers of the target whose inputs it reads. ``draft_vocab``: tokens that it knows, of which its
    logits are. ``reach``:
    tokens that a sliding window lets it see, if it has one; a text may not be longer.
    """

    layer: ModelSpec
    features: tuple[int, ...]
    target_hidden: int
    draft_vocab: int
    reach: int | None

    @property
    def head_dim(self) -> int:
        return self.layer.head_dim

    @property
    def vocab(self) -> int:
        """Ids of tokens that it is fed: the target's."""
        return self.layer.vocab

    @property
    def feature_width(self) -> int:
        """Numbers per token that the target gives."""
        return len(self.features) * self.target_hidden

    def sizes(self, *, capacity: int, dtype: str, cache: str) -> dict[str, Any]:
        """What contract.decoder asks of its engine, ``capacity`` tokens to a cache row, computing in ``dtype``."""
        layer = self.layer
        return {
            "layers": layer.layers,
            "kv_heads": layer.kv_heads,
            "head_dim": layer.head_dim,
            "capacity": capacity,
            "vocab": self.draft_vocab,
            "dtype": dtype,
            "cache": cache,
        }

    def require_fit(self, target: ModelSpec) -> None:
        """Raise BadCheckpoint, by name, if the head was made for another target."""
        layer = self.layer
        if layer.vocab != target.vocab:
            raise misfit("vocab_size", f"the target's, {target.vocab}", layer.vocab)
        if self.target_hidden != target.hidden:
            raise misfit("target_hidden_size", f"the target's hidden_size, {target.hidden}", self.target_hidden)
        if self.draft_vocab > layer.vocab:
            raise misfit("draft_vocab_size", f"at most the target's vocab_size, {target.vocab}", self.draft_vocab)


def require_tensors_fit(checkpoint: Checkpoint, spec: HeadSpec) -> None:
    """Raise BadCheckpoint, before anything is built, if tensors say that the head was made for another target."""
    fusing, expected = checkpoint.tensors.get("fc.weight"), (spec.layer.hidden, spec.feature_width)
    if fusing is not None and fusing.shape != expected:
        raise BadCheckpoint(
            f"{checkpoint.folder}: tensor 'fc.weight' should be {list(expected)}, for {len(spec.features)} layers of a "
            f"target whose hidden_size is {spec.target_hidden}, it is {list(fusing.shape)}; choose a head that was "
            "trained for this target"
        )
    target_ids(checkpoint, spec)


def target_ids(checkpoint: Checkpoint, spec: HeadSpec) -> npt.NDArray[np.int64] | None:
    """The target's id of every token that the head knows, from ``d2t``; None if it knows all of them.

    Raises BadCheckpoint for ids that the target does not have or that come twice, and for a ``t2d`` that disagrees.
    """
    if "d2t" not in checkpoint.tensors:
        if spec.draft_vocab != spec.vocab:
            raise BadCheckpoint(
                f"{checkpoint.folder}: tensor 'd2t' is missing: a head of {spec.draft_vocab} tokens needs it to name "
                f"those of the target's {spec.vocab}"
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
                f"{checkpoint.folder}: {rule}; it names {len(known)} tokens, of which "
                f"{len(np.intersect1d(known, values))} are among the {len(values)} of d2t"
            )
    return ids


def read_layers(config: Any, ignored: Collection[str] = ()) -> tuple[ModelSpec, int | None]:
    """The layers of a head, and the sliding window that any of them has.

    Tools count the window of a head in different ways, so it is taken out here: within it, all of them agree.
    """
    if not isinstance(config, Mapping):
        raise BadCheckpoint(f"config.json: transformer_layer_config should be an object, it is {quoted(config)}")
    kinds = config.get("layer_types") or []
    slides = "sliding_attention" in kinds if kinds else bool(config.get("use_sliding_window"))
    reach = None
    if slides:
        window = config.get("sliding_window")
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise BadCheckpoint(f"config.json: sliding_window should be a whole number, it is {quoted(window)}")
        reach = window
    rest = {name: value for name, value in config.items() if name not in SLIDING}
    spec = ModelSpec.from_hf(rest, ignored=ignored)
    if spec.family not in FAMILIES:
        raise BadCheckpoint(
            f"config.json: the layers of a head should be of {' or '.join(FAMILIES)}, they are of {spec.family}"
        )
    return replace(spec, tied=False), reach


def read_features(fields: Fields, name: str, target: ModelSpec, *, behind: int = 0) -> tuple[int, ...] | None:
    """The target's layers whose inputs the head reads, as the field ``name`` says; None if it says nothing.

    ``behind``: how many layers behind those that it names these are; 1 where it names layers by their outputs.
    """
    named = fields.get(name)
    if named in (None, []):
        return None
    layers = target.layers
    if not isinstance(named, list) or any(isinstance(each, bool) or not isinstance(each, int) for each in named):
        raise BadCheckpoint(f"{fields.where}: {name} should be a list of layers, it is {quoted(named)}")
    found = tuple(each + behind for each in named)
    if any(not 0 <= each < layers for each in found) or len(set(found)) < len(found):
        what = "outputs" if behind else "inputs"
        raise BadCheckpoint(
            f"{fields.where}: {name} should name different layers of the target by their {what}, "
            f"{-behind}..{layers - 1 - behind} (tools disagree on {layers - behind}, what the last one gives), it is "
            f"{quoted(named)}"
        )
    return found


def read_token(fields: Fields, name: str) -> int:
    """The id of a mask token."""
    token = fields.get(name)
    if isinstance(token, bool) or not isinstance(token, int):
        raise BadCheckpoint(f"{fields.where}: {name} should be an id, it is {quoted(token)}")
    return token


def require_token(token: int, spec: HeadSpec) -> None:
    """Raise BadCheckpoint unless a mask token is in the vocabulary."""
    if not 0 <= token < spec.vocab:
        rule = f"mask_token_id should be an id below vocab_size, {spec.vocab}"
        raise BadCheckpoint(f"config.json: {rule}, it is {quoted(token)}")


def misfit(name: str, rule: str, value: object) -> BadCheckpoint:
    return BadCheckpoint(
        f"config.json: {name} should be {rule}, it is {quoted(value)}; choose a head that was trained for this target"
    )
