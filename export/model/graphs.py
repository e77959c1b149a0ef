"""The graphs a recipe asks for: which ones, where they lie in the bundle, and the contract each must meet."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import onnx_ir as ir

from tandemrt.engines import contract
from tandemrt.engines.contract import Contract
from tandemrt.engines.dtypes import BITS, FLOAT8, KV_DTYPES
from tandemrt.engines.errors import BadCheckpoint, BadRecipe, quoted
from tandemrt.engines.gpus import FLOAT8_FROM
from tandemrt.engines.manifest import EngineName
from tandemrt.engines.recipe import HeadDraft, ModelDraft, PardDraft, Recipe, Target
from tandemrt.engines.tensorrt.recipe import TensorRtRtx
from tandemrt.export.model.decoder import build_decoder
from tandemrt.export.model.draft_heads import DraftHead
from tandemrt.export.model.graph import Graph
from tandemrt.export.model.heads import build_adjust, build_propose, build_verify
from tandemrt.export.model.lowerings import STRATEGIES, Lowering, attention_of, fitting
from tandemrt.export.model.scaled_product import unsupported as without_scaled_products
from tandemrt.export.model.support import unsupported
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.quantization.scheme import Quantization
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tokenizer import CheckpointTokenizer
from tandemrt.plugins.operators import HEAD_DIMS

_FLOAT8_FROM = ".".join(map(str, FLOAT8_FROM))  # as a recipe writes it


@dataclass(frozen=True)
class Model:
    """A checkpoint and what was read from it. ``role`` is ``target`` or ``draft``, its section in the recipe.

    ``source`` is the checkpoint as the recipe names it, ``checkpoint`` what the graph points into: the same, or what
    was made of it (``packed``). ``compute`` is the dtype that the engine computes in, ``dtype`` the recipe's, and
    ``kv_dtype`` what its cache holds. ``by_operators``: products with narrow weights are operators of the project,
    which in float8 take a scale per output, none of blocks.
    """

    role: EngineName
    source: Checkpoint
    checkpoint: Checkpoint
    spec: ModelSpec
    vocabulary: CheckpointTokenizer
    dtype: str
    compute: str
    kv_dtype: str
    by_operators: bool = False

    @property
    def tiles(self) -> str | None:
        """The dtype of the scales of weights in 4 bits for products on a GPU; None: they are for a CPU."""
        return self.compute if self.by_operators else None

    @property
    def packed(self) -> bool:
        """Whether a build writes the weights anew: in other integers, in another order of those they come in, or with
        a scale per output instead of blocks."""
        found = self.quantization
        return self.dtype in BITS or (found is not None and (found.comes_packed or self.blocks_become_channels))

    @property
    def blocks_become_channels(self) -> bool:
        """Whether weights come with scales of blocks, and products take none."""
        found = self.quantization
        return self.by_operators and self.dtype not in BITS and found is not None and found.comes_in_blocks

    @property
    def int4_products(self) -> bool:
        """Whether some products on a GPU are by weights in 4 bits."""
        found = self.quantization
        return self.by_operators and (self.dtype == "int4" or (found is not None and found.comes_packed))

    @property
    def quantization(self) -> Quantization | None:
        """How the checkpoint says that its weights come; None: as numbers of their own."""
        return read_quantization(self.source.config, self.source.folder)

    def cache_notes(self) -> list[str]:
        """What somebody who builds should know of the keys and values, a line each."""
        found = self.quantization
        if self.kv_dtype == FLOAT8:
            scaled = found is not None and found.float8_cache
            scales = "the checkpoint's scales" if scaled else "scales of 1: the checkpoint has none"
            return [f"keys and values are held in {FLOAT8}, with {scales}"]
        return [] if found is None else found.notes_on_unused_cache_scales(self.kv_dtype)

    @classmethod
    def open(cls, role: EngineName, recipe: Recipe) -> "Model":
        """Read the checkpoint of a recipe's section. Raises BadCheckpoint, or BadRecipe if texts are too long for it.

        A draft may be made for shorter texts: behind its own length it does not draft.
        """
        section: Target | ModelDraft | PardDraft = recipe.target
        dtype, kv_dtype, length = str(recipe.target.dtype), recipe.target.kv_dtype, recipe.limits.length
        if role == "draft":
            assert isinstance(recipe.draft, ModelDraft | PardDraft)
            section, dtype, kv_dtype = recipe.draft, str(recipe.draft_dtype), recipe.draft_kv_dtype
        folder = section.checkpoint
        checkpoint = Checkpoint.open(folder)
        spec = ModelSpec.from_hf(checkpoint.config, ignored=section.ignore_config_fields, length=length)
        vocabulary = CheckpointTokenizer.open(folder)
        if vocabulary.size > spec.vocab:
            rule = f"the tokenizer must not have more ids than the logits are wide ({spec.vocab})"
            raise BadCheckpoint(f"{role}.checkpoint {folder}: {rule}; it has {vocabulary.size}; resize the embeddings")
        if length > spec.max_length and role == "target":
            rule = f"limits.length must not exceed the length that the target's config.json gives, {spec.max_length}"
            raise BadRecipe(f"{rule}; got {length}; lower limits.length")
        by_operators, compute = STRATEGIES[attention_of(recipe)].scaled_products, recipe.computed_in(dtype)
        model = cls(role, checkpoint, checkpoint, spec, vocabulary, dtype, compute, compute, by_operators)
        _require_support(model, recipe)
        said = model.quantization
        if kv_dtype in KV_DTYPES or (kv_dtype is None and recipe.cache == "paged" and said and said.float8_cache):
            model = replace(model, kv_dtype=FLOAT8)
            _require_float8(f"{role}.kv_dtype float8_e4m3", recipe)
            if recipe.batch_invariant and role == "target":
                raise BadRecipe(
                    "backend.batch_invariant has no attention over keys and values in float8, which target.kv_dtype or "
                    f'the checkpoint asks for; write target.kv_dtype = "{compute}", or drop batch_invariant'
                )
        return model

    def spec_json(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self.spec)))
        return result


Draft = Model | DraftHead
Models = tuple[Model] | tuple[Model, Draft]  # the target, then what drafts, if anything does


def open_models(recipe: Recipe) -> Models:
    """Open the target and, if a model or a head drafts, the draft; check that they fit each other. Raises BadRecipe."""
    target = Model.open("target", recipe)
    if isinstance(recipe.draft, HeadDraft):
        length = recipe.limits.length
        head = DraftHead.open(recipe.draft, target.source, target.spec, dtype=target.compute, length=length)
        _require_support(head, recipe)
        head.require_lowering(attention_of(recipe))
        return target, head
    if not isinstance(recipe.draft, ModelDraft | PardDraft):
        return (target,)
    draft = Model.open("draft", recipe)
    if draft.spec.vocab < target.vocabulary.size:  # what is wider than a tokenizer is padding
        rule = f"it must know every token of the target's tokenizer, {target.vocabulary.size}"
        raise BadRecipe(f"draft.checkpoint: {rule}; its logits have {draft.spec.vocab}; choose one of the same family")
    target.vocabulary.require_same_tokens(draft.vocabulary)
    if isinstance(recipe.draft, PardDraft):
        mask_token(draft.source)
    return target, draft


def mask_token(checkpoint: Checkpoint) -> int:
    """The id that a draft which foresees a window at once takes for a token to come. Raises BadCheckpoint."""
    token, vocab = checkpoint.config.get("pard_token"), checkpoint.config.get("vocab_size")
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < int(vocab or 0):
        raise BadCheckpoint(
            f"{checkpoint.folder}: config.json: pard_token should be an id below vocab_size, {vocab}, it is "
            f"{quoted(token)}; choose a checkpoint that PARD trained, or draft.kind = 'model'"
        )
    return token


def _require_support(model: Draft, recipe: Recipe) -> None:
    """Raise BadCheckpoint or BadRecipe for what the recipe's backend does not do."""
    layers = model.spec.layer if isinstance(model, DraftHead) else model.spec
    if layers.experts is not None and recipe.backend.name == "onnxruntime-cpu" and model.compute != "float32":
        # Their sums do not exist in float16, and their products would round one token in another way than several.
        raise BadRecipe(
            f"{model.role}.dtype should be float32, int8 or int4 for a model with experts; got {model.dtype!r}; change "
            "it, the checkpoint may be stored in any"
        )
    if layers.experts is not None and recipe.cache == "paged" and model.dtype in BITS:
        raise BadRecipe(
            f"{model.role}.dtype must be float32, float16 or bfloat16 for a model with experts on a GPU, which takes "
            f"them whole; got {model.dtype!r}. Choose another dtype, or backend.name 'onnxruntime-cpu'"
        )
    if why := unsupported(layers, fitting(attention_of(recipe), layers), recipe.capacity):
        raise BadCheckpoint(f"{model.role}.checkpoint {model.checkpoint.folder}: {why}")
    _require_products(model, recipe)
    if recipe.cache == "paged" and model.spec.head_dim not in HEAD_DIMS:
        rule = (
            f"backend.cache 'paged' needs a head size of {', '.join(map(str, HEAD_DIMS))}, for which there are kernels"
        )
        found = f"got {model.spec.head_dim} in {model.role}.checkpoint"
        other = "backend 'onnxruntime-cpu'" if layers.experts is not None else "cache = 'linear'"
        raise BadRecipe(f"{rule}; {found}; choose {other} or another checkpoint")


