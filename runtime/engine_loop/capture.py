"""Capture the CUDA graphs of usual rounds: the first before any request, the rest while no request is there.

Usual rounds have every shape of engines/contract/calls.py, with and without filters. Rounds with other draft windows,
with the rejection rule or with adjusted logits are captured when they first occur. Calls with prompts run once in every
size, so that engines choose kernels and allocate memory; small ones are captured when their shape occurs again.

A start need not wait for more than rounds with the largest draft windows, and the largest call with prompts, which
allocates most memory. A request that needs a shape of the rest earlier waits for it.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import product

from tandemrt.engines.contract import calls
from tandemrt.runtime.device.prompt_plan import Chunk, plan
from tandemrt.runtime.engine_loop.loop import EngineLoop
from tandemrt.runtime.requests.round import Round

_MOST_TOKENS = 9216  # of a call, except the largest: at least those of experts, see prefill_chunk
_CAPTURED_TOKENS = 384  # of a call with a prompt; larger ones keep the device busy for longer than the host

Progress = Callable[[int, int], None]  # called with the rounds captured so far, and all of them


def capture(
    loop: EngineLoop, progress: Progress = lambda _done, _total: None, *, adaptive: bool = True
) -> Iterator[None]:
    """Run the first shapes on free slots, in the loop's thread, and restore the slots.

    Return an iterator that runs the rest, one shape for each item. Meanwhile all slots must be free. ``adaptive``:
    whether the rest has the shorter draft windows of adaptive rounds; else these rounds capture them themselves.
    """
    shapes = _first_shapes(loop)
    rounds = [*_rounds(shapes)]
    for done, round_ in enumerate(rounds):
        progress(done, len(rounds))
        _capture_round(loop, round_)
    loop.draft_windows.uncaptured = _adaptive(loop)
    for sizes in _prompt_calls(loop)[:1]:
        _run_packed(loop, *sizes)
    rest = _rest(loop, shapes, adaptive=adaptive)
    if not loop.target.layout.packed:  # rows of a linear cache keep texts of requests that have ended
        for _ in rest:
            pass
    progress(len(rounds), len(rounds))
    return rest


def _rest(loop: EngineLoop, first: Collection[calls.Shape], *, adaptive: bool) -> Iterator[None]:
    for sizes in _prompt_calls(loop)[1:]:
        _run_packed(loop, *sizes)
        _wait(loop)
        yield
    usual = calls.rounds(loop.slots.count, loop.draft_windows.usual) if adaptive else first
    for round_ in _rounds(shape for shape in usual if shape not in first):
        _capture_round(loop, round_)
        _wait(loop)
        yield
    for shape in (shape for shape in _without_drafts(loop) if shape not in (*first, *usual)):
        _run_packed(loop, shape.batch, calls.packed(shape.batch, 1, 1).prompt_tokens, 1, window=0)
        for round_ in _rounds([shape]):
            with _inputs(loop, round_, mask=-1):
                loop.target.verify(round_, None)
        _wait(loop)
        yield
    for batch in sorted(_adaptive(loop)) if adaptive else ():
        for window in loop.draft_windows.usual(batch) if loop.draft_windows.calibrates else ():
            _calibrate(loop, batch, window)
            _wait(loop)
            yield
        loop.draft_windows.uncaptured.discard(batch)


def _first_shapes(loop: EngineLoop) -> list[calls.Shape]:
    """Return the shapes of usual rounds with the largest draft windows of their number of requests."""
    windows = loop.draft_windows
    return calls.rounds(loop.slots.count, lambda live: windows.usual(live)[-1:])


def _without_drafts(loop: EngineLoop) -> list[calls.Shape]:
    """Return the shapes of rounds with prompts whose requests cannot use drafts, see RoundPlanner."""
    return calls.rounds(loop.slots.count, lambda _live: [0]) if loop.target.layout.packed else []


def _adaptive(loop: EngineLoop) -> set[int]:
    """Return the batch sizes of rounds whose draft windows adapt."""
    return {batch for batch in calls.buckets(loop.slots.count) if len(loop.draft_windows.usual(batch)) > 1}


def _rounds(shapes: Iterable[calls.Shape]) -> Iterator[Round]:
    for shape, needs_probs in product(shapes, (False, True)):
        yield Round({}, shape.batch, shape.window, needs_probs, frozenset())


def _capture_round(loop: EngineLoop, round_: Round) -> None:
    # All tokens are allowed and all drafts verified, so that the check of a graph compares real tokens.
    with _inputs(loop, round_, mask=-1):
        _run(loop, round_)


def _calibrate(loop: EngineLoop, batch: int, window: int) -> None:
    """Time a captured round for adaptive draft windows. Empty masks keep slots from advancing.

    Without drafts, only one of ``largest + 1`` rounds runs the draft, so as many are timed.
    """
    round_ = Round({}, batch, window, needs_probs=False, rules=frozenset())
    with _inputs(loop, round_, mask=0):
        rounds = loop.draft_windows.largest + 1
        for _ in range(0 if window else rounds):
            _run(loop, round_)
        _wait(loop)
        start = time.perf_counter()
        for _ in range(rounds):
            _run(loop, round_)
        _wait(loop)
        loop.draft_windows.costs.calibrate(batch, window, (time.perf_counter() - start) / rounds)


@contextmanager
def _inputs(loop: EngineLoop, round_: Round, *, mask: int) -> Iterator[None]:
    """Fill the masks with ``mask`` and let the whole window be verified; restore both and the slots afterwards.

    The next request writes only masks that differ from those on the device.
    """
    own = loop.target.buffers.bitmask.device, loop.target.buffers.draft_len.device
    before = [each.clone() for each in own]
    for each, value in zip(own, (mask, round_.window), strict=True):
        each.fill_(value)
    yield
    for each, values in zip(own, before, strict=True):
        each.copy_(values)
    _clear(loop, round_.batch)


def _clear(loop: EngineLoop, slots: int) -> None:
    """Clear the state of the first ``slots`` slots, in which warm-up rounds and prompts have left tokens."""
    for slot in range(slots):
        loop.target.state.leave(slot)
        loop.drafter.leave(slot)
    loop.target.state.flush()


def _run(loop: EngineLoop, round_: Round) -> None:
    draft_probs = None
    if round_.window and loop.drafter.window:
        draft_probs = loop.drafter.propose(round_)
    else:
        loop.drafter.skip(round_)
    loop.target.score(round_)
    loop.drafter.after_target(round_)
    loop.target.verify(round_, draft_probs)
    loop.drafter.after_verify(round_)


def _wait(loop: EngineLoop) -> None:
    with loop.streams.copies(after_work=True):
        copied = loop.streams.record_copies()
    loop.streams.wait(copied)


def _prompt_calls(loop: EngineLoop) -> list[tuple[int, int, int]]:
    """Return calls with prompts, as arguments of ``_run_packed``: of every size, the largest first, and every number.

    Small calls of one request are there twice and become captured: the device is faster than the host there. Larger
    ones are captured when they recur. Over a linear cache, prompts have no calls of their own shapes.
    """
    budget, slots, query = loop.planner.chunk, loop.slots.count, loop.draft_windows.largest + 1
    if not loop.target.layout.packed:
        return []
    largest = slots * query + calls.packed(slots * query, budget, slots).prompt_tokens
    sizes = sorted({*calls.packed_sizes(min(largest, _MOST_TOKENS)), largest})
    prompt_calls = []
    for size in reversed(sizes):
        batch = min(slots, (size - 1) // query) if size > budget else 0
        prompt_calls.append((batch, size - batch * query, slots))
    prompt_calls += [
        (0, number, number) for number in sorted({min(4**power, slots) for power in range(slots.bit_length())})
    ]
    small = [size for size in sizes if query < size <= min(budget, _CAPTURED_TOKENS)]
    return prompt_calls + [(1, size - query, 1) for size in small for _ in range(2)]


def _run_packed(loop: EngineLoop, batch: int, tokens: int, prompts: int, *, window: int | None = None) -> None:
    """Run a round with ``tokens`` tokens of at most ``prompts`` prompts and the draft windows of ``batch`` slots.

    ``window``: None for the largest. Free slots write to the scratch block.
    """
    layout, largest = loop.target.layout, loop.draft_windows.largest if batch else 0
    window = largest if window is None else window
    each = -(-tokens // prompts)
    chunks = plan([Chunk(slot, 0, each) for slot in range(prompts)], tokens)
    sizes = layout.prompts_of(batch * (window + 1), chunks)
    round_ = Round({}, batch, window, needs_probs=False, rules=frozenset(), prompts=sizes)
    texts = {chunk.slot: [0] * (each + 1) for chunk in chunks}
    loop.target.write_prompts(chunks, texts, round_.shape)
    loop.drafter.write_prompts(chunks, texts, round_.prompts)
    if window and loop.drafter.window:
        loop.drafter.propose(round_)
    else:
        loop.drafter.skip(round_)
    loop.target.score(round_)
    loop.drafter.after_target(round_)
    loop.drafter.read_prompts(round_)
    _clear(loop, max(batch, prompts))
