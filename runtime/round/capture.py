"""The CUDA graphs of rounds, captured when a bundle opens instead of in the middle of traffic.

What is captured are the rounds of requests that ask for nothing unusual, with filters and without: every shape of
engines/calls.py. Windows that a request lowers or a constraint fills, the rejection rule and adjusted logits are
captured when they occur. Calls with prompts are run in every size; small ones are captured when their shape comes
again.
"""

import time
from collections.abc import Callable

from tandemrt.engines import calls
from tandemrt.runtime.round.loop import Loop
from tandemrt.runtime.round.planner import Chunk, plan, total
from tandemrt.runtime.round.round import Round

_MOST_TOKENS = 4096  # of a call: a larger one takes so long that what its first run takes beyond that is no matter

Progress = Callable[[int, int], None]  # graphs' rounds done, and in all


def capture(loop: Loop, progress: Progress = lambda _done, _total: None) -> None:
    """Run a round of every shape on slots without requests, in the loop's thread. The slots are left as they were."""
    buffers = loop.tandem.buffers
    shapes = calls.rounds(loop.slots.count, loop.windows.usual)
    rounds = [
        Round({}, shape.batch, shape.window, filters, frozenset()) for shape in shapes for filters in (False, True)
    ]
    # Everything is allowed and every draft counts, so that what a graph is checked by is what rounds really do.
    buffers.bitmask.device.fill_(-1)
    for done, this in enumerate(rounds):
        progress(done, len(rounds))
        buffers.draft_len.device.fill_(this.window)
        _run(loop, this)
        if loop.windows.adaptive and not this.filters:
            loop.windows.costs.measured(this.batch, this.window, _seconds(loop, this))
        _leave(loop, this.batch)
    buffers.bitmask.device.zero_()  # as the host's twin holds it
    buffers.draft_len.device.zero_()
    _run_prompts(loop)
    _leave(loop, loop.slots.count)
    progress(len(rounds), len(rounds))


def _leave(loop: Loop, slots: int) -> None:
    """The first ``slots`` are as nobody had been there: a drafter keeps what it has of prompts and rounds, by slot."""
    for slot in range(slots):
        loop.tandem.state.leave(slot)
        loop.drafter.leave(slot)


def _run(loop: Loop, this: Round) -> None:
    draft_probs = None
    if this.window and loop.drafter.ahead:
        draft_probs = loop.drafter.propose(this)
    else:
        loop.drafter.skip(this)
    loop.tandem.score(this)
    loop.drafter.scored(this)
    loop.tandem.verify(this, draft_probs)
    loop.drafter.verified(this)


def _seconds(loop: Loop, this: Round) -> float:
    """What a round takes in the mean, once it is captured. Nothing may be emitted, so that no slot moves on.

    Rounds that draft nothing feed a draft once in so many as the largest window has tokens.
    """
    loop.tandem.buffers.bitmask.device.zero_()
    rounds = loop.windows.largest + 1
    for _ in range(0 if this.window else rounds):
        _run(loop, this)
    _wait(loop)
    start = time.perf_counter()
    for _ in range(rounds):
        _run(loop, this)
    _wait(loop)
    loop.tandem.buffers.bitmask.device.fill_(-1)
    return (time.perf_counter() - start) / rounds


def _wait(loop: Loop) -> None:
    with loop.clock.copies(behind=True):
        mark = loop.clock.mark_copies()
    loop.clock.wait(mark)


def _run_prompts(loop: Loop) -> None:
    """Calls with prompts of every size, the largest first, and with every number of them: engines grow, choose kernels
    and set up libraries now. Those of a lone request are captured, where the device is quicker than its host.

    Slots without requests lie in the scratch block. Over a linear cache, prompts and windows are alike.
    """
    budget, slots, query = loop.prompts.chunk, loop.slots.count, loop.windows.largest + 1
    if loop.tandem.runs is None:
        return
    largest = slots * query + calls.packed(slots * query, budget, slots).prompt_tokens
    sizes = calls.packed_sizes(min(largest, _MOST_TOKENS))
    for size in reversed(sizes):
        batch = min(slots, (size - 1) // query) if size > budget else 0
        _run_packed(loop, batch, size - batch * query, slots)
    for number in sorted({min(4**power, slots) for power in range(slots.bit_length())}):
        _run_packed(loop, 0, number, number)
    for size in sizes:
        if query < size <= min(budget, calls.QUICK):
            for _ in range(2):
                _run_packed(loop, 1, size - query, 1)


def _run_packed(loop: Loop, batch: int, tokens: int, prompts: int) -> None:
    """``tokens`` of at most ``prompts`` prompts beside the windows of the first ``batch`` slots."""
    runs, window = loop.tandem.runs, loop.windows.largest if batch else 0
    assert runs is not None
    each = -(-tokens // prompts)
    chunks = plan([Chunk(slot, 0, each) for slot in range(prompts)], tokens)
    sizes = calls.packed(batch * (window + 1), total(chunks), len(chunks))
    this = Round({}, batch, window, filters=False, rules=frozenset(), prompts=sizes)
    texts = {chunk.slot: [0] * (each + 1) for chunk in chunks}
    runs.write(chunks, texts, this.prompts)
    loop.drafter.reads(chunks, texts, this.prompts)
    if window and loop.drafter.ahead:
        loop.drafter.propose(this)
    else:
        loop.drafter.skip(this)
    loop.tandem.score(this)
    loop.drafter.scored(this)
