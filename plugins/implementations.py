"""Implementations of each operator, per backend. A new operator is a schema and a row here.

``reference`` is the definition in numpy, ``function`` the ONNX function in standard operators, ``cuda`` the launcher of
CUDA kernels. On a CPU the function runs in an onnxruntime session, so every operator has a CPU implementation without
further code; the reference runs if there is no function. An operator with a C kernel (plugins/onnxruntime/) has it in
place of the function where a C compiler is installed. ``ranks`` is the launcher of an operator that several processes
run together on CPUs; one process runs the function. Plugins of TensorRT are in plugins/tensorrt/operators.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from tandemrt.engines.contract.gpus import FLOAT8_FROM, OLDEST_WITH_KERNELS
from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.plugins.operators import reference_call
from tandemrt.plugins.operators.launch import Context, FunctionBuilder, Launcher
from tandemrt.plugins.tensors.devices.lookup import device_of


@dataclass(frozen=True)
class OperatorImplementations:
    """Implementations of one operator as ``module:name`` below ``tandemrt.plugins``, imported on first use."""

    reference: str
    function: str | None
    cuda: str | None = None
    ranks: str | None = None


IMPLEMENTATIONS = {
    "token_bitmask": OperatorImplementations("reference.bitmask:token_bitmask", "functions.bitmask:bodies"),
    "adjust_logits": OperatorImplementations(
        "reference.adjust:adjust_logits", "functions.adjust:bodies", "kernels.adjust:launch"
    ),
    "verify_draft": OperatorImplementations(
        "reference.verify:verify_draft", "functions.verify:bodies", "kernels.verify:launch_verify"
    ),
    "verify_draft_probs": OperatorImplementations(
        "reference.verify:verify_draft", "functions.verify:bodies_probs", "kernels.verify:launch_verify"
    ),
    "sample_draft": OperatorImplementations(
        "reference.draft:sample_draft", "functions.draft:bodies", "kernels.verify:launch_propose"
    ),
    "window_attention": OperatorImplementations(
        "reference.attention:window_attention", "functions.attention:bodies", "kernels.attention:launch"
    ),
    "float8_window_attention": OperatorImplementations(
        "reference.attention:window_attention", "functions.attention:float8_bodies", "kernels.attention:launch"
    ),
    "latent_attention": OperatorImplementations(
        "reference.latent_attention:latent_attention", None, "kernels.latent_attention:launch"
    ),
    "linear_attention": OperatorImplementations(
        "reference.linear_attention:linear_attention", None, "kernels.linear_attention:launch"
    ),
    "short_convolution": OperatorImplementations(
        "reference.linear_attention:short_convolution", None, "kernels.short_convolution:launch"
    ),
    "residual_norm": OperatorImplementations(
        "reference.residual_norm:residual_norm", "functions.residual_norm:bodies", "kernels.residual_norm:launch"
    ),
    "swiglu": OperatorImplementations("reference.swiglu:swiglu", "functions.swiglu:bodies", "kernels.swiglu:launch"),
    "linear": OperatorImplementations("reference.linear:linear", "functions.linear:bodies", "kernels.linear:launch"),
    "gated_linear": OperatorImplementations(
        "reference.gated_linear:gated_linear", "functions.gated_linear:bodies", "kernels.gated_linear:launch"
    ),
    "all_reduce": OperatorImplementations(
        "reference.collectives:all_reduce",
        "functions.collectives:all_reduce_bodies",
        "kernels.collectives:launch_all_reduce",
        ranks="operators.shared_ranks:launch_all_reduce",
    ),
    "all_gather": OperatorImplementations(
        "reference.collectives:all_gather",
        "functions.collectives:all_gather_bodies",
        "kernels.collectives:launch_all_gather",
        ranks="operators.shared_ranks:launch_all_gather",
    ),
    "experts": OperatorImplementations(
        "reference.experts:experts", "functions.experts:bodies", "kernels.experts:launch"
    ),
    **{
        f"{numbers}_experts": OperatorImplementations(
            f"reference.low_bit_experts:{numbers}_experts",
            f"functions.low_bit_experts:{numbers}_bodies",
            f"kernels.experts_low_bit:launch_{numbers}",
        )
        for numbers in ("int4", "int8", "float4", "float8")
    },
    "quantize_tokens": OperatorImplementations(
        "reference.float8:quantize_tokens", "functions.float8:quantize_bodies", "kernels.quantize:launch_tokens"
    ),
    "scaled_matmul": OperatorImplementations(
        "reference.float8:scaled_matmul", "functions.float8:scaled_bodies", "kernels.float8_matmul:launch_scaled"
    ),
    "int4_matmul": OperatorImplementations(
        "reference.int4:int4_matmul", "functions.int4:bodies", "kernels.low_bit_matmul:launch_int4"
    ),
    "int8_matmul": OperatorImplementations(
        "reference.int8:int8_matmul", "functions.int8:bodies", "kernels.low_bit_matmul:launch_int8"
    ),
    "float4_matmul": OperatorImplementations(
        "reference.float4:float4_matmul", "functions.float4:bodies", "kernels.low_bit_matmul:launch_float4"
    ),
    **{
        f"{kind}_matmul": OperatorImplementations(
            f"reference.k_quants:{kind}_matmul",
            f"functions.k_quants:{kind}_bodies",
            f"kernels.low_bit_matmul:launch_{kind}",
        )
        for kind in ("q4_k", "q6_k")
    },
    "low_bit_int8_matmul": OperatorImplementations(
        "reference.low_bit_int8:low_bit_int8_matmul", "functions.low_bit_int8:bodies"
    ),
    "tiled_matmul": OperatorImplementations("reference.tiled:tiled_matmul", "functions.tiled:bodies"),
    "decode_attention": OperatorImplementations(
        "reference.decode_attention:decode_attention", "functions.decode_attention:bodies"
    ),
    "float8_matmul": OperatorImplementations(
        "reference.float8:float8_matmul", "functions.float8:matmul_bodies", "kernels.float8_matmul:launch"
    ),
    "quantized_swiglu": OperatorImplementations(
        "reference.quantized:quantized_swiglu", "functions.quantized:swiglu_bodies", "kernels.quantize:launch_swiglu"
    ),
    "quantized_norm": OperatorImplementations(
        "reference.quantized:quantized_norm", "functions.quantized:norm_bodies", "kernels.quantize:launch_norm"
    ),
}


def reference(operator: str) -> Callable[..., Any]:
    """Return the definition in numpy."""
    definition: Callable[..., Any] = _load(IMPLEMENTATIONS[operator].reference)
    return definition


def function(operator: str) -> FunctionBuilder:
    """Return the builder of the ONNX function."""
    builder: FunctionBuilder = _load(IMPLEMENTATIONS[operator].function)
    return builder


def launcher(operator: str, context: Context) -> Launcher:
    """Return the launcher that binds the operator to tensors on the context's device.

    Raises BackendUnavailable if a CUDA device has no kernels, or if the device, or the architecture of the compiled
    kernels, is too old for the operator.
    """
    device = device_of(context.device)
    if device.on_host:
        row = IMPLEMENTATIONS[operator]
        if context.ranks is not None and row.ranks is not None:
            found_ranks: Launcher = _load(row.ranks)
            return found_ranks
        if row.function is None:
            return partial(reference_call.launch, operator, reference(operator))
        from tandemrt.plugins.onnxruntime import function_call

        return partial(function_call.launch, operator, function(operator))
    schema = SCHEMAS[operator]
    needed = ".".join(map(str, schema.compute_capability))
    capability = device.capability
    if capability < schema.compute_capability:
        way = "with backend.cache = 'linear', whose engines need no kernels of ours"
        if schema.compute_capability == FLOAT8_FROM and capability >= OLDEST_WITH_KERNELS:
            way = "without float8: from unquantized weights, and with a KV cache in the compute dtype"
        raise BackendUnavailable(
            f"device: operator {operator} needs compute capability {needed} or later, "
            f"{device.name} has {'.'.join(map(str, capability))}; build the bundle {way}"
        )
    if schema.kernels is not None:
        # Raise now, not in the first step. A newer device also runs older code, in which these kernels are empty.
        major, minor = schema.compute_capability
        from tandemrt.plugins.kernels.module import KernelModule

        if (architecture := KernelModule.of(context, schema.kernels).architecture) < 10 * major + minor:
            raise BackendUnavailable(
                f"{context.kernels}: operator {operator} needs kernels compiled for compute capability {needed} or "
                f"later, those for {device.name} are for sm_{architecture}; add its "
                "compute capability to the recipe and build again"
            )
    launch: Launcher = _load(IMPLEMENTATIONS[operator].cuda)
    return launch


def _load(place: str | None) -> Any:
    assert place is not None
    module, _, name = place.partition(":")
    return getattr(import_module(f"tandemrt.plugins.{module}"), name)
