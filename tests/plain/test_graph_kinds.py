"""Every kind of graph beside decoders: drafts, towers and graphs without weights bind what their contracts say.

graph_kinds.txt has digests as published_graphs.txt, and `python -m tests.plain.test_graph_kinds` writes it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest

from tandemrt.engines.contract import contract
from tandemrt.engines.contract.contract import Contract
from tandemrt.export.bundle.draft_kinds import FEATURE_DRAFTS, GraphSizes
from tandemrt.export.model import vision, weightless
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.onnxruntime.custom_operators import has_kernels
from tests.dflash import BlockHead
from tests.dflash2 import DFlash2Head
from tests.dspark import DSparkHead
from tests.eagle3 import LATENT, Head
from tests.mtp import MtpLayer
from tests.plain.published_images import PUBLISHED
from tests.plain.test_published_graphs import CAPACITY, DTYPE_OF, any_weights, described, digest, require_bound
from tests.plain.test_published_images import tower_of

FILE = Path(__file__).parent / "graph_kinds.txt"
VOCAB = 61
TARGET: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}
_SIZES: dict[str, Any] = {"vocab": VOCAB, "hidden": 32, "draft_vocab": 37, "features": (2, 4, 5)}
_BLOCK = {**_SIZES, "block": 8, "mask_token": 60}
EAGLE = Head(**_SIZES, target_layers=8)
ALL_NORMS = replace(EAGLE, fc_norm=True, norm_before_fc=True, norm_output=True, norm_before_residual=True)
GEMMA: dict[str, Any] = {
    **TARGET,
    "model_type": "gemma4_text",
    "layer_types": ["sliding_attention", "full_attention"],
    "num_hidden_layers": 2,
    "sliding_window": 8,
    "num_key_value_heads": 1,
    "global_head_dim": 32,
    "vocab_size": 64,
    "hidden_size_per_layer_input": 0,
}
ASSISTANT: dict[str, Any] = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "model_type": "gemma4_assistant",
    "tie_word_embeddings": True,
    "backbone_hidden_size": 32,
    "centroid_intermediate_top_k": 3,
    "text_config": GEMMA | {"hidden_size": 16, "vocab_size_per_layer_input": 0},
}
HEADS: dict[str, tuple[str, Any]] = {
    "eagle3": ("eagle3", EAGLE),
    "eagle3 with all norms": ("eagle3", ALL_NORMS),
    "eagle3 of three layers, flat": ("eagle3", replace(EAGLE, layers=3, flat=True, norm_before_head=False)),
    "eagle3 with latent attention": ("eagle3", replace(EAGLE, latent=LATENT, layers=2, fc_norm=True)),
    "peagle": ("peagle", replace(EAGLE, mask_token=60, draft_vocab=VOCAB)),
    "dflash": ("dflash", BlockHead(**_BLOCK, sliding=(True, False))),
    "dflash2": ("dflash2", DFlash2Head(**{**_BLOCK, "draft_vocab": VOCAB}, taps=3, sliding=(True, False))),
    "dspark": ("dspark", DSparkHead(**_BLOCK)),
    "dspark, gated": ("dspark", DSparkHead(**_BLOCK, markov="gated")),
    "dspark, rnn": ("dspark", DSparkHead(**_BLOCK, markov="rnn")),
    "mtp": ("mtp", MtpLayer(hidden=32, target_layers=8, heads=2)),
    "mtp as in MiMo": ("mtp", MtpLayer(hidden=32, target_layers=8, heads=2, form="mimo")),
    "assistant": ("assistant", ASSISTANT),
    "assistant with groups": ("assistant", ASSISTANT | {"use_ordered_embeddings": True, "num_centroids": 4}),
}


def graphs_of(name: str) -> Iterator[tuple[str, ir.Model, Contract]]:
    """The graphs of a draft on a CPU and on a GPU, if it runs there: their names and contracts."""
    kind, head = HEADS[name]
    draft, target = FEATURE_DRAFTS[kind], ModelSpec.from_hf(GEMMA if kind == "assistant" else TARGET)
    checkpoint = _checkpoint(head)
    read = draft.read(SimpleNamespace(ignore_config_fields=(), num_draft_tokens=3), checkpoint, target)
    for lowering, dtype in DTYPE_OF.items():
        sizes = GraphSizes(dtype, CAPACITY, "paged" if lowering == "paged" else "linear", lowering)
        for graph in draft.graphs(read.spec, read.checkpoint, sizes) if lowering in draft.lowerings else ():
            yield f"{graph.name} {lowering}", graph.make(), graph.contract


def _checkpoint(head: Any) -> Checkpoint:
    """The checkpoint of a head, with the names that readers look for."""
    if isinstance(head, MtpLayer):
        shapes = {weight: tuple(tensor.shape) for weight, tensor in head.weights().items()}
        config = TARGET | {"num_nextn_predict_layers": 1}
    elif isinstance(head, dict):
        shapes, config = {}, head
    else:
        shapes = {f"{head.first}.mlp.down_proj.weight": (1, 1)} if isinstance(head, Head) else {}
        shapes |= {} if head.draft_vocab == VOCAB else {"d2t": (head.draft_vocab,)}
        config = head.config()
    file = Path("head.safetensors")
    return Checkpoint(
        file.parent, config, {n: StoredTensor(n, "float32", s, file, 0, 0) for n, s in shapes.items()}, ()
    )


def without_weights() -> Iterator[tuple[str, ir.Model, Contract]]:
    sizes: dict[str, Any] = {"vocab": VOCAB, "dtype": "float16"}
    yield "adjust", weightless.build_adjust(**sizes), contract.adjust(**sizes)
    for probs in (False, True):
        sizes = {"vocab": VOCAB, "dtype": "float16", "draft_probs": probs}
        yield f"verify {probs}", weightless.build_verify(**sizes), contract.verify(**sizes)
        for ids in (False, True):
            more = sizes | {"target_ids": ids}
            yield f"propose {probs} {ids}", weightless.build_propose(**more), contract.propose(**more)


def tower(folder: Path, name: str) -> Iterator[tuple[str, ir.Model, Contract]]:
    """The graph of a published tower with its first two layers, for onnxruntime and for TensorRT."""
    (folder / name).mkdir()
    spec = tower_of(folder / name, name)
    spec = replace(spec, layers=2, taps=spec.taps and (1,), window_layers=spec.window_layers and (0,))
    for standard in (False, True):
        graph = vision.build_vision(spec, Checkpoint(folder, {}, {}, ()), "bfloat16", standard=standard)
        yield "standard" if standard else "onnxruntime", graph, vision.vision_contract(spec)


def lines() -> Iterator[str]:
    """The digests of all kinds. Raises AssertionError for one that does not bind what its contract says."""
    kinds: dict[str, Callable[[], Iterator[tuple[str, ir.Model, Contract]]]] = {"no weights": without_weights}
    kinds |= {name: partial(graphs_of, name) for name in HEADS}
    with any_weights(), TemporaryDirectory() as folder:
        kinds |= {name: partial(tower, Path(folder), name) for name in PUBLISHED}
        for name, graphs in kinds.items():
            digests = []
            for kind, model, bound in graphs():
                # A tower that adds its positions reads no others.
                require_bound(model, bound, ("positions",) if name in PUBLISHED else ())
                digests.append(digest(kind, "\n".join(described(model))))
            yield f"{name}: {'; '.join(digests)}"


@pytest.mark.skipif(not has_kernels(), reason="graphs differ without a C compiler")
def test_a_graph_of_each_kind_keeps_its_contract_and_its_nodes() -> None:
    assert [*lines()] == FILE.read_text().splitlines()


if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for line in lines()))
