"""``gated_delta_net`` on a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.module import KernelModule, Launch, Tensors, current_stream, suffix
from tandemrt.plugins.operators.constants import KEY_DIMS, MAX_KERNEL, VALUE_DIM_MULTIPLE
from tandemrt.plugins.operators.launch import Context

_CONVOLVE_THREADS, _SCAN_THREADS, _SCAN_COLUMNS = 128, 64, 32


def launch(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "GatedDeltaNetLauncher":
    """Bind the operator; see Launcher in plugins/operators/launch.py."""
    return GatedDeltaNetLauncher(context, tensors, **attributes)


@dataclass(frozen=True)
class _Runs:
    """Runs of tokens: draft windows of ``query`` tokens, or prompts with ``slots`` and ``starts``.

    ``mixed`` and ``out`` begin with the first token of the first run. ``rows``: the run of each token of prompts.
    """

    mixed: torch.Tensor
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


class GatedDeltaNetLauncher:
    """One bound call of ``gated_delta_net``; shapes as in ``tandemrt.plugins.reference.gated_delta_net``.

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
    ) -> None:
        mixed, state, recent = tensors["mixed"], tensors["state"], tensors["recent"]
        weight, decay_scale, dt_bias = tensors["conv_weight"], tensors["decay_scale"], tensors["dt_bias"]
        (slots, _, key_dim, value_dim), history, width = state.shape, recent.shape[1], mixed.shape[1]
        channels, kernel = weight.shape
        per_channel = len(dt_bias) > value_heads
        decays = value_heads * (key_dim if per_channel else 1)
        _check("state", state, torch.float32, (slots, value_heads, key_dim, value_dim))
        _check("recent", recent, mixed.dtype, (slots, history, channels + decays + value_heads))
        _check("mixed", mixed, mixed.dtype, (len(mixed), channels + decays + value_heads))
        _check("conv_weight", weight, mixed.dtype, (2 * key_heads * key_dim + value_heads * value_dim, kernel))
        _check("decay_scale", decay_scale, torch.float32, (value_heads,))
        _check("dt_bias", dt_bias, torch.float32, (decays,))
        _check("out", tensors["out"], mixed.dtype, (len(mixed), value_heads * value_dim))
        if key_dim not in KEY_DIMS or value_dim % VALUE_DIM_MULTIPLE or not kernel <= min(MAX_KERNEL, history):
            raise ValueError(
                f"state: key sizes of {KEY_DIMS}, value sizes of a multiple of {VALUE_DIM_MULTIPLE} and at most "
                f"{MAX_KERNEL} tokens of a convolution are needed, got {list(state.shape)}, {kernel} and {history}"
            )
        if width % 2:
            raise ValueError(f"mixed: an even number of values per token is needed, got {width}")
        module = KernelModule.of(context, "gated_delta_net")
        kind = f"{suffix(mixed)}_{'channels_' if per_channel else ''}{key_dim}"
        convolve, scan = module.kernel(f"convolve_{kind}"), module.kernel(f"scan_{kind}")
        replays = history - (kernel - 1)
        workspace = context.get_or_create("gated_delta_net", lambda: _Workspace(context.device))
        blocks = value_heads * -(-value_dim // _SCAN_COLUMNS)

        def launches(runs: _Runs) -> tuple[Launch, Launch]:
            count, tokens = len(runs.write_index), len(runs.mixed)
            rows = workspace.rows((count * replays + tokens) * -(-width // 4) * 4)
            query = tokens // count
            sizes = map(np.int32, (query, replays, key_heads, value_heads, value_dim, history))
            given = (*runs.arguments, *sizes)
            return Launch(
                convolve,
                (count * replays + tokens, key_heads, 1),
                (_CONVOLVE_THREADS, 1, 1),
                *(runs.mixed, recent, weight, decay_scale, dt_bias, runs.rows),
                *given,
                np.int32(count),
                np.int32(kernel),
                np.float32(update_scale),
                rows,
            ), Launch(
                scan,
                (blocks, count, 1),
                (_SCAN_THREADS, 1, 1),
                *(rows, runs.mixed),
                *given,
                *(state, recent, runs.out),
            )

        out, prompt_rows = tensors["out"], tensors["prompt_rows"]
        windows = len(mixed) - len(prompt_rows)
        self._device = mixed.device
        self._launches: tuple[Launch, ...] = ()
        if len(prompt_rows):  # before the windows, which may follow them in the same text
            self._launches = launches(
                _Runs(
                    mixed[windows:],
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
            self._launches += launches(_Runs(mixed[:windows], out[:windows], *indices))

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        stream = current_stream(self._device)
        for each in self._launches:
            each.run(stream)


class _Workspace:
    """Inputs of the recurrence for the tokens of a call. Grows to the largest call; earlier ones keep their memory."""

    def __init__(self, device: torch.device) -> None:
        self._rows = torch.empty(0, dtype=torch.float32, device=device)

    def rows(self, size: int) -> torch.Tensor:
        if len(self._rows) < size:
            self._rows = torch.empty(size, dtype=torch.float32, device=self._rows.device)
        return self._rows


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: a contiguous {dtype}{list(shape)} is needed, got {tensor.dtype}{list(tensor.shape)} "
            f"with strides {tensor.stride()}"
        )
