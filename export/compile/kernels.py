"""The kernels of a bundle: the project's CUDA operators, compiled while the bundle is built."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tandemrt.engines.bundle import KERNELS
from tandemrt.engines.dtypes import BITS, FLOAT8
from tandemrt.engines.gpus import COMPUTE_CAPABILITIES, capabilities_for, parsed
from tandemrt.engines.operators import HEADS, SCHEMAS
from tandemrt.engines.recipe import Recipe
from tandemrt.export.model.models import Model, Models
from tandemrt.plugins.kernels.compile import compile_kernels, kernel_names

# What takes the place of the engines without weights; the other kernels stand between the pieces of a decoder.
_OF_HEADS = {SCHEMAS[operator].kernels for operator in HEADS.values()}
_OF_FLOAT8, _OF_INT4, _OF_EXPERTS = (SCHEMAS[name].kernels for name in ("scaled_product", "int4_product", "experts"))
_ATTENTION, _ATTENTION_IN_FLOAT8 = (SCHEMAS[name].kernels for name in ("window_attention", "float8_window_attention"))

_FROM = {schema.kernels: schema.compute_capability for schema in SCHEMAS.values() if schema.kernels}


@dataclass(frozen=True)
class KernelFile:
    """``NAME.cu`` for ``compute_capabilities`` ("9.0", …), and what of it the models need; None is everything."""

    name: str
    compute_capabilities: tuple[str, ...]
    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...] | None


def kernels_for(recipe: Recipe, models: Models, built_for: str) -> Iterator[KernelFile]:
    """Yield every kernel file of a bundle whose decoders are ``built_for`` these GPUs (engines/gpus.py).

    A paged cache needs all of them, those of products with narrow weights and of experts only where there are some, and
    of attention those for what its caches hold; any other bundle for a GPU those that take the place of the engines
    without weights. A GPU older than the kernels has none and runs the graphs of these engines. A file is compiled for
    no GPU that is older than its operators say: there would be nothing in it.
    """
    capabilities = recipe.kernel_capabilities or capabilities_for(built_for, COMPUTE_CAPABILITIES)
    dtypes = tuple(dict.fromkeys(model.compute for model in models))
    head_dims = tuple(dict.fromkeys(model.spec.head_dim for model in models))
    wanted = {
        _OF_FLOAT8: any(
            model.dtype not in BITS and found.has_float8
            for model in models
            if (found := model.quantization) is not None
        ),
        _OF_INT4: any(isinstance(model, Model) and model.int4_products for model in models),
        _OF_EXPERTS: any(isinstance(model, Model) and model.spec.experts for model in models),
        _ATTENTION: any(model.kv_dtype != FLOAT8 for model in models),
        _ATTENTION_IN_FLOAT8: any(model.kv_dtype == FLOAT8 for model in models),
    }
    for name in kernel_names():
        fitting = tuple(each for each in capabilities if parsed(each) >= _FROM[name])
        if fitting and wanted.get(name, True) and (recipe.cache == "paged" or name in _OF_HEADS):
            attention = name in (_ATTENTION, _ATTENTION_IN_FLOAT8)
            yield KernelFile(name, fitting, dtypes, head_dims if attention else None)


def compile_into(folder: Path, kernels: KernelFile) -> dict[str, str]:
    """Compile ``kernels`` into the bundle in ``folder``.

    Returns what a manifest says of them: file to ``sm_90`` (a cubin), or ``compute_80`` (PTX of the lowest one, for
    GPUs newer than all of them). Raises BackendUnavailable without NVRTC, or when it refuses the source.
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
