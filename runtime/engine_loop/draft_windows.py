"""How many tokens a round drafts: a number, a table by running requests, or a choice that adapts."""

from collections.abc import Collection, Mapping, Sequence
from weakref import WeakKeyDictionary

from tandemrt.engines.options.options import draft_tokens_problem
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.engine_loop.costs import RoundCosts
from tandemrt.runtime.engine_loop.loss_budget import LossBudget
from tandemrt.runtime.requests.acceptance import Acceptance, best_window
from tandemrt.runtime.requests.running import RunningRequest

_ROUNDS_PER_CAPTURE = 256  # of a busy engine, between two windows whose CUDA graphs are captured meanwhile
_FEW_MISSED = 8  # tokens with which the drafter catches up for a round that is only timed
_HORIZON = 16  # rounds that must pay for what the drafter catches up with
_ROUNDS_PER_TRIAL = 4  # without drafts, before a token is drafted to see whether the text has become easier
_FIRST_TRIALS = 8  # tokens that a text tries at its start, where nothing is missed, whatever their acceptance
_REQUESTS_PER_ROUND = 8  # estimates that a round compares on average: those of many requests take the host long


class DraftWindowPlanner:
    """Chooses how many tokens a round drafts: a number, a table by running requests, or an adaptive choice up to these.

    It follows the acceptance of requests in slots (SlotListener).

    Under the coupled rule the window changes no text. Under the rejection rule it does not change the distribution of
    texts, but a table makes a text depend on how many other requests run.

    Attributes:
        largest: the most tokens that any round drafts.
        fast_forward: whether tokens that a constraint forces are drafted.
        mask_drafts: whether grammars mask the drafts.
        adaptive: whether any window follows acceptance and cost (acceptance.py, costs.py).
        uncaptured: rows of rounds whose shorter windows may have no CUDA graphs yet. Rounds capture one at a time.
        costs: seconds of rounds, by rows and window.
        calibrates: whether ``costs`` are measured before there are texts, else in their first rounds.
        missed_cost: of a token that the drafter has missed and processes before it drafts, in drafted tokens.
        any_shape: whether a round may draft any number of tokens, because no graphs are captured.
    """

    def __init__(
        self,
        windows: int | Mapping[int, int] | None,
        limit: int,
        *,
        fast_forward: bool = True,
        drafts: bool = True,
        mask_drafts: bool = False,
        adaptive: bool = False,
        calibrates: bool = True,
        missed_cost: float = 0.0,
        token_cost: float | None = None,
        any_shape: bool = False,
    ) -> None:
        """
        Args:
            windows: a number, or {requests: window}: an entry holds from its number of running requests up to the next
                entry. None: ``limit``.
            limit: the bundle's largest window.
            drafts: whether the bundle has a drafter.
            adaptive: whether rounds draft fewer tokens, or none, where that is faster.
            calibrates: whether rounds without texts cost what others do, in proportion.
            missed_cost: see the class.
            token_cost: see RoundCosts.
            any_shape: see the class.

        Raises BadRequest for a window outside 0..limit, or a table without an entry for one request.
        """
        table = dict(windows) if isinstance(windows, Mapping) else {1: limit if windows is None else windows}
        if problem := draft_tokens_problem(table, limit):
            raise BadRequest(f"num_draft_tokens: {problem}")
        self._table = sorted(table.items(), reverse=True)
        self.largest = max(table.values())
        self.fast_forward = fast_forward
        self.mask_drafts = mask_drafts
        self.costs = RoundCosts(token_cost)
        self.calibrates = calibrates
        self.missed_cost = missed_cost
        self.any_shape = any_shape
        self.uncaptured: set[int] = set()
        self._acceptance: WeakKeyDictionary[RunningRequest, Acceptance] = WeakKeyDictionary()  # survives preemption
        self._running: dict[int, RunningRequest] = {}  # by slot
        self._ended = Acceptance()
        self._drafts = drafts
        self.adaptive = adaptive and drafts
        self._budget = LossBudget(misses=missed_cost > 0)
        self._uncaptured_rounds: dict[int, int] = {}  # by rows
        self._chosen: dict[int, tuple[int, int]] = {}  # by rows: the last choice, and for how many rounds it holds

    def join(self, running: RunningRequest) -> None:
        """See SlotListener.join. A new request starts from the acceptance of ended requests.

        But where a drafter must catch up with missed tokens, the first rounds of a request are the cheapest trial.
        """
        if self.adaptive:
            alone = not self._running
            self._running[running.slot] = running
            if running not in self._acceptance:
                self._budget.begin_text(alone=alone)
                self._acceptance[running] = Acceptance() if self.missed_cost else self._ended.start()

    def leave(self, slot: int) -> None:
        """See SlotListener.leave. A preempted request has not finished; it is counted once, when it ends."""
        running = self._running.pop(slot, None)
        if running is not None and running.finished:
            self._ended.merge(self._acceptance[running])

    def observe(self, running: RunningRequest, accepted: int, proposed: int) -> None:
        """Count a round that accepted the first ``accepted`` of ``proposed`` drafted tokens of a request."""
        if self.adaptive:
            self._acceptance[running].observe(accepted, proposed)

    def observe_round(self, batch: int, window: int, accepted: float, *, missed: int = 0) -> None:
        """Count a round of ``batch`` rows that drafted ``window`` tokens and accepted so many for each request.

        ``missed``: see choose.
        """
        if self.adaptive:
            plain = self.costs.estimate(batch, 0)
            catch_up = self._catch_up(batch, missed) if window else 0.0
            self._budget.observe(self.costs.estimate(batch, window) / plain, accepted, catch_up=catch_up / plain)

    def limit(self, requests: int) -> int:
        """Return the largest window of a round with ``requests`` requests, at least one."""
        return next(window for least, window in self._table if requests >= least)

    def choose(
        self,
        requests: Collection[RunningRequest],
        batch: int,
        *,
        wanted: int | None = None,
        fixed: bool = False,
        prompts: bool = False,
        missed: int = 0,
    ) -> int:
        """Return how many tokens the drafter proposes in a round of ``requests``, all of which have joined.

        ``batch``: rows of the round. ``wanted``: the largest window that any request allows. ``fixed``: do not adapt.
        ``prompts``: whether the round has prompts: it drafts nothing or the largest window, so that its calls have few
        shapes (or one token, as a trial on a CPU). A drafted token costs as much there as it saves in another round.
        ``missed``: tokens that the drafter has not processed, so that it would process them first.
        """
        if not self._drafts:
            return 0
        limit = self.limit(len(requests))
        most = limit if wanted is None else min(wanted, limit)
        if fixed or not most or not self.adaptive:
            return most
        steps = self._captured(batch, self._steps(most))
        if self._budget.spent and not steps[0]:
            return 0
        if self.missed_cost:  # what a drafter missed in a long text may cost more than all drafts may lose
            steps = [step for step in steps if not step or self._affords(batch, step, missed)]
        due = None if prompts or missed > _FEW_MISSED else self.costs.due(batch, steps)
        if due is not None:
            return due
        chosen, rounds = self._chosen.get(batch, (0, 0))
        if not rounds or chosen not in steps:
            catch_up = self._catch_up(batch, missed)
            costs = {step: self.costs.estimate(batch, step) + (step > 0) * catch_up / _HORIZON for step in steps}
            chosen = best_window([self._acceptance[running] for running in requests], costs)
            rounds = len(requests) // _REQUESTS_PER_ROUND
        if not chosen and 1 in steps and self.missed_cost:
            begins = not missed and any(self._acceptance[running].tried < _FIRST_TRIALS for running in requests)
            # Many requests soon miss more than drafts may lose.
            last_chance = not self._affords(batch, 1, missed + len(requests))
            if begins or last_chance or missed >= _ROUNDS_PER_TRIAL * len(requests):
                return 1
        self._chosen[batch] = chosen, max(0, rounds - 1)
        return steps[-1] if prompts and chosen else chosen

    def least_gain(self, batch: int, window: int) -> float:
        """Return how many accepted tokens per request a further drafted token must promise up to ``window``.

        0 as long as its cost is unknown.
        """
        if not self.adaptive or not window or not self.costs.is_timed(batch):
            return 0.0
        cost = self.costs.estimate
        return (cost(batch, window) - cost(batch, window - 1)) / cost(batch, 0) * self._budget.speed

    def _affords(self, batch: int, window: int, missed: int) -> bool:
        """Whether a round that drafts ``window`` tokens after ``missed`` ones may lose all that they cost."""
        plain = self.costs.estimate(batch, 0)
        cost, catch_up = self.costs.estimate(batch, window), self._catch_up(batch, missed)
        return self._budget.affords(cost / plain, window, catch_up=catch_up / plain)

    def _catch_up(self, batch: int, missed: int) -> float:
        """Return how long the drafter takes for ``missed`` tokens."""
        if not missed:
            return 0.0
        token = self.costs.estimate(batch, 1) - self.costs.estimate(batch, 0)
        return max(0.0, token) * (1 + self.missed_cost * missed)

    def _captured(self, batch: int, steps: Sequence[int]) -> Sequence[int]:
        """Return those of ``steps`` that the next round may use. A shape without graphs is captured when it occurs.

        The first, which drafts nothing, is always one of them, because useless drafts must be able to end.
        """
        if batch not in self.uncaptured:
            return steps
        rounds = self._uncaptured_rounds[batch] = self._uncaptured_rounds.get(batch, 0) + 1
        return [*steps[:-1][: 1 + rounds // _ROUNDS_PER_CAPTURE], steps[-1]]

    def usual(self, requests: int) -> list[int]:
        """Return the windows that ``choose`` may return where requests set none, without fast-forward tokens."""
        most = self.limit(requests)
        if not self._drafts:
            return [0]
        return self._steps(most) if most and self.adaptive else [most]

    def _steps(self, most: int) -> list[int]:
        """0, 1, 2, 3, 4, 6, 8, 12, ...: few windows, because each is one more graph per number of rows."""
        powers = [1 << power for power in range(most.bit_length())]
        return sorted({0, most, *(window for power in powers for window in (power, 3 * power) if window < most)})