def _require_products(model: Draft, recipe: Recipe) -> None:
    """Raise BadRecipe unless the backend has products for a checkpoint that comes quantized."""
    found, backend = model.quantization, recipe.backend
    if found is None or not found.rules or backend.name == "onnxruntime-cpu":
        return
    what = f"{model.role}.checkpoint: a checkpoint that comes quantized ({found.method})"
    if recipe.cache == "paged":
        _require_scaled_products(what, model, found, recipe)
        return
    if not isinstance(backend, TensorRtRtx):
        needed = " or ".join(name for name, takes in _TAKES.items() if takes(found))
        raise BadRecipe(
            f"{what} needs backend.name {needed}; got {backend.name!r} with cache = {recipe.cache!r}, which has no "
            "products for it; choose what it needs, or the checkpoint that is not quantized"
        )
    if not _in_tensorrt_rtx(found):
        raise BadRecipe(
            f"{what} needs weights in float8 and inputs that are whole, or have static scales, for backend.name "
            "'tensorrt-rtx'; choose 'onnxruntime-cpu', or a checkpoint quantized so"
        )
    if without := [each for each in backend.compute_capabilities if float(each) < float(_FLOAT8_FROM)]:
        raise BadRecipe(
            f"{what} in float8 needs compute capability {_FLOAT8_FROM} or later; got {', '.join(without)} in "
            "backend.compute_capabilities; drop it, or choose the checkpoint that is not quantized"
        )


