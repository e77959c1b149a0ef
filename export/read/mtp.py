"""What a checkpoint says of layers that predict tokens further on (MTP), and their tensors by the names of one form.

Such layers come with their target, as DeepSeek-V3 and MiMo write them, or one by itself, as ``speculators`` does.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tandemrt.engines import contract
from tandemrt.engines.contract import CacheKind, Contract
from tandemrt.engines.drafts import DRAFT_LAYERS
from tandemrt.engines.dtypes import COMPUTE
from tandemrt.engines.errors import BadCheckpoint, quoted
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.heads import FRAME, HeadSpec, misfit, read_layers
from tandemrt.export.read.quantization.cache import is_cache_scale
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.quantization.scheme import Scheme
from tandemrt.export.read.spec import ModelSpec

Narrow = Mapping[str, tuple[str, Scheme]]  # weights that come quantized: of what module of the checkpoint, and how
PUBLISHED = "num_nextn_predict_layers"
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
    """Layers over the target's last state. ``embedding_first``: of the two that the first product of each reads.

    ``depth``: how many of them draft, each a token, the last all that is further on; ``published``: how many the
    checkpoint has. ``layer`` is what each is like.
    """

    embedding_first: bool
    depth: int = 1
    published: int = 1

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, target: ModelSpec, *, window: int, ignored: Collection[str] = ()
    ) -> tuple["MtpSpec", Checkpoint, "Narrow"]:
        """Read a checkpoint: its layers, as many as draft a token of ``window``, and their tensors under the names of
        ``speculators``, each layer's own as ``layers.0`` behind its ``prefix_of``.

        Weights that come quantized are not among these but told apart.

        Raises BadCheckpoint, by name, for what is not understood or does not fit ``target``.
        """
        config = checkpoint.config
        alone = "speculators_model_type" in config
        reach = None
        if alone:
            if config.get("quantization_config") is not None:
                raise BadCheckpoint(
                    "config.json: quantization_config: a layer by itself must come with whole weights, got "
                    f"{quoted(config['quantization_config'])}; choose one that is not quantized"
                )
            fields = Fields(config, "config.json")
            fields.only("speculators_model_type", "mtp")
            fields.only("tie_word_embeddings", False, True)  # says something of the target
            fields.only(PUBLISHED, 1)
            fields.skip(*FRAME)
            layer, reach = read_layers(fields.get("transformer_layer_config"))
            fields.finish(ignored)
        else:
            layer = target
            found = ModelSpec.from_hf(config, ignored=ignored)
            if (found.layers, found.hidden, found.vocab) != (target.layers, target.hidden, target.vocab):
                raise misfit("num_hidden_layers", f"the target's, {target.layers}", found.layers)
            if not predicts_further(config, layer.layers):
                raise BadCheckpoint(
                    f"config.json: {PUBLISHED} should say how many such layers there are, it is "
                    f"{quoted(config.get(PUBLISHED))}; choose a checkpoint that has one, or another draft"
                )
        mixed = layer.experts is not None and not all(layer.experts.layers)
        if mixed or layer.local_rope is not None or not all(layer.rotary_layers):
            raise BadCheckpoint(
                f"{checkpoint.folder}: layers of {layer.family} differ from one another, and which kind predicts "
                "further on is not known; choose another draft"
            )
        if any(layer.sliding_layers):  # whether this layer slides is not known: within the window it is the same
            reach = layer.sliding_window
        experts = None if layer.experts is None else replace(layer.experts, layers=(True,))
        published = 1 if alone else config[PUBLISHED]
        depth = min(published, window, len(DRAFT_LAYERS))
        forms = _forms(layer.layers, depth, alone=alone)
        tensors, narrow, embedding_first = _tensors(checkpoint, forms, alone=alone)
        one = replace(
            layer,
            layers=1,
            sliding_window=None,
            sliding_layers=(False,),
            rotary_layers=(True,),
            experts=experts,
            tied=False,
        )
        spec = cls(one, (target.layers,), one.hidden, one.vocab, reach, embedding_first, depth, published)
        spec.require_fit(target)
        whole = {name: value for name, value in config.items() if name != "quantization_config"}
        return spec, replace(checkpoint, config=whole, tensors=tensors), narrow

    def contract(self, *, capacity: int, dtype: str, cache: CacheKind = "linear") -> Contract:
        """Return the bindings of each layer, ``capacity`` tokens to a cache row, computing in ``dtype``."""
        sizes = self.sizes(capacity=capacity, dtype=dtype, cache=cache)
        return contract.draft_head(hidden=self.layer.hidden, further=self.depth > 1, **sizes)


def prefix_of(at: int) -> str:
    """What the names of tensors begin with that are layer ``at``'s own."""
    return f"further.{at}." if at else ""


