"""Collective operators on two GPUs: the bits of the reference, on both, eagerly and from graphs."""

import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from tandemrt.plugins.kernels.collectives import DeviceRanks, launch_all_reduce
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.operators.launch import Context
from tandemrt.plugins.operators.shared_ranks import SharedRanks, shared_bytes
from tandemrt.plugins.reference.collectives import all_gather, all_reduce
from tandemrt.runtime.workers.ranks import RankProcesses
from tests.gpu.here import compute_capabilities
from tests.gpu.ranked import DTYPES, GATHERS, SHAPES, context, part, publication, results, same, serve

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RankProcesses, SharedRanks, Context]]:
    folder: Path = tmp_path_factory.mktemp("kernels")
    compile_kernels(compute_capabilities(), folder, names=["collectives"])
    processes = RankProcesses(2, serve, (str(folder),), shared_bytes(2, 1 << 20), 8)
    try:
        shared = SharedRanks(0, processes.parts, processes.arrived, processes.require)
        on = context(shared, folder)
        processes.wait_until_opened()
        yield processes, shared, on
    finally:
        processes.close()


def command(processes: RankProcesses, number: int) -> None:
    processes.command(lambda memory: memory.__setitem__(0, number))


def array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def test_both_gpus_have_the_bits_of_the_reference(ranks: tuple[RankProcesses, SharedRanks, Context]) -> None:
    processes, shared, on = ranks
    command(processes, 1)
    outputs = results(on)
    assert same(shared, outputs), "the ranks differ"
    left = iter(outputs)
    for dtype in DTYPES:
        for shape in SHAPES:
            expected = all_reduce(array(part(0, shape, dtype)), [array(part(1, shape, dtype))])
            np.testing.assert_array_equal(array(next(left)).view(np.uint8), expected.view(np.uint8))
        for rows, columns, width in GATHERS:
            parts = [array(part(rank, (rows, columns), dtype)) for rank in range(2)]
            expected = all_gather(parts[0], width, parts[1:])
            np.testing.assert_array_equal(array(next(left)).view(np.uint8), expected.view(np.uint8))


def test_a_rank_receives_the_inputs_that_rank_0_publishes(ranks: tuple[RankProcesses, SharedRanks, Context]) -> None:
    processes, shared, on = ranks
    first = torch.arange(100, dtype=torch.int32, device=on.device)
    second = torch.arange(1000, 1400, dtype=torch.int32, device=on.device)
    call = publication(on, {"first": first, "second": second}, [0, 448])
    command(processes, 2)
    for _ in range(3):
        call.run()
        first += 1
        torch.cuda.synchronize()
    received = shared.exchange(np.zeros(1024, np.int32))[1]
    np.testing.assert_array_equal(received[:100], np.arange(100) + 2)
    np.testing.assert_array_equal(received[112:512], np.arange(1000, 1400))


def test_a_kernel_returns_when_its_ranks_abort(ranks: tuple[RankProcesses, SharedRanks, Context]) -> None:
    _, _, on = ranks
    assert isinstance(on.ranks, DeviceRanks)
    x = torch.ones(8, 64, device=on.device)
    call = launch_all_reduce({"x": x, "sum": torch.empty_like(x)}, {}, on)
    call.run()  # the other rank never runs it
    event = torch.cuda.Event()
    event.record()
    time.sleep(0.2)
    assert not event.query()
    on.ranks.abort()
    event.synchronize()
