"""Read a checkpoint's config into a frozen ``ModelSpec``, which determines the graph."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tandemrt.engines.contract import contract
from tandemrt.engines.contract.contract import CacheKind, Contract, RecurrentState
from tandemrt.engines.validation.errors import BadCheckpoint, clipped, quoted
from tandemrt.export.read.families.registry import FAMILIES
from tandemrt.export.read.family import Family
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.latent import Latent
from tandemrt.export.read.layer import (
    UNIFORM,
    Activation,
    ClampedSwiglu,
    Experts,
    Heads,
    NormNames,
    QKNorm,
    Scales,
    Skip,
    Variants,
)
from tandemrt.export.read.recurrent_layers import RecurrentLayers
from tandemrt.export.read.rope import Rope, ropes
from tandemrt.export.read.unsupported import UNSUPPORTED, without_head
from tandemrt.export.read.unused_fields import NO_EFFECT_VALUES, is_unused, runs_the_same_model
from tandemrt.export.read.vision_language import gate_up_of, text_config, vision_language


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer with grouped-query attention; by default positions are rotary and norms RMS norms.

    ``sliding_window``: the number of tokens, itself included, that a token attends to in ``sliding_layers``; None if no
    layer slides. ``rotary_layers``: the layers that rotate queries and keys by ``rope``; sliding layers use
    ``local_rope`` if it is given. ``max_length``: the length the model was trained for, or extended to.
    ``norm_offset``: norm weights are stored minus 1. ``gated``: the MLP is down(activation(gate(x)) * up(x)), else
    down(activation(up(x))). ``sinks``: each attention head has one additional logit, equal for every token, that enters
    the softmax and has no value. With ``latent`` attention ``head_dim`` is the width of a cached key, which all heads
    share: ``kv_heads`` is 1. ``gated_attention``: the attention output is multiplied by sigmoid of a second half of
    each query head. ``recurrent``: layers with a recurrent state in place of attention, or in addition to it.
    ``variants``: how layers differ from these sizes. ``mlp_layers``: for each layer, whether it has an MLP or experts;
    (): all have. ``recurrent_norms``: the norms of recurrent layers; None: ``norms``. ``layer_norm``: norms subtract
    the mean; they have weights and biases unless ``norm_weights`` or ``norm_biases`` is false. ``stored_by_head``: the
    projections, of "q", "k" and "v", whose rows a checkpoint stores in one tensor, by head of keys and values.
    ``head_bias``: lm_head has a bias. ``down_bias``: the last matmul of an MLP has one, whatever ``mlp_bias`` says.
    ``normed_head``: the rows of lm_head are divided by their lengths. ``position_offset``: positions are learned, and a
    table has that of position p in row p + offset; None: they are not. ``skips``: how streams are
    mixed. ``position_rows``: see contract.decoder; 3 needs
    Rope.sections. ``image_levels``: 0, or 1 and the number of first layers after which the states of images are added
    (DeepStack). ``images_both_ways``: for each layer, whether the tokens of an image attend to each other, also to
    later ones; (): in none.
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
    local_rope: Rope | None
    rotary_layers: tuple[bool, ...]
    tied: bool
    qk_norm: QKNorm | None
    sinks: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    sliding_layers: tuple[bool, ...]
    norms: NormNames
    norm_offset: bool
    scales: Scales
    activation: Activation
    gated: bool
    experts: Experts | None
    gated_attention: bool = False
    recurrent: RecurrentLayers | None = None
    latent: Latent | None = None
    variants: Variants = UNIFORM
    mlp_layers: tuple[bool, ...] = ()
    recurrent_norms: NormNames | None = None
    layer_norm: bool = False
    norm_weights: bool = True
    norm_biases: bool = True
    stored_by_head: tuple[str, ...] = ()
    down_bias: bool = False
    normed_head: bool = False
    position_offset: int | None = None
    skips: tuple[Skip, ...] = ()
    head_bias: bool = False
    position_rows: Literal[0, 3] = 0
    image_levels: int = 0
    images_both_ways: tuple[bool, ...] = ()

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], *, ignored: Collection[str] = (), length: int | None = None
    ) -> "ModelSpec":
        """Read a Hugging Face config. Raises BadCheckpoint, by name, for fields and values that are not implemented.

        ``ignored``: unknown fields that the recipe declares to be without effect. ``length``: the length of the longest
        text that will be served; None: the longest that the model allows.
        """
        gate_up = gate_up_of(config)
        config, architecture, family = _identified(config)
        fields = Fields({**family.defaults, **_with_common_names(config, family)}, "config.json")
        fields.skip("quantization_config", "quantization")  # export/read/quantization/ reads them
        _skip_unused(fields, family, architecture)
        heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
        if (latent := family.latent(fields)) is None:
            head_dim = scored = rotary = fields.integer("head_dim", max(hidden // heads, 1), most=65_536)
            kv_heads = family.kv_heads(fields, heads)
        else:
            head_dim, kv_heads = latent.cached, 1
            scored, rotary = latent.plain + latent.rotated, latent.rotated
        if heads % kv_heads:
            raise BadCheckpoint(
                f"config.json: num_attention_heads should be a multiple of num_key_value_heads, got {heads}, {kv_heads}"
            )
        if head_dim % 2:
            raise BadCheckpoint(f"config.json: head_dim should be even for rotary embedding, it is {head_dim}")
        max_length, layers = fields.integer("max_position_embeddings"), family.layers(fields)
        bias = family.biases(fields)
        windows = family.windows(fields, layers)
        experts = family.experts(fields, layers)
        variants = family.variants(fields, Heads(heads, kv_heads, head_dim), windows)
        by_layer = zip(variants.heads or (), windows[1], strict=variants.heads is not None)
        full = next((of_layer.dim for of_layer, slides in by_layer if not slides), rotary)
        rope, local_rope = ropes(fields, (full, rotary), max_length, family.rope, length, windows[1])
        spec = cls(
            family=family.name,
            layers=layers,
            hidden=hidden,
            intermediate=family.intermediate(fields),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=fields.integer("vocab_size"),
            max_length=min(max(max_length, rope.extended_length), family.longest(fields)),
            norm_eps=fields.number(family.norm_eps_field if family.norm_eps_field in fields.data else "rms_norm_eps"),
            rope=rope,
            local_rope=local_rope,
            rotary_layers=family.rotary(fields, layers, windows),
            tied=fields.flag("tie_word_embeddings", False),
            qk_norm=family.qk_norm if family.qk_norm_flag is None or fields.flag(family.qk_norm_flag, False) else None,
            sinks=family.sinks,
            qkv_bias=bias.qkv,
            out_bias=bias.out,
            mlp_bias=bias.mlp,
            sliding_window=windows[0],
            sliding_layers=windows[1],
            norms=family.norms if isinstance(family.norms, NormNames) else family.norms(fields),
            norm_offset=family.norm_offset,
            scales=family.scales(fields, scored, hidden),
            activation=_activation(fields, family),
            gated=family.gated,
            experts=experts if experts is None or gate_up is None else replace(experts, gate_up=gate_up),
            gated_attention=family.gated_attention,
            recurrent=family.recurrent(fields, layers),
            latent=latent,
            variants=variants,
            mlp_layers=family.mlp_layers(fields),
            recurrent_norms=family.recurrent_norms,
            layer_norm=family.layer_norm,
            norm_weights=family.norm_weights,
            norm_biases=family.norm_biases,
            stored_by_head=family.stored_by_head,
            down_bias=bias.mlp or bias.down,
            normed_head=family.normed_head,
            position_offset=family.position_offset,
            skips=family.skips(fields, layers),
            head_bias=bias.head,
        )
        fields.finish(ignored)
        return spec

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of a layer; None if the layer sees all earlier tokens."""
        return self.sliding_window if self.sliding_layers[layer] else None

    def heads_of(self, layer: int) -> Heads:
        """Return the attention heads of a layer."""
        return self.variants.heads[layer] if self.variants.heads else Heads(self.heads, self.kv_heads, self.head_dim)

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The head sizes of the layers, ascending."""
        return tuple(sorted({self.heads_of(layer).dim for layer in range(self.layers)}))

    def cache_of(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads: itself, or the last one of its kind that has some."""
        if self.variants.sources:
            return self.variants.sources[layer]
        first = self.layers - self.variants.sharing
        kind = self.sliding_layers[layer]
        return layer if layer < first else max(at for at in range(first) if self.sliding_layers[at] == kind)

    @property
    def caching_layers(self) -> tuple[int, ...]:
        """The layers that have keys and values of their own."""
        return tuple(
            layer for layer in range(self.layers) if self.has_attention(layer) and self.cache_of(layer) == layer
        )

    def intermediate_of(self, layer: int) -> int:
        """Return the width of the MLP of a layer."""
        return self.intermediate if self.cache_of(layer) == layer else self.variants.sharing_intermediate

    def experts_of(self, layer: int) -> Experts | None:
        """Return the experts of a layer; None if it has an MLP."""
        if self.experts is None or not self.experts.layers[layer]:
            return None
        clamps = self.variants.expert_clamps
        return replace(self.experts, clamped=clamps[layer]) if clamps else self.experts

    def mlp_clamp_of(self, layer: int) -> ClampedSwiglu | None:
        """Return what replaces the activation of the MLP or of the shared expert of a layer; None: nothing."""
        return self.variants.mlp_clamps[layer] if self.variants.mlp_clamps else None

    @property
    def large_calls(self) -> bool:
        """Whether calls with several thousand prompt tokens take less time per token on a GPU.

        With experts a call reads the weights of all of them. Recurrent layers go through several runs in parallel.
        """
        return self.experts is not None or self.recurrent is not None

    def recurrent_of(self, layer: int) -> RecurrentLayers | None:
        """Return the recurrent net of a layer; None if it has attention."""
        return self.recurrent if self.recurrent is not None and self.recurrent.layers[layer] else None

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has attention."""
        net = self.recurrent_of(layer)
        return net is None or net.with_attention

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP or experts."""
        return not self.mlp_layers or self.mlp_layers[layer]

    def norms_of(self, layer: int) -> NormNames:
        """Return the norms of a layer."""
        return self.norms if self.recurrent_norms is None or self.recurrent_of(layer) is None else self.recurrent_norms

    def sinks_of(self, layer: int) -> bool:
        """Return whether a layer has attention sinks."""
        return self.sinks and (not self.variants.sliding_sinks or self.sliding_layers[layer])

    def rope_of(self, layer: int) -> Rope | None:
        """Return the rotation rule of a layer; None if it does not rotate queries and keys."""
        rope = self.local_rope if self.local_rope is not None and self.sliding_layers[layer] else self.rope
        return rope if self.rotary_layers[layer] else None

    def contract(
        self,
        *,
        capacity: int,
        dtype: str,
        cache: CacheKind = "linear",
        kv_dtype: str | None = None,
        width: int | None = None,
        features: int = 0,
        uncommitted: int = 2,
    ) -> Contract:
        """Return the bindings of this model's decoder, ``capacity`` tokens to a cache row, computing in ``dtype``.

        ``width``: the width of the logits; None: the model's own. ``kv_dtype``: the dtype of keys and values.
        ``features``: the width of the output for a draft head; see contract.decoder. ``uncommitted``: the most tokens
        of a round that may be rejected later, at least 2; recurrent layers keep the inputs of that many.
        """
        net = self.recurrent
        recurrent = {
            layer: RecurrentState(net.state, net.width)
            for layer in range(self.layers)
            if net is not None and net.layers[layer]
        }
        heads = {layer: (of.kv, of.dim) for layer in self.caching_layers for of in [self.heads_of(layer)]}
        return contract.decoder(
            layers=self.layers - self.variants.sharing,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            heads=heads,
            capacity=capacity,
            vocab=width or self.vocab,
            dtype=dtype,
            cache=cache,
            kv_dtype=kv_dtype,
            features=features,
            recurrent=recurrent,
            history=0 if net is None else uncommitted + net.kernel - 1,
            latent=self.latent is not None and cache == "paged",
            position_rows=self.position_rows,
            image_width=self.image_levels * self.hidden,
            image_ends=any(self.images_both_ways),
        )