def _forms(layers: int, depth: int, *, alone: bool) -> dict[tuple[str, ...], bool]:
    """Where a checkpoint may keep the first ``depth`` layers behind ``layers`` others, and whether the first product of
    each reads the embedding first."""
    if alone:
        return {("mtp_layers.0",): True}
    return {
        tuple(f"model.layers.{layers + at}" for at in range(depth)): True,
        tuple(f"model.mtp_layers.{at}" for at in range(depth)): False,
    }


def _tensors(
    checkpoint: Checkpoint, forms: Mapping[tuple[str, ...], bool], *, alone: bool
) -> tuple[dict[str, Any], Narrow, bool]:
    """The tensors of the layers, and what ``forms`` says of where they are."""
    quantization = read_quantization(checkpoint.config, checkpoint.folder)
    if quantization is not None and checkpoint.config.get("quantization_config") is None:
        raise BadCheckpoint(
            f"{checkpoint.folder}: how weights are quantized should stand in config.json where such a layer drafts, it "
            'stands in a file beside it (ModelOpt); write it there, as quantization_config with quant_method "modelopt"'
        )
    found = next((p for p in forms if any(name.startswith(f"{p[0]}.") for name in checkpoint.tensors)), None)
    if found is None:
        raise BadCheckpoint(
            f"{checkpoint.folder}: should hold tensors {' or '.join(repr(f'{each[0]}.*') for each in forms)}, it holds "
            "none; choose a checkpoint with such a layer, or another draft"
        )
    empty = next((p for p in found if not any(name.startswith(f"{p}.") for name in checkpoint.tensors)), None)
    if empty is not None:
        raise BadCheckpoint(
            f"{checkpoint.folder}: should hold tensors {f'{empty}.*'!r}, as num_nextn_predict_layers in config.json "
            "says, it holds none; choose a whole checkpoint, or a lower number there"
        )
    tensors: dict[str, Any] = {}
    narrow: dict[str, tuple[str, Scheme]] = {}
    for name, tensor in checkpoint.tensors.items():
        at = next((at for at, each in enumerate(found) if name.startswith(f"{each}.")), 0)
        stem = name.removeprefix(f"{found[at]}.")
        if stem == name and alone and name not in _OF_TARGET:
            raise BadCheckpoint(f"{checkpoint.folder}: tensor {quoted(name)} has no place in such a layer")
        if stem == name or stem in _COPIES or is_cache_scale(name):  # a head has no use for scales of its cache
            continue
        module, _, kind = stem.rpartition(".")
        module = _OF_DEEPSEEK.get(module, module)
        new = prefix_of(at) + (module if module in OWN else f"layers.0.{module}")
        source = name.rpartition(".")[0]
        scheme = quantization.scheme(source) if quantization is not None else None
        weight = checkpoint.tensors.get(f"{source}.weight")
        # A config may name all modules, of which some, norms at least, are whole.
        if scheme is not None and kind != "bias" and (weight is None or weight.dtype not in COMPUTE):
            narrow[f"{new}.weight"] = source, scheme
        else:
            tensors[f"{new}.{kind}"] = replace(tensor, name=f"{new}.{kind}")
    return tensors, narrow, forms[found]


def predicts_further(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """What the names of tensors begin with that belong to such layers of a target with ``layers`` others."""
    count = config.get(PUBLISHED)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        return ()
    return (*(f"model.layers.{layers + at}." for at in range(min(count, 64))), "model.mtp_layers.", "mtp.")
