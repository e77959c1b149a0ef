"""Open the models of a recipe and reject those that its backend does not support."""

from collections.abc import Callable

from tandemrt.engines.bundle.manifest import EngineName
from tandemrt.engines.contract.dtypes import BITS, FLOAT8
from tandemrt.engines.contract.gpus import FLOAT8_FROM
from tandemrt.engines.recipe.backends import BACKENDS, CPU, CUDA
from tandemrt.engines.recipe.models import HeadDraft, ModelDraft
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe
from tandemrt.export.bundle.models import Draft, Model, Models
from tandemrt.export.bundle.opened_head import DraftHead
from tandemrt.export.graph.lowering import supported_lowering
from tandemrt.export.model.scaled_matmul import STEP
from tandemrt.export.model.scaled_matmul import unsupported as unsupported_quantization
from tandemrt.export.model.support import unsupported
from tandemrt.export.quantize.stored_weights import require_stored
from tandemrt.export.read.quantization.scheme import Quantization
from tandemrt.export.read.shard import require_splittable
from tandemrt.export.read.tensors import with_graph_names
from tandemrt.plugins.operators.constants import HEAD_DIMS
from tandemrt.plugins.operators.int4_layout import CHUNK

_WIDE = 256  # values of a head, from which on caches in float32 and float8 did not run on a GPU
_FLOAT8_FROM = ".".join(map(str, FLOAT8_FROM))  # in the notation of recipes


def open_models(recipe: Recipe) -> Models:
    """Open the target and, if a model or a head drafts, the draft; check that they fit each other. Raises BadRecipe."""
    target = _open("target", recipe)
    if isinstance(recipe.draft, HeadDraft):
        length = recipe.limits.length
        head = DraftHead.open(recipe.draft, target.source, target.spec, dtype=target.compute, length=length)
        require_support(head, recipe)
        head.require_lowering(recipe.backend.lowering)
        if head.kind.reads_cache and target.kv_dtype == FLOAT8:
            raise BadRecipe(
                f"draft.kind {recipe.draft.kind!r} reads the target's KV cache, which must be in its compute dtype; "
                f'got {target.kv_dtype!r}; choose another draft, or write target.kv_dtype = "{target.compute}"'
            )
        return target, head
    if not isinstance(recipe.draft, ModelDraft):
        return (target,)
    draft = _open("draft", recipe)
    if draft.spec.vocab < target.vocabulary.size:  # logits wider than the tokenizer are padding
        rule = f"its vocabulary must hold every token of the target's tokenizer, {target.vocabulary.size}"
        raise BadRecipe(f"draft.checkpoint: {rule}; its logits have {draft.spec.vocab}; choose one of the same family")
    target.vocabulary.require_same_tokens(draft.vocabulary)
    _require_vocab(recipe, recipe.draft.vocab, min(target.spec.vocab, draft.spec.vocab))
    return target, draft


def _require_vocab(recipe: Recipe, vocab: int | None, most: int) -> None:
    """Raise BadRecipe unless a draft model can propose only the first ``vocab`` of ``most`` tokens."""
    if vocab is not None and recipe.backend.device != "cpu":
        raise BadRecipe(f"draft.vocab needs backend.name {CPU!r}; got {recipe.backend.name!r}; leave it out")
    if vocab is not None and vocab >= most:
        raise BadRecipe(
            f"draft.vocab must be below {most}, the size of the vocabulary; got {vocab}; lower it, or leave it out"
        )


def _open(role: EngineName, recipe: Recipe) -> Model:
    model = Model.open(role, recipe)
    require_support(model, recipe)
    if (stored := model.stored_quantization) is not None:
        keeps = not (model.dequantize or model.rounds_again)
        require_stored(with_graph_names(model.source, model.spec), stored, keeps=keeps)
    if recipe.ranks > 1 and role == "target":
        names = with_graph_names(model.checkpoint, model.spec)
        float8 = model.quantization is not None and model.quantization.has_float8
        require_splittable(
            model.spec, names, recipe.ranks, inputs=CHUNK if model.low_bit_matmuls else STEP if float8 else 1
        )
    if model.kv_dtype == FLOAT8:
        _require_float8(f"{role}.kv_dtype float8_e4m3", recipe)
    return model


