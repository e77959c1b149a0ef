"""Caches in float8 on a CUDA device: the kernels against their definition, and a bundle."""

import numpy as np
import pytest
import torch

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.operators.launch import Context
from tandemrt.runtime.check.run import check_bundle
from tests.engine.attention_cases import BFLOAT16, SCALES, attributes, case_in_float8
from tests.engine.implementation_cases import KINDS
from tests.gpu.attention import PACKED, bind, check, on_device
from tests.gpu.here import compute_capabilities, needs_float8
from tests.gpu.rounds import by_graphs_and_eagerly, paged
from tests.makers import tiny_checkpoint, write_recipe

pytestmark = needs_float8
FLIPPED = 0.13  # a norm in its last bits decides between two numbers of float8


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    compile_kernels(compute_capabilities(), folder, names=["attention_float8"])
    return Context(torch.device("cuda", 0), folder)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("query", [1, 5, 16, 64])
@pytest.mark.parametrize("norm", [False, True])
def test_ragged_rows_equal_the_definition(context, dtype, head_dim, query, norm):
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": head_dim}
    tensors = case_in_float8([0, 1, 63, 64, 65, 200], query, norm=norm, dtype=KINDS[dtype], **sizes)
    check(context, tensors, attributes(**sizes, **SCALES), near=FLIPPED if norm else None)


@pytest.mark.parametrize("query", [1, 5])
@pytest.mark.parametrize("splits", [None, 1, 8, 31])
def test_full_batches_equal_the_definition(context, query, splits):
    sizes = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    lengths = np.random.default_rng(1).integers(1, 1100, 16).tolist()
    tensors = case_in_float8(lengths, query, dtype=BFLOAT16, **sizes)
    check(context, tensors, attributes(**sizes, **SCALES), splits=splits)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize(
    ("runs", "sliding_window", "max_blocks"),
    [
        *((runs, 0, None) for runs in PACKED),
        *(("ragged", 65, None), ("far", 1, None), ("far", 129, None), ("ragged", 0, 13), ("many", 65, 7)),
    ],
)
def test_runs_of_prompts_and_windows_equal_the_definition(context, dtype, head_dim, runs, sliding_window, max_blocks):
    """Tables of an even width can be read by cuDNN, over what is widened for it; our kernel reads those of 13 and 7."""
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": head_dim}
    tensors = case_in_float8([1, 100], 5, PACKED[runs], 7, max_blocks=max_blocks, dtype=KINDS[dtype], **sizes)
    check(context, tensors, attributes(**sizes, **SCALES, sliding_window=sliding_window))


@pytest.mark.parametrize("dtype", KINDS)
def test_a_token_reads_its_own_key_as_later_tokens_do(context, dtype):
    """A window at once, and its tokens one by one: the same caches, byte by byte, and results that are near."""
    tensors, attention = case_in_float8([62, 9], 4, norm=True, dtype=KINDS[dtype]), attributes(**SCALES)
    on_gpu, single = on_device(tensors), on_device(tensors)
    launcher, mixed, _ = bind(context, on_gpu, attention)
    launcher.run()
    for j in range(4):
        one = {"qkv": single["qkv"][j::4].contiguous(), "write_index": single["write_index"] + j}
        launcher, alone, _ = bind(context, single | one, attention)
        launcher.run()
        near = 4e-2 if dtype == "bfloat16" else 5e-3
        torch.testing.assert_close(alone, mixed[j::4], rtol=near, atol=near)
    for name in ("key_cache", "value_cache"):
        assert torch.equal(on_gpu[name].view(torch.uint8), single[name].view(torch.uint8))


def test_a_captured_call_serves_other_lengths_and_tables(context):
    first, second = (
        case_in_float8(lengths, 5, [(9, 30)], max_blocks=20, dtype=BFLOAT16) for lengths in ([9, 300], [1100, 64])
    )
    attention, on_gpu = attributes(**SCALES), on_device(first)
    launcher, mixed, _ = bind(context, on_gpu, attention)
    launcher.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.run()
    for tensors in (second, first):
        fresh = on_device(tensors)
        for name in on_gpu:
            if on_gpu[name] is not None:
                on_gpu[name].copy_(fresh[name])
        mixed.fill_(torch.nan)
        graph.replay()
        eager, alone, _ = bind(context, fresh, attention)
        eager.run()
        assert torch.equal(mixed, alone)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    target, draft = (tiny_checkpoint(folder / name, layers=n, seed=1, head_dim=32) for name, n in (("t", 2), ("d", 1)))
    write_recipe(folder / "r.toml", target=target, draft=draft, backend=paged(), dtype="bfloat16")
    return build(Recipe.load(folder / "r.toml", kv_dtype="float8_e4m3"), folder / "bundle").folder


def test_every_check_of_a_bundle_holds(bundle):
    results = list(check_bundle(bundle, RuntimeOptions(device="cuda")))
    for each in results:
        print(f"{each.check}: {each.result}: {each.verdict}")
    assert not [each for each in results if each.verdict == "fail"]


def test_cuda_graphs_change_no_token(bundle):
    by_graphs, eagerly = by_graphs_and_eagerly(bundle)
    assert by_graphs == eagerly
