"""Rows that the host handles at once: masks, drafts, texts and counts equal those of rows handled one by one."""

from dataclasses import asdict
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.rows import MaskRows
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tandemrt.runtime.engine_loop.draft_windows import DraftWindowPlanner
from tandemrt.runtime.engine_loop.planner import plan_round
from tandemrt.runtime.engine_loop.steady_rows import SteadyRows
from tandemrt.runtime.requests.running import RunningRequest
from tests.plain.requests import VOCABULARY, ids, make_running, ready

WINDOW, WORDS = 3, 8
LETTERS, STOP = ids("ab<"), ids(".")
PROMPT = ids("a")
token = st.sampled_from([*LETTERS, *STOP])


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Rules of a request, of which only a few hold in each example, so that runs are long."""
    thinking = None
    if draw(st.booleans()):
        budget = draw(st.sampled_from([None, 4, 9]))
        thinking = ThinkingRule(ids("<a"), (ids("<b"),), ids("<b"), budget=budget, vocabulary=VOCABULARY)
    return {
        "stop_ids": draw(st.sampled_from([(), STOP])),
        "thinking": thinking,
        "prompt": PROMPT + draw(st.sampled_from([[], ids("<a")])),
        "min_tokens": draw(st.sampled_from([0, 3])),
        "max_tokens": draw(st.sampled_from([None, 7, 20])),
        "banned": draw(st.sampled_from([(), ids("b")])),
    }


class Alone:
    """A request, and all that a round does with it."""

    def __init__(self, rules: dict[str, Any], slot: int) -> None:
        prompt = [*rules["prompt"]]
        self.running = make_running(
            prompt=prompt, slot=slot, window=WINDOW, constraints=ready(Constraint(256, **rules))
        )
        self.running.prefilled = self.running.prefill_end
        self.running.last_token_time = 0.0  # the first token is committed alone
        self.accepted: list[int] = []
        self.texts: list[Any] = []

    def commit(self, emitted: list[int], drafted: int) -> None:
        """Commit a round of its own."""
        self.accepted += self.running.commit(emitted, drafted)

    def state(self) -> dict[str, Any]:
        """Return what later rounds and the caller may see."""
        running = self.running
        self.accepted += running.take_accepted()
        self.texts.append(running._text.take())
        return {
            "tokens": running.tokens,
            "state": running.constraint._state,
            "accepted": self.accepted,
            "speculation": asdict(running.speculation),
            "texts": self.texts,
            "finished": running.request.finish_reason,
            "final": running.final_length,
        }


def masks_of(running: RunningRequest, draft: list[int], size: int) -> tuple[list[int], np.ndarray]:
    """Return the drafts to verify and the mask rows of a row that is written alone."""
    rows = np.zeros((size, WORDS), np.int32)
    return running.fill_rows(draft, MaskRows(rows), 0, limit=0, override=False).tokens, rows


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(options(), min_size=1, max_size=3), st.data())
def test_rows_handled_at_once_equal_rows_handled_alone(rules: list[dict[str, Any]], data: st.DataObject) -> None:
    together, alone = ([Alone(each, slot) for slot, each in enumerate(rules)] for _ in range(2))
    steady, planner = SteadyRows(len(rules)), DraftWindowPlanner(WINDOW, WINDOW)
    for _ in range(data.draw(st.integers(1, 6))):
        rows = [each.running for each in together if not each.running.finished]
        if not rows:
            break
        round_ = plan_round(rows, planner, len(rules))
        drafts = np.array([data.draw(st.lists(token, min_size=WINDOW, max_size=WINDOW)) for _ in range(round_.batch)])
        slots, counts = steady.verified(round_, drafts, None)
        at_once = dict(zip(slots.tolist(), counts.tolist(), strict=True))
        tokens, emitted = np.zeros((round_.batch, WINDOW + 1), np.int64), np.zeros(round_.batch, np.int64)
        verified: dict[int, int] = {}
        for slot in round_.rows:
            most = round_.max_drafted(alone[slot].running)
            kept, masks = masks_of(alone[slot].running, drafts[slot, :most].tolist(), WINDOW + 1)
            verified[slot] = len(kept)
            if slot in at_once:
                assert at_once[slot] == len(kept)
                assert (masks[: len(kept) + 1] == steady.row(slot)).all()
            accepted = data.draw(st.integers(0, len(kept)))
            bits = np.unpackbits(masks[accepted].view(np.uint8), bitorder="little")
            legal = [each for each in (*LETTERS, *STOP) if bits[each]] if accepted < len(kept) or bits.any() else []
            following = [data.draw(st.sampled_from(legal))] if legal else []
            decided = [*kept[:accepted], *following][: WINDOW + 1]
            tokens[slot, : len(decided)], emitted[slot] = decided, len(decided)
        appended = steady.lengthened(round_, tokens, emitted)
        steady.append(appended, emitted[appended])
        lengthened = appended.tolist()
        for slot, running in round_.rows.items():
            decided = tokens[slot, : emitted[slot]].tolist()
            alone[slot].commit(decided, verified[slot])
            if slot in lengthened:
                running.lengthen(decided, verified[slot])
            else:
                together[slot].commit(decided, verified[slot])
                if running.finished:
                    steady.leave(slot)
                else:
                    steady.watch(running)
        if data.draw(st.booleans()):  # otherwise they catch up later
            assert [each.state() for each in together] == [each.state() for each in alone]
    assert [each.state() for each in together] == [each.state() for each in alone]


def test_ordinary_tokens_are_handled_at_once_and_others_alone() -> None:
    """The rows of a usual text need no work of their own, or this path would be dead."""
    rules = {"stop_ids": STOP, "prompt": PROMPT, "max_tokens": 20}
    running, steady = Alone(rules, 0).running, SteadyRows(1)
    a, stop = LETTERS[0], STOP[0]
    running.commit([a], 0)
    steady.watch(running)
    round_ = plan_round([running], DraftWindowPlanner(WINDOW, WINDOW), 1)

    def at_once(tokens: list[int]) -> tuple[list[int], list[int]]:
        drafts, tokens_and_next = np.array([tokens[:WINDOW]]), np.array([tokens])
        return (
            steady.verified(round_, drafts, None)[0].tolist(),
            steady.lengthened(round_, tokens_and_next, np.array([len(tokens)])).tolist(),
        )

    assert at_once([a, a, a, a]) == ([0], [0])
    assert at_once([a, a, stop, a]) == ([], [])
    assert at_once([a, -1, a, a]) == ([], [])
    assert at_once([a, a, a, stop]) == ([0], []), "its drafts are ordinary, and the token after them is not"
