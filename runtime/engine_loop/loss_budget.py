"""A limit on the time that adaptive drafts may lose to autoregressive decoding, whatever estimates promise."""

_SHARE = 0.006  # of a round without drafts: what each round may lose in the long run
_DECAY = 0.95  # of recent rounds, per round
_AT_FIRST, _MOST = 3.0, 12.0  # rounds that may be lost at first, and after drafts that earned more than they cost
# The same where drafters catch up with tokens that they missed: estimates are coarser, and trials cost more. There each
# text begins with no more than the first has, because texts are few and their drafts differ.
_SHARE_WITH_MISSED, _FIRST_WITH_MISSED, _MOST_WITH_MISSED = 0.004, 1.8, 5.0
_MOST_SAVED = 20.0  # rounds that rounds without drafts save for missed tokens: a batch has always missed hundreds


class LossBudget:
    """Time that drafts may lose, in rounds without drafts.

    Each round adds a small share. Drafts spend what they add to the duration of a round, and earn a round for each
    accepted token. Where they do not earn what they cost, they end until the shares have paid for the next trial.
    Each round without drafts saves the same share again, only for the tokens that the drafter misses meanwhile.
    """

    def __init__(self, *, misses: bool) -> None:
        """``misses``: whether the drafter must catch up with tokens of rounds that do not draft."""
        self._share, self._most = (_SHARE_WITH_MISSED, _MOST_WITH_MISSED) if misses else (_SHARE, _MOST)
        self._at_first = _FIRST_WITH_MISSED if misses else _AT_FIRST
        self._left = self._at_first
        self._saved = 0.0
        self._misses = misses
        self._tokens = self._rounds = 1.0

    def begin_text(self, *, alone: bool) -> None:
        """Let a text begin: what earlier ones have earned is not lost to its drafts.

        ``alone``: no other text runs. What is saved for missed tokens then ends too: a drafter has missed none of it.
        """
        if self._misses:
            self._left = min(self._left, self._at_first)
        if alone:
            self._saved = 0.0

    @property
    def spent(self) -> bool:
        """Whether the next round must not draft."""
        return self._left < 0

    def affords(self, cost: float, window: int, *, catch_up: float) -> bool:
        """Whether a round of this ``cost`` in rounds without drafts may lose all that its ``window`` adds to it.

        Windows of several tokens must leave half for further trials. ``catch_up``: cost of missed tokens, in addition.
        """
        unpaid = cost - 1 + max(0.0, catch_up - self._saved)
        return unpaid <= (self._left if window == 1 else self._left / 2)

    @property
    def speed(self) -> float:
        """Tokens for each request in the time of a round without drafts, in recent rounds."""
        return self._tokens / self._rounds

    def observe(self, cost: float, accepted: float, *, catch_up: float) -> None:
        """Count a round by its ``cost`` in rounds without drafts, and its ``accepted`` tokens for each request.

        ``catch_up``: see affords.
        """
        from_saved = min(catch_up, self._saved)
        self._saved -= from_saved
        if cost <= 1:
            self._saved = min(_MOST_SAVED, self._saved + self._share)
        cost += catch_up
        self._left = min(self._most, self._left + self._share + accepted + 1 - (cost - from_saved))
        self._tokens = _DECAY * self._tokens + accepted + 1
        self._rounds = _DECAY * self._rounds + cost