def _in_tensorrt_rtx(found: Quantization) -> bool:
    """Whether TensorRT-RTX builds products of what is ``found`` of a checkpoint."""
    return all(scheme.weight == "float8_e4m3fn" and scheme.inputs != "token" for _, scheme in found.rules)


# A refusal names no backend that would refuse the same.
_TAKES: dict[str, Callable[[Quantization], bool]] = {
    "'onnxruntime-cpu'": lambda _: True,
    "'tensorrt-rtx'": _in_tensorrt_rtx,
    "'onnxruntime-cuda' with cache = 'paged'": lambda found: without_scaled_products(found) is None,
}


def _require_scaled_products(what: str, model: Draft, found: Quantization, recipe: Recipe) -> None:
    """Raise BadRecipe unless a GPU has products for what is ``found`` of a checkpoint."""
    layers = model.spec.layer if isinstance(model, DraftHead) else model.spec
    if layers.experts is not None:
        raise BadRecipe(
            f"{what} has experts, whose products on a GPU take weights that are not; choose backend.name "
            "'onnxruntime-cpu', or the checkpoint that is not quantized"
        )
    if model.dtype in BITS and not found.comes_packed:
        return  # they are rounded anew
    if why := without_scaled_products(found):
        raise BadRecipe(
            f"{what} has {why}, for which backend.name 'onnxruntime-cuda' has no products yet; choose "
            "'onnxruntime-cpu', or weights in 4 bits, or in float8 with a scale per channel or tensor and inputs with "
            "scales per token or static ones"
        )
    if found.comes_packed and isinstance(model, DraftHead):
        raise BadRecipe(f"{what} in 4 bits cannot be a draft head on a GPU yet; choose one that is not, or in float8")
    if found.comes_packed and model.compute == "float32":
        raise BadRecipe(
            f"{what} in 4 bits needs {model.role}.dtype 'bfloat16' or 'float16' on a GPU, in which its products are "
            "computed; got 'float32'"
        )
    if not found.has_float8:
        return
    if model.compute == "float16":
        raise BadRecipe(
            f"{what} needs {model.role}.dtype 'bfloat16' on a GPU: sums of products in float8 are too large for "
            "'float16'; got 'float16'"
        )
    _require_float8(f"{what} in float8", recipe)


