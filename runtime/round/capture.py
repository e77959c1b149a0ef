"""The CUDA graphs of rounds, captured when a bundle opens instead of in the middle of traffic.

What is captured are the rounds of requests that ask for nothing unusual, with filters and without: every shape of
engines/calls.py. Windows that a request lowers, the rejection rule and adjusted logits are captured when they occur.
"""

from collections.abc import Callable

from tandemrt.engines import calls
from tandemrt.runtime.round.loop import Loop

Progress = Callable[[int, int], None]  # graphs' rounds done, and in all


def capture(loop: Loop, progress: Progress = lambda _done, _total: None) -> None:
    """Run a round of every shape on slots without requests, in the loop's thread. The slots are left as they were."""
    buffers, slots = loop.tandem.buffers, loop.slots
    shapes = [(shape, filters) for shape in calls.rounds(slots, loop.windows.of) for filters in (False, True)]
    # Everything is allowed and every draft counts, so that what a graph is checked by is what rounds really do.
    buffers.bitmask.device.fill_(-1)
    for done, (shape, filters) in enumerate(shapes):
        progress(done, len(shapes))
        buffers.draft_len.device.fill_(shape.window)
        _round(loop, shape, filters=filters)
        for slot in range(shape.batch):
            loop.tandem.state.vacate(slot)
    buffers.bitmask.device.zero_()  # as the host's twin holds it
    buffers.draft_len.device.zero_()
    progress(len(shapes), len(shapes))


def _round(loop: Loop, shape: calls.Shape, *, filters: bool) -> None:
    draft_probs = None
    if shape.window and loop.drafter.ahead:
        draft_probs = loop.drafter.propose({}, shape.batch, shape.window, filters=filters)
    loop.tandem.score(shape.batch, shape.window)
    loop.tandem.verify(shape.batch, shape.window, draft_probs, filters=filters)
