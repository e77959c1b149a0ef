"""Cases of every operator, and the comparison of an implementation with its reference."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import torch

from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.plugins.implementations import launcher, reference
from tandemrt.plugins.operators.constants import ACTIVATIONS, SILU_EXPERTS, OutputNorm
from tandemrt.plugins.operators.float8 import FLOAT8
from tandemrt.plugins.operators.float_tiles import tiled
from tandemrt.plugins.operators.int4_layout import padded_inner, scales_of_output
from tandemrt.plugins.operators.k_quants_layout import K_QUANTS
from tandemrt.plugins.operators.launch import Context
from tandemrt.plugins.operators.low_bit_interleaved import by_tile, interleaved
from tandemrt.plugins.operators.tables4 import TABLES
from tandemrt.plugins.reference.float8 import quantize_tokens
from tandemrt.runtime.check.adjust_logits import edge_case_adjust_batch
from tests.engine import attention_cases, latent_cases, recurrent_cases
from tests.engine.operator_cases import case as window_case

KINDS = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
# Of a result of about one, after a few roundings on the way. Probabilities are float32 for logits of any dtype.
NEAR = {"float32": 2e-5, "float16": 2 * 2**-10, "bfloat16": 2 * 2**-7, "float8_e4m3fn": 0.13}
LOW_BIT = ("int4_matmul", "int8_matmul", "float4_matmul", *(f"{kind}_matmul" for kind in K_QUANTS))
LOW_BIT_EXPERTS = ("int4_experts", "int8_experts", "float4_experts", "float8_experts")
HALF_PRECISION = (*LOW_BIT, *LOW_BIT_EXPERTS)  # on a GPU in bfloat16 and float16
SENTINEL = -99
LARGEST = {"batch": 24, "window+1": 5}


@dataclass(frozen=True)
class Case:
    """``inputs`` by their names in the schema; an optional output that ``outputs`` leaves out is not asked for."""

    inputs: Mapping[str, np.ndarray]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int | None = None
    kind: str = "float32"  # what the definition rounds to on its way


def cases(operator: str, dtype: str) -> Iterator[Case]:
    """Awkward sizes and values, with T = ``dtype``."""
    for case in _GENERATORS[operator](KINDS[dtype]):
        assert set(case.inputs) <= {binding.name for binding in SCHEMAS[operator].inputs}
        yield case


def hold(operator: str, case: Case, context: Context) -> None:
    """Assert that the implementation on the context's device gives the reference result, and writes all of it."""
    schema = SCHEMAS[operator]
    tensors, wanted = allocated(operator, case, context.device)
    launcher(operator, context)(tensors, case.attributes, context).run()
    for binding, expected in zip(schema.outputs, wanted, strict=False):
        array, name = to_numpy(tensors[schema.in_place.get(binding.name, binding.name)]), f"{operator}: {binding.name}"
        exact = expected.dtype == FLOAT8 and operator == "quantize_tokens"
        if exact or np.issubdtype(expected.dtype, np.integer):
            np.testing.assert_array_equal(array, expected, err_msg=name)
        else:
            near = max(NEAR[str(each)] for each in (expected.dtype, case.kind))
            wide = (array.astype(np.float64), expected.astype(np.float64))
            np.testing.assert_allclose(*wide, rtol=near, atol=near, err_msg=name)


def allocated(operator: str, case: Case, device: torch.device) -> tuple[dict[str, torch.Tensor], list[np.ndarray]]:
    """Return the tensors that a launcher takes, outputs filled with a sentinel, and the reference results."""
    schema = SCHEMAS[operator]
    results = reference(operator)(**case.inputs, **case.attributes)
    wanted = [results] if isinstance(results, np.ndarray) else list(results)[: case.outputs]
    tensors = {name: to_torch(array.copy()).to(device) for name, array in case.inputs.items()}
    for binding, expected in zip(schema.outputs, wanted, strict=False):
        if binding.name not in schema.in_place:
            tensors[binding.name] = torch.full(expected.shape, SENTINEL, dtype=to_torch(expected).dtype, device=device)
    return tensors, wanted


