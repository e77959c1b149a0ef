"""Verification and drafting by the kernels of ``verify.cu``: bound once, run many times, also in a CUDA graph.

Tensors are named as in engines/contract.py and must be contiguous. Nothing is allocated by a run and nothing is read
by the host.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from tandemrt.engines.operators import SAMPLING
from tandemrt.plugins.kernels.module import KernelModule, Launch, current_stream, suffix
from tandemrt.plugins.launch import Context, Tensors

_SAMPLING = tuple(binding.name for binding in SAMPLING)
_DRAFTED = ("draft_tokens", "draft_len")

_STATS_BYTES, _PARTIAL_BYTES = 24, 20
_COUNTS = 8452  # BF16_COUNTS of stats.cuh
_CHOOSE_THREADS, _STATS_THREADS, _LAW_THREADS = 256, 1024, 256
_GROUP = 8  # tokens that a thread takes at a time
_BLOCKS_AT_ONCE = 2  # of choose on one processor: a single one leaves it idle half of the time
_BLOCK_OVERHEAD = 1.4  # what a block costs beside its part, in steps of its threads through it
_LEAST_STATS_PARTS = 3  # fewer gain less than it costs to put their counts together
_MOST_PARTS = 64
_MOST_ROWS = 32


def launch_verify(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "VerifyLaunch":
    """See plugins/launch.py. Hints: ``filters`` as Engine.bind says, and ``advance``, the tensors of Advance.

    A ``bitmask`` among the tensors is applied first, as by token_bitmask.
    """
    advance = attributes.get("advance")
    return VerifyLaunch(
        context.module("verify"),
        tensors,
        _workspace(context),
        stats=attributes.get("filters", True),
        advance=None if advance is None else Advance(**advance),
    )


def launch_propose(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "ProposeLaunch":
    """See plugins/launch.py. Hint: ``filters``, as Engine.bind says."""
    filters = attributes.get("filters", True)
    return ProposeLaunch(context.module("verify"), tensors, _workspace(context), stats=filters)


class Workspace:
    """What the kernels hand on to one another, for at most ``batch`` requests of ``rows`` rows.

    Launches that share one must follow each other in one stream.
    """

    def __init__(self, batch: int, rows: int, device: torch.device) -> None:
        self.batch, self.rows = batch, rows
        zeros = partial(torch.zeros, device=device)
        self.stats = zeros(batch * rows, _STATS_BYTES, dtype=torch.uint8)
        self.partials = zeros(batch * rows * _MOST_PARTS, _PARTIAL_BYTES, dtype=torch.uint8)
        self.counters = zeros(batch, dtype=torch.int32)
        self.counts = zeros(min(batch * rows, _processors(device) // _LEAST_STATS_PARTS), _COUNTS, dtype=torch.int32)
        self.arrivals = zeros(len(self.counts), dtype=torch.int32)


@dataclass(frozen=True)
class Advance:
    """Per-request state that verification moves on by what it emits, int64 (runtime/round/state.py).

    ``length`` and ``position`` [batch] grow by the count, ``newest`` [batch, 2] are the two last tokens.
    """

    length: torch.Tensor
    position: torch.Tensor
    newest: torch.Tensor


class VerifyLaunch:
    """``verify_draft`` on one set of tensors: the bindings of ``contract.verify``; ``bitmask`` may be missing.

    ``stats`` says that a request may filter, or use the rejection rule: a launch more. Without it, filters and the
    rejection rule of the requests are not looked at, so it must be true as soon as one request has any.
    """

    def __init__(
        self,
        module: KernelModule,
        tensors: Mapping[str, torch.Tensor],
        workspace: Workspace,
        *,
        stats: bool,
        advance: Advance | None = None,
    ) -> None:
        logits = tensors["logits"]
        drafts = [tensors[name] for name in _DRAFTED] if logits.shape[1] > 1 else [None, None]
        inputs = [logits, tensors.get("bitmask"), *drafts, *(tensors[name] for name in _SAMPLING)]
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
        _run(self._launches, self._device)


class ProposeLaunch:
    """``sample_draft`` on one set of tensors: the bindings of ``contract.propose``.

    With ``draft_probs`` among them the law of each token is written too; ``target_ids`` may be missing. ``stats`` says
    that a request may filter.
    """

    def __init__(
        self, module: KernelModule, tensors: Mapping[str, torch.Tensor], workspace: Workspace, *, stats: bool
    ) -> None:
        logits, token, probs = tensors["logits"], tensors["token"], tensors.get("draft_probs")
        batch, vocab, ids = logits.shape[0], logits.shape[-1], tensors.get("target_ids")
        sampling = [tensors[name] for name in _SAMPLING]
        inputs = [logits.view(batch, 1, vocab), None, None, None, *sampling]
        outputs = [None, None, None, token, None]
        self._device = logits.device
        self._launches = _choice(
            module, inputs, None, workspace, stats or probs is not None, True, outputs, probs is not None, ids
        )
        if probs is not None:
            kernel = module.kernel(f"draft_law_{suffix(logits)}")
            grid = (min(_MOST_PARTS, -(-vocab // _LAW_THREADS)), batch, 1)
            arguments = (logits, *sampling, workspace.stats, token, ids, np.int32(vocab), probs)
            self._launches.append(Launch(kernel, grid, (_LAW_THREADS, 1, 1), *arguments))

    def run(self) -> None:
        """Enqueue the launches on torch's current stream."""
        _run(self._launches, self._device)


