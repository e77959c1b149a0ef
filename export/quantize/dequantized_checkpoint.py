"""Write a checkpoint whose quantized weights become unquantized ones, for backends without matmuls for them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tandemrt.engines.options.build_listener import Progress
from tandemrt.export.quantize.checkpoint import FILE
from tandemrt.export.quantize.dequantize import dequantized_entry
from tandemrt.export.quantize.stored_weights import is_quantized, tensor_names
from tandemrt.export.quantize.writer import copied, write_safetensors
from tandemrt.export.read.checkpoint import Checkpoint, read_header
from tandemrt.export.read.fused_tensors import stores_transposed_experts
from tandemrt.export.read.quantization.scheme import Quantization, Scheme
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tensors import with_graph_names


@dataclass(frozen=True)
class DequantizedCheckpoint:
    """The written ``checkpoint``; ``weights``: how many were dequantized, ``before`` and ``after``: their bytes."""

    checkpoint: Checkpoint
    weights: int
    before: int
    after: int


def write_dequantized(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    quantization: Quantization,
    folder: Path,
    dtype: str,
    progress: Progress | None = None,
) -> DequantizedCheckpoint:
    """Write ``checkpoint`` to a file in ``folder`` with dequantized weights in ``dtype``; other tensors are copied.

    The config of the result has no quantized weights; scales of keys and values stay. One matrix is in memory at a
    time. Raises BadCheckpoint for a weight that contradicts its config.
    """
    joined = spec.experts is not None and spec.experts.gate_up != "separate"
    transposed = joined and stores_transposed_experts(checkpoint, spec)  # what reads the result expects one order
    checkpoint = with_graph_names(checkpoint, spec)
    tensors = checkpoint.tensors
    schemes = dict(_quantized(checkpoint, quantization))
    stored = {name for module, scheme in schemes.items() for name in tensor_names(module, scheme)} & set(tensors)
    entries = [
        dequantized_entry(
            f"{module}.weight", module, tensors, scheme, dtype, transposed=transposed and ".mlp.experts." in module
        )
        for module, scheme in schemes.items()
    ]
    kept = [copied(tensor) for name, tensor in tensors.items() if name not in stored]
    file = folder / FILE
    write_safetensors(file, [*entries, *kept], progress=progress)
    config = {name: value for name, value in checkpoint.config.items() if name != "quantization_config"}
    if quantization.float8_cache:
        cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
        left = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": cache}
        config["quantization_config"] = left
    # Another folder than the source's: that may hold a hf_quant_config.json.
    written = Checkpoint(folder, config, read_header(file), (file,))
    after = sum(written.tensors[f"{module}.weight"].nbytes for module in schemes)
    before = sum(tensors[name].nbytes for name in stored)
    return DequantizedCheckpoint(written, len(schemes), before, after)


def _quantized(checkpoint: Checkpoint, quantization: Quantization) -> Iterator[tuple[str, Scheme]]:
    """Yield the modules with quantized weights."""
    for module in sorted({name.rpartition(".")[0] for name in checkpoint.tensors}):
        scheme = quantization.scheme(*checkpoint.names_of(module))
        if scheme is not None and is_quantized(module, checkpoint.tensors, scheme):
            yield module, scheme
