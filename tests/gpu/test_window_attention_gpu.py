"""The kernels of ``window_attention`` against its definition, on a CUDA device.

Every cache entry that no row has written is NaN, and every table is in random order, in every case.
"""

import numpy as np
import pytest
import torch

from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.operators.constants import HEAD_DIMS
from tandemrt.plugins.operators.launch import Context
from tests.engine.attention_cases import BFLOAT16, attributes, case, expected, tolerance
from tests.engine.implementation_cases import to_numpy
from tests.gpu.attention import PACKED, bind, check, on_device
from tests.gpu.here import compute_capabilities

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": BFLOAT16}
RAGGED = [0, 1, 63, 64, 65, 200, 511]


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """One for all calls of this file, whatever their shape: each must leave its workspace as it found it."""
    folder = tmp_path_factory.mktemp("kernels")
    compile_kernels(compute_capabilities(), folder, names=["attention"])
    return Context(torch.device("cuda", 0), folder)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("query", [1, 2, 3, 5, 8, 16, 64])
@pytest.mark.parametrize("norm", [False, True])
def test_ragged_rows_equal_the_definition(context, dtype, head_dim, query, norm):
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": head_dim}
    tensors = case(RAGGED, query, norm=norm, dtype=DTYPES[dtype], **sizes)
    check(context, tensors, attributes(**sizes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("query", [1, 5, 40])
@pytest.mark.parametrize("writes", [True, False])
def test_sinks_value_norms_and_caches_of_earlier_layers_equal_the_definition(context, dtype, head_dim, query, writes):
    """Windows and runs, of layers that slide and of others."""
    sizes = {"heads": 16, "kv_heads": 2, "head_dim": head_dim}
    for sliding_window, norm in ((0, True), (70, False)):
        how = {"norm": norm, "sinks": True, "writes": writes, "dtype": DTYPES[dtype]}
        tensors = case([1, 64, 300], query, PACKED["ragged"], 7, **how, **sizes)
        check(context, tensors, attributes(**sizes, sliding_window=sliding_window, value_norm=1))


@pytest.mark.parametrize("splits", [1, 2, 8, 31])
def test_the_number_of_splits_changes_no_sink(context, splits):
    tensors = case([1, 64, 700, 1500], 5, sinks=True, dtype=BFLOAT16)
    check(context, tensors, attributes(), splits=splits)


@pytest.mark.parametrize("query", range(1, 17))
@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
def test_every_window_and_group_equals_the_definition(context, query, group):
    sizes = {"heads": 2 * group, "kv_heads": 2, "head_dim": 128}
    check(context, case([5, 130, 64 - query], query, dtype=BFLOAT16, **sizes), attributes(**sizes))


@pytest.mark.parametrize("batch", [1, 2, 8, 16, 33, 64])
@pytest.mark.parametrize("query", [1, 5])
def test_full_batches_equal_the_definition(context, batch, query):
    sizes = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    lengths = np.random.default_rng(batch).integers(1, 1100, batch).tolist()
    check(context, case(lengths, query, dtype=BFLOAT16, **sizes), attributes(**sizes))


@pytest.mark.parametrize("lengths", [[0], [37], [600, 0, 1]])
@pytest.mark.parametrize("query", [65, 512])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_prefill_chunks_equal_the_definition(context, lengths, query, head_dim):
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": head_dim}
    tensors = case(lengths, query, norm=True, dtype=np.dtype(np.float16), **sizes)
    if lengths == [0]:  # a request that begins, not a free row
        tensors["block_table"][0] = 1 + np.arange(tensors["block_table"].shape[1])
    check(context, tensors, attributes(**sizes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sliding_window", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("query", [1, 5, 70])
def test_sliding_windows_equal_the_definition(context, dtype, sliding_window, query):
    tensors = case([3, 64, 190, 500], query, dtype=DTYPES[dtype])
    check(context, tensors, attributes(sliding_window=sliding_window))


def test_nothing_before_the_sliding_window_is_read(context):
    """The blocks there may already belong to another request."""
    tensors, attention = case([500], 5, dtype=BFLOAT16), attributes(sliding_window=130)
    wanted = expected(tensors, attention)[0]
    on_gpu = on_device(tensors)
    for position in range(500 - 129):
        block = tensors["block_table"][0, position // 64]
        on_gpu["key_cache"][block, :, position % 64] = on_gpu["value_cache"][block, :, position % 64] = torch.nan
    launcher, mixed, _ = bind(context, on_gpu, attention)
    launcher.run()
    near = tolerance(BFLOAT16)
    np.testing.assert_allclose(to_numpy(mixed).astype(float), wanted.astype(float), rtol=near, atol=near)


@pytest.mark.parametrize("capacity", [64, 101, 512, 999])
@pytest.mark.parametrize("query", [1, 5, 40])
def test_a_linear_cache_is_one_block_per_row(context, capacity, query):
    lengths = [1, capacity // 2 - 10, capacity - query]
    tensors = case(lengths, query, block_size=capacity, max_blocks=1, dtype=np.dtype(np.float16))
    check(context, tensors, attributes())


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8, 31, 32])
@pytest.mark.parametrize("query", [1, 5, 100])
def test_the_number_of_splits_changes_nothing(context, splits, query):
    tensors = case([1, 64, 700, 1500], query, dtype=BFLOAT16)
    check(context, tensors, attributes(), splits=splits)


@pytest.mark.parametrize("query", [1, 5])
def test_splits_of_the_keys_of_heads_of_512_change_no_bit(context, query):
    sizes = {"heads": 16, "kv_heads": 2, "head_dim": 512}
    tensors, results = case([1, 64, 700, 1500], query, sinks=True, dtype=BFLOAT16, **sizes), []
    for splits in (1, 8):
        launcher, mixed, _ = bind(context, on_device(tensors), attributes(**sizes), splits)
        launcher.run()
        results.append(mixed)
    assert torch.equal(*results)
    with pytest.raises(ValueError, match="splits: 1 or 8 are needed for heads of 512, got 2"):
        bind(context, on_device(tensors), attributes(**sizes), 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("runs", PACKED)
@pytest.mark.parametrize("norm", [False, True])
def test_runs_of_prompts_and_windows_equal_the_definition(context, dtype, head_dim, runs, norm):
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": head_dim}
    tensors = case([1, 100], 5, PACKED[runs], 7, norm=norm, dtype=DTYPES[dtype], **sizes)
    check(context, tensors, attributes(**sizes))


@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
@pytest.mark.parametrize("runs", PACKED)
def test_runs_of_prompts_without_windows_equal_the_definition(context, group, runs):
    sizes = {"heads": 2 * group, "kv_heads": 2, "head_dim": 128}
    check(context, case([7], 0, PACKED[runs], 3, dtype=BFLOAT16, **sizes), attributes(**sizes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sliding_window", [1, 63, 64, 200])
@pytest.mark.parametrize("runs", ["one run", "ragged"])
def test_sliding_windows_of_runs_equal_the_definition(context, dtype, sliding_window, runs):
    tensors = case([3, 190], 2, PACKED[runs], dtype=DTYPES[dtype])
    check(context, tensors, attributes(sliding_window=sliding_window))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_window_after_a_run_of_the_same_text_sees_the_run(context, dtype):
    tensors = case([500], 5, [(30, 470)], dtype=DTYPES[dtype])
    tensors["block_table"] = tensors["prompt_table"].copy()
    check(context, tensors, attributes())


@pytest.mark.parametrize("runs", [[(4000, 512)], [(0, 2048)], [(8000, 40), (100, 900)]])
def test_long_runs_equal_the_definition(context, runs):
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": 128}
    for max_blocks in (150, 151):  # even: tables that cuDNN can read; odd: our kernel
        check(context, case([5], 1, runs, max_blocks=max_blocks, dtype=BFLOAT16, **sizes), attributes(**sizes))


def test_windows_have_the_same_bits_with_and_without_prompts(context):
    tensors, attention = case([9, 300], 5, PACKED["ragged"], dtype=BFLOAT16), attributes()
    alone = tensors | {
        "qkv": tensors["qkv"][:10],
        "prompt_rows": tensors["prompt_rows"][:0],
        "prompt_starts": tensors["prompt_starts"][:1],
        "prompt_index": tensors["prompt_index"][:0],
        "prompt_table": tensors["prompt_table"][:0],
    }
    results = []
    for each in (tensors, alone):
        launcher, mixed, _ = bind(context, on_device(each), attention)
        launcher.run()
        results.append(mixed[:10].clone())
    assert torch.equal(*results)


@pytest.mark.parametrize("query", [1, 5, 100])
def test_a_captured_call_serves_other_lengths_tables_and_runs(context, query):
    rows = [([9, 300, 70], [(9, 30), (0, 70)]), ([1100, 64, 2], [(700, 65), (1, 20)])]
    first, second = (
        case(lengths, query, runs, 100 - sum(new for _, new in runs), max_blocks=20, dtype=BFLOAT16)
        for lengths, runs in rows
    )
    attention, on_gpu = attributes(), on_device(first)
    launcher, mixed, _ = bind(context, on_gpu, attention)
    launcher.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.run()
    for tensors in (second, first, second):
        fresh = on_device(tensors)
        for name in on_gpu:
            if on_gpu[name] is not None:
                on_gpu[name].copy_(fresh[name])
        mixed.fill_(torch.nan)
        graph.replay()
        eager, alone, _ = bind(context, fresh, attention)
        eager.run()
        real = len(mixed) - int((fresh["prompt_rows"] < 0).sum())
        assert torch.equal(mixed[:real], alone[:real])
        assert torch.equal(on_gpu["key_cache"].nan_to_num(), fresh["key_cache"].nan_to_num())


def test_the_same_call_gives_the_same_bits(context):
    on_gpu, attention = on_device(case([1000] * 16, 5, dtype=BFLOAT16)), attributes()
    launcher, mixed, _ = bind(context, on_gpu, attention)
    launcher.run()
    first = mixed.clone()
    for _ in range(200):
        mixed.fill_(torch.nan)
        launcher.run()
        assert torch.equal(mixed, first)