def require_support(model: Draft, recipe: Recipe) -> None:
    """Raise BadCheckpoint or BadRecipe for a model that the recipe's backend does not support."""
    layers = model.spec.layer if isinstance(model, DraftHead) else model.spec
    float32_only = "experts" if layers.experts is not None else "recurrent layers" if layers.recurrent else None
    if float32_only and recipe.backend.device == "cpu" and model.compute != "float32":
        # The sum of experts and the recurrence have no float16, and the experts' matmuls would round one token
        # differently from several.
        raise BadRecipe(
            f"{model.role}.dtype should be float32, int8 or int4 for a model with {float32_only}; got {model.dtype!r}; "
            "change it, the checkpoint may be stored in any"
        )
    if layers.experts is not None and recipe.cache == "paged" and model.dtype in BITS and recipe.ranks > 1:
        raise BadRecipe(
            f"{model.role}.dtype must be float32, float16 or bfloat16 for a model with experts over {recipe.ranks} "
            f"ranks; got {model.dtype!r}. Choose another dtype, or one rank"
        )
    if why := unsupported(layers, supported_lowering(recipe.backend.lowering, layers), recipe.capacity):
        raise BadCheckpoint(f"{model.role}.checkpoint {model.checkpoint.folder}: {why}")
    _require_matmuls(model, recipe)
    if layers.latent is not None and model.kv_dtype == FLOAT8:
        raise BadRecipe(
            f"{model.role}.kv_dtype must be {model.compute} for a model with latent attention, whose cache has no "
            f'float8 form; write {model.role}.kv_dtype = "{model.compute}"'
        )
    unsupported_sizes = [size for size in layers.head_dims if size not in HEAD_DIMS]
    if recipe.cache == "paged" and layers.latent is None and unsupported_sizes:
        rule = (
            f"backend.cache 'paged' needs a head size of {', '.join(map(str, HEAD_DIMS))}, for which there are kernels"
        )
        received = f"got {unsupported_sizes[0]} in {model.role}.checkpoint"
        other = f"backend {CPU!r}" if layers.experts is not None else "cache = 'linear'"
        raise BadRecipe(f"{rule}; {received}; choose {other} or another checkpoint")
    if recipe.cache == "paged" and layers.latent is None and layers.head_dims[-1] >= _WIDE:
        _require_half_precision(model)


def _require_half_precision(model: Draft) -> None:
    """Raise BadRecipe unless the widest heads are computed and cached in the dtypes in which they ran on a GPU."""
    for name, dtype in (("dtype", model.compute), ("kv_dtype", model.kv_dtype)):
        if dtype not in ("bfloat16", "float16"):
            raise BadRecipe(
                f"{model.role}.{name} must be bfloat16 or float16 for attention heads of {_WIDE} values or more over a "
                f"paged cache; got {dtype!r}; change it"
            )


def _require_matmuls(model: Draft, recipe: Recipe) -> None:
    """Raise BadRecipe unless the backend has matmuls for a checkpoint that comes quantized."""
    quantization, backend = model.quantization, recipe.backend
    if quantization is not None and (why := quantization.without_matmuls) and model.dtype not in BITS:
        ways = f"{_DEQUANTIZE.format(role=model.role)}, or dtype 'int4' or 'int8', which rounds them again"
        raise BadRecipe(
            f"{model.role}.checkpoint: weights in {why} ({quantization.method}) have no matmuls on any backend; "
            f"{'choose an unquantized or float8 head' if isinstance(model, DraftHead) else ways}"
        )
    if quantization is None or not quantization.rules or backend.device == "cpu":
        return
    what = f"{model.role}.checkpoint: a checkpoint that comes quantized ({quantization.method})"
    if recipe.cache == "paged":
        _require_scaled_matmuls(what, model, quantization, recipe)
        return
    if not backend.static_float8:
        needed = " or ".join(name for name, takes in _BACKENDS_WITH_MATMULS.items() if takes(quantization))
        raise BadRecipe(
            f"{what} needs backend.name {needed}; got {backend.name!r} with cache = {recipe.cache!r}, which has no "
            f"matmuls for it; choose what it needs, or the checkpoint that is not quantized{_advice(model)}"
        )
    if not _is_static_float8(quantization):
        raise BadRecipe(
            f"{what} needs weights in float8 and inputs that are unquantized, or have static scales, for backend.name "
            f"{backend.name!r}; choose {CPU!r}, or such a checkpoint{_advice(model)}"
        )
    if without := [each for each in backend.named_capabilities if float(each) < float(_FLOAT8_FROM)]:
        raise BadRecipe(
            f"{what} in float8 needs compute capability {_FLOAT8_FROM} or later; got {', '.join(without)} in "
            "backend.compute_capabilities; drop it, or choose the checkpoint that is not quantized"
        )


