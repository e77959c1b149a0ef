"""com.microsoft.PagedAttention of onnxruntime-gpu, to compare ``window_attention`` with."""

import math
from collections.abc import Callable
from typing import Any

import onnx
import onnxruntime
import torch
from onnx import helper

from tandemrt.engines.contract.dtypes import ONNX

BLOCK = 256
_INPUTS = ("qkv", "key_cache", "value_cache", "cumulative", "past", "table", "cosine", "sine", "slots", "bounds")


def paged_attention(shape: Any, replay: Callable[[Callable[[], None], int, torch.cuda.Stream], float]) -> float | None:
    """Return microseconds per layer, rotary embedding and cache update included.

    ``replay`` times a run of all layers on a stream. Returns None without onnxruntime's CUDA provider.
    """
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return None
    blocks = math.ceil((shape.context + shape.new) / BLOCK)
    tokens = shape.batch * shape.new

    def integers(values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32).contiguous()

    table = integers(torch.arange(shape.batch * blocks).view(shape.batch, blocks))
    positions = shape.context + torch.arange(shape.new)
    slots = table[:, positions // BLOCK].long() * BLOCK + positions % BLOCK
    angles = shape.normal(blocks * BLOCK, shape.head_dim // 2)
    shared = {
        "qkv": shape.normal(tokens, (shape.heads + 2 * shape.kv_heads) * shape.head_dim),
        "cumulative": integers(torch.arange(shape.batch + 1) * shape.new).cuda(),
        "past": integers([shape.context] * shape.batch).cuda(),
        "table": table.cuda(),
        "cosine": angles.cos(),
        "sine": angles.sin(),
        "slots": integers(slots.flatten()).cuda(),
        "bounds": integers([shape.new, shape.context + shape.new]),
        "mixed": shape.normal(tokens, shape.heads * shape.head_dim),
    }
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    size = (shape.batch * blocks, BLOCK, shape.kv_heads, shape.head_dim)
    layers = [
        shared | {name: shape.normal(*size) for name in ("key_cache", "value_cache")} for _ in range(shape.layers)
    ]
    session = _session(shape, layers[0], stream)
    bindings = [_bind(session, tensors) for tensors in layers]

    def run() -> None:
        for binding in bindings:
            session.run_with_iobinding(binding, options)

    return replay(run, shape.layers, stream)


def _session(shape: Any, tensors: dict[str, torch.Tensor], stream: Any) -> onnxruntime.InferenceSession:
    def value(name: str, like: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, _element(tensors[like]), tensors[like].shape)

    qkv, keys, values, cumulative, past, table, cosine, sine, slots, bounds = _INPUTS
    inputs = [qkv, "", "", keys, values, cumulative, past, table, cosine, sine, slots, "", "", "", "", "", bounds]
    attributes = {"num_heads": shape.heads, "kv_num_heads": shape.kv_heads, "do_rotary": 1}
    node = helper.make_node(
        "PagedAttention", inputs, ["mixed", "key_out", "value_out"], domain="com.microsoft", **attributes
    )
    outputs = [value("mixed", "mixed"), value("key_out", "key_cache"), value("value_out", "value_cache")]
    graph = helper.make_graph([node], "paged", [value(name, name) for name in _INPUTS], outputs)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    provider = {"user_compute_stream": str(stream.cuda_stream), "use_ep_level_unified_stream": "1"}
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=[("CUDAExecutionProvider", provider)])


def _bind(session: onnxruntime.InferenceSession, tensors: dict[str, torch.Tensor]) -> onnxruntime.IOBinding:
    binding = session.io_binding()

    def place(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.device.type, 0, _element(tensor), list(tensor.shape), tensor.data_ptr()

    for name in _INPUTS:
        binding.bind_input(name, *place(tensors[name]))
    for name, source in (("mixed", "mixed"), ("key_out", "key_cache"), ("value_out", "value_cache")):
        binding.bind_output(name, *place(tensors[source]))
    return binding


def _element(tensor: torch.Tensor) -> int:
    return ONNX[str(tensor.dtype).removeprefix("torch.")]
