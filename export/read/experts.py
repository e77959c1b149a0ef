"""Read the experts of a family: their number, their router, the layers that have them, shared experts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.layer import ClampedSwiglu, ExpertNorms, Experts, GateUp, Router, SharedExpert
from tandemrt.export.read.recurrent import nemotron_layers

_LEAST = 1e-20  # of the sum of chosen sigmoids


def no_experts(fields: Fields, layers: int) -> None:
    """A dense model."""


def mixtral_experts(fields: Fields, layers: int) -> Experts:
    """Mixtral: experts in every layer."""
    count, chosen = fields.integer("num_local_experts", 8), fields.integer("num_experts_per_tok", 2)
    return _experts(count, chosen, fields.integer("intermediate_size"), True, (True,) * layers)


def qwen_experts(fields: Fields, layers: int) -> Experts:
    """Qwen3-MoE: experts in one of ``decoder_sparse_step`` layers, except in ``mlp_only_layers``."""
    count = fields.integer("num_experts", fields.integer("num_local_experts", 128))
    step, dense = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise BadCheckpoint(f"config.json: mlp_only_layers should be a list of layers, it is {quoted(dense)}")
    return _experts(
        count,
        fields.integer("num_experts_per_tok", 8),
        fields.integer("moe_intermediate_size", 768),
        fields.flag("norm_topk_prob", False),
        tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
    )


def mellum_experts(fields: Fields, layers: int) -> Experts:
    """Mellum: as Qwen3-MoE, in the layers that ``mlp_layer_types`` names."""
    return replace(qwen_experts(fields, layers), layers=_sparse_layers(fields, layers))


def qwen2_experts(fields: Fields, layers: int) -> Experts:
    """Qwen2-MoE: as Qwen3-MoE, and a shared expert with a gate."""
    shared = SharedExpert(
        fields.integer("shared_expert_intermediate_size", 5632), "shared_expert", gate="shared_expert_gate"
    )
    return replace(qwen_experts(fields, layers), shared=shared)


def flint_experts(fields: Fields, layers: int) -> Experts:
    """Flint: as Qwen3-MoE, with a sigmoid without a correction, and a shared expert without a gate."""
    shared = SharedExpert(fields.integer("shared_expert_intermediate_size", 1024), "shared_expert")
    return replace(qwen_experts(fields, layers), router=Router("sigmoid"), shared=shared)


def olmoe_experts(fields: Fields, layers: int) -> Experts:
    """OLMoE and FlexOlmo: experts in every layer."""
    count, chosen = fields.integer("num_experts", 64), fields.integer("num_experts_per_tok", 8)
    normalized = fields.flag("norm_topk_prob", False)
    return _experts(count, chosen, fields.integer("intermediate_size"), normalized, (True,) * layers)


def granite_experts(fields: Fields, layers: int) -> Experts:
    """Granite MoE: as Mixtral, with a shared expert if ``shared_intermediate_size`` is not 0."""
    shared = fields.get("shared_intermediate_size", 0)
    experts = mixtral_experts(fields, layers)
    if shared == 0:
        return experts
    return replace(experts, shared=SharedExpert(fields.integer("shared_intermediate_size"), "shared_mlp"))


def gemma4_experts(fields: Fields, layers: int) -> Experts | None:
    """Gemma 4: experts in addition to the MLP of every layer, with a router that norms its input."""
    if not fields.flag("enable_moe_block", False):
        fields.skip("num_experts", "top_k_experts", "moe_intermediate_size")
        return None
    count, chosen = fields.integer("num_experts"), fields.integer("top_k_experts")
    experts = _experts(count, chosen, fields.integer("moe_intermediate_size"), True, (True,) * layers)
    norms = ExpertNorms("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "post_feedforward_layernorm_1")
    return replace(experts, norms=norms, shared=SharedExpert(fields.integer("intermediate_size"), "shared_expert"))


def phimoe_experts(fields: Fields, layers: int) -> Experts:
    """Phi-3.5-MoE: as Mixtral, with sparsemixer as router."""
    experts = mixtral_experts(fields, layers)
    if experts.per_token != 2:
        raise BadCheckpoint(f"config.json: num_experts_per_tok should be 2 for sparsemixer, it is {experts.per_token}")
    fields.skip("input_jitter_noise")  # training only
    router = Router("sparsemixer", jitter=fields.number("router_jitter_noise", 0.01))
    return replace(experts, router=router, normalized=False)


def llama4_experts(fields: Fields, layers: int) -> Experts | None:
    """Llama 4: a sigmoid of each logit multiplies the input of its expert; a shared expert in every such layer."""
    step = fields.integer("interleave_moe_layer_step", 1)
    listed = fields.get("moe_layers", list(range(step - 1, layers, step)))
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise BadCheckpoint(f"config.json: moe_layers should be a list of layers, it is {quoted(listed)}")
    count, chosen = fields.integer("num_local_experts", 16), fields.integer("num_experts_per_tok", 1)
    width = fields.integer("intermediate_size", 8192)
    sparse = tuple(layer in listed for layer in range(layers))
    return replace(
        _experts(count, chosen, width, False, sparse),
        gate_up="halves",
        router=Router("sigmoid"),
        shared=SharedExpert(width, "shared_expert"),
        weighted_input=True,
    )


def mimo_v2_experts(fields: Fields, layers: int) -> Experts:
    """MiMo V2: DeepSeek's router; ``mlp_layer_types``, else ``moe_layer_freq``, names the layers with experts."""
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("n_shared_experts", None, 0)
    dense = fields.get("moe_layer_freq", [0, *[1] * (layers - 1)])
    kinds = fields.get("mlp_layer_types")
    if kinds is None and (
        not isinstance(dense, list) or len(dense) != layers or not set(map(str, dense)) <= {"0", "1"}
    ):
        raise BadCheckpoint(
            f"config.json: moe_layer_freq should be 0 or 1 for each of {layers} layers, it is {quoted(dense)}"
        )
    sparse = tuple(map(bool, dense)) if kinds is None else _sparse_layers(fields, layers)
    number = fields.integer("n_routed_experts", 256)
    scale = 1.0 if fields.get("routed_scaling_factor") is None else fields.number("routed_scaling_factor")
    router = Router("sigmoid", True, *_groups(fields, number), least_sum=_LEAST, scale=scale)
    width, normalized = fields.integer("moe_intermediate_size", 2048), fields.flag("norm_topk_prob", True)
    return replace(_experts(number, fields.integer("num_experts_per_tok", 8), width, normalized, sparse), router=router)


