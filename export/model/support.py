"""Models that a lowering's operators do not support, with the reason."""

from tandemrt.engines.recipe.backends import CPU, CUDA
from tandemrt.export.graph.lowering import HEAD_DIM_STEP, Lowering
from tandemrt.export.read.latent import Latent
from tandemrt.export.read.layer import UNIFORM, Experts, Router
from tandemrt.export.read.recurrent_layers import Mamba2, RecurrentLayers, ShortConvolution
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.operators.constants import (
    ACTIVATIONS,
    DELTA_KEY_DIMS,
    HIDDEN_MULTIPLE,
    KEY_DIMS,
    LATENT,
    MAX_EXPERTS,
    MAX_EXPERTS_PER_TOKEN,
    MAX_KERNEL,
    VALUE_DIM_MULTIPLE,
    WIDTH_MULTIPLE,
)


def unsupported(spec: ModelSpec, lowering: Lowering, capacity: int) -> str | None:
    """Return why a lowering does not support a model with rows of ``capacity`` tokens, and the fix; None: it does."""
    if spec.recurrent is not None and lowering not in ("grouped", "paged"):
        return (
            f"{spec.family} has recurrent layers, which run with {CUDA} over a paged cache, or on a CPU "
            f"with attention heads of a multiple of {HEAD_DIM_STEP} values, and as many of "
            "them rotated; the backend must be one of these"
        )
    if spec.sinks and lowering not in ("grouped", "paged"):
        what = "attention sinks" if spec.experts is None else "experts and attention sinks"
        return (
            f"{spec.family} has {what}, which run with {CUDA} over a paged cache, or on a CPU with heads of "
            f"a multiple of {HEAD_DIM_STEP} values; the backend must be one of these"
        )
    if spec.experts is not None and lowering not in ("grouped", "paged"):
        return (
            f"{spec.family} has experts, which run with {CUDA} over a paged cache, or on a CPU with heads of "
            f"a multiple of {HEAD_DIM_STEP} values; the backend must be one of these"
        )
    if spec.latent is not None and lowering not in ("grouped", "paged"):
        return (
            f"{spec.family} caches one latent vector per token, which runs with {CUDA} over a paged cache, "
            f"or on a CPU with latent vectors and rotated keys of a multiple of {HEAD_DIM_STEP} values; the backend "
            "must be one of these"
        )
    if spec.variants != UNIFORM and lowering not in ("grouped", "paged"):
        return (
            f"{spec.family} has layers of different shapes, which run with {CUDA} over a paged cache, or on "
            f"a CPU with heads of a multiple of {HEAD_DIM_STEP} values; the backend must be one of these"
        )
    if spec.position_rows and (why := _unsupported_positions(spec, lowering)):
        return why
    if spec.image_levels > spec.layers:
        return f"deepstack_visual_indexes has {spec.image_levels - 1} layers, it should be fewer than {spec.layers}"
    if spec.image_levels and lowering == "length":
        return (
            f"{spec.family} reads images with {CUDA} over a paged cache, on a CPU with heads of a multiple of "
            f"{HEAD_DIM_STEP} values, or with TensorRT; choose one of these, or target.images = false"
        )
    if lowering == "paged" and spec.position_offset is not None:
        return (
            f"{spec.family} has learned positions, which no operator adds over a paged cache: choose cache = 'linear', "
            f"or {CPU}"
        )
    if lowering == "paged":
        return (
            _unsupported_recurrence(spec, spec.recurrent)
            or _unsupported_latent(spec, spec.latent)
            or _unsupported_by_window_attention(spec)
            or _unsupported_variants(spec)
            or _unsupported_by_experts(spec, spec.experts)
        )
    if lowering == "length" and spec.sliding_window is not None and capacity > spec.sliding_window:
        return (
            f"sliding_window is {spec.sliding_window} and the capacity {capacity}; sliding-window attention needs a "
            "paged cache, so a row of this one may hold at most the window: lower the length limit"
        )
    return None


def _unsupported_recurrence(spec: ModelSpec, net: RecurrentLayers | None) -> str | None:
    """Return the part of the model that the operators of recurrent layers (paged cache) do not support, or None."""
    if net is None:
        return None
    if isinstance(net, ShortConvolution):
        if net.kernel <= MAX_KERNEL and net.channels % 2 == 0:
            return None
        return (
            f"{spec.family} has convolutions of {net.kernel} tokens of {net.channels} channels; on a GPU at most "
            f"{MAX_KERNEL} tokens of an even number of channels run: choose {CPU}"
        )
    heads, key_dim, value_dim = net.state
    key_dims = KEY_DIMS if isinstance(net, Mamba2) else DELTA_KEY_DIMS
    if key_dim not in key_dims or value_dim % VALUE_DIM_MULTIPLE or net.kernel > MAX_KERNEL or heads % 2:
        return (
            f"{spec.family} has recurrent layers with {heads} heads, keys of {key_dim} values, values of {value_dim} "
            f"and a convolution of {net.kernel} tokens; on a GPU keys of {', '.join(map(str, key_dims))} run, values "
            f"of a multiple of {VALUE_DIM_MULTIPLE}, an even number of heads and convolutions of at most {MAX_KERNEL}: "
            f"choose {CPU}"
        )
    return None


