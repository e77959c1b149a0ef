"""Launches of the kernels of ``verify.cu``, for verification and drafting: bound once, run many times. Capturable.

Tensors have the names of engines/contract/contract.py and must be contiguous. A run allocates nothing and reads nothing
on the host.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from tandemrt.engines.contract.sampling_parameters import SAMPLING_PARAMETERS
from tandemrt.plugins.kernels.module import KernelModule, Launch, Tensors, run_in_order, suffix
from tandemrt.plugins.operators.launch import Context
from tandemrt.plugins.tensors.devices.lookup import device_of

_DRAFTED = ("draft_tokens", "draft_len")

_STATS_BYTES, _PARTIAL_BYTES = 24, 20
_COUNTS = 8452  # BF16_COUNTS of stats.cuh
_CHOOSE_THREADS, _STATS_THREADS, _PROBS_THREADS = 256, 1024, 256
_GROUP = 8  # tokens that a thread processes at a time
_BLOCKS_AT_ONCE = 2  # blocks of choose per SM: a single one leaves it idle half of the time
_BLOCK_OVERHEAD = 1.4  # fixed cost of a block, in steps of its threads
_MIN_STATS_PARTS = 3  # with fewer parts, summing their counts costs more than they gain
_MAX_PARTS = 64
_MAX_ROWS = 32


def launch_verify(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "VerifyLaunch":
    """Bind the operator. Hints: ``needs_probs`` as in Engine.bind, and ``advance``, the tensors of Advance.

    If ``tensors`` has a ``bitmask``, the kernels apply it first, as token_bitmask does.
    """
    advance = attributes.get("advance")
    return VerifyLaunch(
        KernelModule.of(context, "verify"),
        tensors,
        _workspace(context),
        stats=attributes.get("needs_probs", True),
        advance=None if advance is None else Advance(**advance),
    )


def launch_propose(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "ProposeLaunch":
    """Bind the operator; see Launcher in plugins/operators/launch.py. Hint: ``needs_probs``, as in Engine.bind."""
    needs_probs = attributes.get("needs_probs", True)
    return ProposeLaunch(KernelModule.of(context, "verify"), tensors, _workspace(context), stats=needs_probs)


class VerifyWorkspace:
    """Intermediate results of the kernels, for at most ``batch`` requests of ``rows`` rows.

    Launches that share a workspace must run one after another on one stream.
    """

    def __init__(self, batch: int, rows: int, device: torch.device) -> None:
        self.batch, self.rows = batch, rows
        zeros = partial(torch.zeros, device=device)
        self.stats = zeros(batch * rows, _STATS_BYTES, dtype=torch.uint8)
        self.partials = zeros(batch * rows * _MAX_PARTS, _PARTIAL_BYTES, dtype=torch.uint8)
        self.counters = zeros(batch, dtype=torch.int32)
        counted = min(batch * rows, device_of(device).processors // _MIN_STATS_PARTS)
        self.counts = zeros(counted, _COUNTS, dtype=torch.int32)
        self.arrivals = zeros(len(self.counts), dtype=torch.int32)


@dataclass(frozen=True)
class Advance:
    """Per-request state that verification advances by the emitted tokens, int64 (runtime/device/slot_state.py).

    ``length`` and ``position`` [batch] grow by the count; ``newest`` [batch, 2] are the last two tokens.
    """

    length: torch.Tensor
    position: torch.Tensor
    newest: torch.Tensor


class VerifyLaunch:
    """``verify_draft`` on one set of tensors: the bindings of ``contract.verify``; ``bitmask`` is optional.

    ``stats`` adds a launch that requests with filters or the rejection rule need. Without it the kernels ignore both,
    so it must be true as soon as one request has either.
    """

    def __init__(
        self,
        module: KernelModule,
        tensors: Mapping[str, torch.Tensor],
        workspace: VerifyWorkspace,
        *,
        stats: bool,
        advance: Advance | None = None,
    ) -> None:
        logits = tensors["logits"]
        drafts = [tensors[name] for name in _DRAFTED] if logits.shape[1] > 1 else [None, None]
        inputs = [logits, tensors.get("bitmask"), *drafts, *(tensors[name] for name in SAMPLING_PARAMETERS)]
        progress = [advance.length, advance.position, advance.newest] if advance else [None] * 3
        self._device = logits.device
        self._launches = _choice(
            module,
            inputs,
            tensors.get("draft_probs"),
            workspace,
            stats,
            False,
            [*progress, tensors["tokens"], tensors["count"]],
        )

    def run(self) -> None:
        """Enqueue the launches on torch's current stream."""
        run_in_order(self._launches, self._device)


