"""What a checkpoint says of a layer that predicts tokens further on (MTP), and its tensors by the names of one form.

Such a layer comes with its target, as DeepSeek-V3 and MiMo write it, or by itself, as ``speculators`` does.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tandemrt.engines import contract
from tandemrt.engines.contract import CacheKind, Contract
from tandemrt.engines.errors import BadCheckpoint, quoted
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.heads import FRAME, HeadSpec, misfit, read_layers
from tandemrt.export.read.spec import ModelSpec

LAYERS = "num_nextn_predict_layers"
# The names of speculators, which the graph asks for, by those of DeepSeek; MiMo has them as they are.
_OF_DEEPSEEK = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "shared_head.norm": "final_layernorm",
}
_COPIES = ("shared_head.head.weight", "embed_tokens.weight")  # of the target's own
_OF_TARGET = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")  # the last is full of NaN
OWN = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")


@dataclass(frozen=True)
class MtpSpec(HeadSpec):
    """One layer over the target's last state. ``embedding_first``: of the two that its first product reads."""

    embedding_first: bool

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, target: ModelSpec, *, ignored: Collection[str] = ()
    ) -> tuple["MtpSpec", Checkpoint]:
        """Read a checkpoint: the layer, and its tensors under the names of ``speculators``, the layer as ``layers.0``.

        Raises BadCheckpoint, by name, for what is not understood or does not fit ``target``.
        """
        config = checkpoint.config
        if config.get("quantization_config") is not None:  # it names modules as the checkpoint does
            raise BadCheckpoint(
                "config.json: quantization_config: a layer that predicts tokens further on must come with whole "
                f"weights, got {quoted(config['quantization_config'])}; choose one that is not quantized"
            )
        alone = "speculators_model_type" in config
        reach = None
        if alone:
            fields = Fields(config, "config.json")
            fields.only("speculators_model_type", "mtp")
            fields.only("tie_word_embeddings", False, True)  # says something of the target
            fields.only(LAYERS, 1)
            fields.skip(*FRAME)
            layer, reach = read_layers(fields.get("transformer_layer_config"))
            fields.finish(ignored)
        else:
            layer = target
            found = ModelSpec.from_hf(config, ignored=ignored)
            if (found.layers, found.hidden, found.vocab) != (target.layers, target.hidden, target.vocab):
                raise misfit("num_hidden_layers", f"the target's, {target.layers}", found.layers)
            if config.get(LAYERS) != 1:
                raise BadCheckpoint(
                    f"config.json: {LAYERS} should be 1, it is {quoted(config.get(LAYERS))}; choose a checkpoint that "
                    "has one such layer, or another draft"
                )
        if layer.experts is not None or any(layer.sliding_layers) or not all(layer.rotary_layers):
            raise BadCheckpoint(
                f"{checkpoint.folder}: layers of {layer.family} differ from one another, and which kind predicts "
                "further on is not known; choose another draft"
            )
        layers = layer.layers
        layer = replace(layer, layers=1, sliding_layers=(False,), rotary_layers=(True,), tied=False)
        tensors, embedding_first = _tensors(checkpoint, "mtp_layers.0" if alone else None, layers)
        spec = cls(layer, (target.layers,), layer.hidden, layer.vocab, reach, embedding_first)
        spec.require_fit(target)
        return spec, replace(checkpoint, tensors=tensors)

    def contract(self, *, capacity: int, dtype: str, cache: CacheKind = "linear") -> Contract:
        """Return the bindings of this head, ``capacity`` tokens to a cache row, computing in ``dtype``."""
        sizes = self.sizes(capacity=capacity, dtype=dtype, cache=cache)
        return contract.draft_head(hidden=self.layer.hidden, **sizes)


def _tensors(checkpoint: Checkpoint, alone: str | None, layers: int) -> tuple[dict[str, Any], bool]:
    """The tensors of the layer behind ``layers`` others, or of a checkpoint of it ``alone``, and its form."""
    forms = {alone: True} if alone else {f"model.layers.{layers}": True, "model.mtp_layers.0": False}
    found = next((p for p in forms if any(name.startswith(f"{p}.") for name in checkpoint.tensors)), None)
    if found is None:
        raise BadCheckpoint(
            f"{checkpoint.folder}: should hold tensors {' or '.join(repr(f'{each}.*') for each in forms)}, it holds "
            "none; choose a checkpoint with such a layer, or another draft"
        )
    tensors: dict[str, Any] = {}
    for name, tensor in checkpoint.tensors.items():
        stem = name.removeprefix(f"{found}.")
        if stem == name and alone and name not in _OF_TARGET:
            raise BadCheckpoint(f"{checkpoint.folder}: tensor {quoted(name)} has no place in such a layer")
        if stem == name or stem in _COPIES:
            continue
        module, _, kind = stem.rpartition(".")
        module = _OF_DEEPSEEK.get(module, module)
        new = f"{module}.{kind}" if module in OWN else f"layers.0.{module}.{kind}"
        tensors[new] = replace(tensor, name=new)
    return tensors, forms[found]


def predicts_further(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """What the names of tensors begin with that belong to such layers of a target with ``layers`` others."""
    count = config.get(LAYERS)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        return ()
    return (*(f"model.layers.{layers + at}." for at in range(min(count, 64))), "model.mtp_layers.", "mtp.")
