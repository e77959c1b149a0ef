"""The graphs a recipe asks for: which ones, where they lie in the bundle, and the contract each must meet."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx_ir as ir

from tandemrt.engines import contract
from tandemrt.engines.contract import Contract
from tandemrt.engines.dtypes import QUANTIZED
from tandemrt.engines.errors import BadCheckpoint, BadRecipe
from tandemrt.engines.manifest import EngineName
from tandemrt.engines.recipe import ModelDraft, Recipe, Target
from tandemrt.engines.tensorrt.recipe import TensorRtRtx
from tandemrt.export.model.decoder import build_decoder
from tandemrt.export.model.heads import build_adjust, build_propose, build_verify
from tandemrt.export.model.lowerings import Lowering, fitting
from tandemrt.export.model.support import unsupported
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tokenizer import CheckpointTokenizer
from tandemrt.plugins.operators import HEAD_DIMS

FLOAT8_FROM = 8.9  # the first compute capability that has it


@dataclass(frozen=True)
class Model:
    """A checkpoint and what was read from it. ``role`` is ``target`` or ``draft``, its section in the recipe.

    ``source`` is the checkpoint as the recipe names it, ``checkpoint`` what the graph points into: the same, or what
    was made of it (``packed``).
    """

    role: EngineName
    source: Checkpoint
    checkpoint: Checkpoint
    spec: ModelSpec
    vocabulary: CheckpointTokenizer
    dtype: str

    @property
    def compute(self) -> str:
        """The dtype that the engine computes in."""
        return QUANTIZED.get(self.dtype, self.dtype)

    @property
    def packed(self) -> bool:
        """Whether a build writes the weights anew: in other integers, or in another order of those they come in."""
        found = read_quantization(self.source.config, self.source.folder)
        return self.dtype in QUANTIZED or (found is not None and found.comes_packed)

    @classmethod
    def open(cls, role: EngineName, section: Target | ModelDraft, dtype: str, *, length: int) -> "Model":
        """Read the checkpoint of a recipe's section. Raises BadCheckpoint, or BadRecipe if ``length`` is too long."""
        folder = section.checkpoint
        checkpoint = Checkpoint.open(folder)
        spec = ModelSpec.from_hf(checkpoint.config, ignored=section.ignore_config_fields, length=length)
        vocabulary = CheckpointTokenizer.open(folder)
        if vocabulary.size > spec.vocab:
            rule = f"the tokenizer must not have more ids than the logits are wide ({spec.vocab})"
            raise BadCheckpoint(f"{role}.checkpoint {folder}: {rule}; it has {vocabulary.size}; resize the embeddings")
        if length > spec.max_length:
            rule = f"limits.length must not exceed the length that the {role}'s config.json gives, {spec.max_length}"
            raise BadRecipe(f"{rule}; got {length}; lower limits.length")
        return cls(role, checkpoint, checkpoint, spec, vocabulary, dtype)

    def spec_json(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self.spec)))
        return result


@dataclass(frozen=True)
class Graph:
    """One graph to build: ``file`` is its path in the bundle, ``make`` builds it."""

    name: EngineName
    file: str
    dtype: str
    contract: Contract
    make: Callable[[], ir.Model]


def open_models(recipe: Recipe) -> tuple[Model, ...]:
    """Open the target and, if a model drafts, the draft; check that they fit each other. Raises BadRecipe."""
    target = Model.open("target", recipe.target, recipe.target.dtype, length=recipe.limits.length)
    _require_products(target, recipe)
    _require_kernel(target, recipe)
    if recipe.draft.kind != "model":
        return (target,)
    dtype = recipe.draft.dtype or recipe.target.dtype
    draft = Model.open("draft", recipe.draft, dtype, length=recipe.limits.length)
    _require_products(draft, recipe)
    _require_kernel(draft, recipe)
    if draft.spec.vocab != target.spec.vocab:
        rule = f"its logits must be as wide as the target's, {target.spec.vocab}"
        raise BadRecipe(f"draft.checkpoint: {rule}; got {draft.spec.vocab}; choose a draft of the target's family")
    target.vocabulary.require_same_tokens(draft.vocabulary)
    return target, draft


