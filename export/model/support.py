"""What the operators of a lowering do not do: models that need it are refused by name."""

from tandemrt.export.model.grouped_attention import HEAD_DIM_STEP
from tandemrt.export.model.lowerings import Lowering
from tandemrt.export.read.block import Experts
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.operators import HIDDEN_STEP, MOST_EXPERTS, MOST_PER_TOKEN, WIDTH_STEP


def unsupported(spec: ModelSpec, attention: Lowering, capacity: int) -> str | None:
    """Why a model cannot be built by a lowering with rows of ``capacity`` tokens, and what to do; None: it can."""
    if spec.sinks and attention != "grouped":
        what = "attention sinks" if spec.experts is None else "experts and attention sinks"
        return (
            f"{spec.family} has {what}, which run on a CPU alone, with heads of a multiple of {HEAD_DIM_STEP} values; "
            "the backend must be onnxruntime-cpu"
        )
    if spec.experts is not None and attention not in ("grouped", "paged"):
        return (
            f"{spec.family} has experts, which run with onnxruntime-cuda over a paged cache, or on a CPU with heads of "
            f"a multiple of {HEAD_DIM_STEP} values; the backend must be one of these"
        )
    if attention == "paged":
        return _beyond_window_attention(spec) or _beyond_experts(spec, spec.experts)
    if attention == "length" and spec.sliding_window is not None and capacity > spec.sliding_window:
        return (
            f"sliding_window is {spec.sliding_window} and the capacity {capacity}; sliding-window attention needs a "
            "paged cache, so a row of this one may hold at most the window: lower the length limit"
        )
    return None


def _beyond_experts(spec: ModelSpec, experts: Experts | None) -> str | None:
    """What the operator of a paged cache, ``experts``, does not do."""
    if experts is None:
        return None
    sizes = f"{experts.per_token} of {experts.count} experts of {experts.intermediate} values for {spec.hidden}"
    if experts.biased or experts.joined or experts.clamped or spec.activation != "silu":
        return f"{spec.family} has experts with biases or bounds, which run on a CPU alone; choose onnxruntime-cpu"
    if (
        spec.hidden % HIDDEN_STEP
        or experts.intermediate % WIDTH_STEP
        or experts.count > MOST_EXPERTS
        or experts.per_token > MOST_PER_TOKEN
    ):
        return (
            f"{spec.family} has {sizes}; over a paged cache at most {MOST_PER_TOKEN} of {MOST_EXPERTS} run, in "
            f"multiples of {WIDTH_STEP} values, for multiples of {HIDDEN_STEP}: choose onnxruntime-cpu"
        )
    return None


def _beyond_window_attention(spec: ModelSpec) -> str | None:
    """What the operator of a paged cache, ``window_attention``, does not do."""
    advice = "choose cache = 'linear', or onnxruntime-cpu"
    if spec.scales.attention_softcap:
        return (
            f"attn_logit_softcapping is {spec.scales.attention_softcap:g}; attention over a paged cache bounds no "
            f"scores: {advice}"
        )
    if spec.qk_norm is not None and spec.qk_norm.after_rotary:
        return (
            f"{spec.family} norms queries and keys behind the rotary embedding; attention over a paged cache norms "
            f"in front of it: {advice}"
        )
    if spec.rope.growth:
        return (
            f"llama_4_scaling_beta is {spec.rope.growth:g}; attention over a paged cache scales no queries by their "
            f"position: {advice}"
        )
    return None
