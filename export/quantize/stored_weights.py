"""Read quantized weights of a checkpoint in every supported format, and name the tensors that store them."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.graph.low_bit_format import LowBitFormat
from tandemrt.export.quantize.float4 import GROUPS, Float4Matrix, read_mxfp4, read_nvfp4, read_powers
from tandemrt.export.quantize.gguf.packed import gguf_form, gguf_parts, gguf_shape, read_gguf, read_gguf_mxfp4
from tandemrt.export.quantize.groups import QuantizedMatrix
from tandemrt.export.quantize.stored_integers import integer_format, integer_shape, read_integers, read_reordered
from tandemrt.export.quantize.table4 import TENSORS as TABLE4_TENSORS
from tandemrt.export.quantize.table4 import read_table4, table4_shape
from tandemrt.export.quantize.typed_tensors import FLOATS, find, typed
from tandemrt.export.read.checkpoint import Checkpoint, StoredTensor
from tandemrt.export.read.quantization.scheme import BITS, Quantization, Scheme
from tandemrt.export.read.values import read_values, require_scales

_GLOBAL = {"compressed-tensors": "weight_global_scale", "modelopt": "weight_scale_2"}  # NVFP4's scale of a tensor


def is_quantized(module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme) -> bool:
    """Whether the tensors of ``scheme`` are there: the patterns of a config may also match norms."""
    if scheme.layout == "gguf":
        return f"{module}.weight" in tensors
    return sum(name in tensors for name in tensor_names(module, scheme)) > 1


def tensor_names(module: str, scheme: Scheme) -> tuple[str, ...]:
    """Return the names of the tensors that store the weight of ``module``; some of them are optional."""
    if scheme.layout == "gguf":
        kinds: tuple[str, ...] = ("weight",)
    elif scheme.weight == "nvfp4":
        inputs = "input_global_scale" if scheme.layout == "compressed-tensors" else "input_scale"
        kinds = (_float4_values(scheme), "weight_scale", _GLOBAL[scheme.layout], inputs)
    elif scheme.weight == "mxfp4":
        kinds = (_float4_values(scheme), "scales" if scheme.layout == "mxfp4" else "weight_scale", "input_scale")
    elif scheme.layout == "compressed-tensors" and scheme.packed:
        kinds = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", *_INPUTS)
    elif scheme.layout == "integers":
        kinds = ("weight", "weight_scale", "weight_zero_point", *_INPUTS)
    elif scheme.layout == "bitsandbytes":
        kinds = ("weight", "SCB", "weight_format") if scheme.weight == "int8" else TABLE4_TENSORS
    elif scheme.packed:
        kinds = ("qweight", "scales", "qzeros", "g_idx")
    else:
        kinds = ("weight", scheme.scale, scheme.input_scale)
    return tuple(f"{module}.{kind}" for kind in kinds)


_INPUTS = ("input_scale", "input_zero_point")  # of inputs that a build leaves unquantized


def require_stored(checkpoint: Checkpoint, quantization: Quantization, *, keeps: bool) -> None:
    """Raise BadCheckpoint, by name, if packed weights contradict the config, before a build writes anything.

    ``checkpoint`` has the graph's tensor names (with_graph_names). The sizes of all weights are compared, and the
    smallest weight of each scheme is read. ``keeps``: the build keeps the integers, which must be in groups in their
    order. Weights of a GGUF file are not compared: their config was written with them.
    """
    smallest: dict[Scheme, tuple[int, str]] = {}
    for module in sorted({name.rpartition(".")[0] for name in checkpoint.tensors}):
        scheme = quantization.scheme(*checkpoint.names_of(module))
        if scheme is None or not scheme.packed or scheme.layout == "gguf":
            continue
        if is_quantized(module, checkpoint.tensors, scheme):
            rows, inner = shape_of(module, checkpoint.tensors, scheme)
            smallest[scheme] = min(smallest.get(scheme, (rows * inner, module)), (rows * inner, module))
    for scheme, (_, module) in smallest.items():
        (read_low_bit if keeps else read_matrix)(module, checkpoint.tensors, scheme)


def packed_format(scheme: Scheme, inner: int, *, on_gpu: bool) -> LowBitFormat:
    """Return the format in which a build writes a packed weight with ``inner`` inputs.

    ``on_gpu``: 4-bit floats stay floats. On a CPU they choose among integers of 8 bits.
    """
    if (group := GROUPS.get(scheme.weight)) is not None:
        return LowBitFormat(4, group, floats=on_gpu, table="" if on_gpu else "mxfp4")
    if scheme.layout == "gguf":
        return gguf_form(scheme, on_gpu=on_gpu)
    return integer_format(scheme, inner)


def is_rounded_again(form: LowBitFormat, bits: int | None) -> bool:
    """Return whether a weight of this ``packed_format`` is rounded to ``bits`` where weights are rounded again."""
    return bits is not None and bits < form.bits and not form.floats


def shape_of(module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme) -> tuple[int, int]:
    """Return the outputs and inputs of the weight of ``module``. Raises BadCheckpoint for a malformed tensor."""
    if scheme.layout == "gguf":
        return gguf_shape(module, tensors, scheme)
    if scheme.weight in BITS:
        return integer_shape(module, tensors, scheme)
    if scheme.weight == "table4":
        return table4_shape(module, tensors)
    if scheme.weight in ("float8_e4m3fn", "mxfp8"):
        weight = tensors.get(f"{module}.weight")
        if weight is None or len(weight.shape) != 2 or weight.dtype != "float8_e4m3fn":
            raise BadCheckpoint(
                f"tensor {quoted(f'{module}.weight')} should be a float8_e4m3fn matrix by its quantization_config, it "
                f"is {'missing' if weight is None else f'{weight.dtype}{list(weight.shape)}'}; quantize the model again"
            )
        rows, inner = weight.shape[::-1] if weight.transposed else weight.shape
        return rows, inner
    tensor, group = find(tensors, f"{module}.{_float4_values(scheme)}"), scheme.group_shape[1]
    if scheme.layout == "mxfp4":
        rows, groups, _ = (*tensor.shape, 0, 0, 0)[:3]  # the next line rejects tensors of another rank
        typed(tensors, tensor.name, (rows, groups, group // 2), ("uint8",))
        return rows, groups * group
    rows, count = (*tensor.shape, 0, 0)[:2]
    typed(tensors, tensor.name, (rows, count * 2 // group * group // 2), ("uint8",))
    return rows, count * 2


def low_bit_parts(
    module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme
) -> Iterator[Callable[[], QuantizedMatrix]]:
    """Yield functions that read some rows of the packed weight of ``module``. Raises as ``read_low_bit`` does."""
    if scheme.layout == "gguf":
        yield from gguf_parts(module, tensors, scheme)
    else:
        yield partial(read_low_bit, module, tensors, scheme)


def read_low_bit(module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme) -> QuantizedMatrix:
    """Read the packed weight of ``module``. Raises BadCheckpoint, by name, for tensors that do not fit."""
    if scheme.layout == "gguf":
        return read_gguf(module, tensors, scheme)
    if scheme.weight in BITS:
        return read_integers(module, tensors, scheme)
    return read_float4(module, tensors, scheme).as_integers


def read_float4(module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme) -> Float4Matrix:
    """Read the weight of ``module``, floats of 4 bits. Raises BadCheckpoint, by name, for tensors that do not fit."""
    if scheme.layout == "gguf":
        return read_gguf_mxfp4(module, tensors, scheme)
    rows, inner = shape_of(module, tensors, scheme)
    values, groups = find(tensors, f"{module}.{_float4_values(scheme)}"), (rows, inner // scheme.group_shape[1])
    if scheme.weight == "mxfp4":
        kind = "scales" if scheme.layout == "mxfp4" else "weight_scale"
        return read_mxfp4(values, typed(tensors, f"{module}.{kind}", groups, ("uint8",)))
    if f"{module}.pre_quant_scale" in tensors:
        raise BadCheckpoint(
            f"{module}: pre_quant_scale multiplies inputs, which the exporter does not implement; choose a checkpoint "
            "without it, such as NVFP4 without AWQ"
        )
    scales = typed(tensors, f"{module}.weight_scale", groups, ("float8_e4m3fn",))
    name = f"{module}.{_GLOBAL[scheme.layout]}"
    of_tensor = typed(tensors, name, () if find(tensors, name).shape == () else (1,), ("float32",))
    return read_nvfp4(values, scales, of_tensor, divides=scheme.layout == "compressed-tensors")


def read_matrix(module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme | None) -> npt.NDArray[np.float32]:
    """Read the weight of ``module``, stored in any form, as float32 [outputs, inputs].

    Raises BadCheckpoint for tensors of another shape or dtype than ``scheme`` implies.
    """
    if scheme is not None and scheme.weight in BITS and scheme.layout != "gguf":
        return read_reordered(module, tensors, scheme)
    if scheme is not None and scheme.packed:
        return read_low_bit(module, tensors, scheme).dequantized
    if scheme is not None and scheme.weight == "table4":
        return read_table4(module, tensors)
    weight = find(tensors, f"{module}.weight")
    matrix = read_values(weight).astype(np.float32)
    if weight.transposed:
        matrix = np.ascontiguousarray(matrix.T)
    if scheme is None:
        return matrix
    rows, inner = matrix.shape
    if scheme.weight == "mxfp8":
        powers = read_powers(typed(tensors, f"{module}.{scheme.scale}", scheme.scales(rows, inner), ("uint8",)))
        return matrix * powers.repeat(scheme.group_shape[1], axis=1)[:, :inner]
    scales = read_scales(module, tensors, scheme, rows, inner)
    tall, wide = (size or full for size, full in zip(scheme.group_shape, (rows, inner), strict=True))
    return matrix * scales.repeat(tall, axis=0)[:rows].repeat(wide, axis=1)[:, :inner]


def read_scales(
    module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme, rows: int, inner: int
) -> npt.NDArray[np.float32]:
    """Read the scales of a float8 weight [rows, inner]: float32 [groups of outputs, groups of inputs].

    Raises BadCheckpoint for a tensor of another shape or dtype than ``scheme`` implies.
    """
    counts = scheme.scales(rows, inner)
    tensor = find(tensors, f"{module}.{scheme.scale}")
    flat = {counts, counts[:1]} if counts[1] == 1 else {counts}
    if tensor.shape not in flat | ({()} if counts == (1, 1) else set()) or tensor.dtype not in FLOATS:
        raise BadCheckpoint(
            f"{tensor.file}: tensor {quoted(tensor.name)} should be {' or '.join(FLOATS)}{list(counts)} by its "
            f"quantization_config, it is {tensor.dtype}{list(tensor.shape)}"
        )
    require_scales(tensor)
    return read_values(tensor).astype(np.float32).reshape(counts)


def _float4_values(scheme: Scheme) -> str:
    return {"mxfp4": "blocks", "modelopt": "weight"}.get(scheme.layout, "weight_packed")
