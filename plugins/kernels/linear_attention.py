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

_CONVOLVE_THREADS, _SCAN_THREADS, _SCAN_COLUMNS, _MOST_FINISH_THREADS = 128, 128, 32, 512
_OF_A_JOB, _VALUES_OF_A_JOB, _JOBS = 32, 64, _CONVOLVE_THREADS // 32  # decays and rates; values; jobs of a block


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
        (slots, _, key_dim, value_dim), history = state.shape, recent.shape[1]
        channels, kernel = weight.shape
        values, decays = value_heads * value_dim, len(dt_bias)
        parts = Projections(key_heads, value_heads, key_dim, value_dim, decays, **places)
        check("state", state, torch.float32, (slots, value_heads, key_dim, value_dim))
        check("projected", projected, projected.dtype, (len(projected), parts.pitch))
        check("recent", recent, projected.dtype, (slots, history, parts.width))
        check("conv_weight", weight, projected.dtype, (parts.channels, kernel))
        check("conv_bias", tensors["conv_bias"], torch.float32, (channels,))
        check("decay_scale", tensors["decay_scale"], torch.float32, (value_heads,))
        check("dt_bias", dt_bias, torch.float32, (decays,))
        check("skip", tensors["skip"], torch.float32, (value_heads,))
        check("norm_weight", norm_weight, torch.float32, tuple(norm_weight.shape))
        check("out", tensors["out"], projected.dtype, (len(projected), values))
        key_dims = DELTA_KEY_DIMS if parts.has_update else KEY_DIMS
        if key_dim not in key_dims or value_dim % VALUE_DIM_MULTIPLE or not kernel <= min(MAX_KERNEL, history):
            raise ValueError(
                f"state: key sizes of {key_dims}, value sizes of a multiple of {VALUE_DIM_MULTIPLE} and at most "
                f"{MAX_KERNEL} tokens of a convolution are needed, got {list(state.shape)}, {kernel} and {history}"
            )
        in_pairs = [each[part] for each in (parts.first, parts.stride) for part in (0, 1, 2, 5)]  # not decays, updates
        if any(number % 2 for number in (parts.pitch, parts.width, *in_pairs)):
            raise ValueError(f"projected: parts of an even number of values are needed, got {parts}")
        module = KernelModule.of(context, "linear_attention")
        rule = "gated" if not parts.has_update else "channels" if decays > value_heads else "delta"
        convolve, scan, finish = (
            module.kernel(f"{step}_{suffix(projected)}_{rule}_{key_dim}") for step in ("convolve", "scan", "finish")
        )
        replays, early = history - (kernel - 1), module.architecture >= HOPPER
        workspace = context.get_or_create("linear_attention", lambda: _Workspace(context.device))
        sizes = tuple(map(np.int32, (key_heads, value_heads, value_dim, parts.pitch, *parts.first, *parts.stride)))
        gates = -(-(decays + (value_heads if parts.has_update else 0)) // _OF_A_JOB)
        jobs = key_heads + -(-values // _VALUES_OF_A_JOB) + gates
        blocks = value_heads * -(-value_dim // _SCAN_COLUMNS)
        pitch = -(-(channels + decays + value_heads + key_heads) // 4) * 4
        size = values // norm_groups
        threads = min(_MOST_FINISH_THREADS, max(32, 1 << (size // 4 - 1).bit_length()))

        def launches(runs: _Runs) -> tuple[Launch, ...]:
            count, tokens = len(runs.write_index), len(runs.projected)
            entries = count * replays + tokens
            rows, mixtures = workspace.rows(entries * pitch), workspace.mixtures(tokens * values)
            given = (*runs.arguments, *map(np.int32, (tokens // count, replays, history)), *sizes)
            return (
                Launch(
                    convolve,
                    (entries, -(-jobs // _JOBS), 1),
                    (_CONVOLVE_THREADS, 1, 1),
                    *(runs.projected, recent, weight, tensors["conv_bias"], tensors["decay_scale"], dt_bias, runs.rows),
                    *given,
                    *(np.int32(count), np.int32(kernel), np.float32(update_scale), rows),
                    early=early,
                ),
                Launch(
                    scan,
                    (blocks, count, 1),
                    (_SCAN_THREADS, 1, 1),
                    *(rows, runs.projected, tensors["skip"]),
                    *given,
                    *(state, recent, mixtures),
                    early=early,
                ),
                Launch(
                    finish,
                    (tokens, norm_groups, 1),
                    (threads, 1, 1),
                    *(mixtures, runs.projected, norm_weight, runs.rows),
                    *sizes,
                    *map(np.int32, (size, len(norm_weight), OutputNorm(norm), sigmoid_gate)),
                    *(np.float32(epsilon), runs.out),
                    early=early,
                ),
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


class _Workspace:
    """Values between the kernels of a call. Grows to the largest call; earlier ones keep their memory."""

    def __init__(self, device: torch.device) -> None:
        self._rows = self._mixtures = torch.empty(0, dtype=torch.float32, device=device)

    def rows(self, size: int) -> torch.Tensor:
        """Inputs of the recurrence for all tokens."""
        if len(self._rows) < size:
            self._rows = self._rows.new_empty(size)
        return self._rows

    def mixtures(self, size: int) -> torch.Tensor:
        """Outputs of the recurrence."""
        if len(self._mixtures) < size:
            self._mixtures = self._mixtures.new_empty(size)
        return self._mixtures