def _unsupported_latent(spec: ModelSpec, latent: Latent | None) -> str | None:
    """Return the part of the model that the operator ``latent_attention`` (paged cache) does not support, or None."""
    if latent is None:
        return None
    if (latent.rank, latent.rotated) != LATENT:
        return (
            f"{spec.family} has latent vectors of {latent.rank} values and rotated keys of {latent.rotated}; over a "
            f"paged cache {LATENT[0]} and {LATENT[1]} run: choose {CPU}"
        )
    return None


def _unsupported_positions(spec: ModelSpec, lowering: Lowering) -> str | None:
    """Return why a model cannot read positions in time, height and width, or None."""
    ropes = [rope for layer in range(spec.layers) if (rope := spec.rope_of(layer)) is not None]
    if any(2 * len(rope.rows) != rope.rotated for rope in ropes):
        pairs = [rope.rotated // 2 for rope in ropes]
        return f"mrope_section should be three sections of {pairs[0]} pairs, it is {list(ropes[0].sections)}"
    over_all_heads = lowering == "paged" and spec.qk_norm is not None and spec.qk_norm.over_all_heads
    if spec.latent is not None or over_all_heads:
        return f"{spec.family} has one position per token; positions in time, height and width do not go with it"
    return None


def _unsupported_by_experts(spec: ModelSpec, experts: Experts | None) -> str | None:
    """Return the part of the model that the operator ``experts`` (paged cache) does not support, or None."""
    if experts is None:
        return None
    sizes = f"{experts.per_token} of {experts.count} experts of {experts.intermediate} values for {spec.hidden}"
    clamped = experts.clamped is not None and experts.clamped.clamped_after
    if clamped or experts.weighted_input or not spec.gated or spec.activation not in ACTIVATIONS or experts.latent:
        return (
            f"{spec.family} has experts with weighted or latent inputs, no gates, a bound after the activation, or "
            f"another activation than {', '.join(ACTIVATIONS)}, which run on a CPU alone; choose {CPU}"
        )
    if not experts.normalized and experts.router != Router(scale=experts.router.scale):
        return (
            f"{spec.family} has a sparsemixer, or a router with a correction or groups whose weights are not "
            f"normalized, which runs on a CPU alone; choose {CPU}"
        )
    if (
        spec.hidden % HIDDEN_MULTIPLE
        or experts.intermediate % WIDTH_MULTIPLE
        or experts.count > MAX_EXPERTS
        or experts.per_token > MAX_EXPERTS_PER_TOKEN
    ):
        return (
            f"{spec.family} has {sizes}; over a paged cache at most {MAX_EXPERTS_PER_TOKEN} of {MAX_EXPERTS} run, in "
            f"multiples of {WIDTH_MULTIPLE} values, for multiples of {HIDDEN_MULTIPLE}: choose {CPU}"
        )
    return None


def _unsupported_variants(spec: ModelSpec) -> str | None:
    """Return the part in which layers differ that a paged cache does not support, or None."""
    variants = spec.variants
    gates_heads = variants.gate is not None and not variants.gate.per_value
    if variants.value_dim or gates_heads or any((*variants.expert_clamps, *variants.mlp_clamps)):
        return (
            f"{spec.family} has values smaller than keys, gates of heads or bounds of activations by layer, which run "
            f"on a CPU alone; choose {CPU}"
        )
    return None


def _unsupported_by_window_attention(spec: ModelSpec) -> str | None:
    """Return the part of the model that ``window_attention`` (paged cache) does not support, or None."""
    advice = f"choose cache = 'linear', or {CPU}"
    if spec.scales.attention_softcap:
        return (
            f"attn_logit_softcapping is {spec.scales.attention_softcap:g}; attention over a paged cache bounds no "
            f"scores: {advice}"
        )
    if spec.qk_norm is not None and spec.layer_norm:
        return (
            f"{spec.family} norms queries and keys by norms that subtract the mean, which attention over a paged cache "
            f"does not: {advice}"
        )
    if spec.qk_norm is not None and spec.qk_norm.after_rotary:
        return (
            f"{spec.family} norms queries and keys after the rotary embedding; attention over a paged cache norms "
            f"before it: {advice}"
        )
    if spec.rope.query_scale_beta:
        return (
            f"llama_4_scaling_beta is {spec.rope.query_scale_beta:g}; attention over a paged cache scales no queries "
            f"by their position: {advice}"
        )
    return None