def _require_kernel(model: Model, recipe: Recipe) -> None:
    if recipe.cache == "paged" and model.spec.head_dim not in HEAD_DIMS:
        rule = (
            f"backend.cache 'paged' needs a head size of {', '.join(map(str, HEAD_DIMS))}, for which there are kernels"
        )
        found = f"got {model.spec.head_dim} in {model.role}.checkpoint"
        raise BadRecipe(f"{rule}; {found}; choose cache = 'linear' or another checkpoint")
    if recipe.cache == "paged" and (why := unsupported(model.spec, "paged", recipe.capacity)):
        raise BadCheckpoint(f"{model.role}.checkpoint {model.checkpoint.folder}: {why}")


def _require_products(model: Model, recipe: Recipe) -> None:
    """Raise BadRecipe unless the backend has products for a checkpoint that comes quantized."""
    found = read_quantization(model.source.config, model.source.folder)
    backend = recipe.backend
    if found is None or backend.name == "onnxruntime-cpu":
        return
    what = f"{model.role}.checkpoint: a checkpoint that comes quantized ({found.method})"
    if not isinstance(backend, TensorRtRtx):
        raise BadRecipe(
            f"{what} needs backend.name 'onnxruntime-cpu' or 'tensorrt-rtx'; got {backend.name!r}, which has no "
            "products for it yet; choose one of these, or the checkpoint that is not quantized"
        )
    if any(scheme.weight != "float8_e4m3fn" or scheme.inputs == "token" for _, scheme in found.rules):
        raise BadRecipe(
            f"{what} needs weights in float8 and inputs that are whole, or have static scales, for backend.name "
            "'tensorrt-rtx'; choose 'onnxruntime-cpu', or a checkpoint quantized so"
        )
    if without := [each for each in backend.compute_capabilities if float(each) < FLOAT8_FROM]:
        raise BadRecipe(
            f"{what} in float8 needs compute capability {FLOAT8_FROM} or later; got {', '.join(without)} in "
            "backend.compute_capabilities; drop it, or choose the checkpoint that is not quantized"
        )


def graphs(recipe: Recipe, models: tuple[Model, ...], attention: Lowering) -> list[Graph]:
    """Every graph of the bundle: decoders, adjusted logits, verification, and drafting when a model drafts."""
    target, *drafts = models
    return [
        *(_decoder(model, recipe, attention) for model in models),
        _head("adjust", target, contract.adjust, build_adjust),
        _head("verify", target, contract.verify, build_verify, draft_probs=False),
        _head("verify_probs", target, contract.verify, build_verify, draft_probs=True),
        *(_head("propose", draft, contract.propose, build_propose, draft_probs=False) for draft in drafts),
        *(_head("propose_probs", draft, contract.propose, build_propose, draft_probs=True) for draft in drafts),
    ]


def _decoder(model: Model, recipe: Recipe, attention: Lowering) -> Graph:
    spec, capacity = model.spec, recipe.capacity
    attention = fitting(attention, spec)
    bindings = spec.contract(capacity=capacity, dtype=model.compute, cache=recipe.cache)

    def make() -> ir.Model:
        return build_decoder(spec, model.checkpoint, dtype=model.compute, capacity=capacity, attention=attention)

    return Graph(model.role, f"{model.role}/model.onnx", model.compute, bindings, make)


def _head(
    name: EngineName,
    model: Model,
    bindings: Callable[..., Contract],
    build: Callable[..., ir.Model],
    **options: bool,
) -> Graph:
    arguments = {"vocab": model.spec.vocab, "dtype": model.compute, **options}
    return Graph(name, f"{name}.onnx", model.compute, bindings(**arguments), partial(build, **arguments))
