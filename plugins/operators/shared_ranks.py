"""Ranks of a tensor-parallel target on CPUs: processes that exchange parts of tensors through shared memory."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tandemrt.plugins.operators.launch import Call, Context, Tensors
from tandemrt.plugins.tensors.host_tensor import array_of

_PHASES = 2  # a rank writes part n + 1 while others still read part n; all have read it before part n + 2
_LINE = 64  # bytes; parts begin at a multiple of it
_WAIT_S = 0.2  # between two checks that the other ranks are alive


class Semaphore(Protocol):
    """multiprocessing's or threading's. A release orders earlier writes to memory before later reads of the waiter."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool: ...

    def release(self) -> None: ...


class SharedRanks:
    """This process among ``count`` ranks that call ``exchange`` equally often, with parts of the same size.

    ``memory``: shared bytes, at least ``shared_bytes``. ``arrived``: ``arrived[a][b]`` counts the parts of rank a that
    rank b has not read yet. ``check`` is called while this rank waits, with the rank that it waits for and the seconds
    for which it has; it raises if a rank has failed.
    """

    def __init__(
        self,
        rank: int,
        memory: Any,
        arrived: Sequence[Sequence[Semaphore]],
        check: Callable[[int, float], None] = lambda _other, _waited: None,
    ) -> None:
        self.rank = rank
        self.count = len(arrived)
        self.check = check
        parts = np.frombuffer(memory, np.uint8)
        self.most = len(parts) // (_PHASES * self.count) // _LINE * _LINE
        self._parts = [
            [parts[at * self.most : (at + 1) * self.most] for at in range(phase * self.count, (phase + 1) * self.count)]
            for phase in range(_PHASES)
        ]
        self._arrived = arrived
        self._phase = 0

    def exchange(self, part: np.ndarray) -> list[np.ndarray]:
        """Return the parts of all ranks, in their order; they are valid until the call after the next.

        ``part`` is this rank's, at most ``most`` bytes. Every rank passes the same shape and dtype.
        """
        parts = [memory[: part.nbytes].view(part.dtype).reshape(part.shape) for memory in self._parts[self._phase]]
        self._phase = (self._phase + 1) % _PHASES
        parts[self.rank][...] = part
        others = [rank for rank in range(self.count) if rank != self.rank]
        for other in others:
            self._arrived[self.rank][other].release()
        for other in others:
            acquire(self._arrived[other][self.rank], other, self.check)
        return parts


def acquire(semaphore: Semaphore, other: int, check: Callable[[int, float], None]) -> None:
    """Acquire a semaphore that rank ``other`` releases. ``check``: see SharedRanks."""
    waited = 0.0
    while not semaphore.acquire(timeout=_WAIT_S):
        waited += _WAIT_S
        check(other, waited)


def shared_bytes(count: int, most: int) -> int:
    """Return the size of the shared memory of ``count`` ranks for parts of at most ``most`` bytes."""
    return _PHASES * count * -(-most // _LINE) * _LINE


class RanksCall:
    """An operator that all ranks run together, with bound tensors."""

    def __init__(self, ranks: SharedRanks, x: Any, out: Any, join: Callable[[list[np.ndarray], np.ndarray], None]):
        self._ranks = ranks
        self._x, self._out = array_of(x), array_of(out)
        self._join = join

    def run(self) -> None:
        """Run once, when all ranks do."""
        self._join(self._ranks.exchange(self._x), self._out)


def launch_all_reduce(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> Call:  # noqa: ARG001
    """Bind ``all_reduce``; see Launcher in plugins/operators/launch.py."""
    assert isinstance(context.ranks, SharedRanks)
    return RanksCall(context.ranks, tensors["x"], tensors["sum"], _add)


def launch_all_gather(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> Call:  # noqa: ARG001
    """Bind ``all_gather``; see Launcher in plugins/operators/launch.py."""
    assert isinstance(context.ranks, SharedRanks)
    return RanksCall(context.ranks, tensors["x"], tensors["gathered"], _place)


def _add(parts: list[np.ndarray], out: np.ndarray) -> None:
    if out.dtype == np.float32:
        np.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out += part
        return
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total += part.astype(np.float32)
    out[...] = total.astype(out.dtype)


def _place(parts: list[np.ndarray], out: np.ndarray) -> None:
    width, part = out.shape[-1], parts[0].shape[-1]
    for rank, columns in enumerate(parts):
        begin = min(rank * part, width - part)
        out[..., begin : begin + part] = columns
