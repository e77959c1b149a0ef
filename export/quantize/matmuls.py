"""The matmuls of a model whose weights a build may rewrite, and the order in which it writes them."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Weights of one matmul of the graph are adjacent in the file, in the matmul's order (export/model/linear.py).
_ORDER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")  # kv_b_proj stays as it is (latent_attention.py)
_OWN_INPUTS = ("per_layer_model_projection", "per_layer_input_gate", "per_layer_projection")  # Gemma 4
# Gates of decay and update are small and stay as they are.
_RECURRENT = ("in_proj", "in_proj_qkv", "in_proj_qkvz", "in_proj_z", "out_proj")

_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(\w+)")

Matmul = TypeVar("Matmul")


def matmul_modules(checkpoint: Checkpoint, spec: ModelSpec) -> Iterator[str]:
    """Yield the modules of the matmuls of ``checkpoint``, which has the graph's tensor names (with_graph_names)."""
    head = None if spec.normed_head else (EMBEDDING if spec.tied else HEAD).removesuffix(".weight")
    for module in sorted({name.rpartition(".")[0] for name in checkpoint.tensors}):
        if module == head or module.rpartition(".")[2] in (*_ORDER, *_LATENT, *_OWN_INPUTS, *_RECURRENT):
            yield module


def place(module: str) -> tuple[str, int]:
    """Return the key by which the weights of modules are sorted in a file."""
    layer, _, kind = module.rpartition(".")
    return layer, _ORDER.index(kind) if kind in _ORDER else 0


def place_on_gpu(module: str) -> tuple[str, int, int, int]:
    """As ``place``, but gates and ups of all experts of a layer come one after another, and then all downs."""
    if (expert := _EXPERT.fullmatch(module)) is None:
        return *place(module), 0, 0
    layer, number, kind = expert.groups()
    return layer, int(kind == "down_proj"), int(number), _ORDER.index(kind)


def groups(
    matmuls: Iterable[Matmul],
    module: Callable[[Matmul], str],
    form: Callable[[Matmul], Any],
    *,
    on_gpu: bool = False,
) -> Iterator[list[Matmul]]:
    """Group sorted weights that the graph may join in one matmul: q, k and v, or gate and up, of equal ``form``.

    ``on_gpu``: also those of all experts of a layer, sorted by ``place_on_gpu``.
    """
    group: list[Matmul] = []
    for matmul in matmuls:
        name = module(matmul)
        if on_gpu and _EXPERT.fullmatch(name):
            alone = bool(group) and place_on_gpu(module(group[0]))[:2] != place_on_gpu(name)[:2]
        else:
            alone = name.rpartition(".")[2] not in ("k_proj", "v_proj", "up_proj")
        if group and (alone or form(matmul) != form(group[0])):
            yield group
            group = []
        group.append(matmul)
    if group:
        yield group