def to_torch(array: np.ndarray) -> torch.Tensor:
    array = np.ascontiguousarray(array)
    if array.dtype == KINDS["bfloat16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype == FLOAT8:
        return torch.from_numpy(array.view(np.int8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.cpu()
    if tensor.dtype == torch.bfloat16:
        array: np.ndarray = tensor.view(torch.int16).numpy().view(KINDS["bfloat16"])
        return array
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.int8).numpy().view(FLOAT8)
    return tensor.numpy()


def _windows(operator: str, kind: np.dtype[Any]) -> Iterator[Case]:
    schema = SCHEMAS[operator]
    names = [binding.name for binding in schema.inputs if binding.name not in schema.optional]
    for vocab, window in ((33, 0), (1000, 1), (1000, 4)):
        tensors = window_case(vocab, window)
        logits = tensors["logits"].astype(kind)
        yield Case({name: logits if name == "logits" else tensors[name] for name in names})


def _drafts(kind: np.dtype[Any]) -> Iterator[Case]:
    for case in _windows("sample_draft", kind):
        inputs = {**case.inputs, "logits": case.inputs["logits"][:, :1]}
        vocab = inputs["logits"].shape[-1]
        ids = np.random.default_rng(vocab).choice(3 * vocab, vocab, replace=False).astype(np.int32)
        for case_inputs in (inputs, {**inputs, "target_ids": np.sort(ids)}):
            yield Case(case_inputs)
            yield Case(case_inputs, outputs=1)


def _adjusted(kind: np.dtype[Any]) -> Iterator[Case]:
    for vocab, window, columns in ((33, 0, 16), (1001, 4, 64)):
        tensors = edge_case_adjust_batch(vocab=vocab, window=window, columns=columns, batch=5, seed=0)
        yield Case({**tensors, "logits": tensors["logits"].astype(kind)})


def _attention(kind: np.dtype[Any]) -> Iterator[Case]:
    for query, norm, sliding_window in ((1, False, 0), (5, True, 0), (16, False, 9)):
        tensors = attention_cases.case([1, 63, 130], query, head_dim=32, norm=norm, dtype=kind)
        attention = attention_cases.attributes(head_dim=32, sliding_window=sliding_window)
        yield Case({name: array for name, array in tensors.items() if array is not None}, attention)
    for runs, sliding_window in (([(0, 70), (65, 1), (3, 0), (130, 33)], 0), ([(100, 40)], 50)):
        tensors = attention_cases.case([1, 63], 3, runs, head_dim=32, norm=True, dtype=kind)
        inputs = {name: array for name, array in tensors.items() if array is not None}
        yield Case(inputs, attention_cases.attributes(head_dim=32, sliding_window=sliding_window))
    for images, sliding_window in (([(0, 5, 70), (1, 60, 66), (2, 140, 150)], 0), ([(0, 0, 9), (2, 131, 163)], 20)):
        runs = [(0, 70), (65, 1), (130, 33)]
        tensors = attention_cases.case([1, 63], 3, runs, head_dim=32, norm=True, images=images, dtype=kind)
        inputs = {name: array for name, array in tensors.items() if array is not None}
        yield Case(inputs, attention_cases.attributes(head_dim=32, sliding_window=sliding_window))
    for norm, writes, sinks, value_norm in (
        (False, True, True, 0),
        (True, True, True, 1),
        (True, False, False, 1),
        (False, False, True, 0),
    ):
        how = {"norm": norm, "writes": writes, "sinks": sinks, "dtype": kind}
        tensors = attention_cases.case([1, 63, 130], 5, [(0, 70), (65, 1), (130, 33)], head_dim=32, **how)
        inputs = {name: array for name, array in tensors.items() if array is not None}
        yield Case(inputs, attention_cases.attributes(head_dim=32, sliding_window=50, value_norm=value_norm))


def _attention_in_float8(kind: np.dtype[Any]) -> Iterator[Case]:
    for lengths, query, runs, sliding_window, norm in (
        ([1, 63, 130], 1, [], 0, False),
        ([1, 63, 130], 5, [], 0, True),
        ([70, 3], 16, [], 9, False),
        ([1, 63], 3, [(0, 70), (65, 1), (3, 0), (130, 33)], 0, False),
        ([1], 0, [(100, 40)], 50, True),
    ):
        tensors = attention_cases.case_in_float8(lengths, query, runs, head_dim=32, norm=norm, dtype=kind)
        attention = attention_cases.attributes(head_dim=32, sliding_window=sliding_window, **attention_cases.SCALES)
        rounded = "float8_e4m3fn" if norm else str(kind)  # last bits of a norm decide between two neighbours
        yield Case({name: array for name, array in tensors.items() if array is not None}, attention, kind=rounded)


def _latent(kind: np.dtype[Any]) -> Iterator[Case]:
    """One head and several, and runs next to windows."""
    for lengths, query, runs, heads in (
        ([1, 63, 130], 1, [], 1),
        ([1, 63], 3, [(0, 20), (65, 1), (3, 0)], 4),
    ):
        tensors = latent_cases.case(lengths, query, runs, heads=heads, dtype=kind)
        yield Case(tensors, {"heads": heads, "scale": latent_cases.SCALE})


def _recurrences(kind: np.dtype[Any]) -> Iterator[Case]:
    """Beginnings of texts, tokens to replay, free slots, empty runs, and a run followed by a window of its text."""
    by_kind = recurrent_cases.Sizes(2, 4, 32, 48)
    by_key_head = recurrent_cases.Sizes(2, 4, 32, 48, order="by key head", update_scale=2.0)
    by_channel = recurrent_cases.Sizes(2, 2, 32, 16, per_channel=True, update_scale=2.0)
    mamba = recurrent_cases.Sizes(2, 4, 32, 80, order="as Mamba-2")
    for sizes, call in zip((by_kind, mamba, by_key_head, by_channel), _RECURRENT_CALLS, strict=True):
        yield Case(recurrent_cases.call(sizes, kind, *call), sizes.attributes)
    inputs = recurrent_cases.call(mamba, kind, *_RECURRENT_CALLS[2])
    yield Case(inputs, mamba.attributes | {"norm": int(OutputNorm.NONE), "norm_groups": 1})


# Rows, tokens of a window, runs: see recurrent_cases.call.
_RECURRENT_CALLS: tuple[tuple[Any, ...], ...] = (
    ([(0, 0, 0), (3, 5, 5), (7, 7, 7), (0, 0, 0)], 5, []),
    ([(20, 25, 20), (3, 1, 1)], 1, []),
    ([(8, 9, 9)], 3, [(1, 0, 0, 70), (0, 0, 0, 9), (2, 12, 13, 1), (1, 3, 3, 0)]),
    ([(4, 6, 6), (0, 2, 1)], 2, [(3, 10, 11, 12)]),
)


def _short_convolutions(kind: np.dtype[Any]) -> Iterator[Case]:
    for channels, call in zip((32, 34, 512, 2), _RECURRENT_CALLS, strict=True):
        yield Case(recurrent_cases.convolution_call(channels, kind, *call))


def _residual_norms(kind: np.dtype[Any]) -> Iterator[Case]:
    rng = np.random.default_rng(4)
    for shape in ((1, 2), (3, 66), (2, 3, 5000), (2, 1026), (2, 17_408)):  # the last two are read in several rounds
        x, update = (rng.normal(size=shape).astype(kind) for _ in range(2))
        yield Case(
            {"x": x, "update": update, "weight": 1 + rng.normal(size=shape[-1]).astype(np.float32) / 9}, _EPSILON
        )


_EPSILON = {"epsilon": 1e-5}


def _gates(kind: np.dtype[Any]) -> Iterator[Case]:
    rng = np.random.default_rng(3)
    for shape in ((1, 1, 74), (3, 5, 64)):
        values = rng.normal(size=shape) * 4
        values[0, 0, :4] = [-60000, 60000, 0, -1e-8]
        yield Case({"gate_up": values.astype(kind)})


def _rows_and_weights(kind: np.dtype[Any]) -> Iterator[Case]:
    rng = np.random.default_rng(5)
    for shape, width in (((1, 16), 8), ((2, 3, 72), 24), ((70, 264), 64)):
        x, weight = rng.normal(size=shape), rng.normal(size=(width, shape[-1])) / shape[-1] ** 0.5
        yield Case({"x": x.astype(kind), "weight": weight.astype(kind)})


def _mixtures(kind: np.dtype[Any]) -> Iterator[Case]:
    """Few rows and many, one expert that most of them choose, equal logits, and a row of nonsense."""
    rng = np.random.default_rng(8)
    for rows, hidden, width, count, chosen, normalized in (
        ((1,), 48, 24, 6, 3, 1),
        ((2, 3), 80, 40, 4, 2, 0),
        ((70,), 64, 16, 40, 4, 1),
        ((520,), 32, 8, 5, 2, 0),
        ((2, 0), 32, 8, 5, 2, 1),
    ):
        logits = rng.normal(size=(*rows, count)) * 2
        logits[..., 1] += 3
        logits[0, ..., 2:] = 0
        x = rng.normal(size=(*rows, hidden))
        if rows == (70,):
            x[7] = logits[9] = np.nan
        gate_up = rng.normal(size=(count * 2 * width, hidden)) / hidden**0.5
        down = rng.normal(size=(count * hidden, width)) / width**0.5
        tensors = {"x": x, "router_logits": logits, "gate_up": gate_up, "down": down}
        inputs = {name: each.astype(kind) for name, each in tensors.items()}
        how = {"per_token": chosen, "normalized": normalized, **SILU_EXPERTS}
        yield Case(inputs, how)
        if rows == (70,):
            last = {"prompt_rows": np.zeros(50, np.int32)}
            yield Case(inputs | last, how)
        for more, activation in _activations(rng, count, hidden, width, kind):
            yield Case(inputs | more, how | activation)
        if width == 16 or len(rows) == 2:  # the last expert is a shared one
            for unread in (0, 3):
                columns = np.append(logits, rng.normal(size=(*rows, unread)), axis=-1).astype(kind)
                shared = {"router_logits": columns, "expert_factors": rng.normal(size=count - 1).astype(kind)}
                yield Case(inputs | shared, how | {"shared_columns": 1 + unread})


def _activations(
    rng: np.random.Generator, count: int, hidden: int, width: int, kind: np.dtype[Any]
) -> Iterator[tuple[dict[str, np.ndarray], Mapping[str, float]]]:
    """Yield biases, factors and activations of gpt-oss and of Gemma 4, and some of them alone."""
    both, last, factors = (rng.normal(size=size).astype(kind) for size in (2 * count * width, count * hidden, count))
    clamped = {"interleaved": 1, "alpha": 1.702, "cubic": 0.0, "limit": 0.8, "offset": 1.0}
    yield {"gate_up_bias": both, "down_bias": last}, clamped
    yield {"expert_factors": factors}, ACTIVATIONS["gelu_tanh"]
    yield {"down_bias": last, "expert_factors": factors}, {"interleaved": 1}


def _low_bit_mixtures(numbers: str) -> Callable[[np.dtype[Any]], Iterator[Case]]:
    """Whole chunks of inputs and others, every group size, one expert that most rows choose, and a row of nonsense."""

    def generate(kind: np.dtype[Any]) -> Iterator[Case]:
        rng = np.random.default_rng(12)
        groups = {"float4": (16, 32), "float8": (128, 128)}.get(numbers, (32, 64, 128))
        for at, (rows, hidden, width, count, chosen) in enumerate(
            (
                ((1,), 64, 32, 6, 3),
                ((2, 3), 160, 96, 4, 2),
                ((40,), 352, 32, 12, 4),
                ((2, 0), 32, 32, 5, 2),
            )
        ):
            logits = rng.normal(size=(*rows, count)) * 2
            logits[..., 1] += 3
            x = rng.normal(size=(*rows, hidden))
            if rows == (40,):
                x[7] = logits[9] = np.nan
            sizes = groups[at % len(groups)], groups[(at + 1) % len(groups)]
            inputs = {"x": x.astype(kind), "router_logits": logits.astype(kind)}
            for name, outputs, inner, group in (
                ("gate_up", count * 2 * width, hidden, sizes[0]),
                ("down", count * hidden, width, sizes[1]),
            ):
                inputs |= {f"{name}{end}": each for end, each in _stored(rng, numbers, outputs, inner, group, kind)}
            inputs = {name: inputs[name] for name in _in_order(numbers, inputs)}
            groups_of = {"gate_up_group": sizes[0], "down_group": sizes[1]}
            how = {"per_token": chosen, "normalized": at % 2, **SILU_EXPERTS, **groups_of}
            yield Case(inputs, how)
            for more, activation in _activations(rng, count, hidden, width, kind):
                yield Case(inputs | more, how | activation)
            if numbers == "int4":
                zeros = {
                    f"{name}_zeros": rng.integers(0, 256, (len(scales), scales.shape[1] // 2), dtype=np.uint8)
                    for name in ("gate_up", "down")
                    for scales in (inputs[f"{name}_scales"],)
                }
                yield Case(inputs | zeros, how)
            if count == 12:  # the last one is a shared one, followed by columns without a meaning
                columns = np.append(logits, np.zeros((*rows, 4)), axis=-1).astype(kind)
                yield Case(inputs | {"router_logits": columns}, how | {"shared_columns": 5})

    return generate


def _in_order(numbers: str, arrays: Mapping[str, np.ndarray]) -> list[str]:
    return [binding.name for binding in SCHEMAS[f"{numbers}_experts"].inputs if binding.name in arrays]


def _stored(
    rng: np.random.Generator, numbers: str, outputs: int, inner: int, group: int, kind: np.dtype[Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a random weight whose products with values of about 1 are about 1: numbers, scales and factors."""
    padded, size = padded_inner(inner), 1 / inner**0.5
    weight = rng.integers(0, 256, (outputs, padded * (2 if numbers.endswith("8") else 1) // 2), dtype=np.uint8)
    shape = (outputs, scales_of_output(inner, group))
    if numbers == "float8":
        yield "", np.where(weight & 0x7F == 0x7F, 0, weight).astype(np.uint8)  # not a number
        yield "_scales", (rng.uniform(0.5, 1.5, (outputs, padded // 128)) * size / 50).astype(np.float32)
        return
    yield "", weight
    if numbers == "float4":
        yield "_scales", rng.integers(32, 80, shape, dtype=np.uint8)
        yield "_factors", (rng.uniform(0.5, 1.5, outputs) * size / 6).astype(np.float32)
        return
    yield "_scales", (rng.uniform(0.5, 1.5, shape) * size / (5 if numbers == "int4" else 75)).astype(kind)


def _parts_of_one_rank(kind: np.dtype[Any]) -> Iterator[Case]:
    rng = np.random.default_rng(10)
    for shape in ((1, 8), (3, 5, 40)):
        yield Case({"x": rng.normal(size=shape).astype(kind)})


def _columns_of_one_rank(kind: np.dtype[Any]) -> Iterator[Case]:
    rng = np.random.default_rng(11)
    for shape in ((1, 1, 8), (3, 5, 33)):
        yield Case({"x": rng.normal(size=shape).astype(kind)}, {"width": shape[-1]})


def _unrounded(kind: np.dtype[Any]) -> Iterator[Case]:
    rng = np.random.default_rng(4)
    for shape in ((1, 1, 80), (3, 5, 64), (2, 20480)):
        values = (rng.normal(size=shape) * 4).astype(kind)
        values[0, ..., :4] = [-60000, 0, 1e-8, 300]
        values[-1, ..., 0] = 2000  # what a static scale has no room for
        yield Case({"x": values})
        yield Case({"x": values, "static_scale": np.array([0.25], np.float32)})
    yield Case({"x": np.zeros((2, 16), kind)})


def _matmuls(kind: np.dtype[Any]) -> Iterator[Case]:
    """Numbers of rows on either side of what kernels take, and inputs beyond what they ask for at first."""
    rng = np.random.default_rng(5)
    for rows, inner, width in (((1,), 80, 16), ((2, 4), 1104, 48), ((9,), 64, 32), ((16,), 4624, 16), ((17,), 640, 16)):
        quantized, scales = quantize_tokens(rng.normal(size=(*rows, inner)))
        weight, weight_scales = quantize_tokens(rng.normal(size=(width, inner)) / inner**0.5)
        scaled = {"scales": scales, "weight": weight.view(np.uint8), "weight_scales": weight_scales[:, 0]}
        yield Case({"quantized": quantized, **scaled}, {"dtype": kind})


_LOW_BIT_SIZES = (((1,), 128, 8, 32), ((2, 4), 1120, 56, 32), ((9,), 192, 24, 64), ((33,), 64, 16, 32))


def _by_int4(kind: np.dtype[Any]) -> Iterator[Case]:
    """Numbers of rows on either side of what the kernels take at once, every block, with zero points and without."""
    rng = np.random.default_rng(8)
    for rows, inner, width, block in (*_LOW_BIT_SIZES, ((90,), 640, 264, 128)):
        blocks = scales_of_output(inner, block)
        scales = (rng.uniform(0.02, 0.06, (width, blocks)) / inner**0.5).astype(kind)
        weight = rng.integers(0, 256, (width, padded_inner(inner) // 2), dtype=np.uint8)
        inputs = {"x": rng.normal(size=(*rows, inner)).astype(kind), "weight": weight, "scales": scales}
        yield Case(inputs, {"group_size": block})
        yield Case(
            {**inputs, "zeros": rng.integers(0, 256, (width, blocks // 2), dtype=np.uint8)}, {"group_size": block}
        )
    yield Case({**inputs, "prompt_rows": np.zeros(70, np.int32)}, {"group_size": block})


def _by_int8(kind: np.dtype[Any]) -> Iterator[Case]:
    rng = np.random.default_rng(11)
    for rows, inner, width, group in _LOW_BIT_SIZES:
        scales = (rng.uniform(0.02, 0.06, (width, scales_of_output(inner, group))) / inner**0.5 / 16).astype(kind)
        weight = rng.integers(0, 256, (width, padded_inner(inner)), dtype=np.uint8)
        x = rng.normal(size=(*rows, inner)).astype(kind)
        inputs = {"x": x, "weight": weight, "scales": scales}
        yield Case(inputs, {"group_size": group})
    yield Case({**inputs, "prompt_rows": np.zeros(20, np.int32)}, {"group_size": group})


def _by_float4(kind: np.dtype[Any]) -> Iterator[Case]:
    """Every code and every finite scale, the tiny ones and zero too, with factors that keep results near one."""
    rng = np.random.default_rng(12)
    for rows, inner, width, group in _LOW_BIT_SIZES:
        scales = rng.integers(0, 127, (width, scales_of_output(inner, group // 2)), dtype=np.uint8)
        scales[::2] = rng.integers(0, 24, scales[::2].shape)
        weight = rng.integers(0, 256, (width, padded_inner(inner) // 2), dtype=np.uint8)
        factors = (rng.uniform(0.5, 2, width) / (100 * inner**0.5)).astype(np.float32)
        factors[::2] *= 2**12
        x = rng.normal(size=(*rows, inner)).astype(kind)
        inputs = {"x": x, "weight": weight, "scales": scales, "factors": factors}
        yield Case(inputs, {"group_size": group // 2})
    yield Case({**inputs, "prompt_rows": np.zeros(20, np.int32)}, {"group_size": group // 2})


def _by_k_quants(kind: str) -> Callable[[np.dtype[Any]], Iterator[Case]]:
    """Return cases of a type K: scales of 6 bits or, without minima, of either sign."""
    quant = K_QUANTS[kind]

    def cases_of(dtype: np.dtype[Any]) -> Iterator[Case]:
        rng = np.random.default_rng(13)
        for rows, inner, width in (((1,), 256, 8), ((2, 4), 1280, 56), ((70,), 512, 264)):
            integers = rng.integers(0, 256, (width, inner * quant.bits // 8), dtype=np.uint8)
            least = 0 if quant.minima else -64
            scales = rng.integers(least, 64, (width, quant.scales_of_output(inner)), dtype=np.int8)
            one = 8 if quant.minima else 32  # for results of about one
            factors = rng.uniform(0.5, 1, (width, quant.factors_of_output(inner))) / (one * inner**0.5 * 64)
            x = rng.normal(size=(*rows, inner)).astype(dtype)
            inputs = {"x": x, "weight": integers, "scales": scales, "factors": factors.astype(np.float16)}
            yield Case(inputs, {})
        yield Case({**inputs, "prompt_rows": np.zeros(20, np.int32)}, {})

    return cases_of


def _by_low_bits_and_int8(kind: np.dtype[Any]) -> Iterator[Case]:  # noqa: ARG001
    """Numbers of rows around what the kernel takes at once, whole tiles and steps, and others."""
    rng = np.random.default_rng(9)
    sizes = [((1,), 32, 8, 32), ((2, 3), 100, 37, 32), ((5,), 192, 24, 64), ((35,), 64, 200, 32), ((4,), 320, 8, 128)]
    for rows, inner, width, group in sizes:
        x = rng.normal(size=(*rows, inner)).astype(np.float32)
        inputs = {"x": x, **interleaved_weight(rng, width, inner, group)}
        attributes = {"bits": 4, "group_size": group, "width": width}
        for more in ({}, {"zeros"}, {"offsets"}):
            yield Case({"x": x, **interleaved_weight(rng, width, inner, group, more=more)}, attributes)
    inputs["x"][1, :32], inputs["x"][2, 40], inputs["x"][3, 99] = 0, np.inf, np.nan
    yield Case(inputs, attributes)
    two_levels = {"offsets", "subscales", "suboffsets"}
    forms = [(8, 32, set(), 1), (5, 32, set(), 1), (5, 32, {"offsets"}, 1), (6, 16, {"subscales"}, 16)]
    forms += [(4, 32, {"table"}, 1), (4, 32, {"table", "subscales"}, 8)]
    for bits, group, more, groups_per_scale in [*forms, *((bits, 32, two_levels, 8) for bits in (4, 5))]:
        for rows, width in ((1, 8), (9, 37)):
            weight = interleaved_weight(rng, width, 512, group, bits, more=more, groups_per_scale=groups_per_scale)
            x = rng.normal(size=(rows, 512)).astype(np.float32)
            yield Case({"x": x, **weight}, {"bits": bits, "group_size": group, "width": width})
    yield Case({"x": x, **weight}, {"bits": bits, "group_size": group, "width": 19})  # of 37 outputs


def interleaved_weight(
    rng: np.random.Generator,
    width: int,
    inner: int,
    group: int,
    bits: int = 4,
    *,
    more: Collection[str] = (),
    groups_per_scale: int = 1,
) -> dict[str, np.ndarray]:
    """Return random inputs of ``low_bit_int8_matmul`` for a weight, with ``more`` optional ones."""
    groups = -(-32 * -(-inner // 32) // group)  # of whole steps
    scales = groups // groups_per_scale
    values = {
        "zeros": lambda: rng.integers(0, 1 << bits, (width, groups), dtype=np.uint8),
        "offsets": lambda: (rng.uniform(-0.6, 0.6, (width, scales)) / inner**0.5 / groups_per_scale).astype(np.float32),
        "subscales": lambda: rng.integers(-40, 41, (width, groups), dtype=np.int8),
        "suboffsets": lambda: rng.integers(0, 64, (width, groups), dtype=np.int8),
    }
    steps = rng.uniform(0.02, 0.06, (width, scales)) / inner**0.5 / groups_per_scale
    return {
        "weight": interleaved(rng.integers(0, 1 << bits, (width, inner), dtype=np.uint8), bits),
        "scales": by_tile(steps.astype(np.float32)),
        **{name: by_tile(values[name]()) for name in sorted({*more} - {"table"})},
        **({"table": TABLES["iq4"]} if "table" in more else {}),
    }


def _by_tiles(kind: np.dtype[Any]) -> Iterator[Case]:
    """Numbers of rows around what the kernel takes at once, outputs that fill no tile, and tiny values."""
    rng = np.random.default_rng(10)
    for rows, inner, width in (((1,), 32, 70), ((2,), 7, 33), ((3,), 64, 48), ((2, 3), 100, 37), ((103,), 40, 130)):
        weight = rng.normal(size=(width, inner)) / inner**0.5
        weight[0, :4] = [6e-8, -3e-7, 0, -1e-5]
        x = rng.normal(size=(*rows, inner)).astype(np.float32)
        yield Case({"x": x, "weight": tiled(weight.astype(kind))}, {"width": width})
    yield Case({"x": x[:0], "weight": tiled(weight.astype(kind))}, {"width": width})
    yield Case({"x": x[:9], "weight": tiled(weight.astype(kind))}, {"width": 41})  # of 130 outputs


def _unscaled(kind: np.dtype[Any]) -> Iterator[Case]:
    for case in _matmuls(kind):  # numbers so small that float16 has room for their sums
        quantized = (case.inputs["quantized"].astype(np.float32) / 64).astype(FLOAT8)
        weight = (case.inputs["weight"].view(FLOAT8).astype(np.float32) / 2048).astype(FLOAT8)
        yield Case({"quantized": quantized, "weight": weight.view(np.uint8)}, case.attributes)


def _quantized_gates(kind: np.dtype[Any]) -> Iterator[Case]:
    """Tokens that some blocks share and tokens of a block each, wider than what those keep."""
    rng = np.random.default_rng(6)
    for shape in ((1, 1, 80), (3, 5, 64), (1, 65_600), (64, 32_800), (256, 1_200)):
        scales = {"token_scales": _scales(rng, *shape[:-1], 1), "weight_scales": _scales(rng, shape[-1])}
        inputs = {"gate_up": (rng.normal(size=shape) * 500).astype(kind), **scales}
        yield Case(inputs, kind=str(kind))
        yield Case({**inputs, "static_scale": np.array([0.01], np.float32)}, kind=str(kind))


def _quantized_norms(kind: np.dtype[Any]) -> Iterator[Case]:
    rng = np.random.default_rng(7)
    for shape in ((1, 1, 80), (3, 5, 64), (2, 16_640)):
        scales = {"token_scales": _scales(rng, *shape[:-1], 1), "weight_scales": _scales(rng, shape[-1])}
        skip, update = rng.normal(size=shape), rng.normal(size=shape) * 500
        inputs = {"skip": skip.astype(kind), "update": update.astype(kind), **scales}
        inputs["norm_weight"] = rng.normal(size=shape[-1]).astype(kind)
        yield Case(inputs, {"epsilon": 1e-3}, kind=str(kind))
        yield Case({**inputs, "static_scale": np.array([0.01], np.float32)}, {"epsilon": 1e-3}, kind=str(kind))


def _decoded(_kind: np.dtype[Any]) -> Iterator[Case]:
    """Draft windows, single tokens and prompts, of rows of different lengths; unwritten entries hold NaN."""
    rng, capacity = np.random.default_rng(3), 150
    for heads, kv_heads, dim, half, query, window in (
        (4, 2, 16, 8, 1, 0),
        (3, 1, 96, 16, 3, 7),
        (2, 2, 64, 0, 5, 70),
        (4, 2, 64, 32, 83, 0),
        (2, 1, 32, 16, 83, 21),
    ):
        index = np.array([0, 67, capacity - query])
        qkv = rng.normal(size=(len(index), query, (heads + 2 * kv_heads) * dim)).astype(np.float32)
        past = rng.normal(size=(2, len(index), kv_heads, capacity, dim)).astype(np.float32)
        for row, end in enumerate(index):
            past[:, row, :, end:] = np.nan
        angles = rng.uniform(0, 7, (capacity, half))
        tables = {"cosine": np.cos(angles).astype(np.float32), "sine": np.sin(angles).astype(np.float32)}
        inputs = {"qkv": qkv, "past_key": past[0], "past_value": past[1], "write_index": index}
        sizes = {"heads": heads, "sliding_window": window, "scale": dim**-0.5}
        ends = np.zeros((len(index), query), np.int64)
        ends[:, query // 4 : query // 2] = index[:, None] + query // 2  # the tokens of an image
        for images in ({}, {"ends": ends}):
            yield Case(inputs | tables | images, sizes)


def _scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.uniform(0.02, 0.06, shape).astype(np.float32)


def _of(operator: str) -> Callable[[np.dtype[Any]], Iterator[Case]]:
    return lambda kind: _windows(operator, kind)


_GENERATORS: dict[str, Callable[[np.dtype[Any]], Iterator[Case]]] = {
    "token_bitmask": _of("token_bitmask"),
    "adjust_logits": _adjusted,
    "verify_draft": _of("verify_draft"),
    "verify_draft_probs": _of("verify_draft_probs"),
    "sample_draft": _drafts,
    "window_attention": _attention,
    "float8_window_attention": _attention_in_float8,
    "latent_attention": _latent,
    "linear_attention": _recurrences,
    "short_convolution": _short_convolutions,
    "residual_norm": _residual_norms,
    "swiglu": _gates,
    "linear": _rows_and_weights,
    "gated_linear": _rows_and_weights,
    "all_reduce": _parts_of_one_rank,
    "all_gather": _columns_of_one_rank,
    "experts": _mixtures,
    **{f"{numbers}_experts": _low_bit_mixtures(numbers) for numbers in ("int4", "int8", "float4", "float8")},
    "quantize_tokens": _unrounded,
    "scaled_matmul": _matmuls,
    "int4_matmul": _by_int4,
    "int8_matmul": _by_int8,
    "float4_matmul": _by_float4,
    **{f"{kind}_matmul": _by_k_quants(kind) for kind in K_QUANTS},
    "low_bit_int8_matmul": _by_low_bits_and_int8,
    "tiled_matmul": _by_tiles,
    "decode_attention": _decoded,
    "float8_matmul": _unscaled,
    "quantized_swiglu": _quantized_gates,
    "quantized_norm": _quantized_norms,
}
