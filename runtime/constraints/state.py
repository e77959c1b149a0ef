"""Where a text stands between its tokens, and what becomes known of it."""

from enum import Enum
from typing import Literal, NamedTuple

from tandemrt.runtime.constraints.markers import ROOT

Kind = Literal["reasoning", "marker", "answer"]


class Phase(Enum):
    OPEN = "open"  # no marker so far: the model may open a block or answer
    THINKING = "thinking"
    FORCING = "forcing"  # the budget is spent, the forced end is being emitted
    ANSWER = "answer"
    DONE = "done"


class State(NamedTuple):
    phase: Phase
    node: int = ROOT  # of the marker matcher
    spent: int = 0  # reasoning tokens in the current or last block
    tail: tuple[int, ...] = ()  # symbols of the last of them, as far as they may be part of an end marker
    in_prompt: int = 0  # symbols of an unfinished end marker that are the prompt's
    forced: int = 0  # tokens of the forced end that are out
    forced_at: tuple[int, ...] = ()  # `length` at the first token of each forced end
    length: int = 0  # tokens out
    pending: tuple[int, ...] = ()  # OPEN with a grammar: may begin the start marker, not fed to the grammar yet
    marker_only: bool = False  # the grammar refuses `pending`, so it must become the start marker
    finish: str | None = None
    stop_token: int | None = None


class Told(NamedTuple):
    """What of the text has a certain role now: all that had none, up to ``left`` symbols before its end.

    ``cuts``: also inside a token. Else one that lies in part behind that place has no certain role either.
    """

    kind: Kind
    left: int
    cuts: bool = True


class Refused(Exception):
    """The token is not in the mask row of the state."""
