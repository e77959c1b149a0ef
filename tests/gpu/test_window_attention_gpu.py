"""The kernels of ``window_attention`` against its definition, on a CUDA device.

Every cache entry that no row has written is NaN, and every table is in random order, in every case.
"""

import numpy as np
import pytest
import torch

from tandemrt.plugins.kernels.attention import AttentionLauncher
from tandemrt.plugins.kernels.attention_plan import Workspace
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.kernels.module import KernelModule
from tests.engine.attention_cases import BFLOAT16, assert_close, attributes, case, expected, tolerance
from tests.gpu.here import compute_capabilities

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": BFLOAT16}
RAGGED = [0, 1, 63, 64, 65, 200, 511]


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    compile_kernels(compute_capabilities(), folder, names=["attention"])
    return KernelModule.open(folder, "attention")


@pytest.fixture(scope="module")
def workspace():
    """One for all calls of this file, whatever their shape: each must leave it as it found it."""
    return Workspace("cuda")


def on_device(tensors):
    return {name: None if array is None else _to_torch(array).cuda() for name, array in tensors.items()}


def bind(module, workspace, tensors, given, splits=None):
    """The launcher for tensors on the device, and ``mixed`` with room behind it that must stay as it is."""
    batch, query, _ = tensors["qkv"].shape
    width = given["heads"] * tensors["key_cache"].shape[-1]
    room = torch.full((batch * query * width + 256,), 77.0, dtype=tensors["qkv"].dtype, device="cuda")
    mixed = room[:-256].view(batch, query, width)
    launcher = AttentionLauncher(module, *tensors.values(), mixed, workspace=workspace, splits=splits, **given)
    return launcher, mixed, room[-256:]


def check(module, workspace, tensors, given, splits=None):
    held = on_device(tensors)
    launcher, mixed, behind = bind(module, workspace, held, given, splits)
    launcher.run()
    found = [_to_numpy(each) for each in (mixed, held["key_cache"], held["value_cache"])]
    assert_close(found, expected(tensors, given), tensors, tolerance(tensors["qkv"].dtype))
    assert (behind == 77.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("query", [1, 2, 3, 5, 8, 16, 64])
@pytest.mark.parametrize("norm", [False, True])
def test_ragged_rows_equal_the_definition(module, workspace, dtype, head_dim, query, norm):
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": head_dim}
    tensors = case(RAGGED, query, norm=norm, dtype=DTYPES[dtype], **sizes)
    check(module, workspace, tensors, attributes(**sizes))


@pytest.mark.parametrize("query", range(1, 17))
@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
def test_every_window_and_group_equals_the_definition(module, workspace, query, group):
    sizes = {"heads": 2 * group, "kv_heads": 2, "head_dim": 128}
    check(module, workspace, case([5, 130, 64 - query], query, dtype=BFLOAT16, **sizes), attributes(**sizes))


@pytest.mark.parametrize("batch", [1, 2, 8, 16, 33, 64])
@pytest.mark.parametrize("query", [1, 5])
def test_full_batches_equal_the_definition(module, workspace, batch, query):
    sizes = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    lengths = np.random.default_rng(batch).integers(1, 1100, batch).tolist()
    check(module, workspace, case(lengths, query, dtype=BFLOAT16, **sizes), attributes(**sizes))


@pytest.mark.parametrize("lengths", [[0], [37], [600, 0, 1]])
@pytest.mark.parametrize("query", [65, 512])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_prefill_chunks_equal_the_definition(module, workspace, lengths, query, head_dim):
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": head_dim}
    tensors = case(lengths, query, norm=True, dtype=np.dtype(np.float16), **sizes)
    if lengths == [0]:  # a request that begins, not a free row
        tensors["block_table"][0] = 1 + np.arange(tensors["block_table"].shape[1])
    check(module, workspace, tensors, attributes(**sizes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sliding_window", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("query", [1, 5, 70])
def test_sliding_windows_equal_the_definition(module, workspace, dtype, sliding_window, query):
    tensors = case([3, 64, 190, 500], query, dtype=DTYPES[dtype])
    check(module, workspace, tensors, attributes(sliding_window=sliding_window))


def test_nothing_before_the_sliding_window_is_read(module, workspace):
    """The blocks there may already belong to somebody else."""
    tensors, given = case([500], 5, dtype=BFLOAT16), attributes(sliding_window=130)
    wanted = expected(tensors, given)[0]
    held = on_device(tensors)
    for position in range(500 - 129):
        block = tensors["block_table"][0, position // 64]
        held["key_cache"][block, :, position % 64] = held["value_cache"][block, :, position % 64] = torch.nan
    launcher, mixed, _ = bind(module, workspace, held, given)
    launcher.run()
    near = tolerance(BFLOAT16)
    np.testing.assert_allclose(_to_numpy(mixed).astype(float), wanted.astype(float), rtol=near, atol=near)


@pytest.mark.parametrize("capacity", [64, 101, 512, 999])
@pytest.mark.parametrize("query", [1, 5, 40])
def test_a_linear_cache_is_one_block_per_row(module, workspace, capacity, query):
    lengths = [1, capacity // 2 - 10, capacity - query]
    tensors = case(lengths, query, block_size=capacity, max_blocks=1, dtype=np.dtype(np.float16))
    check(module, workspace, tensors, attributes())


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8, 31, 32])
@pytest.mark.parametrize("query", [1, 5, 100])
def test_the_number_of_splits_changes_nothing(module, workspace, splits, query):
    tensors = case([1, 64, 700, 1500], query, dtype=BFLOAT16)
    check(module, workspace, tensors, attributes(), splits=splits)


@pytest.mark.parametrize("query", [1, 5, 100])
def test_a_captured_call_serves_other_lengths_and_tables(module, workspace, query):
    first, second = (case(lengths, query, max_blocks=20, dtype=BFLOAT16) for lengths in ([9, 300, 70], [1100, 64, 2]))
    given, held = attributes(), on_device(first)
    launcher, mixed, _ = bind(module, workspace, held, given)
    launcher.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.run()
    for tensors in (second, first, second):
        fresh = on_device(tensors)
        for name in held:
            if held[name] is not None:
                held[name].copy_(fresh[name])
        mixed.fill_(torch.nan)
        graph.replay()
        eager, alone, _ = bind(module, workspace, fresh, given)
        eager.run()
        assert torch.equal(mixed, alone)
        assert torch.equal(held["key_cache"].nan_to_num(), fresh["key_cache"].nan_to_num())


def test_the_same_call_gives_the_same_bits(module, workspace):
    held, given = on_device(case([1000] * 16, 5, dtype=BFLOAT16)), attributes()
    launcher, mixed, _ = bind(module, workspace, held, given)
    launcher.run()
    first = mixed.clone()
    for _ in range(200):
        mixed.fill_(torch.nan)
        launcher.run()
        assert torch.equal(mixed, first)


def _to_torch(array):
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _to_numpy(tensor):
    tensor = tensor.cpu()
    return tensor.view(torch.int16).numpy().view(BFLOAT16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
