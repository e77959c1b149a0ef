"""What holds when an engine loop has ended, whatever its test is about: see ``sound_loops``."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary, WeakSet

import pytest

from tandemrt.runtime.caches.kv_cache import BlockTable
from tandemrt.runtime.engine_loop.commit import Committer
from tandemrt.runtime.engine_loop.loop import EngineLoop
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.request import Request, RequestOutput


@pytest.fixture(scope="module", autouse=True)
def sound_loops() -> Iterator[None]:
    """Fail a module in which a loop ended with something left in it, or counted other things than its outputs."""
    checks = LoopChecks()
    with checks.watch():
        yield
    assert not checks.problems, "\n".join(checks.problems)


class LoopChecks:
    """Keeps the outputs of each loop, and checks the loop when it closes.

    Loops from before are left out, such as those of a fixture that several modules share.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._loops: WeakSet[EngineLoop] = WeakSet()
        self._ended: WeakKeyDictionary[Committer, list[RequestOutput]] = WeakKeyDictionary()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Check all loops of this process that close while the block runs."""
        begin, count_end, close = EngineLoop.__init__, Committer._count_end, EngineLoop.close

        def kept_begin(loop: EngineLoop, *arguments: Any, **named: Any) -> None:
            begin(loop, *arguments, **named)
            self._loops.add(loop)

        def kept_end(committer: Committer, request: Request) -> None:
            count_end(committer, request)
            if request.output is not None:
                self._ended.setdefault(committer, []).append(request.output)

        def checked_close(loop: EngineLoop) -> None:
            close(loop)
            if loop not in self._loops:
                return
            outputs = self._ended.get(loop._committer, [])
            self.problems += [f"{line} (after {len(outputs)} requests)" for line in _broken(loop, outputs)]

        with (
            patch.object(EngineLoop, "__init__", kept_begin),
            patch.object(Committer, "_count_end", kept_end),
            patch.object(EngineLoop, "close", checked_close),
        ):
            yield


def _broken(loop: EngineLoop, outputs: list[RequestOutput]) -> Iterator[str]:
    """Yield the rules that ``loop`` breaks after requests with these ``outputs``."""
    manager = loop.cache_manager
    rules = {
        f"slots and queue are empty: {len(loop.slots)}, {loop.scheduler.waiting}": loop.idle
        and not loop.scheduler.waiting,
        "all blocks are free": not isinstance(manager, BlockTable)
        or manager.allocator.available == manager.allocator.blocks - 1,
    }
    yield from (rule for rule, holds in rules.items() if not holds)
    yield from broken_sums(loop.metrics, outputs)


def broken_sums(metrics: Metrics, outputs: list[RequestOutput]) -> Iterator[str]:
    """Yield the rules that ``metrics`` break: within themselves, and against all ``outputs`` of their loop."""
    rules = _sums(metrics)
    if all(output.finish_reason != "error" for output in outputs):  # one may lack what its last round counted
        rules |= _sums_of_outputs(metrics, outputs)
    yield from (rule for rule, holds in rules.items() if not holds)


def _sums(metrics: Metrics) -> dict[str, bool]:
    return {
        "a draft is verified, or a constraint rejected it": metrics.drafted
        == metrics.evaluated + metrics.constraint_rejected_drafts,
        "what is kept was emitted": metrics.emitted >= metrics.kept,
        "what is accepted was verified": metrics.evaluated + metrics.fast_forward_drafts >= sum(metrics.accepted),
        "every step is in the histogram": metrics.accepted_per_step.count == metrics.steps,
        "a request has a slot once": metrics.queue_seconds.count <= sum(metrics.finished.values()),
        "time passes in phases": all(seconds >= 0 for seconds in metrics.seconds.values()),
    }


def _sums_of_outputs(metrics: Metrics, outputs: list[RequestOutput]) -> dict[str, bool]:
    tokens = [len(output.token_ids) for output in outputs]
    pairs = {
        "finish reasons": (metrics.finished, dict(Counter(output.finish_reason for output in outputs))),
        "tokens": (metrics.kept, sum(tokens)),
        "outputs": (metrics.output_tokens.count, len(outputs)),
        "forced ends": (metrics.forced_ends, sum(output.forced_ends for output in outputs)),
        "steps": (metrics.steps, sum(output.speculation.num_spec_steps for output in outputs)),
        "accepted drafts": (sum(metrics.accepted), sum(each.speculation.num_accepted_draft_tokens for each in outputs)),
    }
    return {
        f"{name} are those of the outputs: {ours}, {theirs}": ours == theirs for name, (ours, theirs) in pairs.items()
    }