def step_experts(fields: Fields, layers: int) -> Experts:
    """Step 3.5: a sigmoid with a correction, a shared expert; ``mlp_layer_types``, else ``moe_layers_enum``."""
    for name, value in (
        *(("use_moe", True), ("use_moe_router_bias", True), ("norm_expert_weight", True)),
        ("moe_router_activation", "sigmoid"),
    ):
        fields.only(name, value)
    count, chosen = fields.integer("n_routed_experts", 288), fields.integer("num_experts_per_tok", 8)
    listed = fields.get("moe_layers_enum")
    sparse = _sparse_layers(fields, layers)
    if listed is not None and fields.get("mlp_layer_types") is None:
        items = [each.strip() for each in listed.split(",")] if isinstance(listed, str) else listed
        if not isinstance(items, list) or not all(str(each).isdecimal() for each in items):
            raise BadCheckpoint(f"config.json: moe_layers_enum should list layers, as in '3,4', it is {quoted(listed)}")
        sparse = tuple(layer in set(map(int, items)) for layer in range(layers))
    experts = _experts(count, chosen, fields.integer("moe_intermediate_size", 1280), True, sparse)
    router = Router("sigmoid", correction=True, scale=fields.number_or_absent("moe_router_scaling_factor", 1.0))
    return replace(experts, router=router, shared=SharedExpert(fields.integer("share_expert_dim", 1280)))


def gpt_oss_experts(fields: Fields, layers: int) -> Experts:
    """gpt-oss: experts in every layer, with biases, interleaved gate and up, and a clamped SwiGLU.

    GGUF files separate gate and up, which export/quantize/gguf/families.py states.
    """
    chosen = fields.integer("num_experts_per_tok", 4)
    fields.only("experts_per_token", chosen)  # an alias of num_experts_per_tok
    experts = _experts(
        fields.integer("num_local_experts", 128), chosen, fields.integer("intermediate_size"), True, (True,) * layers
    )
    clamped = ClampedSwiglu(
        fields.number_or_absent("swiglu_alpha", 1.702), fields.number_or_absent("swiglu_limit", 7.0)
    )
    gate_up: GateUp = "interleaved" if fields.flag("interleaved_gate_up", True) else "separate"
    return replace(experts, biased=True, gate_up=gate_up, clamped=clamped)


