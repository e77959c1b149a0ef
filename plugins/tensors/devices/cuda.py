"""A CUDA GPU, through torch. Another maker's GPU is a module like this one, and kernels."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from tandemrt.engines.contract.gpus import Capability
from tandemrt.plugins.tensors.devices.device import Device


class CudaDevice(Device):
    """A GPU that runs CUDA."""

    on_host = False

    def numbered(self, offset: int = 0) -> torch.device:
        index = torch.cuda.current_device() if self.handle.index is None else self.handle.index
        return torch.device("cuda", index + offset)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.handle)

    @property
    def capability(self) -> Capability:
        return torch.cuda.get_device_capability(self.handle)

    @property
    def processors(self) -> int:
        return int(torch.cuda.get_device_properties(self.handle).multi_processor_count)

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.handle)  # type: ignore[no-untyped-call]

    def current_stream(self) -> int:
        return int(torch.cuda.current_stream(self.handle).cuda_stream)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.handle)

    def select(self) -> None:
        torch.cuda.set_device(self.handle)

    def new_event(self) -> Any:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self, stream: Any) -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait_on_device(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.handle).synchronize()

    def timestamp(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def has_passed(self, timestamp: Any) -> bool:
        return bool(timestamp.query())

    def seconds_between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end) / 1e3)

    def host_zeros(self, *shape: int, dtype: Any) -> Any:
        from tandemrt.plugins.tensors.torch import zeros

        return zeros(*shape, dtype=dtype, pin_memory=True)

    def pinned(self, tensor: Any) -> Any:
        return tensor.pin_memory()

    def total_memory(self) -> int:
        return int(torch.cuda.get_device_properties(self.handle).total_memory)

    def free_memory(self) -> int:
        return int(torch.cuda.mem_get_info(self.handle)[0])

    def used_memory(self) -> int | None:
        free, total = torch.cuda.mem_get_info(self.handle)
        return int(total - free)

    def release_memory(self) -> None:
        torch.cuda.empty_cache()

    def capture(self, work: Callable[[], None], *, waits: bool, memory: Any) -> Any:
        graph = torch.cuda.CUDAGraph()
        # Relaxed: other threads may use CUDA and libraries may allocate; that does not become part of the graph.
        if waits:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
                work()
            return graph
        graph.capture_begin(pool=memory, capture_error_mode="relaxed")
        with ExitStack() as always:
            always.callback(graph.capture_end)
            work()
        return graph

    def is_graph(self, value: Any) -> bool:
        return isinstance(value, torch.cuda.CUDAGraph)

    def graph_memory(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()
