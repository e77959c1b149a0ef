"""What ranks on GPUs run in tests; their processes import this module."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.collectives import (
    DeviceRanks,
    launch_all_gather,
    launch_all_reduce,
    publish,
    receive,
)
from tandemrt.plugins.operators.launch import Context
from tandemrt.plugins.operators.shared_ranks import SharedRanks
from tandemrt.runtime.workers.ranks import Link

MOST, INPUTS = 64 << 20, 1 << 20
SHAPES = [(1, 64), (5, 4096), (33, 8192), (2, 64), (320, 8192), (2048, 8192)]
GATHERS = [(1, 160, 320), (5, 161, 321), (7, 64128, 128256), (3, 5, 9)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + shape[0])
    return (4 * torch.randn(shape, generator=generator)).to(dtype)


def context(shared: SharedRanks, kernels: Path) -> Context:
    device = torch.device("cuda", shared.rank)
    torch.cuda.set_device(device)
    return Context(device, kernels, ranks=DeviceRanks(shared, device, MOST, INPUTS))


def results(on: Context) -> list[torch.Tensor]:
    """Run every case eagerly twice and from a graph twice, and return the last results, on the host."""
    assert on.ranks is not None
    outputs = []
    for dtype in DTYPES:
        for shape in SHAPES:
            x = part(on.ranks.rank, shape, dtype).to(on.device)
            total = torch.zeros_like(x)
            outputs.append(_repeated(launch_all_reduce({"x": x, "sum": total}, {}, on), total))
        for rows, columns, width in GATHERS:
            x = part(on.ranks.rank, (rows, columns), dtype).to(on.device)
            gathered = torch.zeros(rows, width, dtype=dtype, device=on.device)
            outputs.append(_repeated(launch_all_gather({"x": x, "gathered": gathered}, {"width": width}, on), gathered))
    return outputs


def _repeated(call: Any, out: torch.Tensor) -> torch.Tensor:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
            call.run()
        out.fill_(7)
        for _ in range(2):
            graph.replay()
        stream.synchronize()
    return out.cpu()


def serve(link: Link, kernels: str) -> None:
    """1: compute all results and compare them with rank 0's. 2: receive inputs. 3: wait for a rank that never comes."""
    shared = SharedRanks(link.rank, link.parts, link.arrived)
    on = context(shared, Path(kernels))
    memory = torch.zeros(INPUTS // 4, dtype=torch.int32, device=on.device)
    waiting = receive(on, {"memory": memory[:1024]})

    def run(command: np.ndarray) -> None:
        if command[0] == 1:
            for result in results(on):
                bits = result.view(torch.uint8).numpy().reshape(-1)
                for begin in range(0, len(bits), 1 << 20):
                    shared.exchange(bits[begin : begin + (1 << 20)])
        if command[0] == 2:
            for _ in range(3):
                waiting.run()
            shared.exchange(memory[:1024].cpu().numpy())

    link.opened()
    link.run_commands(run)


def publication(on: Context, tensors: dict[str, torch.Tensor], places: list[int]) -> Any:
    return publish(on, tensors, places)


def same(shared: SharedRanks, results: list[torch.Tensor]) -> bool:
    """Whether all ranks have the bits of ``results``."""
    equal = True
    for result in results:
        bits = result.view(torch.uint8).numpy().reshape(-1)
        for begin in range(0, len(bits), 1 << 20):
            parts = shared.exchange(bits[begin : begin + (1 << 20)])
            equal &= all(np.array_equal(parts[0], other) for other in parts[1:])
    return equal
