"""Compile the CUDA kernels of a bundle while it is built."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandemrt.engines.bundle.bundle import KERNELS
from tandemrt.engines.bundle.manifest import EngineEntry
from tandemrt.engines.contract.dtypes import BITS, FLOAT8
from tandemrt.engines.contract.gpus import COMPUTE_CAPABILITIES, capabilities_for, parsed
from tandemrt.engines.contract.operators import SCHEMAS, WEIGHTLESS_ENGINES
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.models import Draft, Model, Models
from tandemrt.export.graph.weights import EXPERTS
from tandemrt.export.read.recurrent_layers import ShortConvolution
from tandemrt.plugins.kernels.compile import compile_kernels, kernel_names
from tandemrt.plugins.operators.constants import IMAGE_ATTENTION_KERNELS
from tandemrt.plugins.operators.k_quants_layout import K_QUANTS

# Kernels that replace the engines without weights; the other kernels run between the subgraphs of a decoder.
_WEIGHTLESS_KERNELS = {SCHEMAS[operator].kernels for operator in WEIGHTLESS_ENGINES.values()}
_FLOAT8_KERNELS, _EXPERT_KERNELS = (SCHEMAS[name].kernels for name in ("scaled_matmul", "experts"))
_LOW_BIT_KERNELS = {"int4": ("int4",), "int8": ("int8",), "float4": ("float4",), "k_quants": tuple(K_QUANTS)}
_LOW_BIT_EXPERTS = {numbers: SCHEMAS[f"{numbers}_experts"].kernels for numbers in ("int4", "int8", "float4", "float8")}
_RECURRENT_KERNELS, _CONVOLUTION_KERNELS = (SCHEMAS[name].kernels for name in ("linear_attention", "short_convolution"))
_LATENT_KERNELS = SCHEMAS["latent_attention"].kernels
_LINEAR_KERNELS, _GATED_KERNELS = (SCHEMAS[name].kernels for name in ("linear", "gated_linear"))
_COLLECTIVE_KERNELS = SCHEMAS["all_reduce"].kernels
_ATTENTION_KERNELS, _FLOAT8_ATTENTION_KERNELS = (
    SCHEMAS[name].kernels for name in ("window_attention", "float8_window_attention")
)

_MIN_CAPABILITIES = {schema.kernels: schema.compute_capability for schema in SCHEMAS.values() if schema.kernels}
_MIN_CAPABILITIES[IMAGE_ATTENTION_KERNELS] = SCHEMAS["window_attention"].compute_capability


@dataclass(frozen=True)
class KernelFile:
    """``NAME.cu``, to be compiled for ``compute_capabilities`` ("9.0", …) and the models' dtypes and head sizes.

    ``head_dims``: of attention, or of the keys of recurrent layers; None: all.
    """

    name: str
    compute_capabilities: tuple[str, ...]
    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...] | None


def kernels_for(recipe: Recipe, models: Models, target: EngineEntry) -> Iterator[KernelFile]:
    """Yield every kernel file of a bundle whose decoders are built for the GPUs of ``target``.

    With a paged cache these are all kernels, except those of quantized weights, experts, cache dtypes, batch
    invariance and ranks that no model uses. Any other bundle for a GPU needs only the kernels that replace the engines
    without weights. On GPUs older than the kernels, the runtime runs the graphs of these engines instead. A file is not
    compiled for GPUs that its operators do not support.
    """
    capabilities = recipe.kernel_capabilities or capabilities_for(target.built_for, COMPUTE_CAPABILITIES)
    dtypes = tuple(dict.fromkeys(model.compute for model in models))
    by_head = [model for model in models if model.spec.latent is None]
    head_dims = tuple(dict.fromkeys(size for model in by_head for size in model.spec.head_dims))
    nets = [model.spec.recurrent for model in models if isinstance(model, Model)]
    key_dims = [net.state[1] for net in nets if net is not None and net.state]
    sizes = dict.fromkeys((_ATTENTION_KERNELS, _FLOAT8_ATTENTION_KERNELS, IMAGE_ATTENTION_KERNELS), head_dims)
    sizes[_RECURRENT_KERNELS] = tuple(dict.fromkeys(key_dims))
    wanted: dict[str | None, Any] = {
        _FLOAT8_KERNELS: any(
            model.dtype not in BITS and quantization.has_float8
            for model in models
            if (quantization := model.quantization) is not None
        ),
        **{
            file: any(_has(each, model) for each in numbers for model in models)
            for file, numbers in _LOW_BIT_KERNELS.items()
        },
        **{
            file: any(_has(numbers, model, experts=True) for model in models)
            for numbers, file in _LOW_BIT_EXPERTS.items()
        },
        _EXPERT_KERNELS: any(isinstance(model, Model) and model.spec.experts for model in models),
        _RECURRENT_KERNELS: bool(key_dims),
        _CONVOLUTION_KERNELS: any(isinstance(net, ShortConvolution) for net in nets),
        _LINEAR_KERNELS: target.batch_invariant,
        _GATED_KERNELS: _runs(target, "gated_linear"),
        _COLLECTIVE_KERNELS: recipe.ranks > 1,
        _ATTENTION_KERNELS: any(model.kv_dtype != FLOAT8 for model in by_head),
        _FLOAT8_ATTENTION_KERNELS: any(model.kv_dtype == FLOAT8 for model in by_head),
        _LATENT_KERNELS: any(model.spec.latent is not None for model in models),
        IMAGE_ATTENTION_KERNELS: any(isinstance(model, Model) and any(model.spec.images_both_ways) for model in models),
    }
    for name in kernel_names():
        fitting = tuple(each for each in capabilities if parsed(each) >= _MIN_CAPABILITIES[name])
        if fitting and wanted.get(name, True) and (recipe.cache == "paged" or name in _WEIGHTLESS_KERNELS):
            yield KernelFile(name, fitting, dtypes, sizes.get(name))


def _runs(engine: EngineEntry, operator: str) -> bool:
    return engine.decoder is not None and any(step.name == operator for step in engine.decoder.operators)


def _has(numbers: str, model: Draft, *, experts: bool = False) -> bool:
    """Whether the build wrote weights of ``numbers`` (LowBitFormat) for the model's experts, or for its matmuls."""
    return any(f".{numbers}." in name and (EXPERTS in name) == experts for name in model.checkpoint.tensors)


def compile_into(folder: Path, kernels: KernelFile) -> dict[str, str]:
    """Compile ``kernels`` into the bundle in ``folder``.

    Returns the manifest's entries: file to ``sm_90`` (a cubin), or to ``compute_80`` (PTX of the lowest capability, for
    GPUs newer than all of them). Raises BackendUnavailable without NVRTC, or if NVRTC rejects the source.
    """
    lowest = min(int(capability.replace(".", "")) for capability in kernels.compute_capabilities)
    written = compile_kernels(
        kernels.compute_capabilities,
        folder / KERNELS,
        names=[kernels.name],
        dtypes=kernels.dtypes,
        head_dims=kernels.head_dims,
    )
    return {
        path.relative_to(folder).as_posix(): f"compute_{lowest}" if path.suffix == ".ptx" else path.suffixes[-2][1:]
        for path in written
    }
