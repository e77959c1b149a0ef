"""Read multi-token-prediction (MTP) layers: their config, and their tensors under common names.

DeepSeek-V3, MiMo, Qwen3-Next and Qwen3.5 store such layers in the target's checkpoint; ``speculators`` stores one layer
in its own checkpoint.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from tandemrt.engines.contract import contract
from tandemrt.engines.contract.contract import CacheKind, Contract
from tandemrt.engines.contract.draft_kinds import DRAFT_LAYERS
from tandemrt.engines.contract.dtypes import COMPUTE
from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.draft_heads import SPECULATORS_FIELDS, DraftHeadSpec, mismatch, read_layers
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.fused_tensors import parts_of, stores_transposed_experts
from tandemrt.export.read.layer import UNIFORM
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.quantization.kv_cache import is_cache_scale
from tandemrt.export.read.quantization.scheme import Scheme
from tandemrt.export.read.spec import ModelSpec

QuantizedWeights = Mapping[str, tuple[str, Scheme]]  # weight -> its module in the checkpoint, its scheme
LAYER_COUNT, QWEN_LAYER_COUNT = "num_nextn_predict_layers", "mtp_num_hidden_layers"
# DeepSeek's and Qwen's names to the names of speculators, which the graph uses; MiMo has the names of speculators.
_COMMON_NAMES = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "shared_head.norm": "final_layernorm",
    "pre_fc_norm_embedding": "token_layernorm",
    "pre_fc_norm_hidden": "hidden_layernorm",
    "fc": "input_proj",
    "norm": "final_layernorm",
}
_QWEN = "mtp"  # Qwen3-Next and Qwen3.5: the prefix of the matmul and the norms; the layer is mtp.layers.0
_COPIES = ("shared_head.head.weight", "embed_tokens.weight")  # copies of the target's tensors
_OF_TARGET = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")  # the last is full of NaN
MTP_MODULES = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")


@dataclass(frozen=True)
class MtpSpec(DraftHeadSpec):
    """MTP layers, which read the target's last hidden state.

    ``embedding_first``: the first matmul of each layer reads the embedding and then the state, else the state first.
    ``depth``: the number of layers that draft; each drafts one token, the last layer all further tokens. ``published``:
    the number of layers in the checkpoint. ``layer``: the spec of one layer.
    """

    embedding_first: bool
    depth: int = 1
    published: int = 1

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, target: ModelSpec, *, num_draft_tokens: int, ignored: Collection[str] = ()
    ) -> tuple["MtpSpec", Checkpoint, "QuantizedWeights"]:
        """Read the first layers of a checkpoint, at most ``num_draft_tokens`` of them.

        Returns the spec, the checkpoint with its unquantized tensors under the names of ``speculators``, and the
        quantized weights. The tensors of each layer are ``layers.0.*`` after its ``layer_prefix``. Raises
        BadCheckpoint, by name, for unknown fields and values that do not fit ``target``.
        """
        config = checkpoint.config
        alone = "speculators_model_type" in config
        max_context = None
        if alone:
            if config.get("quantization_config") is not None:
                raise BadCheckpoint(
                    "config.json: quantization_config: an MTP layer in its own checkpoint must be unquantized, got "
                    f"{quoted(config['quantization_config'])}; choose one that is not quantized"
                )
            fields = Fields(config, "config.json")
            fields.only("speculators_model_type", "mtp")
            fields.only("tie_word_embeddings", False, True)  # describes the target
            fields.only(LAYER_COUNT, 1)
            fields.skip(*SPECULATORS_FIELDS)
            layer, max_context = read_layers(fields.get("transformer_layer_config"))
            fields.finish(ignored)
        else:
            layer = target
            stated = ModelSpec.from_hf(config, ignored=ignored)
            for name, own, wanted in (
                ("num_hidden_layers", stated.layers, target.layers),
                ("hidden_size", stated.hidden, target.hidden),
                ("vocab_size", stated.vocab, target.vocab),
            ):
                if own != wanted:
                    raise mismatch(name, f"the target's, {wanted}", own)
            if layer.recurrent is not None:
                require_one_layer(config)
            elif not mtp_prefixes(config, layer.layers):
                raise BadCheckpoint(
                    f"config.json: {LAYER_COUNT} should be the number of MTP layers, it is "
                    f"{quoted(config.get(LAYER_COUNT))}; choose a checkpoint that has one, or another draft"
                )
        sparse = () if layer.experts is None else layer.experts.layers
        mixed = sorted(sparse) != list(sparse)  # an MTP layer has experts if only the first layers have none
        if mixed or layer.variants != UNIFORM or layer.local_rope is not None or not all(layer.rotary_layers):
            raise BadCheckpoint(
                f"{checkpoint.folder}: the layers of {layer.family} differ from one another, and the kind of its MTP "
                "layer is not defined; choose another draft"
            )
        if any(layer.sliding_layers):  # undefined for this layer; within the window both kinds are equal
            max_context = layer.sliding_window
        experts = replace(layer.experts, layers=(True,)) if layer.experts is not None and sparse[-1] else None
        published = 1 if alone or layer.recurrent is not None else config[LAYER_COUNT]
        depth = min(published, num_draft_tokens, len(DRAFT_LAYERS))
        forms = _forms(layer, depth, alone=alone)
        tensors, quantized, embedding_first = _tensors(checkpoint, forms, alone=alone)
        one = replace(
            layer,
            layers=1,
            sliding_window=None,
            sliding_layers=(False,),
            rotary_layers=(True,),
            experts=experts,
            recurrent=None,
            tied=False,
        )
        spec = cls(one, (target.layers,), one.hidden, one.vocab, max_context, embedding_first, depth, published)
        spec.require_fit(target)
        unquantized = {name: value for name, value in config.items() if name != "quantization_config"}
        named = replace(checkpoint, config=unquantized, tensors=tensors)
        transposed = stores_transposed_experts(named, one)
        split = [parts_of(name, tensor, one, transposed=transposed) for name, tensor in tensors.items()]
        return spec, replace(named, tensors=dict(chain.from_iterable(split))), quantized

    def contract(self, *, capacity: int, dtype: str, cache: CacheKind = "linear") -> Contract:
        """Return the bindings of each layer, ``capacity`` tokens to a cache row, computing in ``dtype``."""
        sizes = self.sizes(capacity=capacity, dtype=dtype, cache=cache)
        return contract.draft_head(hidden=self.layer.hidden, further=self.depth > 1, **sizes)


def layer_prefix(at: int) -> str:
    """Return the prefix of the tensor names of layer ``at``."""
    return f"further.{at}." if at else ""


def _forms(layer: ModelSpec, depth: int, *, alone: bool) -> dict[tuple[str, ...], bool]:
    """Return possible prefixes of the first ``depth`` MTP layers of a model like ``layer``.

    The values say whether the first matmul of each layer reads the embedding first.
    """
    if alone:
        return {("mtp_layers.0",): True}
    if layer.recurrent is not None:
        return {(_QWEN,): True}
    return {
        tuple(f"model.layers.{layer.layers + at}" for at in range(depth)): True,
        tuple(f"model.mtp_layers.{at}" for at in range(depth)): False,
    }


def _tensors(
    checkpoint: Checkpoint, forms: Mapping[tuple[str, ...], bool], *, alone: bool
) -> tuple[dict[str, Any], QuantizedWeights, bool]:
    """Return the unquantized tensors, the quantized weights, and the value of the entry of ``forms`` that matches."""
    quantization = read_quantization(checkpoint.config, checkpoint.folder)
    if quantization is not None and checkpoint.config.get("quantization_config") is None:
        raise BadCheckpoint(
            f"{checkpoint.folder}: config.json should have the quantization_config where an MTP layer drafts, it is in "
            'a separate file (ModelOpt); copy it into config.json, as quantization_config with quant_method "modelopt"'
        )
    prefixes = _prefixes(checkpoint, forms)
    tensors: dict[str, Any] = {}
    quantized: dict[str, tuple[str, Scheme]] = {}
    for name, tensor in checkpoint.tensors.items():
        at = next((at for at, each in enumerate(prefixes) if name.startswith(f"{each}.")), 0)
        stem = name.removeprefix(f"{prefixes[at]}.")
        if prefixes[at] == _QWEN:
            stem = stem.removeprefix("layers.0.")
        if stem == name and alone and name not in _OF_TARGET:
            raise BadCheckpoint(f"{checkpoint.folder}: tensor {quoted(name)} does not belong to an MTP layer")
        # The cache of a head is not quantized.
        if stem == name or stem in _COPIES or is_cache_scale(name) or of_index(name):
            continue
        module, _, kind = stem.rpartition(".")
        module = _COMMON_NAMES.get(module, module)
        new = layer_prefix(at) + (module if module in MTP_MODULES else f"layers.0.{module}")
        source = name.rpartition(".")[0]
        scheme = quantization.scheme(source) if quantization is not None else None
        weight = checkpoint.tensors.get(f"{source}.weight")
        # A config may match all modules; some of them, at least the norms, are unquantized.
        if scheme is not None and kind != "bias" and (weight is None or weight.dtype not in COMPUTE):
            quantized[f"{new}.weight"] = source, scheme
        else:
            tensors[f"{new}.{kind}"] = replace(tensor, name=f"{new}.{kind}")
    return tensors, quantized, forms[prefixes]


def _prefixes(checkpoint: Checkpoint, forms: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the prefixes of the layers' tensors, the first of ``forms`` that the checkpoint has."""
    prefixes = next((p for p in forms if any(name.startswith(f"{p[0]}.") for name in checkpoint.tensors)), None)
    if prefixes is None:
        raise BadCheckpoint(
            f"{checkpoint.folder}: should hold tensors {' or '.join(repr(f'{each[0]}.*') for each in forms)}, it holds "
            "none; choose a checkpoint with an MTP layer, or another draft"
        )
    empty = next((p for p in prefixes if not any(name.startswith(f"{p}.") for name in checkpoint.tensors)), None)
    if empty is not None:
        raise BadCheckpoint(
            f"{checkpoint.folder}: should hold tensors {f'{empty}.*'!r}, as num_nextn_predict_layers in config.json "
            "says, it holds none; choose a complete checkpoint, or lower that number"
        )
    return prefixes


def of_index(name: str) -> bool:
    """Whether a tensor belongs to the index of DeepSeek-V3.2, which no graph computes (export/read/chunks.py)."""
    return ".self_attn.indexer." in name


def require_one_layer(config: Mapping[str, Any]) -> None:
    """Raise BadCheckpoint if Qwen3.5 has another number of MTP layers than one. Configs of Qwen3-Next do not tell."""
    text = config.get("text_config", config)
    if (count := text.get(QWEN_LAYER_COUNT, 1)) != 1:
        raise BadCheckpoint(f"config.json: {QWEN_LAYER_COUNT} should be 1, it is {quoted(count)}; choose another draft")


def mtp_prefixes(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Return the prefixes of MTP tensors in the checkpoint of a target with ``layers`` other layers; () if none."""
    count = config.get(LAYER_COUNT)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        return ()
    return (*(f"model.layers.{layers + at}." for at in range(min(count, 64))), "model.mtp_layers.", "mtp.")
