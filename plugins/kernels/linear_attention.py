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
# Of chunks.cuh: tokens of a chunk, values of a key, columns and threads of a block that scans, numbers prepared for a
# head, unused chunks of a run, bytes of shared memory to prepare and to scan.
_CHUNK, _CHUNK_KEY, _CHUNK_COLUMNS, _CHUNK_THREADS, _PREPARED, _UNUSED = 64, 128, 64, 256, 2 * 64 * 64 + 4 * 64, 3
_PREPARE_BYTES, _SCAN_BYTES = 69_136, 163_840


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
        projected, state, recent = tensors["projected"], tensors["state"], tensors["recent"]
        weight, dt_bias, norm_weight = tensors["conv_weight"], tensors["dt_bias"], tensors["norm_weight"]
        (*_, key_dim, value_dim), history = state.shape, recent.shape[1]
        channels, kernel = weight.shape
        values, decays = value_heads * value_dim, len(dt_bias)
        parts = Projections(key_heads, value_heads, key_dim, value_dim, decays, **places)
        _check_tensors(tensors, parts)
        module = KernelModule.of(context, "linear_attention")
        rule = "gated" if not parts.has_update else "channels" if decays > value_heads else "delta"
        kind = f"{suffix(projected)}_{rule}_{key_dim}"
        kernels = {step: module.kernel(f"{step}_{kind}") for step in ("convolve", "scan", "scan_windows", "finish")}
        in_chunks = _in_chunks(rule, parts, projected.dtype) and module.shared_memory >= _SCAN_BYTES
        replays, early = history - (kernel - 1), module.architecture >= HOPPER
        workspace = context.get_or_create("linear_attention", lambda: _Workspace(context.device))
        sizes = tuple(map(np.int32, (key_heads, value_heads, value_dim, parts.pitch, *parts.first, *parts.stride)))
        weights = (weight, *(tensors[name] for name in ("conv_bias", "decay_scale")), dt_bias)
        layer = (*weights, np.int32(kernel), np.float32(update_scale))
        gates = -(-(decays + (value_heads if parts.has_update else 0)) // _OF_A_JOB)
        job_blocks = -(-(key_heads + -(-values // _VALUES_OF_A_JOB) + gates) // _WARPS)
        pitch = -(-(channels + decays + value_heads + key_heads) // 4) * 4
        size = values // norm_groups
        by_warp = size <= _OF_A_WARP
        finish_threads = _THREADS if by_warp else min(_MOST_FINISH_THREADS, 1 << (size // 4 - 1).bit_length())
        finish_blocks = -(-norm_groups // _WARPS) if by_warp else norm_groups
        finish_blocks += -(-(parts.width - channels // 2) // (_KEPT * finish_threads))
        norming = (size, len(norm_weight), OutputNorm(norm), sigmoid_gate)

        def launches(runs: _Runs) -> tuple[Launch, ...]:
            count, tokens = len(runs.write_index), len(runs.projected)
            entries = count * replays + tokens
            rows, mixtures = workspace.rows(entries * pitch), workspace.mixtures(tokens * values)
            run_arguments = (*runs.arguments, *map(np.int32, (tokens // count, replays, history)), *sizes)
            convolved = (runs.projected, recent, runs.rows, *layer, *run_arguments, np.int32(count), rows)
            of_prompts = runs.slots is not None
            scans: tuple[Launch, ...]
            if of_prompts and in_chunks:
                places = tokens // _CHUNK + _UNUSED * count
                prepared = workspace.prepared(places * value_heads * _PREPARED)
                chunked = (*run_arguments, np.int32(count), prepared)
                of_scan = (rows, tensors["skip"], *chunked, state, mixtures)
                prepare = module.kernel(f"prepare_chunks_{kind}", shared=_PREPARE_BYTES)
                scan = module.kernel(f"scan_chunks_{kind}", shared=_SCAN_BYTES)
                grid, tiles = (places, key_heads, 1), count * value_heads * value_dim // _CHUNK_COLUMNS
                scans = (
                    Launch(prepare, grid, (_THREADS, 1, 1), rows, *chunked, shared=_PREPARE_BYTES, early=early),
                    Launch(scan, (tiles, 1, 1), (_CHUNK_THREADS, 1, 1), *of_scan, shared=_SCAN_BYTES, early=early),
                )
            else:
                warps = _PROMPT_WARPS if of_prompts and key_dim <= _WIDE_KEY else _WINDOW_WARPS
                tiles = count * value_heads * -(-value_dim // (warps * _COLUMNS))
                scan = kernels["scan" if of_prompts else "scan_windows"]
                scanned = (rows, tensors["skip"], *run_arguments, np.int32(count), state, mixtures)
                scans = (Launch(scan, (tiles, 1, 1), (32 * warps, 1, 1), *scanned, early=early),)
            finished = (mixtures, runs.projected, norm_weight, runs.rows, *run_arguments, *map(np.int32, norming))
            grid, block = (tokens, finish_blocks, 1), (finish_threads, 1, 1)
            return (
                Launch(kernels["convolve"], (entries, job_blocks, 1), (_THREADS, 1, 1), *convolved, early=early),
                *scans,
                Launch(kernels["finish"], grid, block, *finished, np.float32(epsilon), recent, runs.out, early=early),
            )

        out, prompt_rows = tensors["out"], tensors["prompt_rows"]
        windows = len(projected) - len(prompt_rows)
        self._device = projected.device
        self._launches: tuple[Launch, ...] = ()
        if len(prompt_rows):  # before the windows, which may follow them in the same text
            self._launches = launches(
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
            self._launches += launches(_Runs(projected[:windows], out[:windows], *indices))

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        run_in_order(self._launches, self._device)


def _in_chunks(rule: str, parts: Projections, dtype: torch.dtype) -> bool:
    """Whether prompts go through chunks.cuh, whose tensor cores keep fewer bits than float32 and more than bfloat16."""
    sizes = parts.key_dim == _CHUNK_KEY and parts.value_dim % _CHUNK_COLUMNS == 0
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