_DEQUANTIZE = "write {role}.dequantize = true, which stores them unquantized"


def _is_static_float8(quantization: Quantization) -> bool:
    """Whether a backend with ``static_float8`` has matmuls for a checkpoint's quantization."""
    return all(scheme.weight == "float8_e4m3fn" and scheme.inputs != "token" for _, scheme in quantization.rules)


# Backends that an error message may suggest, with a test that the backend accepts the checkpoint.
_BACKENDS_WITH_MATMULS: dict[str, Callable[[Quantization], bool]] = {
    f"{CPU!r}": lambda _: True,
    **{repr(name): _is_static_float8 for name, backend in BACKENDS.items() if backend.static_float8},
    f"{CUDA!r} with cache = 'paged'": lambda quantization: unsupported_quantization(quantization) is None,
}


def _require_scaled_matmuls(what: str, model: Draft, quantization: Quantization, recipe: Recipe) -> None:
    """Raise BadRecipe unless a GPU has matmuls for the quantization of a checkpoint."""
    layers = model.spec.layer if isinstance(model, DraftHead) else model.spec
    if layers.experts is not None and isinstance(model, DraftHead):
        raise BadRecipe(
            f"{what} has experts, which need unquantized weights of a draft head; choose the checkpoint that is not "
            f"quantized, or another backend or draft{_advice(model)}"
        )
    if layers.experts is not None and model.compute == "float32":
        raise BadRecipe(
            f"{what} has experts, which need {model.role}.dtype 'bfloat16' or 'float16' on a GPU; got 'float32'"
        )
    if model.dtype in BITS and not quantization.is_packed:
        return  # the build requantizes them
    if why := unsupported_quantization(quantization):
        raise BadRecipe(
            f"{what} has {why}, for which backend.name {CUDA!r} has no matmuls yet; choose "
            f"{CPU!r}, or weights in 4 bits, or in float8 with a scale per channel or tensor and inputs with "
            f"scales per token or static ones{_advice(model)}"
        )
    if quantization.is_packed and isinstance(model, DraftHead):
        raise BadRecipe(
            f"{what} in 4 or 8 bits cannot be a draft head on a GPU yet; choose an unquantized or float8 head"
        )
    if quantization.is_packed and model.compute == "float32":
        raise BadRecipe(
            f"{what} in 4 or 8 bits needs {model.role}.dtype 'bfloat16' or 'float16' on a GPU, in which its matmuls "
            "are computed; got 'float32'"
        )
    if not quantization.has_float8:
        return
    if model.compute == "float16":
        raise BadRecipe(
            f"{what} needs {model.role}.dtype 'bfloat16' on a GPU: sums of matmuls in float8 are too large for "
            "'float16'; got 'float16'"
        )
    _require_float8(f"{what} in float8", recipe)


def _advice(model: Draft) -> str:
    """Return a further way out for an error message; a head's weights are never dequantized."""
    return "" if isinstance(model, DraftHead) else f"; or {_DEQUANTIZE.format(role=model.role)}"


def _require_float8(what: str, recipe: Recipe) -> None:
    """Raise BadRecipe unless the recipe names a GPU that computes with float8."""
    if all(float(each) < float(_FLOAT8_FROM) for each in recipe.kernel_capabilities):
        named = ", ".join(recipe.kernel_capabilities)
        raise BadRecipe(
            f"{what} needs compute capability {_FLOAT8_FROM} or later; got {named} in backend.compute_capabilities; "
            "name a later one, or choose an unquantized model or cache"
        )