def hunyuan_experts(fields: Fields, layers: int) -> Experts:
    """Hunyuan MoE: experts and a shared MLP in every layer; published configs have lists with a value per layer."""
    width = _equal_in_all_layers(fields, "moe_intermediate_size", layers, fields.integer("intermediate_size"))
    if width != fields.integer("intermediate_size"):
        raise BadCheckpoint(
            f"config.json: moe_intermediate_size should be intermediate_size, {fields.get('intermediate_size')}, it is "
            f"{quoted(width)}"
        )
    experts = _experts(
        _equal_in_all_layers(fields, "num_experts", layers, 1),
        _equal_in_all_layers(fields, "moe_topk", layers, 1),
        width,
        True,
        (True,) * layers,
    )
    shared = _equal_in_all_layers(fields, "num_shared_expert", layers, 1)
    return replace(experts, shared=SharedExpert(width * shared, "shared_mlp"))


def granite_hybrid_experts(fields: Fields, layers: int) -> Experts | None:
    """Granite 4: as Granite MoE; without experts, ``num_local_experts`` is 0 and the shared MLP is the only one."""
    if fields.get("num_local_experts", 8) == 0:
        fields.skip("num_experts_per_tok", "intermediate_size")
        return None
    return granite_experts(fields, layers)


def nemotron_experts(fields: Fields, layers: int) -> Experts | None:  # noqa: ARG001
    """Nemotron-H: the blocks that are called E, or moe: DeepSeek-V3's router, and a shared expert of its own width.

    Experts may read a latent vector; the router and the shared expert never do.
    """
    where = tuple(mlp == "moe" for _, mlp in nemotron_layers(fields))
    fields.only("n_shared_experts", 1)
    count, width = fields.integer("n_routed_experts", 8), fields.integer("moe_shared_expert_intermediate_size", 7688)
    router = Router(
        "sigmoid", True, *_groups(fields, count), least_sum=_LEAST, scale=fields.number("routed_scaling_factor", 1.0)
    )
    experts = _experts(
        count,
        fields.integer("num_experts_per_tok", 2),
        fields.integer("moe_intermediate_size", 7688),
        fields.flag("norm_topk_prob", True),
        where,
    )
    latent = 0 if fields.get("moe_latent_size") is None else fields.integer("moe_latent_size")
    return replace(experts, router=router, shared=SharedExpert(width), latent=latent) if any(where) else None


def lfm2_experts(fields: Fields, layers: int) -> Experts:
    """LFM2-MoE: a sigmoid, perhaps with a correction, in all but the first ``num_dense_layers`` layers."""
    dense = fields.get("num_dense_layers", 2)
    if type(dense) is not int or dense < 0:
        raise BadCheckpoint(f"config.json: num_dense_layers should be an integer of at least 0, it is {quoted(dense)}")
    return replace(
        _experts(
            fields.integer("num_experts", 32),
            fields.integer("num_experts_per_tok", 4),
            fields.integer("moe_intermediate_size", 1792),
            fields.flag("norm_topk_prob", True),
            tuple(layer >= dense for layer in range(layers)),
        ),
        router=Router(
            "sigmoid",
            correction=fields.flag("use_expert_bias", True),
            added_sum=1e-6,
            scale=fields.number_or_absent("routed_scaling_factor", 1.0),
        ),
    )


def ernie_experts(fields: Fields, layers: int) -> Experts:
    """ERNIE 4.5: a softmax with a correction, in every ``moe_layer_interval``-th layer of a range."""
    count, chosen = fields.integer("moe_num_experts", 64), fields.integer("moe_k", 6)
    width = fields.integer("moe_intermediate_size", 1536)
    first, last, step = (
        fields.get(f"moe_layer_{name}", default)
        for name, default in (("start_index", 1), ("end_index", -1), ("interval", 1))
    )
    if not all(type(each) is int for each in (first, last, step)) or step < 1:
        raise BadCheckpoint(
            "config.json: moe_layer_start_index, moe_layer_end_index and moe_layer_interval should be integers, they "
            f"are {quoted([first, last, step])}"
        )
    last = layers - 1 if last == -1 else last
    experts = _experts(
        count, chosen, width, True, tuple(first <= i <= last and (i + 1) % step == 0 for i in range(layers))
    )
    return replace(
        experts,
        router=Router(correction=True, least_sum=fields.number_or_absent("moe_norm_min", 1e-12)),
        shared=_shared(fields, "moe_num_shared_experts", 2, width),
    )


