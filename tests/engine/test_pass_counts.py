"""How many rewrites each pass makes, per model family: a fusion that stops matching fails here, not in a benchmark."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.model.decoder import build_decoder
from tandemrt.export.model.dflash import build_context, build_dflash
from tandemrt.export.model.draft_vocabulary import EMBEDDING
from tandemrt.export.model.eagle3 import build_eagle3
from tandemrt.export.passes.pipelines import BATCH_INVARIANT, PIPELINES
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.dflash import DFlashSpec
from tandemrt.export.read.eagle3 import Eagle3Spec
from tandemrt.export.read.spec import ModelSpec
from tests.engine.decoding import CAPACITY, CONFIGS, SLIDING, make_checkpoint
from tests.engine.test_dflash_graphs import PLAIN as BLOCK_DRAFT
from tests.engine.test_eagle3_graphs import PLAIN as EAGLE3
from tests.engine.test_eagle3_graphs import TARGET, VOCAB
from tests.engine.test_quantized_checkpoints import FLOAT8
from tests.families.cases import FAMILIES
from tests.heads import Draw

_KERNEL = "use_residual_norm_kernel"
# Norms without a bias, of families whose residual sums have biases.
UNBIASED = {
    **dict.fromkeys(("llama biased with linear scaling", "ernie4_5", "internlm3"), 0),
    **dict.fromkeys(("gpt_oss", "qwen3 tied with yarn"), 2),
    "lfm2_moe": 4,
}
# Every model has two layers. A layer has four matmuls on a GPU and a CPU: queries, keys and values; their output; gate
# and up; down. The ninth is lm_head.
PRE_NORM_GROUPED = {"fuse_residual_norms": 4, "fuse_transposed_matmuls": 9}
PRE_NORM_PAGED = PRE_NORM_GROUPED | {"fuse_wide_norms": 0, "defer_scales": 0, "fuse_lone_norms": 1}
# Norms whose weights are stored minus one, in 16 bits.
IN_16_BITS = {"gemma3": 4, "qwen3_5": 8}
# A norm after attention and MLP leaves the last norm alone to read a residual sum.
POST_NORM_GROUPED = PRE_NORM_GROUPED | {"fuse_residual_norms": 1}
UNSUPPORTED: dict[str, int] = {}
# Families with a dense first layer and a layer of 6 or 8 experts and a shared one.
ONE_OF_TWO, ONE_OF_TWO_IN_GROUPS = ("ernie4_5_moe", "glm4_moe air", "exaone_moe", "hy_v3"), ("glm4_moe", "dots1")
LAYER_NORMS = (
    *("starcoder2", "stablelm", "nemotron", "jais2", "cohere", "cohere2", "gpt_neox", "gpt_neox sequential", "gptj"),
    *("falcon", "falcon 40b", "falcon 11b", "phi", "olmo"),
)
# Not over a paged cache: learned positions, and norms of queries and keys that subtract the mean.
LAYER_NORMS_ON_A_CPU = (
    *("gpt_bigcode", "gpt_bigcode with all heads", "opt", "persimmon", "stablelm 12b"),
    "cohere with norms of queries and keys",
)
GROUPED = dict.fromkeys((*CONFIGS, *SLIDING, *FAMILIES), PRE_NORM_GROUPED) | {
    **dict.fromkeys(("olmo2", "olmo3", "exaone4", "exaone4 full"), POST_NORM_GROUPED),
    # An expert has its matmuls in a nested graph of its own.
    "mixtral": PRE_NORM_GROUPED | {"fuse_transposed_matmuls": 31},
    "qwen3_moe": PRE_NORM_GROUPED | {"fuse_transposed_matmuls": 43},
    **dict.fromkeys(("qwen3_moe with a dense layer", "mellum"), PRE_NORM_GROUPED | {"fuse_transposed_matmuls": 26}),
    **dict.fromkeys(("olmoe", "granitemoe", "minimax_m2"), PRE_NORM_GROUPED | {"fuse_transposed_matmuls": 43}),
    "flex_olmo": POST_NORM_GROUPED | {"fuse_transposed_matmuls": 43},
    # A shared expert has 2 matmuls, and one more for its gate.
    **dict.fromkeys(
        ("granitemoeshared", "granitemoe_swa", "hunyuan_v1_moe"), PRE_NORM_GROUPED | {"fuse_transposed_matmuls": 47}
    ),
    "qwen2_moe": PRE_NORM_GROUPED | {"fuse_transposed_matmuls": 49},
    **dict.fromkeys((*ONE_OF_TWO, "flint"), PRE_NORM_GROUPED | {"fuse_transposed_matmuls": 28}),
    **dict.fromkeys(ONE_OF_TWO_IN_GROUPS, PRE_NORM_GROUPED | {"fuse_transposed_matmuls": 34}),
    "solar_open": PRE_NORM_GROUPED | {"fuse_transposed_matmuls": 59},
    # Latent attention has 3 matmuls before attention, one fewer without latent queries; those per head stay.
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), PRE_NORM_GROUPED | {"fuse_transposed_matmuls": 38}),
    "deepseek_v2": PRE_NORM_GROUPED | {"fuse_transposed_matmuls": 63},
    "deepseek_v2 lite": PRE_NORM_GROUPED | {"fuse_transposed_matmuls": 36},
    **dict.fromkeys(("youtu", "minicpm3"), PRE_NORM_GROUPED | {"fuse_transposed_matmuls": 13}),
    # The sum of experts and the shared one is normed, too.
    "axk1": PRE_NORM_GROUPED | {"fuse_residual_norms": 5, "fuse_transposed_matmuls": 38},
    # Attention has a matmul for its gates; AFMoE has three layers, whose shared expert's sum is normed.
    "afmoe": {"fuse_residual_norms": 8, "fuse_transposed_matmuls": 54},
    **dict.fromkeys(("laguna", "laguna with a gate per value"), PRE_NORM_GROUPED | {"fuse_transposed_matmuls": 30}),
    # Hybrid models have four layers here. Queries with a gate are a matmul of their own.
    "qwen3_5": {"fuse_residual_norms": 8, "fuse_transposed_matmuls": 18},
    "qwen3_next": {"fuse_residual_norms": 8, "fuse_transposed_matmuls": 81},
    "qwen3_5_moe": {"fuse_residual_norms": 8, "fuse_transposed_matmuls": 98},
    # Norms that subtract the mean stay.
    **dict.fromkeys((*LAYER_NORMS, *LAYER_NORMS_ON_A_CPU), PRE_NORM_GROUPED | {"fuse_residual_norms": 0}),
    "gpt2": {"fuse_residual_norms": 0, "fuse_transposed_matmuls": 1},  # matrices of layers are stored transposed
    "cohere2_moe": {"fuse_residual_norms": 0, "fuse_transposed_matmuls": 74},  # four layers, three with experts
    "cohere2_moe with a sigmoid": {"fuse_residual_norms": 0, "fuse_transposed_matmuls": 47},
    "phimoe": {"fuse_residual_norms": 0, "fuse_transposed_matmuls": 43},
    # Three layers; experts are stored as [inputs, outputs].
    "llama4": {"fuse_residual_norms": 6, "fuse_transposed_matmuls": 15},
    # Three layers; gate and up are two matmuls where they are clamped, and heads have a matmul for their gates.
    "step3p5": {"fuse_residual_norms": 6, "fuse_transposed_matmuls": 44},
    "mimo_v2_flash": PRE_NORM_GROUPED | {"fuse_transposed_matmuls": 30},  # values are a matmul of their own
    # Gemma 4: keys that are values are a matmul of their own; five layers with two matmuls for their inputs.
    "gemma4": {"fuse_residual_norms": 5, "fuse_transposed_matmuls": 32},
    "gemma4 dense": {"fuse_residual_norms": 2, "fuse_transposed_matmuls": 10},
    "gemma4 experts": PRE_NORM_GROUPED | {"fuse_transposed_matmuls": 48},
    "lfm2": {"fuse_residual_norms": 8, "fuse_transposed_matmuls": 17},
    # Three layers here. A Mamba-2 layer has two matmuls, as a convolution has.
    "lfm2_moe": {"fuse_residual_norms": 6, "fuse_transposed_matmuls": 47},
    # Five layers; attention has a matmul for its gates.
    "lfm3": {"fuse_residual_norms": 10, "fuse_transposed_matmuls": 23},
    "granite 4": {"fuse_residual_norms": 6, "fuse_transposed_matmuls": 70},
    "granite 4 dense": {"fuse_residual_norms": 6, "fuse_transposed_matmuls": 13},
    "bamba": {"fuse_residual_norms": 6, "fuse_transposed_matmuls": 13},
    # Two layers with Mamba-2 and attention each, whose gates are a matmul of their own.
    "falcon_h1": {"fuse_residual_norms": 4, "fuse_transposed_matmuls": 15},
    "falcon_h1 with norms": {"fuse_residual_norms": 4, "fuse_transposed_matmuls": 15},
    # Three layers, one without an MLP; an expert has two matmuls.
    "nemotron_h": {"fuse_residual_norms": 5, "fuse_transposed_matmuls": 30},
    "kimi_linear": {"fuse_residual_norms": 6, "fuse_transposed_matmuls": 68},
    "olmo_hybrid": {"fuse_residual_norms": 4, "fuse_transposed_matmuls": 13},
    "gpt_oss": PRE_NORM_GROUPED | {"fuse_transposed_matmuls": 7},  # experts are stored as [inputs, outputs]
}
PAGED = dict.fromkeys((*CONFIGS, *SLIDING, *FAMILIES), PRE_NORM_PAGED) | {
    # Norms of queries and keys over all heads are lone norms, too.
    **dict.fromkeys(("olmo2", "olmo3"), PRE_NORM_PAGED | {"fuse_residual_norms": 1, "fuse_lone_norms": 8}),
    **dict.fromkeys(("exaone4", "exaone4 full"), PRE_NORM_PAGED | {"fuse_residual_norms": 1, "fuse_lone_norms": 4}),
    **dict.fromkeys(("gemma3", "glm4", "hyperclovax"), PRE_NORM_PAGED | {"fuse_lone_norms": 5}),
    **dict.fromkeys(LAYER_NORMS, PRE_NORM_PAGED | {"fuse_residual_norms": 0, "fuse_lone_norms": 0}),
    # All experts of a layer are one operator; the router is a matmul.
    **dict.fromkeys(("mixtral", "qwen3_moe"), PRE_NORM_PAGED | {"fuse_transposed_matmuls": 7}),
    **dict.fromkeys(("qwen3_moe with a dense layer", "mellum"), PRE_NORM_PAGED | {"fuse_transposed_matmuls": 8}),
    **dict.fromkeys(("olmoe", "minimax_m2"), PRE_NORM_PAGED | {"fuse_lone_norms": 5, "fuse_transposed_matmuls": 7}),
    "flex_olmo": PRE_NORM_PAGED | {"fuse_residual_norms": 1, "fuse_lone_norms": 8, "fuse_transposed_matmuls": 7},
    "granitemoe": PRE_NORM_PAGED | {"fuse_transposed_matmuls": 7},
    **dict.fromkeys(("granitemoeshared", "solar_open"), PRE_NORM_PAGED | {"fuse_transposed_matmuls": 11}),
    "qwen2_moe": PRE_NORM_PAGED | {"fuse_transposed_matmuls": 13},
    **dict.fromkeys((*ONE_OF_TWO, *ONE_OF_TWO_IN_GROUPS), PRE_NORM_PAGED | {"fuse_transposed_matmuls": 10}),
    **dict.fromkeys(("ministral3", "gemma2", "vaultgemma", "hunyuan", "hunyuan_v1_moe"), UNSUPPORTED),
    **dict.fromkeys((*LAYER_NORMS_ON_A_CPU, "gpt2", "cohere2_moe with a sigmoid", "laguna", "step3p5"), UNSUPPORTED),
    "cohere2_moe": PRE_NORM_PAGED | {"fuse_residual_norms": 0, "fuse_lone_norms": 0, "fuse_transposed_matmuls": 20},
    "afmoe": PRE_NORM_PAGED | {"fuse_residual_norms": 8, "fuse_lone_norms": 5, "fuse_transposed_matmuls": 18},
    "laguna with a gate per value": PRE_NORM_PAGED | {"fuse_transposed_matmuls": 12},
    "flint": PRE_NORM_PAGED | {"fuse_transposed_matmuls": 10},
    "granitemoe_swa": PRE_NORM_PAGED | {"fuse_transposed_matmuls": 11},
    "gpt_oss": PRE_NORM_PAGED | {"fuse_transposed_matmuls": 7},
    "gemma4": PRE_NORM_PAGED | {"fuse_residual_norms": 5, "fuse_lone_norms": 22, "fuse_transposed_matmuls": 32},
    "gemma4 dense": PRE_NORM_PAGED | {"fuse_residual_norms": 2, "fuse_lone_norms": 7},
    "gemma4 experts": PRE_NORM_PAGED | {"fuse_lone_norms": 13, "fuse_transposed_matmuls": 11},
    # Latent vectors, and latent queries, have lone norms.
    **dict.fromkeys(
        ("deepseek_v3", "glm4_moe_lite"), PRE_NORM_PAGED | {"fuse_lone_norms": 5, "fuse_transposed_matmuls": 14}
    ),
    "deepseek_v2": UNSUPPORTED,
    "deepseek_v2 lite": PRE_NORM_PAGED | {"fuse_lone_norms": 3, "fuse_transposed_matmuls": 12},
    **dict.fromkeys(("youtu", "minicpm3"), PRE_NORM_PAGED | {"fuse_lone_norms": 5, "fuse_transposed_matmuls": 13}),
    "axk1": PRE_NORM_PAGED | {"fuse_residual_norms": 5, "fuse_lone_norms": 5, "fuse_transposed_matmuls": 14},
    **dict.fromkeys(("phimoe", "llama4", "mimo_v2_flash"), UNSUPPORTED),
    # Hybrid models have two to four layers here.
    "qwen3_5": PRE_NORM_PAGED | {"fuse_residual_norms": 8, "fuse_transposed_matmuls": 18},
    "qwen3_5_moe": PRE_NORM_PAGED | {"fuse_residual_norms": 8, "fuse_transposed_matmuls": 14},
    "qwen3_next": PRE_NORM_PAGED | {"fuse_residual_norms": 8, "fuse_transposed_matmuls": 24},
    "olmo_hybrid": PRE_NORM_PAGED | {"fuse_lone_norms": 5, "fuse_transposed_matmuls": 13},
    "lfm2": PRE_NORM_PAGED | {"fuse_residual_norms": 8, "fuse_transposed_matmuls": 17},
    "lfm2_moe": PRE_NORM_PAGED | {"fuse_residual_norms": 6, "fuse_transposed_matmuls": 11},
    "granite 4": PRE_NORM_PAGED | {"fuse_residual_norms": 6, "fuse_transposed_matmuls": 16},
    **dict.fromkeys(
        ("granite 4 dense", "bamba"), PRE_NORM_PAGED | {"fuse_residual_norms": 6, "fuse_transposed_matmuls": 13}
    ),
    **dict.fromkeys(("falcon_h1", "falcon_h1 with norms"), PRE_NORM_PAGED | {"fuse_transposed_matmuls": 15}),
    "kimi_linear": PRE_NORM_PAGED | {"fuse_residual_norms": 6, "fuse_lone_norms": 2, "fuse_transposed_matmuls": 20},
    **dict.fromkeys(("nemotron_h", "lfm3"), UNSUPPORTED),
}


def with_kernels(case: str, counts: Mapping[str, int]) -> Mapping[str, int]:
    """Add the norms that C kernels compute: all fused ones without a bias."""
    return counts and {**counts, _KERNEL: UNBIASED.get(case, counts["fuse_residual_norms"])}


ROWS = [
    *(("grouped", case, with_kernels(case, counts)) for case, counts in GROUPED.items()),
    *(("paged", case, counts) for case, counts in PAGED.items()),
]


def counts_of(folder: Path, lowering: Lowering, *, dtype: str = "float32", batch_invariant: bool = False) -> object:
    checkpoint = Checkpoint.open(folder)
    spec = ModelSpec.from_hf(checkpoint.config)
    model = build_decoder(spec, checkpoint, dtype=dtype, capacity=CAPACITY, lowering=lowering)
    return (BATCH_INVARIANT if batch_invariant else PIPELINES[lowering])(model)


@pytest.mark.parametrize(("lowering", "case", "counts"), ROWS, ids=str)
def test_every_pass_rewrites_as_often_as_the_family_needs(
    tmp_path: Path, lowering: Lowering, case: str, counts: Mapping[str, int]
) -> None:
    make_checkpoint(case, tmp_path)
    if counts is UNSUPPORTED:
        with pytest.raises(BadCheckpoint):
            counts_of(tmp_path, lowering)
        return
    assert counts_of(tmp_path, lowering) == counts


@pytest.mark.parametrize(("case", "count"), IN_16_BITS.items())
def test_norms_whose_weights_are_stored_minus_one_are_fused_in_16_bits(tmp_path: Path, case: str, count: int) -> None:
    make_checkpoint(case, tmp_path)
    wanted = PAGED[case] | {"fuse_wide_norms": count, "fuse_residual_norms": 0}
    assert counts_of(tmp_path, "paged", dtype="bfloat16") == wanted


@pytest.mark.parametrize("lowering", ["length", "mask"])
def test_a_graph_of_standard_operators_has_no_passes(tmp_path: Path, lowering: Lowering) -> None:
    make_checkpoint("qwen3", tmp_path)
    assert counts_of(tmp_path, lowering) == {}


def test_the_basic_lowering_folds_constants_and_expands_operators(tmp_path: Path) -> None:
    """Per layer an attention, two cache updates, two rotations and four norms; the last norm, and a Shape."""
    make_checkpoint("qwen3", tmp_path)
    assert counts_of(tmp_path, "basic") == {"fold_constants": 7, "expand_operators": 2 * 9 + 2}


# With static input scales queries, keys and values (and gate and up) quantize their input each by themselves, so the
# norm has three readers and no scale moves.
@pytest.mark.parametrize(
    ("case", "deferred"),
    [
        ("compressed-tensors, channel, inputs by token", 5),
        ("compressed-tensors, tensor, static inputs", 0),
        ("modelopt", 0),
    ],
)
def test_float8_scales_are_deferred_at_every_norm_and_activation_within_the_model(
    tmp_path: Path, case: str, deferred: int
) -> None:
    """Two in each layer and one between the two layers. lm_head is unquantized, so the last norm stays as it is."""
    FLOAT8[case].write(tmp_path)
    counts = counts_of(tmp_path, "paged")
    assert counts == PRE_NORM_PAGED | {"defer_scales": deferred, "fuse_transposed_matmuls": 1}


def test_a_batch_invariant_target_has_no_matmul_left_to_transpose(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path, sizes={"vocab_size": 64})
    lone = {"fuse_lone_norms": 0, "make_batch_invariant": 10}  # in float16 the lone norm is one of the ten
    counts = counts_of(tmp_path, "paged", dtype="float16", batch_invariant=True)
    assert counts == PRE_NORM_PAGED | lone | {"fuse_gated_linears": 2, "fuse_transposed_matmuls": 0}


@pytest.mark.parametrize(
    ("lowering", "counts", "context"),
    [
        # The block's attention names its tokens otherwise than the residual stream, so the first sum is not fused.
        ("grouped", PRE_NORM_GROUPED | {"fuse_residual_norms": 3, _KERNEL: 3}, {"fuse_residual_norms": 0, _KERNEL: 0}),
        ("paged", PRE_NORM_PAGED, PRE_NORM_PAGED | {"fuse_residual_norms": 0}),
    ],
)
def test_a_block_draft_is_fused_as_its_target(
    tmp_path: Path, lowering: Lowering, counts: dict[str, int], context: dict[str, int]
) -> None:
    weights = BLOCK_DRAFT.weights() | {EMBEDDING: Draw(9).matrix(VOCAB, BLOCK_DRAFT.hidden)}
    checkpoint = Checkpoint.open(BLOCK_DRAFT.save(tmp_path, weights))
    spec = DFlashSpec.from_hf(checkpoint.config, ModelSpec.from_hf(TARGET))
    sizes: Any = {"dtype": "float32", "capacity": CAPACITY, "lowering": lowering}
    assert PIPELINES[lowering](build_dflash(spec, checkpoint, **sizes)) == counts
    # Of the target's features, and of keys and values per layer.
    assert PIPELINES[lowering](build_context(spec, checkpoint, **sizes)) == context | {"fuse_transposed_matmuls": 3}


@pytest.mark.parametrize(
    ("lowering", "lone"),
    [("grouped", {_KERNEL: 2}), ("paged", {"fuse_wide_norms": 0, "defer_scales": 0, "fuse_lone_norms": 2})],
)
def test_the_layer_of_an_eagle3_head_is_fused(tmp_path: Path, lowering: Lowering, lone: Mapping[str, int]) -> None:
    """The first norms, of the token and of the state, are lone norms."""
    checkpoint = Checkpoint.open(EAGLE3.save(tmp_path, EAGLE3.weights()))
    spec = Eagle3Spec.from_hf(checkpoint.config, ModelSpec.from_hf(TARGET))
    model = build_eagle3(spec, checkpoint, dtype="float32", capacity=CAPACITY, lowering=lowering)
    assert PIPELINES[lowering](model) == {"fuse_residual_norms": 2, **lone, "fuse_transposed_matmuls": 5}