def _identified(config: Mapping[str, Any]) -> tuple[dict[str, Any], str, Family]:
    """Return the config of the text part as one object, its architecture, and its family."""
    named, kind = config.get("architectures") or [], config.get("model_type")
    architectures = [str(name) for name in named] if isinstance(named, list) else [str(named)]
    if (architecture := vision_language(config)) is not None:
        config, text = text_config(config, architecture)
        architectures, kind = [text], None
    if not architectures:
        architectures = next(([name] for name, row in FAMILIES.items() if kind in (row.name, *row.aliases)), [])
    family = FAMILIES.get(architectures[0]) if len(architectures) == 1 else None
    if family is None and architectures and architectures[0] in UNSUPPORTED:
        raise BadCheckpoint(
            f"config.json: {architectures[0]} is not exported: {UNSUPPORTED[architectures[0]]}; choose another model"
        )
    if family is None and len(architectures) == 1:
        why = without_head(architectures[0]) or "it is none of the architectures that docs/models.md lists"
        raise BadCheckpoint(f"config.json: {clipped(architectures[0])} is not exported: {why}; choose another model")
    if family is None or kind not in (None, family.name, *family.aliases):
        raise BadCheckpoint(
            f"config.json: architectures should be one of those that docs/models.md lists, it is {quoted(named)} with "
            f"model_type {quoted(kind)}"
        )
    return dict(config), architectures[0], family


def _with_common_names(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for name, value in config.items():
        common = family.field_names.get(name, name)
        if renamed.get(common) is None:
            renamed[common] = value
        elif value not in (None, renamed[common]):
            raise BadCheckpoint(
                f"config.json: {name} and another name of {common} should be equal, they are {quoted(value)} and "
                f"{quoted(renamed[common])}"
            )
    return renamed


def _skip_unused(fields: Fields, family: Family, architecture: str) -> None:
    fields.skip(*filter(is_unused, fields.data), *family.unused_fields)
    for name, values in {**NO_EFFECT_VALUES, **family.no_effect_values}.items():
        fields.only(name, *values)
    code = fields.get("auto_map", {})
    if not runs_the_same_model(code, architecture):
        raise BadCheckpoint(
            f"config.json: auto_map names the checkpoint's own code, {quoted(code)}, which the exporter does not "
            f"run; supported: none, or a class {architecture}"
        )


def _activation(fields: Fields, family: Family) -> Activation:
    fields.only(family.activation_field, *family.activations)
    return family.activations[fields.get(family.activation_field, next(iter(family.activations)))]
