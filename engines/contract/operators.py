"""Schemas of the operators in the ``tandemrt`` domain: inputs, outputs, attributes and in-place updates.

Contracts, decoders, ONNX functions, kernels, TensorRT plugins, checks and tests derive from these schemas. Their
implementations are in plugins/implementations.py. Shapes mix integers and symbols; ``T`` is the compute dtype of a
decoder.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tandemrt.engines.contract.binding import Binding, Dim
from tandemrt.engines.contract.gpus import FLOAT8_FROM, OLDEST_WITH_KERNELS, Capability
from tandemrt.engines.contract.sampling_parameters import SAMPLING_PARAMETERS

T = "T"


@dataclass(frozen=True)
class Schema:
    """One operator.

    Attributes:
        kernels: file of the operator's CUDA kernels, without its suffix; None: kernels of a library.
        attributes: types of the attributes, all of them required.
        in_place: output -> the input whose memory it shares.
        optional: inputs and outputs that may be omitted, at the end of their lists.
        compute_capability: the oldest compute capability that the kernels run on.
        batch_invariant: the operator can compute the same bits for a token whatever else is in the call, in a decoder
            that requires it.
    """

    name: str
    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    kernels: str | None
    attributes: Mapping[str, Literal["int", "float"]] = field(default_factory=dict)
    in_place: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    compute_capability: Capability = OLDEST_WITH_KERNELS
    batch_invariant: bool = False

    def __getitem__(self, name: str) -> Binding:
        for binding in (*self.inputs, *self.outputs):
            if binding.name == name:
                return binding
        raise KeyError(name)

    def resolved(self, bindings: tuple[Binding, ...], *, dtype: str, **sizes: int) -> tuple[Binding, ...]:
        """Return ``bindings`` with ``dtype`` for T and an integer for every symbol in ``sizes``."""

        def shape(binding: Binding) -> tuple[Dim, ...]:
            return tuple(sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in binding.shape)

        return tuple(Binding(b.name, dtype if b.dtype == T else b.dtype, shape(b)) for b in bindings)


_SAMPLING = tuple(Binding(name, parameter.dtype, ("batch",)) for name, parameter in SAMPLING_PARAMETERS.items())
_WINDOW_LOGITS = Binding("logits", T, ("batch", "window+1", "vocab"))
_DRAFT_TOKENS = Binding("draft_tokens", "int64", ("batch", "window"))
_DRAFTS = (_DRAFT_TOKENS, Binding("draft_len", "int64", ("batch",)))
_STATIC_SCALE = Binding("static_scale", "float32", (1,))
# Bytes of float8_e4m3fn values, because Concat of ONNX does not support float8.
_FLOAT8_WEIGHT = Binding("weight", "uint8", ("width", "inner"))
# Where the tokens of a packed call are in a paged cache (contract.packed).
_PLACE = (
    Binding("block_table", "int32", ("batch", "max_blocks")),
    Binding("write_index", "int64", ("batch",)),
    Binding("prompt_rows", "int32", ("prompt_tokens",)),
    Binding("prompt_starts", "int32", ("prompts+1",)),
    Binding("prompt_index", "int64", ("prompts",)),
    Binding("prompt_table", "int32", ("prompts", "max_blocks")),
)
# With them a batch-invariant operator may compute the last rows, those of prompts, otherwise than those of windows.
_PROMPT_ROWS = Binding("prompt_rows", "int32", ("prompt_tokens",))
# Of all experts together, as their weights are; the factor of an expert multiplies its routing weights.
_OF_EXPERTS = (
    Binding("gate_up_bias", T, ("gate_up_rows",)),
    Binding("down_bias", T, ("down_rows",)),
    Binding("expert_factors", T, ("experts",)),
)
_OF_EXPERTS_OPTIONAL = tuple(binding.name for binding in _OF_EXPERTS)
_ROUTING: Mapping[str, Literal["int", "float"]] = dict.fromkeys(("per_token", "normalized", "shared_columns"), "int")
# (up + offset) * gate * sigmoid(alpha * gate + cubic * gate ** 3), after the bound ``limit``; 0: no bound.
_ACTIVATION: Mapping[str, Literal["int", "float"]] = {
    "interleaved": "int",
    **dict.fromkeys(("alpha", "cubic", "limit", "offset"), "float"),
}
_LATENT_CACHE: tuple[Dim, ...] = ("blocks", 1, "block_size", "cached")
_LINEAR_CACHE: tuple[Dim, ...] = ("batch", "kv_heads", "capacity", "head_dim")
_EMITTED = (Binding("tokens", "int64", ("batch", "window+1")), Binding("count", "int64", ("batch",)))


def _quantized(width: str) -> tuple[Binding, Binding]:
    """Return float8 values and one scale per token."""
    quantized = Binding("quantized", "float8_e4m3fn", ("tokens", width))
    return quantized, Binding("scales", "float32", ("tokens", 1))


def _attention(
    name: str,
    cache: str,
    *,
    kernels: str,
    scales: tuple[str, ...] = (),
    compute_capability: Capability = OLDEST_WITH_KERNELS,
    batch_invariant: bool = False,
) -> Schema:
    """Return the schema of attention over a paged cache of dtype ``cache``; ``scales`` are additional attributes."""
    shape: tuple[Dim, ...] = ("blocks", "kv_heads", "block_size", "head_dim")
    return Schema(
        name,
        inputs=(
            Binding("qkv", T, ("tokens", "qkv_width")),
            Binding("key_cache", cache, shape),
            Binding("value_cache", cache, shape),
            *_PLACE,
            Binding("cosine", T, ("positions", "half_head_dim")),
            Binding("sine", T, ("positions", "half_head_dim")),
            Binding("q_norm", T, ("head_dim",)),
            Binding("k_norm", T, ("head_dim",)),
            Binding("sinks", "float32", ("heads",)),
            Binding("image_ends", "int64", ("tokens",)),
        ),
        outputs=(
            Binding("mixed", T, ("tokens", "mixed_width")),
            Binding("present_key_cache", cache, shape),
            Binding("present_value_cache", cache, shape),
        ),
        attributes={
            "heads": "int",
            "kv_heads": "int",
            "sliding_window": "int",
            "value_norm": "int",
            "scale": "float",
            "epsilon": "float",
            **dict.fromkeys(scales, "float"),
        },
        in_place={"present_key_cache": "key_cache", "present_value_cache": "value_cache"},
        optional=("q_norm", "k_norm", "sinks", "image_ends"),
        kernels=kernels,
        compute_capability=compute_capability,
        batch_invariant=batch_invariant,
    )


def _low_bit_matmul(
    numbers: str, *weight: Binding, optional: tuple[str, ...] = (), kernels: str = "", groups: bool = True
) -> Schema:
    """Return the schema of a matmul with a ``weight`` of ``numbers`` of 4 or 8 bits on a GPU.

    ``groups``: an attribute has the size of groups.
    """
    return Schema(
        f"{numbers}_matmul",
        inputs=(Binding("x", T, ("tokens", "inner")), *weight, _PROMPT_ROWS),
        outputs=(Binding("out", T, ("tokens", "width")),),
        attributes={"group_size": "int"} if groups else {},
        optional=(*optional, "prompt_rows"),
        kernels=kernels or numbers,
        batch_invariant=True,
    )


def _low_bit_experts(numbers: str, scales: str, *more: Binding, optional: tuple[str, ...] = ()) -> Schema:
    """Return the schema of experts with weights of ``numbers`` of 4 or 8 bits, for both weights as for one matmul."""
    parts = (Binding("", "uint8", ("rows", "bytes")), Binding("scales", scales, ("rows", "groups")), *more)
    weights = [
        Binding("_".join(filter(None, (name, part.name))), part.dtype, tuple(f"{name}_{dim}" for dim in part.shape))
        for part in parts
        for name in ("gate_up", "down")
    ]
    return Schema(
        f"{numbers}_experts",
        inputs=(
            Binding("x", T, ("tokens", "hidden")),
            Binding("router_logits", T, ("tokens", "router_columns")),
            *weights,
            *_OF_EXPERTS,
            _PROMPT_ROWS,
        ),
        outputs=(Binding("mixed", T, ("tokens", "hidden")),),
        attributes={**_ROUTING, **_ACTIVATION, "gate_up_group": "int", "down_group": "int"},
        optional=(*optional, *_OF_EXPERTS_OPTIONAL, "prompt_rows"),
        kernels=f"experts_{numbers}",
        batch_invariant=True,
    )


SCHEMAS = {
    schema.name: schema
    for schema in (
        Schema(
            "token_bitmask",
            inputs=(_WINDOW_LOGITS, Binding("bitmask", "int32", ("batch", "window+1", "words"))),
            outputs=(Binding("masked", T, ("batch", "window+1", "vocab")),),
            kernels="verify",
        ),
        Schema(
            "adjust_logits",
            inputs=(
                _WINDOW_LOGITS,
                _DRAFT_TOKENS,
                Binding("entry_tokens", "int32", ("batch", "entries")),
                Binding("entry_counts", "int32", ("batch", "entries")),
                Binding("entry_in_prompt", "int32", ("batch", "entries")),
                Binding("entry_bias", "float32", ("batch", "entries")),
                Binding("entry_len", "int32", ("batch",)),
                Binding("presence", "float32", ("batch",)),
                Binding("frequency", "float32", ("batch",)),
                Binding("repetition", "float32", ("batch",)),
            ),
            outputs=(Binding("adjusted", T, ("batch", "window+1", "vocab")),),
            in_place={"adjusted": "logits"},
            kernels="adjust",
        ),
        Schema("verify_draft", inputs=(_WINDOW_LOGITS, *_DRAFTS, *_SAMPLING), outputs=_EMITTED, kernels="verify"),
        # A separate operator, because a TensorRT plugin has a fixed number of inputs.
        Schema(
            "verify_draft_probs",
            inputs=(
                _WINDOW_LOGITS,
                *_DRAFTS,
                *_SAMPLING,
                Binding("draft_probs", "float32", ("batch", "window", "vocab")),
            ),
            outputs=_EMITTED,
            kernels="verify",
        ),
        Schema(  # for a draft with a part of the target's vocabulary, `vocab` is that part and `token` the target's id
            "sample_draft",
            inputs=(
                Binding("logits", T, ("batch", 1, "vocab")),
                *_SAMPLING,
                Binding("target_ids", "int32", ("vocab",)),
            ),
            outputs=(Binding("token", "int64", ("batch",)), Binding("draft_probs", "float32", ("batch", "vocab"))),
            optional=("target_ids", "draft_probs"),
            kernels="verify",
        ),
        _attention("window_attention", T, kernels="attention", batch_invariant=True),
        # A separate operator, because its kernels need newer GPUs. Caches hold keys and values divided by the scales.
        _attention(
            "float8_window_attention",
            "float8_e4m3fn",
            kernels="attention_float8",
            scales=("key_scale", "value_scale"),
            compute_capability=FLOAT8_FROM,
            batch_invariant=True,
        ),
        Schema(  # a packed call; a key is the latent vector of its token, after a part that is rotated
            "latent_attention",
            inputs=(
                Binding("query", T, ("tokens", "query_width")),
                Binding("key", T, ("tokens", "cached")),
                Binding("cache", T, _LATENT_CACHE),
                *_PLACE,
                Binding("cosine", T, ("positions", "half_rotated")),
                Binding("sine", T, ("positions", "half_rotated")),
            ),
            outputs=(
                Binding("mixed", T, ("tokens", "mixed_width")),
                Binding("present_cache", T, _LATENT_CACHE),
            ),
            attributes={"heads": "int", "scale": "float"},
            in_place={"present_cache": "cache"},
            kernels="latent_attention",
        ),
        Schema(  # recurrent layers with a state, over a paged cache (docs/operators.md)
            "linear_attention",
            inputs=(
                Binding("projected", T, ("tokens", "projected_width")),
                Binding("state", "float32", ("slots", "value_heads", "key_dim", "value_dim")),
                Binding("recent", T, ("slots", "history", "token_width")),
                Binding("conv_weight", T, ("channels", "kernel")),
                Binding("conv_bias", "float32", ("channels",)),
                Binding("decay_scale", "float32", ("value_heads",)),
                Binding("dt_bias", "float32", ("decays",)),
                Binding("skip", "float32", ("value_heads",)),
                Binding("norm_weight", "float32", ("norm_width",)),
                Binding("state_index", "int64", ("batch",)),
                Binding("write_index", "int64", ("batch",)),
                Binding("commit_index", "int64", ("batch",)),
                Binding("prompt_rows", "int32", ("prompt_tokens",)),
                Binding("prompt_starts", "int32", ("prompts+1",)),
                Binding("prompt_index", "int64", ("prompts",)),
                Binding("prompt_slots", "int64", ("prompts",)),
                Binding("prompt_state_index", "int64", ("prompts",)),
            ),
            outputs=(
                Binding("out", T, ("tokens", "out_width")),
                Binding("present_state", "float32", ("slots", "value_heads", "key_dim", "value_dim")),
                Binding("present_recent", T, ("slots", "history", "token_width")),
            ),
            attributes={
                **dict.fromkeys(("key_heads", "value_heads"), "int"),
                **dict.fromkeys(("query_at", "key_at", "value_at", "decay_at", "update_at", "gate_at"), "int"),
                **dict.fromkeys(("by_key_head", "sigmoid_gate", "norm", "norm_groups"), "int"),
                **dict.fromkeys(("update_scale", "epsilon"), "float"),
            },
            in_place={"present_state": "state", "present_recent": "recent"},
            kernels="linear_attention",
            batch_invariant=True,
        ),
        Schema(  # recurrent layers that are only a gated convolution
            "short_convolution",
            inputs=(
                Binding("projected", T, ("tokens", "projected_width")),
                Binding("recent", T, ("slots", "history", "channels")),
                Binding("conv_weight", T, ("channels", "kernel")),
                Binding("conv_bias", "float32", ("channels",)),
                Binding("write_index", "int64", ("batch",)),
                Binding("prompt_rows", "int32", ("prompt_tokens",)),
                Binding("prompt_starts", "int32", ("prompts+1",)),
                Binding("prompt_index", "int64", ("prompts",)),
                Binding("prompt_slots", "int64", ("prompts",)),
            ),
            outputs=(
                Binding("out", T, ("tokens", "channels")),
                Binding("present_recent", T, ("slots", "history", "channels")),
            ),
            in_place={"present_recent": "recent"},
            kernels="short_convolution",
            batch_invariant=True,
        ),
        Schema(  # the sum of two streams, and its norm times a weight that 16 bits would round
            "residual_norm",
            inputs=(
                Binding("x", T, ("tokens", "width")),
                Binding("update", T, ("tokens", "width")),
                Binding("weight", "float32", ("width",)),
            ),
            outputs=(Binding("normed", T, ("tokens", "width")), Binding("sum", T, ("tokens", "width"))),
            attributes={"epsilon": "float"},
            kernels="residual_norm",
            batch_invariant=True,
        ),
        Schema(  # inputs of any rank: works on the last dimension
            "swiglu",
            inputs=(Binding("gate_up", T, ("tokens", "gate_up_width")),),
            outputs=(Binding("activated", T, ("tokens", "width")),),
            kernels="swiglu",
            batch_invariant=True,
        ),
        Schema(  # a matmul with a stored weight whose rounding does not depend on the number of tokens
            "linear",
            inputs=(Binding("x", T, ("tokens", "inner")), Binding("weight", T, ("width", "inner"))),
            outputs=(Binding("out", T, ("tokens", "width")),),
            kernels="linear",
            batch_invariant=True,
        ),
        Schema(  # linear with gates and then ups of an MLP, rounded, and swiglu of them
            "gated_linear",
            inputs=(Binding("x", T, ("tokens", "inner")), Binding("weight", T, ("gate_up_width", "inner"))),
            outputs=(Binding("activated", T, ("tokens", "width")),),
            kernels="gated_linear",
            batch_invariant=True,
        ),
        Schema(  # the sum of x over all ranks, added in their order, so that all ranks have the same bits
            "all_reduce",
            inputs=(Binding("x", T, ("tokens", "width")),),
            outputs=(Binding("sum", T, ("tokens", "width")),),
            kernels="collectives",
            batch_invariant=True,
        ),
        Schema(  # columns of all ranks; those of rank r begin at column min(r * part, width - part)
            "all_gather",
            inputs=(Binding("x", T, ("batch", "rows", "part")),),
            outputs=(Binding("gathered", T, ("batch", "rows", "width")),),
            attributes={"width": "int"},
            kernels="collectives",
            batch_invariant=True,
        ),
        Schema(  # inputs of any rank; a weight is the concatenation of the experts' weights
            "experts",
            inputs=(
                Binding("x", T, ("tokens", "hidden")),
                Binding("router_logits", T, ("tokens", "router_columns")),
                Binding("gate_up", T, ("gate_up_rows", "hidden")),
                Binding("down", T, ("down_rows", "width")),
                *_OF_EXPERTS,
                _PROMPT_ROWS,
            ),
            outputs=(Binding("mixed", T, ("tokens", "hidden")),),
            attributes={**_ROUTING, **_ACTIVATION},
            optional=(*_OF_EXPERTS_OPTIONAL, "prompt_rows"),
            kernels="experts",
            batch_invariant=True,
        ),
        _low_bit_experts(
            "int4", T, Binding("zeros", "uint8", ("rows", "half_groups")), optional=("gate_up_zeros", "down_zeros")
        ),
        _low_bit_experts("int8", T),
        _low_bit_experts("float4", "uint8", Binding("factors", "float32", ("rows",))),
        _low_bit_experts("float8", "float32"),  # float8_e4m3fn
        Schema(  # one scale per token, computed from the token, or one scale of the checkpoint for all tokens
            "quantize_tokens",
            inputs=(Binding("x", T, ("tokens", "inner")), _STATIC_SCALE),
            outputs=_quantized("inner"),
            optional=("static_scale",),
            kernels="float8",
            compute_capability=FLOAT8_FROM,
            batch_invariant=True,
        ),
        Schema(
            "scaled_matmul",
            inputs=(*_quantized("inner"), _FLOAT8_WEIGHT, Binding("weight_scales", "float32", ("width",))),
            outputs=(Binding("out", T, ("tokens", "width")),),
            kernels="float8",
            compute_capability=FLOAT8_FROM,
            batch_invariant=True,
        ),
        _low_bit_matmul(  # weights of 4-bit integers, with one scale per group of inputs
            "int4",
            Binding("weight", "uint8", ("width", "half_padded")),
            Binding("scales", T, ("width", "groups")),
            Binding("zeros", "uint8", ("width", "half_groups")),
            optional=("zeros",),
        ),
        _low_bit_matmul(  # weights of 8-bit integers, with one scale per group of inputs
            "int8",
            Binding("weight", "uint8", ("width", "padded")),
            Binding("scales", T, ("width", "groups")),
        ),
        _low_bit_matmul(  # weights of 4-bit floats, with a float8_e4m3fn scale per group and a factor per output
            "float4",
            Binding("weight", "uint8", ("width", "half_padded")),
            Binding("scales", "uint8", ("width", "groups")),
            Binding("factors", "float32", ("width",)),
        ),
        *(
            _low_bit_matmul(  # weights of types K of GGUF: int8 scales per group, and factors of these
                kind,
                Binding("weight", "uint8", ("width", "bytes")),
                Binding("scales", "int8", ("width", "groups")),
                Binding("factors", "float16", ("width", "blocks")),
                kernels="k_quants",
                groups=False,
            )
            for kind in ("q4_k", "q6_k")
        ),
        Schema(  # on a CPU: weights of 4 to 8 bits, inputs rounded to 8 bits, the same bits for a row in any call
            "low_bit_int8_matmul",
            inputs=(
                Binding("x", "float32", ("tokens", "inner")),
                Binding("weight", "uint8", ("tiles", "tile_bytes")),
                Binding("scales", "float32", ("tiles", "tile_scales")),
                Binding("zeros", "uint8", ("tiles", "tile_groups")),
                Binding("offsets", "float32", ("tiles", "tile_scales")),
                Binding("subscales", "int8", ("tiles", "tile_groups")),
                Binding("suboffsets", "int8", ("tiles", "tile_groups")),
                Binding("table", "uint8", (16,)),
            ),
            outputs=(Binding("out", "float32", ("tokens", "width")),),
            attributes={"bits": "int", "group_size": "int", "width": "int"},
            optional=("zeros", "offsets", "subscales", "suboffsets", "table"),
            kernels=None,
        ),
        Schema(  # on a CPU: weights in the checkpoint's dtype T, sums in float32, equal bits for a row in any call
            "tiled_matmul",
            inputs=(Binding("x", "float32", ("tokens", "inner")), Binding("weight", T, ("tiles", "tile_values"))),
            outputs=(Binding("out", "float32", ("tokens", "width")),),
            attributes={"width": "int"},
            kernels=None,
        ),
        Schema(  # on a CPU: a linear cache, equal bits for a token in any call
            "decode_attention",
            inputs=(
                Binding("qkv", "float32", ("batch", "query", "qkv_width")),
                Binding("past_key", "float32", _LINEAR_CACHE),
                Binding("past_value", "float32", _LINEAR_CACHE),
                Binding("write_index", "int64", ("batch",)),
                Binding("cosine", "float32", ("positions", "half_rotated")),
                Binding("sine", "float32", ("positions", "half_rotated")),
                Binding("ends", "int64", ("batch", "query")),
            ),
            outputs=(
                Binding("mixed", "float32", ("batch", "query", "mixed_width")),
                Binding("present_key", "float32", _LINEAR_CACHE),
                Binding("present_value", "float32", _LINEAR_CACHE),
            ),
            attributes={"heads": "int", "sliding_window": "int", "scale": "float"},
            optional=("ends",),
            in_place={"present_key": "past_key", "present_value": "past_value"},
            kernels=None,
        ),
        Schema(  # without scales: the next operator applies them
            "float8_matmul",
            inputs=(_quantized("inner")[0], _FLOAT8_WEIGHT),
            outputs=(Binding("out", T, ("tokens", "width")),),
            kernels="float8",
            compute_capability=FLOAT8_FROM,
            batch_invariant=True,
        ),
        Schema(
            "quantized_swiglu",
            inputs=(
                Binding("gate_up", T, ("tokens", "gate_up_width")),
                Binding("token_scales", "float32", ("tokens", 1)),
                Binding("weight_scales", "float32", ("gate_up_width",)),
                _STATIC_SCALE,
            ),
            outputs=_quantized("width"),
            optional=("static_scale",),
            kernels="float8",
            compute_capability=FLOAT8_FROM,
            batch_invariant=True,
        ),
        Schema(
            "quantized_norm",
            inputs=(
                Binding("skip", T, ("tokens", "hidden")),
                Binding("update", T, ("tokens", "hidden")),
                Binding("token_scales", "float32", ("tokens", 1)),
                Binding("weight_scales", "float32", ("hidden",)),
                Binding("norm_weight", T, ("hidden",)),
                _STATIC_SCALE,
            ),
            outputs=(*_quantized("hidden"), Binding("sum", T, ("tokens", "hidden"))),
            attributes={"epsilon": "float"},
            optional=("static_scale",),
            kernels="float8",
            compute_capability=FLOAT8_FROM,
            batch_invariant=True,
        ),
    )
}

EXPERTS = tuple(name for name in SCHEMAS if name.endswith("experts"))  # mixtures of experts in any format
COLLECTIVES = ("all_reduce", "all_gather")  # operators that all ranks of a tensor-parallel target run together

# Each engine without weights is one operator. Verification also applies token_bitmask first.
WEIGHTLESS_ENGINES = {
    "adjust": "adjust_logits",
    "verify": "verify_draft",
    "verify_probs": "verify_draft_probs",
    "propose": "sample_draft",
    "propose_probs": "sample_draft",
}