def minimax_experts(fields: Fields, layers: int) -> Experts:
    """MiniMax M2: a sigmoid with a correction, experts in every layer."""
    fields.only("scoring_func", "sigmoid")
    fields.only("use_routing_bias", True)
    fields.only("shared_intermediate_size", 0)
    experts = mixtral_experts(fields, layers)
    return replace(experts, router=Router("sigmoid", correction=True, least_sum=_LEAST))


def deepseek_experts(
    *,
    count: str = "n_routed_experts",
    shared: str = "n_shared_experts",
    scale: str = "routed_scaling_factor",
    stored: str = "shared_experts",
) -> Callable[[Fields, int], Experts]:
    """Return a reader for DeepSeek-V3 and models with its router: a sigmoid with a correction and groups.

    The first layers are dense. ``count``, ``shared`` and ``scale`` are the names of the fields for the number of
    experts, the number of shared experts, and the factor of the weights; ``stored`` is the name of the shared experts.
    """

    def read(fields: Fields, layers: int) -> Experts:
        fields.only("scoring_func", "sigmoid", "noaux_tc")  # dots.llm1 has the name of the method
        fields.only("topk_method", "noaux_tc")
        fields.only("moe_layer_freq", 1)
        width, number = fields.integer("moe_intermediate_size"), fields.integer(count)
        groups = _groups(fields, number)
        router = Router("sigmoid", True, *groups, least_sum=_LEAST, scale=fields.number_or_absent(scale, 1.0))
        experts = _experts(
            number,
            fields.integer("num_experts_per_tok"),
            width,
            fields.flag("norm_topk_prob", True),
            _sparse_layers(fields, layers),
        )
        return replace(experts, router=router, shared=_shared(fields, shared, 1, width, name=stored))

    return read


def axk1_experts(fields: Fields, layers: int) -> Experts:
    """A.X K1: as DeepSeek-V3, with a norm of their output."""
    return replace(deepseek_experts()(fields, layers), output_norm="post_mlp_layernorm")


def cohere2_experts(fields: Fields, layers: int) -> Experts:
    """Command A with experts: a softmax or a sigmoid of the chosen experts' logits, shared ones averaged or added."""
    fields.only("expert_selection_fn", "softmax", "sigmoid")
    fields.only("shared_expert_combination_strategy", "average", "sum")
    width = fields.integer("intermediate_size")
    sigmoid = fields.get("expert_selection_fn") == "sigmoid"
    normalized = fields.flag("norm_topk_prob", True) or not sigmoid
    count, chosen = fields.integer("num_experts", 8), fields.integer("num_experts_per_tok", 2)
    experts = _experts(count, chosen, width, normalized, _sparse_layers(fields, layers))
    averaged = fields.get("shared_expert_combination_strategy", "average") == "average"
    shared = _shared(fields, "num_shared_experts", 0, width, averaged=averaged)
    return replace(experts, router=Router("sigmoid") if sigmoid else Router(), shared=shared)


def pangu_experts(fields: Fields, layers: int) -> Experts:
    """openPangu Ultra: as DeepSeek-V3, but the correction is optional."""
    experts = deepseek_experts()(fields, layers)
    corrected = fields.flag("router_enable_expert_bias", False)
    return replace(experts, router=replace(experts.router, correction=corrected))


def laguna_experts(fields: Fields, layers: int) -> Experts:
    """Laguna: a sigmoid with a correction, and a shared expert."""
    fields.only("moe_apply_router_weight_on_input", False)
    fields.only("moe_router_logit_softcapping", 0.0)
    experts = _experts(
        fields.integer("num_experts", 256),
        fields.integer("num_experts_per_tok", 8),
        fields.integer("moe_intermediate_size", 512),
        True,
        _sparse_layers(fields, layers),
    )
    router = Router("sigmoid", correction=True, scale=fields.number("moe_routed_scaling_factor", 1.0))
    shared = SharedExpert(fields.integer("shared_expert_intermediate_size", 512), "shared_expert")
    return replace(experts, router=router, shared=shared)


def deepseek_v1_experts(fields: Fields, layers: int) -> Experts:
    """DeepSeek 1 and Ling 1: a softmax over all experts, and shared experts."""
    fields.only("scoring_func", "softmax")
    fields.only("moe_layer_freq", 1)
    width, normalized = fields.integer("moe_intermediate_size", 1407), fields.flag("norm_topk_prob", False)
    number, chosen = fields.integer("n_routed_experts"), fields.integer("num_experts_per_tok")
    experts = _experts(number, chosen, width, normalized, _sparse_layers(fields, layers))
    return replace(experts, shared=_shared(fields, "n_shared_experts", 0, width))


