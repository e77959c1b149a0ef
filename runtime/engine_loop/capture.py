"""Capture the CUDA graphs of usual rounds when a bundle is opened, before the first request.

Usual rounds have every shape of engines/contract/calls.py, with and without filters. Rounds with other draft windows,
with the rejection rule or with adjusted logits are captured when they first occur. Calls with prompts run once in every
size, so that engines choose kernels and allocate memory; small ones are captured when their shape occurs again.
"""

import time
from collections.abc import Callable

from tandemrt.engines.contract import calls
from tandemrt.runtime.device.prompt_plan import Chunk, plan
from tandemrt.runtime.engine_loop.loop import EngineLoop
from tandemrt.runtime.requests.slots import Round

_MOST_TOKENS = 4096  # of a call; the first run of a larger call takes long anyway
_CAPTURED_TOKENS = 384  # of a call with a prompt; larger ones keep the device busy for longer than the host

Progress = Callable[[int, int], None]  # called with the rounds captured so far, and all of them


def capture(loop: EngineLoop, progress: Progress = lambda _done, _total: None) -> None:
    """Run a round of every usual shape on free slots, in the loop's thread; restore the slots afterwards."""
    buffers = loop.target.buffers
    shapes = calls.rounds(loop.slots.count, loop.draft_windows.usual)
    rounds = [
        Round({}, shape.batch, shape.window, filters, frozenset()) for shape in shapes for filters in (False, True)
    ]
    masks = buffers.bitmask.device.clone()  # the next request writes only rows that differ from them
    # All tokens are allowed and all drafts verified, so that the check of a graph compares real tokens.
    buffers.bitmask.device.fill_(-1)
    for done, this in enumerate(rounds):
        progress(done, len(rounds))
        buffers.draft_len.device.fill_(this.window)
        _run(loop, this)
        if loop.draft_windows.adapts(this.batch) and not this.filters:
            loop.draft_windows.costs.calibrate(this.batch, this.window, _seconds(loop, this))
        _clear(loop, this.batch)
    buffers.bitmask.device.zero_()
    buffers.draft_len.device.zero_()
    _run_prompts(loop)
    _clear(loop, loop.slots.count)
    buffers.bitmask.device.copy_(masks)
    progress(len(rounds), len(rounds))


def _clear(loop: EngineLoop, slots: int) -> None:
    """Clear the state of the first ``slots`` slots, in which warm-up rounds and prompts have left tokens."""
    for slot in range(slots):
        loop.target.state.leave(slot)
        loop.drafter.leave(slot)


def _run(loop: EngineLoop, this: Round) -> None:
    draft_probs = None
    if this.window and loop.drafter.drafts_before_commit:
        draft_probs = loop.drafter.propose(this)
    else:
        loop.drafter.skip(this)
    loop.target.score(this)
    loop.drafter.after_target(this)
    loop.target.verify(this, draft_probs)
    loop.drafter.after_verify(this)


def _seconds(loop: EngineLoop, this: Round) -> float:
    """Return the mean duration of a captured round. Empty masks keep slots from advancing.

    Without drafts, only one of ``largest + 1`` rounds runs the draft, so as many are timed.
    """
    loop.target.buffers.bitmask.device.zero_()
    rounds = loop.draft_windows.largest + 1
    for _ in range(0 if this.window else rounds):
        _run(loop, this)
    _wait(loop)
    start = time.perf_counter()
    for _ in range(rounds):
        _run(loop, this)
    _wait(loop)
    loop.target.buffers.bitmask.device.fill_(-1)
    return (time.perf_counter() - start) / rounds


def _wait(loop: EngineLoop) -> None:
    with loop.streams.copies(after_work=True):
        copied = loop.streams.record_copies()
    loop.streams.wait(copied)


def _run_prompts(loop: EngineLoop) -> None:
    """Run calls with prompts of every size, the largest first, and of every number, so that engines allocate memory and
    choose kernels. Small calls of one request run twice and are captured: the device is faster than the host there.
    Larger ones are captured when they recur.

    Free slots write to the scratch block. Over a linear cache, prompts have no calls of their own shapes.
    """
    budget, slots, query = loop.planner.chunk, loop.slots.count, loop.draft_windows.largest + 1
    if not loop.target.layout.packed:
        return
    largest = slots * query + calls.packed(slots * query, budget, slots).prompt_tokens
    sizes = calls.packed_sizes(min(largest, _MOST_TOKENS))
    for size in reversed(sizes):
        batch = min(slots, (size - 1) // query) if size > budget else 0
        _run_packed(loop, batch, size - batch * query, slots)
    for number in sorted({min(4**power, slots) for power in range(slots.bit_length())}):
        _run_packed(loop, 0, number, number)
    for size in sizes:
        if query < size <= min(budget, _CAPTURED_TOKENS):
            for _ in range(2):
                _run_packed(loop, 1, size - query, 1)


def _run_packed(loop: EngineLoop, batch: int, tokens: int, prompts: int) -> None:
    """Run a round with ``tokens`` tokens of at most ``prompts`` prompts and the draft windows of ``batch`` slots."""
    layout, window = loop.target.layout, loop.draft_windows.largest if batch else 0
    each = -(-tokens // prompts)
    chunks = plan([Chunk(slot, 0, each) for slot in range(prompts)], tokens)
    sizes = layout.prompts_of(batch * (window + 1), chunks)
    this = Round({}, batch, window, filters=False, rules=frozenset(), prompts=sizes)
    texts = {chunk.slot: [0] * (each + 1) for chunk in chunks}
    layout.write(chunks, texts, this.prompts)
    loop.drafter.write_prompts(chunks, texts, this.prompts)
    if window and loop.drafter.drafts_before_commit:
        loop.drafter.propose(this)
    else:
        loop.drafter.skip(this)
    loop.target.score(this)
    loop.drafter.after_target(this)
