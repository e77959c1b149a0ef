"""The vision tower of a target that reads images: its tensors in the bundle, and its graph."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tandemrt.engines.bundle.manifest import EngineName
from tandemrt.engines.contract.calls import tower_use
from tandemrt.engines.contract.contract import VISION_DTYPE
from tandemrt.engines.contract.dtypes import BITS, COMPUTE, FLOAT8, HALF
from tandemrt.engines.contract.vision import VisionEntry
from tandemrt.engines.recipe.backends import CPU, CUDA
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe
from tandemrt.export.bundle.models import Model
from tandemrt.export.graph.graph import Graph
from tandemrt.export.model.vision import build_vision, vision_contract
from tandemrt.export.quantize.checkpoint import write_rounded
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.vision.processor import TEXT_ONLY
from tandemrt.export.read.vision.spec import VisionSpec
from tandemrt.export.read.vision.towers import TOWERS, read_tower, tower_tensors
from tandemrt.export.read.vision_language import vision_language
from tandemrt.plugins.onnxruntime.custom_operators import has_kernels

ROLE: EngineName = "vision"


@dataclass(frozen=True)
class VisionTower:
    """A tower and the checkpoint that its graph points into: the target's tensors, or their copies in the bundle.

    ``multiplies_in``, ``standard``: see build_vision. ``in_int8``: its matmul weights are written so, for a CPU.
    """

    spec: VisionSpec
    checkpoint: Checkpoint
    multiplies_in: str
    in_int8: bool = False
    standard: bool = False

    @classmethod
    def open(cls, target: Model, *, standard: bool) -> "VisionTower":
        """Read the tower of ``target``. Raises BadCheckpoint for one of which a part is not implemented."""
        spec, tensors = read_tower(target.source, target.spec.hidden), tower_tensors(target.source)
        if quantized := next((tensor for tensor in tensors.values() if tensor.dtype not in COMPUTE), None):
            raise BadCheckpoint(f"{quantized.file}: a tower's weights should not be quantized, {quantized.name!r} is")
        if not (target.on_cpu or standard) and spec.entry.resize != "square":
            spec = replace(spec, entry=spec.entry.model_copy(update={"padded": True}))
        narrow = target.compute in HALF and not target.on_cpu
        multiplies_in = VISION_DTYPE if not narrow else target.compute if standard else "bfloat16"
        checkpoint = replace(target.source, config={}, tensors=tensors, stored_names={})
        return cls(spec, checkpoint, multiplies_in, target.on_cpu and target.dtype in BITS, standard)

    def placed(self, folder: Path) -> "VisionTower":
        """Return the tower with its tensors written into ``folder``; graphs only refer to files next to them."""
        folder.mkdir()
        matmuls = self.spec.matmuls(self.checkpoint.tensors) if self.in_int8 else ()
        written = write_rounded(self.checkpoint, matmuls, folder, BITS["int8"], interleaved=has_kernels())
        return replace(self, checkpoint=written.checkpoint)

    def read_by(self, target: Model) -> Model:
        """Return ``target`` as a model that reads images."""
        layers = target.spec.layers
        both_ways = {"none": (), "all": (True,) * layers, "sliding": target.spec.sliding_layers}
        spec = replace(target.spec, image_levels=self.spec.levels, position_rows=self.spec.entry.position_rows)
        return replace(target, spec=replace(spec, images_both_ways=both_ways[self.spec.image_attention]))

    def graph(self, length: int) -> Graph:
        """Return the graph for images in prompts of fewer than ``length`` tokens."""
        make = partial(build_vision, self.spec, self.checkpoint, self.multiplies_in, standard=self.standard)
        sizes = tower_use(self.spec.entry, length)
        return Graph(ROLE, f"{ROLE}/model.onnx", VISION_DTYPE, vision_contract(self.spec), make, sizes=sizes)


def open_tower(recipe: Recipe, target: Model) -> tuple[VisionTower | None, tuple[str, ...]]:
    """Return the tower of ``target`` as the recipe asks for it, and notes; None: the bundle reads text only.

    Raises BadRecipe or BadCheckpoint if the recipe asks for images that cannot be read.
    """
    asked, known = recipe.target.images, vision_language(target.source.config) in TOWERS
    if asked is False or not (asked or known):
        return None, ()
    try:
        if not known:
            raise BadRecipe(f"images are read by models with towers of {', '.join(TOWERS)}; {TEXT_ONLY}")
        if (backend := recipe.backend).lowering == "length" or backend.ranks > 1:
            rule = f"images are read by {CPU}, by {CUDA} with a paged cache on one GPU, or by TensorRT"
            raise BadRecipe(f"{rule}, not by this recipe's backend, {backend.name}; {TEXT_ONLY}")
        tower = VisionTower.open(target, standard=backend.attends_by_mask)
        if tower.spec.entry.both_ways and (problem := _both_ways_problem(tower.spec.entry, recipe, target)):
            raise BadCheckpoint(f"{target.spec.family}: tokens of an image attend to later ones, {problem}")
        return tower, ()
    except (BadCheckpoint, BadRecipe) as error:
        if asked:
            raise
        return None, (f"target: images are not read, only text (target.images): {error}",)


def _both_ways_problem(entry: VisionEntry, recipe: Recipe, target: Model) -> str | None:
    """Return why tokens of an image cannot attend to later ones, or None."""
    if recipe.backend.attends_by_mask:
        return f"which {CPU} and {CUDA} compute, not {recipe.backend.name}"
    if target.on_cpu and (target.compute != "float32" or not has_kernels()):
        return f"which {CPU} computes in float32, with a C compiler here; dtype is {target.compute}"
    if target.kv_dtype == FLOAT8:
        return "which no kernel computes over a KV cache in float8; leave kv_dtype out"
    if shared := target.spec.variants.sharing:
        return f"which layers that share caches do not support; num_kv_shared_layers is {shared}"
    tokens, chunk = (entry.max_pixels // entry.factor**2), recipe.prefill_chunk(large=target.spec.large_calls)
    if chunk < tokens:
        return f"so limits.prefill_chunk should be at least the {tokens} tokens of an image, it is {chunk}"
    return None
