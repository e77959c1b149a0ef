"""Find a shortest text that several expressions match."""

from collections.abc import Sequence

from tandemrt.runtime.grammars.regex import patterns
from tandemrt.runtime.grammars.regex.automaton import Nfa, character_classes
from tandemrt.runtime.grammars.regex.syntax import Range, UnsupportedPattern

MAX_STATES = 2048
_SURROGATES = range(0xD800, 0xE000)

_State = tuple[int, ...]  # the length of a text, at most the least one, and a state of each automaton


def shortest_text(written: Sequence[str], least: int, most: int | None) -> str | None:
    """Return a text of ``least`` to ``most`` characters that all expressions of ``patterns`` match completely.

    Returns None if there is none, or if the search would visit more than ``MAX_STATES`` states.
    """
    try:
        automata = [Nfa([f"^(?:{patterns.as_pattern(each)})$"]) for each in written]
        classes = character_classes([pair for nfa in automata for pair in nfa.ranges()])
        return _search([_Automaton(nfa, classes) for nfa in automata], classes, least, most)
    except UnsupportedPattern:
        return None


class _Automaton:
    """A deterministic automaton whose states are numbered when they are first reached, from 0."""

    def __init__(self, nfa: Nfa, classes: list[list[Range]]) -> None:
        self._nfa = nfa
        self._steps = nfa.by_class(classes)
        self._numbers: dict[frozenset[int], int] = {}
        self._states: list[frozenset[int]] = []
        self._after: dict[tuple[int, int], int | None] = {}
        self._number(nfa.epsilon_closure(nfa.starts))

    def accepts(self, state: int) -> bool:
        return not self._nfa.ends.isdisjoint(self._states[state])

    def after(self, state: int, index: int) -> int | None:
        """Return the state after a character of the class ``index``; None if no text begins so."""
        if (state, index) not in self._after:
            targets = [target for place in self._states[state] for target in self._steps[place].get(index, ())]
            self._after[state, index] = self._number(self._nfa.epsilon_closure(targets)) if targets else None
        return self._after[state, index]

    def _number(self, places: frozenset[int]) -> int:
        if places not in self._numbers:
            if len(self._states) >= MAX_STATES:
                raise UnsupportedPattern("an expression of many cases")
            self._numbers[places] = len(self._states)
            self._states.append(places)
        return self._numbers[places]


def _search(automata: list[_Automaton], classes: list[list[Range]], least: int, most: int | None) -> str | None:
    letters = [(index, chr(one[0][0])) for index, one in enumerate(classes) if one[0][0] not in _SURROGATES]
    first: _State = (0,) * (1 + len(automata))
    before: dict[_State, tuple[_State, str]] = {}
    pending = [first]
    for state in pending:
        length, *places = state
        if length == least and all(one.accepts(place) for one, place in zip(automata, places, strict=True)):
            text = _text(before, state)
            return text if most is None or len(text) <= most else None
        for index, letter in letters:
            after = [one.after(place, index) for one, place in zip(automata, places, strict=True)]
            following = (min(length + 1, least), *(place for place in after if place is not None))
            if None in after or following in before or following == first:
                continue
            if len(before) >= MAX_STATES:
                return None
            before[following] = state, letter
            pending.append(following)
    return None


def _text(before: dict[_State, tuple[_State, str]], state: _State) -> str:
    letters = []
    while state in before:
        state, letter = before[state]
        letters.append(letter)
    return "".join(reversed(letters))
