"""What a checkpoint's config says about the graph: a frozen ``ModelSpec``, read field by field."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tandemrt.engines import contract
from tandemrt.engines.contract import CacheKind, Contract
from tandemrt.engines.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.neutral import NEUTRAL, is_irrelevant, runs_the_same_model
from tandemrt.export.read.rope import Rope

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer with grouped-query attention, rotary positions, RMS norms and a gated MLP.

    ``sliding_window``: in the layers that ``sliding_layers`` says, attention reaches back this many tokens, a token's
    own included; None if there are no such layers. ``max_length`` is the length the model was trained for, or that its
    positions were stretched to.
    """

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_length: int
    norm_eps: float
    rope: Rope
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    sliding_layers: tuple[bool, ...]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, ignored: Collection[str] = ()) -> "ModelSpec":
        """Read a Hugging Face config. Raises BadCheckpoint, by name, for whatever the exporter does not understand.

        ``ignored`` names fields that somebody vouches for: they are taken as changing nothing.
        """
        fields = Fields(config, "config.json")
        family = _family(fields)
        fields.only("hidden_act", "silu", "swish")
        _skip_neutral(fields, family)
        heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
        default_head = 128 if family == "qwen3" else max(hidden // heads, 1)
        head_dim, kv_heads = (
            fields.integer("head_dim", default_head, most=65_536),
            fields.integer("num_key_value_heads", heads),
        )
        if heads % kv_heads:
            raise BadCheckpoint(
                f"config.json: num_attention_heads should be a multiple of num_key_value_heads, got {heads}, {kv_heads}"
            )
        if head_dim % 2:
            raise BadCheckpoint(f"config.json: head_dim should be even for rotary embedding, it is {head_dim}")
        max_length, layers = fields.integer("max_position_embeddings"), fields.integer("num_hidden_layers", most=10_000)
        bias = _biases(fields, family)
        sliding_window, sliding_layers = _sliding_window(fields, family, layers)
        rope = Rope.from_hf(fields, head_dim, max_length)
        spec = cls(
            family=family,
            layers=layers,
            hidden=hidden,
            intermediate=fields.integer("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=fields.integer("vocab_size"),
            max_length=max(max_length, rope.stretched_to),
            norm_eps=fields.number("rms_norm_eps"),
            rope=rope,
            tied=fields.flag("tie_word_embeddings", False),
            qk_norm=family == "qwen3",
            qkv_bias=bias[0],
            out_bias=bias[1],
            mlp_bias=bias[2],
            sliding_window=sliding_window,
            sliding_layers=sliding_layers,
        )
        fields.finish(ignored)
        return spec

    def contract(self, *, capacity: int, dtype: str, cache: CacheKind = "linear", features: int = 0) -> Contract:
        """Return the bindings of this model's decoder, ``capacity`` tokens to a cache row, computing in ``dtype``.

        ``features``: how wide what it gives for a draft head is, see contract.decoder.
        """
        return contract.decoder(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            capacity=capacity,
            vocab=self.vocab,
            dtype=dtype,
            cache=cache,
            features=features,
        )


def _family(fields: Fields) -> str:
    named = fields.get("architectures", [])
    kind = fields.get("model_type")
    found = named if isinstance(named, list) else [named]
    family = FAMILIES.get(str(found[0])) if len(found) == 1 else (kind if not found else None)
    if family not in FAMILIES.values() or kind not in (None, family):
        raise BadCheckpoint(
            f"config.json: architectures should be one of {', '.join(FAMILIES)}, it is {quoted(found)} "
            f"with model_type {quoted(kind)}"
        )
    return str(family)


def _skip_neutral(fields: Fields, family: str) -> None:
    fields.skip(*filter(is_irrelevant, fields.data))
    for name, values in NEUTRAL.items():
        fields.only(name, *values)
    architecture = next(name for name, known in FAMILIES.items() if known == family)
    code = fields.get("auto_map", {})
    if not runs_the_same_model(code, architecture):
        raise BadCheckpoint(
            f"config.json: auto_map names code of the checkpoint's own, {quoted(code)}, which the exporter does not "
            f"run; supported: none, or a class {architecture}"
        )


def _biases(fields: Fields, family: str) -> tuple[bool, bool, bool]:
    """Whether the query/key/value, the output and the MLP projections add a bias."""
    if family == "qwen2":
        fields.only("attention_bias", True)
        return True, False, False
    if family == "llama":
        fields.only("pretraining_tp", 1)
    attention = family in ("llama", "qwen3") and fields.flag("attention_bias", False)
    return attention, attention, family == "llama" and fields.flag("mlp_bias", False)


def _sliding_window(fields: Fields, family: str, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """The sliding window, if any layer uses one, and for each layer whether it does."""
    kinds = _layer_types(fields, layers)
    named = fields.get("sliding_window")
    if family in ("qwen2", "qwen3"):
        on, first = fields.flag("use_sliding_window", False), fields.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise BadCheckpoint(f"config.json: max_window_layers should be a whole number, it is {quoted(first)}")
        # Configs from before layer_types say it by the first layer that has one.
        sliding = kinds if kinds else [on and i >= first for i in range(layers)]
        return fields.integer("sliding_window") if any(sliding) else None, tuple(sliding)
    if family == "mistral":
        # 4096 is what transformers takes where the field is absent; null switches it off.
        window = 4096 if "sliding_window" not in fields.data else named and fields.integer("sliding_window")
    else:
        fields.only("sliding_window", None)
        window = None
    sliding = [window is not None] * layers
    fields.only("use_sliding_window", window is not None)
    if kinds not in (None, sliding):
        raise BadCheckpoint(
            f"config.json: layer_types should say {'sliding' if window else 'full'}_attention for every layer of a "
            f"{family} with sliding_window {quoted(named)}, it is {quoted(fields.get('layer_types'))}"
        )
    return window, tuple(sliding)


def _layer_types(fields: Fields, layers: int) -> list[bool] | None:
    """For each layer whether layer_types gives it a sliding window; None if the config does not say."""
    kinds = fields.get("layer_types")
    if not isinstance(kinds, list | None):
        raise BadCheckpoint(f"config.json: layer_types should be a list, it is {quoted(kinds)}")
    if kinds is None:
        return None
    strange = sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"})
    if strange or len(kinds) != layers:
        raise BadCheckpoint(
            f"config.json: layer_types should name full_attention or sliding_attention for each of {layers} layers, "
            f"it has {len(kinds)} entries and {quoted(strange) if strange else 'no others'}"
        )
    return [kind == "sliding_attention" for kind in kinds]