class ProposeLaunch:
    """``sample_draft`` on one set of tensors: the bindings of ``contract.propose``; ``target_ids`` is optional.

    With ``draft_probs`` a further launch writes the distribution of each token. ``stats`` must be true if a request
    filters.
    """

    def __init__(
        self, module: KernelModule, tensors: Mapping[str, torch.Tensor], workspace: VerifyWorkspace, *, stats: bool
    ) -> None:
        logits, token, probs = tensors["logits"], tensors["token"], tensors.get("draft_probs")
        batch, vocab, ids = logits.shape[0], logits.shape[-1], tensors.get("target_ids")
        sampling = [tensors[name] for name in SAMPLING_PARAMETERS]
        inputs = [logits.view(batch, 1, vocab), None, None, None, *sampling]
        outputs = [None, None, None, token, None]
        self._device = logits.device
        self._launches = _choice(
            module, inputs, None, workspace, stats or probs is not None, True, outputs, probs is not None, ids
        )
        if probs is not None:
            kernel = module.kernel(f"draft_probs_{suffix(logits)}")
            grid = (min(_MAX_PARTS, -(-vocab // _PROBS_THREADS)), batch, 1)
            arguments = (logits, *sampling, workspace.stats, token, ids, np.int32(vocab), probs)
            self._launches.append(Launch(kernel, grid, (_PROBS_THREADS, 1, 1), *arguments))

    def run(self) -> None:
        """Enqueue the launches on torch's current stream."""
        run_in_order(self._launches, self._device)


def _choice(
    module: KernelModule,
    inputs: list[torch.Tensor | None],
    draft_probs: torch.Tensor | None,
    workspace: VerifyWorkspace,
    stats: bool,
    drafting: bool,
    outputs: list[torch.Tensor | None],
    with_probs: bool = False,
    target_ids: torch.Tensor | None = None,
) -> list[Launch]:
    """Bind the kernels row_stats (if ``stats``) and choose."""
    logits = inputs[0]
    assert logits is not None
    batch, rows, vocab = logits.shape
    if batch > workspace.batch or rows > workspace.rows:
        raise ValueError(
            f"workspace: {batch} requests of {rows} rows are needed, it has room for {workspace.batch} of "
            f"{workspace.rows}; make a larger one"
        )
    if rows > _MAX_ROWS:
        raise ValueError(f"logits: at most {_MAX_ROWS} rows per request are possible, got {rows}; shorten the window")
    dtype, sizes, launches = suffix(logits), (np.int32(rows), np.int32(vocab)), []
    sm_count = module.sm_count
    if stats:
        shared = (workspace.counts, workspace.arrivals)
        arguments = (*inputs, draft_probs, *sizes, np.int32(with_probs), *shared, workspace.stats)
        grid = (stats_parts(batch * rows, vocab, sm_count) if dtype == "bf16" else 1, rows, batch)
        kernel = module.kernel(f"row_stats_{dtype}")
        launches.append(Launch(kernel, grid, (_STATS_THREADS, 1, 1), *arguments))
    scratch = (workspace.partials, workspace.counters)
    arguments = (
        *inputs,
        draft_probs,
        workspace.stats if stats else None,
        target_ids,
        *sizes,
        np.int32(drafting),
        *scratch,
        *outputs,
    )
    grid = (parts(batch * rows, vocab, sm_count), rows, batch)
    kernel = module.kernel(f"choose_{dtype}")
    launches.append(Launch(kernel, grid, (_CHOOSE_THREADS, 1, 1), *arguments))
    return launches


def parts(rows: int, vocab: int, sm_count: int) -> int:
    """Return the number of parts per row for the kernel choose that balances the load of all SMs."""
    steps = -(-vocab // (_GROUP * _CHOOSE_THREADS))

    def cost(count: int) -> float:
        return max(_BLOCKS_AT_ONCE, -(-rows * count // sm_count)) * (-(-steps // count) + _BLOCK_OVERHEAD)

    return min(range(1, min(steps, _MAX_PARTS) + 1), key=cost)


def stats_parts(rows: int, vocab: int, sm_count: int) -> int:
    """Return the number of parts per row for the kernel row_stats: one if there are enough rows."""
    most = min(sm_count // rows, -(-vocab // (_GROUP * _STATS_THREADS)))
    return most if most >= _MIN_STATS_PARTS else 1


def _workspace(context: Context) -> VerifyWorkspace:
    batch, rows = context.sizes["batch"], context.sizes["window+1"]
    return context.get_or_create("verify workspace", lambda: VerifyWorkspace(batch, rows, context.device))
