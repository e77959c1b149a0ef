"""Grammar masks for drafts: those of a request's own grammar, whatever its neighbours have."""

import numpy as np
import torch

from tandemrt.plugins.operators.constants import Rule
from tandemrt.runtime.device.buffers import Buffer
from tandemrt.runtime.drafters.masks import DraftMasks
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.requests.running import RunningRequest
from tests.plain.constraints import WIDTH, constraint, regex_grammar
from tests.plain.requests import make_running, ready

CPU = torch.device("cpu")


def masked(masks: DraftMasks, *rows: RunningRequest) -> list[set[int]]:
    """The tokens that masks forbid to the first drafts of rows in slots 0, 1, …"""
    buffer = Buffer((len(rows), WIDTH), torch.float32, CPU, host=True)
    rules = frozenset({Rule.COUPLED, Rule.REJECTION})
    with masks.following(Round(dict(enumerate(rows)), len(rows), 4, needs_probs=True, rules=rules, num_proposed=4)):
        masks.apply(buffer.view(len(rows), WIDTH))
    return [set(np.flatnonzero(row == -np.inf).tolist()) for row in buffer.host_view(len(rows), WIDTH).numpy()]


def test_drafts_are_masked_by_the_grammar_of_their_own_request_alone() -> None:
    """A round masks drafts if any request has a grammar; a text under the rejection rule must not show it."""
    masks = DraftMasks(2, WIDTH, CPU)
    banning, plain = (
        make_running(constraints=ready(constraint(banned=banned)), rule="rejection", slot=slot)
        for slot, banned in ((0, [5]), (1, []))
    )
    first, second = (
        make_running(constraints=ready(constraint(grammar=regex_grammar("[ab]{9}"))), slot=slot) for slot in (0, 1)
    )
    every = set(range(WIDTH))
    assert masked(masks, banning, second) == [set(), every - set(b"ab")]
    assert masked(masks, first, plain) == [every - set(b"ab"), set()], "after a grammar in that slot"
