"""The faces of every operator: what computes it, by where it runs. A new operator is a schema and a row here.

``reference`` is the definition of correct (numpy), ``function`` its ONNX function body in standard operators, ``cuda``
launches its kernels, ``tensorrt`` is what an ahead-of-time plugin launches. On a CPU the function runs in a session of
onnxruntime (``cpu``), so an operator has that face for free.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tandemrt.engines.errors import BackendUnavailable
from tandemrt.engines.operators import SCHEMAS
from tandemrt.plugins.launch import Context, Function, Launcher
from tandemrt.plugins.tensors import torch

if TYPE_CHECKING:
    from tandemrt.plugins.tensorrt.operators import Plugin


@dataclass(frozen=True)
class Faces:
    """``module:name`` below ``tandemrt.plugins``; modules are imported when a face is asked for."""

    reference: str
    function: str
    cuda: str | None = None
    tensorrt: str | None = None


FACES = {
    "token_bitmask": Faces(
        "reference.bitmask:token_bitmask", "functions.bitmask:bodies", tensorrt="tensorrt.operators:TOKEN_BITMASK"
    ),
    "adjust_logits": Faces("reference.adjust:adjust_logits", "functions.adjust:bodies", "kernels.adjust:launch"),
    "verify_draft": Faces(
        "reference.verify:verify_draft",
        "functions.verify:bodies",
        "kernels.verify:launch_verify",
        "tensorrt.operators:VERIFY_DRAFT",
    ),
    "verify_draft_probs": Faces(
        "reference.verify:verify_draft",
        "functions.verify:bodies_probs",
        "kernels.verify:launch_verify",
        "tensorrt.operators:VERIFY_DRAFT_PROBS",
    ),
    "sample_draft": Faces("reference.draft:sample_draft", "functions.draft:bodies", "kernels.verify:launch_propose"),
    "window_attention": Faces(
        "reference.attention:window_attention", "functions.attention:bodies", "kernels.attention:launch"
    ),
    "float8_window_attention": Faces(
        "reference.attention:window_attention", "functions.attention:float8_bodies", "kernels.attention:launch"
    ),
    "swiglu": Faces("reference.swiglu:swiglu", "functions.swiglu:bodies", "kernels.swiglu:launch"),
    "linear": Faces("reference.linear:linear", "functions.linear:bodies", "kernels.linear:launch"),
    "experts": Faces("reference.experts:experts", "functions.experts:bodies", "kernels.experts:launch"),
    "quantize_tokens": Faces(
        "reference.float8:quantize_tokens", "functions.float8:quantize_bodies", "kernels.quantize:launch_tokens"
    ),
    "scaled_product": Faces(
        "reference.float8:scaled_product", "functions.float8:scaled_bodies", "kernels.float8_product:launch_scaled"
    ),
    "int4_product": Faces("reference.int4:int4_product", "functions.int4:bodies", "kernels.int4_product:launch"),
    "float8_product": Faces(
        "reference.float8:float8_product", "functions.float8:product_bodies", "kernels.float8_product:launch"
    ),
    "quantized_swiglu": Faces(
        "reference.quantized:quantized_swiglu", "functions.quantized:swiglu_bodies", "kernels.quantize:launch_swiglu"
    ),
    "quantized_norm": Faces(
        "reference.quantized:quantized_norm", "functions.quantized:norm_bodies", "kernels.quantize:launch_norm"
    ),
}


def reference(operator: str) -> Callable[..., Any]:
    """The definition in numpy."""
    found: Callable[..., Any] = _load(FACES[operator].reference)
    return found


def function(operator: str) -> Function:
    """What makes the ONNX function."""
    found: Function = _load(FACES[operator].function)
    return found


def launcher(operator: str, context: Context) -> Launcher:
    """What binds the operator to tensors on the context's device.

    Raises BackendUnavailable if its kernels are not there for a CUDA device, or the device, or what they were compiled
    for, is too old for them.
    """
    if context.device.type == "cpu":
        from tandemrt.plugins import cpu

        return partial(cpu.launch, operator, function(operator))
    schema = SCHEMAS[operator]
    needed = ".".join(map(str, schema.compute_capability))
    capability = torch.cuda.get_device_capability(context.device)
    if capability < schema.compute_capability:
        raise BackendUnavailable(
            f"device: operator {operator} needs compute capability {needed} or later, "
            f"{torch.cuda.get_device_name(context.device)} has {'.'.join(map(str, capability))}; build the bundle "
            "without float8: from weights that are not quantized, and with kv_dtype as it computes"
        )
    if schema.kernels is not None:
        # A refusal now, not in the first round. A later device runs older code, in which these kernels are empty.
        major, minor = schema.compute_capability
        if (architecture := context.module(schema.kernels).architecture) < 10 * major + minor:
            raise BackendUnavailable(
                f"{context.kernels}: operator {operator} needs kernels compiled for compute capability {needed} or "
                f"later, those for {torch.cuda.get_device_name(context.device)} are for sm_{architecture}; add its "
                "compute capability to the recipe and build again"
            )
    found: Launcher = _load(FACES[operator].cuda)
    return found


def plugins() -> "tuple[Plugin, ...]":
    """The operators that are TensorRT plugins."""
    return tuple(_load(faces.tensorrt) for faces in FACES.values() if faces.tensorrt)


def _load(place: str | None) -> Any:
    assert place is not None
    module, _, name = place.partition(":")
    return getattr(import_module(f"tandemrt.plugins.{module}"), name)
