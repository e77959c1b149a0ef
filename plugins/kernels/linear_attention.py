"""``linear_attention`` on a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.module import HOPPER, KernelModule, Launch, Tensors, run_in_order, suffix
from tandemrt.plugins.kernels.tensors import check
from tandemrt.plugins.operators.constants import (
    DELTA_KEY_DIMS,
    KEY_DIMS,
    MAX_KERNEL,
    VALUE_DIM_MULTIPLE,
    OutputNorm,
)
from tandemrt.plugins.operators.launch import Context
from tandemrt.plugins.operators.projections import Projections

_THREADS, _MOST_FINISH_THREADS = 128, 512
_WARPS, _COLUMNS = _THREADS // 32, 8  # columns of a state to a warp
_OF_A_JOB, _VALUES_OF_A_JOB = 32, 64  # decays and rates; values
_PROMPT_WARPS, _WINDOW_WARPS, _WIDE_KEY = 8, 4, 128  # of a block that scans; wider keys have the warps of windows
_OF_A_WARP = 256  # the most outputs of a group that one warp norms
_KEPT = 4  # pairs or single values of a token that a thread stores in the ring
# Of chunks.cuh: tokens of a chunk, values of a key, columns of a block that scans, numbers prepared for a head, unused
# chunks of a run, threads and bytes of shared memory to prepare and to scan.
_CHUNK, _CHUNK_KEY, _CHUNK_COLUMNS, _PREPARED, _UNUSED = 64, 128, 32, 64 * 64 + 4 * 64, 3
_PREPARE_THREADS, _PREPARE_BYTES, _SCAN_THREADS, _SCAN_BYTES = 256, 68_624, 128, 81_920
# Of chunk_convolution.cuh: tokens that the convolution reads, tokens of a block, columns of a warp.
_CHUNK_TAPS, _TILE_TOKENS, _JOB_COLUMNS = 4, 8, 128
# Of chunk_finish.cuh: outputs of a head, tokens and heads of a block.
_FINISHED_HEAD, _FINISHED_TOKENS, _FINISHED_HEADS = 128, 4, 8


def launch(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "LinearAttentionLauncher":
    """Bind the operator; see Launcher in plugins/operators/launch.py."""
    return LinearAttentionLauncher(context, tensors, **attributes)


@dataclass(frozen=True)
class _Runs:
    """Runs of tokens: draft windows of ``query`` tokens, or prompts with ``slots`` and ``starts``.

    ``projected`` and ``out`` begin with the first token of the first run. ``rows``: the run of each token of prompts.
    """

    projected: torch.Tensor
    out: torch.Tensor
    state_index: torch.Tensor
    write_index: torch.Tensor
    commit_index: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    rows: torch.Tensor | None = None

    @property
    def arguments(self) -> tuple[torch.Tensor | None, ...]:
        return self.state_index, self.write_index, self.commit_index, self.slots, self.starts


class LinearAttentionLauncher:
    """One bound call of ``linear_attention``; shapes as in ``tandemrt.plugins.reference.linear_attention``.

    All tensors are contiguous and on the context's device. A run updates ``state`` and ``recent`` in place and writes
    ``out``; rows of padding keep their contents. Calls of one context must run one after another. Capturable: a run
    allocates nothing and reads nothing on the host.
    """

    def __init__(self, context: Context, tensors: Tensors, **attributes: Any) -> None:
        layer = _Layer(context, tensors, **attributes)
        projected, out, prompt_rows = tensors["projected"], tensors["out"], tensors["prompt_rows"]
        windows = len(projected) - len(prompt_rows)
        self._device = projected.device
        self._launches: tuple[Launch, ...] = ()
        if len(prompt_rows):  # before the windows, which may follow them in the same text
            self._launches = layer.launches(
                _Runs(
                    projected[windows:],
                    out[windows:],
                    tensors["prompt_state_index"],
                    tensors["prompt_index"],
                    slots=tensors["prompt_slots"],
                    starts=tensors["prompt_starts"],
                    rows=prompt_rows,
                )
            )
        if windows:
            indices = (tensors[name] for name in ("state_index", "write_index", "commit_index"))
            self._launches += layer.launches(_Runs(projected[:windows], out[:windows], *indices))

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        run_in_order(self._launches, self._device)


class _Layer:
    """Binds the kernels of a layer for runs of draft windows or of prompts."""

    def __init__(
        self,
        context: Context,
        tensors: Tensors,
        *,
        key_heads: int,
        value_heads: int,
        update_scale: float,
        sigmoid_gate: int,
        norm: int,
        norm_groups: int,
        epsilon: float,
        **places: int,
    ) -> None:
        projected, self.state, self.recent = tensors["projected"], tensors["state"], tensors["recent"]
        weight, dt_bias, self.norm_weight = tensors["conv_weight"], tensors["dt_bias"], tensors["norm_weight"]
        (*_, key_dim, value_dim), self.history = self.state.shape, self.recent.shape[1]
        kernel = weight.shape[1]
        self.parts = Projections(key_heads, value_heads, key_dim, value_dim, len(dt_bias), **places)
        _check_tensors(tensors, self.parts)
        self.module = KernelModule.of(context, "linear_attention")
        rule = "gated" if not self.parts.has_update else "channels" if len(dt_bias) > value_heads else "delta"
        self.kind = f"{suffix(projected)}_{rule}_{key_dim}"
        self.in_chunks = _in_chunks(rule, self.parts, kernel, projected.dtype) and (
            self.module.shared_memory >= _SCAN_BYTES
        )
        self.replays = self.history - (kernel - 1)
        self.workspace = context.get_or_create("linear_attention", lambda: _Workspace(context.device))
        places_of_parts = (self.parts.pitch, *self.parts.first, *self.parts.stride)
        self.sizes = tuple(map(np.int32, (key_heads, value_heads, value_dim, *places_of_parts)))
        weights = (weight, *(tensors[name] for name in ("conv_bias", "decay_scale")), dt_bias)
        self.weights = (*weights, np.int32(kernel), np.float32(update_scale))
        self.skip, self.epsilon, self.sigmoid_gate = tensors["skip"], np.float32(epsilon), sigmoid_gate
        self.values = value_heads * value_dim
        self.norm, self.group = OutputNorm(norm), self.values // norm_groups

    def launches(self, runs: _Runs) -> tuple[Launch, ...]:
        """Bind all kernels, in their order."""
        count, tokens = len(runs.write_index), len(runs.projected)
        mixtures = self.workspace.mixtures(tokens * self.values)
        arguments = (*runs.arguments, *map(np.int32, (tokens // count, self.replays, self.history)), *self.sizes)
        if runs.slots is not None and self.in_chunks:
            recurrence = self._by_chunks(runs, arguments, mixtures)
        else:
            recurrence = self._by_tokens(runs, arguments, mixtures)
        return (*recurrence, self._finish(runs, arguments, mixtures))

    def _launch(self, name: str, grid: tuple[int, int], threads: int, *arguments: Any, shared: int = 0) -> Launch:
        kernel, early = self.module.kernel(f"{name}_{self.kind}", shared=shared), self.module.architecture >= HOPPER
        return Launch(kernel, (*grid, 1), (threads, 1, 1), *arguments, shared=shared, early=early)

    def _by_tokens(self, runs: _Runs, arguments: tuple[Any, ...], mixtures: torch.Tensor) -> tuple[Launch, ...]:
        parts, count, of_prompts = self.parts, len(runs.write_index), runs.slots is not None
        entries = count * self.replays + len(runs.projected)
        row_size = _round_up(parts.channels + parts.decays + parts.value_heads + parts.key_heads, 4)
        rows = self.workspace.rows(entries * row_size)
        jobs = parts.key_heads + -(-self.values // _VALUES_OF_A_JOB)
        jobs += -(-(parts.decays + (parts.value_heads if parts.has_update else 0)) // _OF_A_JOB)
        convolved = (runs.projected, self.recent, runs.rows, *self.weights, *arguments, np.int32(count), rows)
        warps = _PROMPT_WARPS if of_prompts and parts.key_dim <= _WIDE_KEY else _WINDOW_WARPS
        tiles = count * parts.value_heads * -(-parts.value_dim // (warps * _COLUMNS))
        scanned = (rows, self.skip, *arguments, np.int32(count), self.state, mixtures)
        return (
            self._launch("convolve", (entries, -(-jobs // _WARPS)), _THREADS, *convolved),
            self._launch("scan" if of_prompts else "scan_windows", (tiles, 1), 32 * warps, *scanned),
        )

    def _by_chunks(self, runs: _Runs, arguments: tuple[Any, ...], mixtures: torch.Tensor) -> tuple[Launch, ...]:
        parts, count, tokens = self.parts, len(runs.write_index), len(runs.projected)
        row_bytes = _round_up(2 * parts.channels + 8 * parts.value_heads, 16)
        rows = self.workspace.rows((count * self.replays + tokens) * row_bytes // 4)
        sizes = (np.int32(count), np.int32(tokens))
        convolved = (runs.projected, self.recent, runs.rows, *self.weights, *arguments, *sizes, rows)
        tiles = count * -(-self.replays // _TILE_TOKENS) + -(-tokens // _TILE_TOKENS)
        jobs = 2 * parts.key_heads + -(-self.values // _JOB_COLUMNS) + -(-parts.value_heads // _OF_A_JOB)
        places = tokens // _CHUNK + _UNUSED * count
        prepared = self.workspace.prepared(places * parts.value_heads * _PREPARED)
        chunked = (*arguments, np.int32(count), prepared)
        scanned = (rows, self.skip, *chunked, self.state, mixtures)
        scans = count * self.values // _CHUNK_COLUMNS
        return (
            self._launch("convolve_chunks", (tiles, -(-jobs // _WARPS)), _THREADS, *convolved),
            self._launch(
                "prepare_chunks", (places, parts.key_heads), _PREPARE_THREADS, rows, *chunked, shared=_PREPARE_BYTES
            ),
            self._launch("scan_chunks", (scans, 1), _SCAN_THREADS, *scanned, shared=_SCAN_BYTES),
        )

    def _finish(self, runs: _Runs, arguments: tuple[Any, ...], mixtures: torch.Tensor) -> Launch:
        tokens, inputs, outputs = len(runs.projected), (mixtures, runs.projected), (self.recent, runs.out)
        finished = (*inputs, self.norm_weight, runs.rows, *arguments)
        if runs.slots is not None and self.in_chunks and self._finishes_heads:
            tiles = -(-tokens // _FINISHED_TOKENS) + len(runs.write_index) * self.history
            grid = tiles, -(-self.parts.value_heads // _FINISHED_HEADS)
            numbers = map(np.int32, (tokens, self.sigmoid_gate))
            return self._launch("finish_heads", grid, 32 * _FINISHED_HEADS, *finished, *numbers, self.epsilon, *outputs)
        by_warp, groups = self.group <= _OF_A_WARP, self.values // self.group
        threads = _THREADS if by_warp else min(_MOST_FINISH_THREADS, 1 << (self.group // 4 - 1).bit_length())
        blocks = -(-groups // _WARPS) if by_warp else groups
        blocks += -(-(self.parts.width - self.parts.channels // 2) // (_KEPT * threads))
        numbers = map(np.int32, (self.group, len(self.norm_weight), self.norm, self.sigmoid_gate))
        return self._launch("finish", (tokens, blocks), threads, *finished, *numbers, self.epsilon, *outputs)

    @property
    def _finishes_heads(self) -> bool:
        """Whether ``finish_heads`` can do it, which reads four gates at once."""
        of_heads = self.group == _FINISHED_HEAD == len(self.norm_weight) and self.norm is OutputNorm.BEFORE_GATE
        aligned = not any(number % 4 for number in (self.parts.pitch, self.parts.first[-1], self.parts.stride[-1]))
        return of_heads and aligned


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _in_chunks(rule: str, parts: Projections, kernel: int, dtype: torch.dtype) -> bool:
    """Whether prompts go through chunks.cuh, whose tensor cores keep fewer bits than float32 and more than bfloat16."""
    sizes = parts.key_dim == _CHUNK_KEY and parts.value_dim % _CHUNK_COLUMNS == 0 and kernel == _CHUNK_TAPS
    return rule == "delta" and sizes and dtype != torch.float32


def _check_tensors(tensors: Tensors, parts: Projections) -> None:
    """Raise ValueError unless the kernels support the sizes, and the tensors have the shapes that follow from them."""
    projected, state = tensors["projected"], tensors["state"]
    slots, history, kernel = len(state), tensors["recent"].shape[1], tensors["conv_weight"].shape[1]
    check("state", state, torch.float32, (slots, parts.value_heads, parts.key_dim, parts.value_dim))
    check("projected", projected, projected.dtype, (len(projected), parts.pitch))
    check("recent", tensors["recent"], projected.dtype, (slots, history, parts.width))
    check("conv_weight", tensors["conv_weight"], projected.dtype, (parts.channels, kernel))
    check("conv_bias", tensors["conv_bias"], torch.float32, (parts.channels,))
    check("decay_scale", tensors["decay_scale"], torch.float32, (parts.value_heads,))
    check("dt_bias", tensors["dt_bias"], torch.float32, (parts.decays,))
    check("skip", tensors["skip"], torch.float32, (parts.value_heads,))
    check("norm_weight", tensors["norm_weight"], torch.float32, tuple(tensors["norm_weight"].shape))
    check("out", tensors["out"], projected.dtype, (len(projected), parts.value_heads * parts.value_dim))
    key_dims = DELTA_KEY_DIMS if parts.has_update else KEY_DIMS
    supported = parts.key_dim in key_dims and parts.value_dim % VALUE_DIM_MULTIPLE == 0
    if not supported or not kernel <= min(MAX_KERNEL, history):
        raise ValueError(
            f"state: key sizes of {key_dims}, value sizes of a multiple of {VALUE_DIM_MULTIPLE} and at most "
            f"{MAX_KERNEL} tokens of a convolution are needed, got {list(state.shape)}, {kernel} and {history}"
        )
    in_pairs = [each[part] for each in (parts.first, parts.stride) for part in (0, 1, 2, 5)]  # not decays, updates
    if any(number % 2 for number in (parts.pitch, parts.width, *in_pairs)):
        raise ValueError(f"projected: parts of an even number of values are needed, got {parts}")


class _Workspace:
    """Values between the kernels of a call. Grows to the largest call; earlier ones keep their memory."""

    def __init__(self, device: torch.device) -> None:
        self._rows = self._mixtures = self._prepared = torch.empty(0, dtype=torch.float32, device=device)

    def rows(self, size: int) -> torch.Tensor:
        """Inputs of the recurrence for all tokens."""
        if len(self._rows) < size:
            self._rows = self._rows.new_empty(size)
        return self._rows

    def prepared(self, size: int) -> torch.Tensor:
        """What chunks of prompts compute before the recurrence."""
        if len(self._prepared) < size:
            self._prepared = self._prepared.new_empty(size)
        return self._prepared

    def mixtures(self, size: int) -> torch.Tensor:
        """Outputs of the recurrence."""
        if len(self._mixtures) < size:
            self._mixtures = self._mixtures.new_empty(size)
        return self._mixtures
