"""The drafter of bundles that draft nothing: a round decides one token, and the fast-forward tokens before it."""

from tandemrt.runtime.requests.round import NullHooks, Round
from tandemrt.runtime.requests.running import RunningRequest


class NoDrafter(NullHooks):
    """Drafts nothing."""

    drafts_before_commit = True
    window = 0
    max_length: int | None = None
    caches = ()

    def propose(self, this: Round) -> None:
        """See Drafter.propose. Never called: the window is 0."""

    def cached_tokens(self, running: RunningRequest) -> int:
        """See Drafter.cached_tokens."""
        return len(running.tokens)