def _choice(
    module: KernelModule,
    inputs: list[torch.Tensor | None],
    draft_probs: torch.Tensor | None,
    workspace: Workspace,
    stats: bool,
    drafting: bool,
    outputs: list[torch.Tensor | None],
    with_probs: bool = False,
    target_ids: torch.Tensor | None = None,
) -> list[Launch]:
    """row_stats, if ``stats``, and choose."""
    logits = inputs[0]
    assert logits is not None
    batch, rows, vocab = logits.shape
    if batch > workspace.batch or rows > workspace.rows:
        raise ValueError(
            f"workspace: {batch} requests of {rows} rows are needed, it has room for {workspace.batch} of "
            f"{workspace.rows}; make a larger one"
        )
    if rows > _MOST_ROWS:
        raise ValueError(f"logits: at most {_MOST_ROWS} rows per request are possible, got {rows}; shorten the window")
    dtype, sizes, launches = suffix(logits), (np.int32(rows), np.int32(vocab)), []
    processors = _processors(module.device)
    if stats:
        shared = (workspace.counts, workspace.arrivals)
        arguments = (*inputs, draft_probs, *sizes, np.int32(with_probs), *shared, workspace.stats)
        grid = (stats_parts(batch * rows, vocab, processors) if dtype == "bf16" else 1, rows, batch)
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
    grid = (parts(batch * rows, vocab, processors), rows, batch)
    kernel = module.kernel(f"choose_{dtype}")
    launches.append(Launch(kernel, grid, (_CHOOSE_THREADS, 1, 1), *arguments))
    return launches


def parts(rows: int, vocab: int, processors: int) -> int:
    """Into how many parts to cut a row for choose, so that all processors have work, and equally much."""
    steps = -(-vocab // (_GROUP * _CHOOSE_THREADS))

    def cost(count: int) -> float:
        return max(_BLOCKS_AT_ONCE, -(-rows * count // processors)) * (-(-steps // count) + _BLOCK_OVERHEAD)

    return min(range(1, min(steps, _MOST_PARTS) + 1), key=cost)


def stats_parts(rows: int, vocab: int, processors: int) -> int:
    """Into how many parts to cut a row for row_stats: one where there are rows enough."""
    most = min(processors // rows, -(-vocab // (_GROUP * _STATS_THREADS)))
    return most if most >= _LEAST_STATS_PARTS else 1


def _workspace(context: Context) -> Workspace:
    batch, rows = context.sizes["batch"], context.sizes["window+1"]
    return context.keep("verify workspace", lambda: Workspace(batch, rows, context.device))


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _run(launches: list[Launch], device: torch.device) -> None:
    stream = current_stream(device)
    for launch in launches:
        launch.run(stream)