def deepseek_v2_experts(fields: Fields, layers: int) -> Experts:
    """DeepSeek-V2: a softmax over all experts, of which the best groups are kept, without a correction."""
    fields.only("scoring_func", "softmax")
    fields.only("topk_method", "greedy", "group_limited_greedy")
    fields.only("moe_layer_freq", 1)
    fields.only("norm_topk_prob", False)
    width, number = fields.integer("moe_intermediate_size", 1407), fields.integer("n_routed_experts", 64)
    groups = _groups(fields, number) if fields.get("topk_method") == "group_limited_greedy" else (1, 1)
    fields.skip("n_group", "topk_group")  # without effect for the other method
    router = Router("softmax", False, *groups, 1, scale=fields.number_or_absent("routed_scaling_factor", 1.0))
    experts = _experts(number, fields.integer("num_experts_per_tok"), width, False, _sparse_layers(fields, layers))
    shared = SharedExpert(width * fields.integer("n_shared_experts", 2))
    return replace(experts, router=router if groups != (1, 1) else Router(scale=router.scale), shared=shared)


def mistral4_experts(fields: Fields, layers: int) -> Experts:
    """Mistral 4: DeepSeek's groups and shared experts, with a softmax without a correction."""
    width, number = fields.integer("moe_intermediate_size"), fields.integer("n_routed_experts")
    scale = fields.number_or_absent("routed_scaling_factor", 1.0)
    router = Router("softmax", False, *_groups(fields, number), added_sum=1e-20, scale=scale)
    normalized = fields.flag("norm_topk_prob", True)
    experts = _experts(number, fields.integer("num_experts_per_tok"), width, normalized, _sparse_layers(fields, layers))
    return replace(experts, router=router, shared=SharedExpert(width * fields.integer("n_shared_experts", 1)))


def _shared(fields: Fields, number: str, default: int, width: int, **how: Any) -> SharedExpert | None:
    """Return the experts that every token runs as one MLP; ``number``: the field with their number, 0 for none."""
    return SharedExpert(width * fields.integer(number, default), **how) if fields.get(number, default) else None


def _experts(count: int, chosen: int, intermediate: int, normalized: bool, layers: tuple[bool, ...]) -> Experts:
    if chosen > count:
        raise BadCheckpoint(
            f"config.json: num_experts_per_tok should be at most the number of experts, {count}, it is {chosen}"
        )
    return Experts(count, chosen, intermediate, normalized, layers)


def _groups(fields: Fields, count: int) -> tuple[int, int]:
    """Return the number of groups and of chosen groups. If all groups are chosen, one group is the same."""
    groups = fields.integer("n_group", 1)
    chosen = fields.integer("topk_group", 1, most=groups)
    if count % groups or (groups > 1 and count // groups < 2):
        raise BadCheckpoint(
            f"config.json: n_group should divide the number of experts, {count}, into groups of at least 2, it is "
            f"{groups}"
        )
    return (1, 1) if chosen == groups else (groups, chosen)


def _sparse_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has experts: ``mlp_layer_types``, else all but the first dense layers."""
    dense = fields.get("first_k_dense_replace", 1)
    kinds = fields.get("mlp_layer_types")
    if type(dense) is not int or dense < 0:
        raise BadCheckpoint(f"config.json: first_k_dense_replace should be a number of layers, it is {quoted(dense)}")
    if kinds is None:
        return tuple(layer >= dense for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {"dense", "sparse"}:
        raise BadCheckpoint(
            f"config.json: mlp_layer_types should name dense or sparse for each of {layers} layers, it is "
            f"{quoted(kinds)}"
        )
    return tuple(kind == "sparse" for kind in kinds)


def _equal_in_all_layers(fields: Fields, name: str, layers: int, default: int) -> int:
    """Read an integer, or a list with the same integer for every layer."""
    value: Any = fields.get(name, default)
    if isinstance(value, list) and len(value) >= layers and len(set(map(str, value[:layers]))) == 1:
        value = value[0]
    if type(value) is not int or value < 1:
        raise BadCheckpoint(
            f"config.json: {name} should be an integer of at least 1, the same in every layer, it is {quoted(value)}"
        )
    return value