def _require_float8(what: str, recipe: Recipe) -> None:
    """Raise BadRecipe unless the recipe names a GPU that computes with float8."""
    if all(float(each) < float(_FLOAT8_FROM) for each in recipe.kernel_capabilities):
        named = ", ".join(recipe.kernel_capabilities)
        raise BadRecipe(
            f"{what} needs compute capability {_FLOAT8_FROM} or later; got {named} in backend.compute_capabilities; "
            "name a later one, or choose what is not quantized"
        )


def graphs(recipe: Recipe, models: Models, attention: Lowering) -> list[Graph]:
    """Every graph of the bundle: decoders, adjusted logits, verification, and drafting when a model drafts."""
    target, drafts = models[0], models[1:]
    width = target.spec.vocab  # a draft model's logits are padded to it, or cut where they are padding
    features = [draft.spec.features for draft in drafts if isinstance(draft, DraftHead)]
    return [
        _decoder(target, recipe, attention, width, *features),
        *(graph for draft in drafts for graph in _draft(draft, recipe, attention, width)),
        _head("adjust", target, contract.adjust, build_adjust, width),
        _head("verify", target, contract.verify, build_verify, width, draft_probs=False),
        _head("verify_probs", target, contract.verify, build_verify, width, draft_probs=True),
        *(graph for draft in drafts for graph in _propose(draft, width)),
    ]


def _propose(draft: Draft, width: int) -> list[Graph]:
    known = draft.spec.draft_vocab if isinstance(draft, DraftHead) else width
    names: tuple[EngineName, EngineName] = ("propose", "propose_probs")
    return [
        _head(
            name, draft, contract.propose, build_propose, known, draft_probs=name == names[1], target_ids=known < width
        )
        for name in names
    ]


def _decoder(model: Model, recipe: Recipe, attention: Lowering, width: int, features: tuple[int, ...] = ()) -> Graph:
    spec = model.spec
    sizes: dict[str, Any] = {"dtype": model.compute, "kv_dtype": model.kv_dtype}
    sizes |= {"capacity": recipe.capacity, "width": width}
    bindings = spec.contract(**sizes, cache=recipe.cache, features=len(features) * spec.hidden)
    make = partial(
        build_decoder, spec, model.checkpoint, **sizes, attention=fitting(attention, spec), features=features
    )
    return Graph(model.role, f"{model.role}/model.onnx", model.compute, bindings, make)


def _draft(draft: Draft, recipe: Recipe, attention: Lowering, width: int) -> list[Graph]:
    if isinstance(draft, Model):
        return [_decoder(draft, recipe, attention, width)]
    return draft.graphs(recipe, attention)


def _head(
    name: EngineName,
    model: Draft,
    bindings: Callable[..., Contract],
    build: Callable[..., ir.Model],
    width: int,
    **options: bool,
) -> Graph:
    arguments = {"vocab": width, "dtype": model.compute, **options}
    return Graph(name, f"{name}.onnx", model.compute, bindings(**arguments), partial(build, **arguments))
