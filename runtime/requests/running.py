"""A request in a slot: its text so far, what it is held to, and how it ends."""

from collections.abc import Sequence

from tandemrt.runtime.constraints.phases import Phase
from tandemrt.runtime.requests.outputs import Speculation, StreamOutput
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.waiting import Waiting


class Running:
    """State of a request from the moment it joins ``slot``. Used by the loop's thread alone.

    ``tokens`` holds prompt and output; ``prefilled`` counts those in the caches. All but the last token that a request
    comes with are prefilled: the last one is the first token a round feeds, so the first output token is decided by
    the same code as every other.

    Raises what kept ``waiting.enforcement`` from being made; a request that waits for it must not run.
    """

    def __init__(self, waiting: Waiting, slot: int) -> None:
        self.request: Request = waiting.request
        self.slot = slot
        self.constraint, self._check = waiting.enforcement.result()
        self.penalties = waiting.penalties
        self.tokens = list(self.request.prompt)
        self.prefill_end = len(self.tokens) - 1
        self.prefilled = 0
        self.speculation = Speculation(self.request.window)
        self.boundaries_inside = 0  # reasoning that ended in the middle of what one round emitted
        self.newest: float | None = None  # when the newest token came, in seconds of time.monotonic
        self._transcript = waiting.transcript
        self._told = 0  # output tokens the listener knows

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens are missing in the caches, so that no round decides anything yet."""
        return self.prefilled < self.prefill_end

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def remaining(self) -> int:
        """Output tokens that may still come."""
        return self.request.length - len(self.tokens)

    @property
    def finished(self) -> bool:
        return self.request.finished

    @property
    def forced_ends(self) -> int:
        """How often a thinking budget closed the reasoning."""
        return self.constraint.forced_ends

    def commit(self, emitted: Sequence[int], drafted: int) -> int | None:
        """Take in what verification emitted for this request. May finish it.

        Returns how many of the ``drafted`` tokens that were verified were accepted and kept; None without any.
        """
        commit = self.constraint.commit(emitted)
        before = len(self.tokens)
        self.tokens += commit.kept
        finish = commit.finish
        stop_reason: str | int | None = commit.stop_token
        for piece in commit.pieces:
            if self._transcript.add(piece.kind, piece.tokens):
                finish, stop_reason = "stop", self._transcript.stopped_by
                del self.tokens[len(self.request.prompt) + self._transcript.tokens :]
                break
        kinds = [piece.kind for piece in commit.pieces]
        self.boundaries_inside += "answer" in kinds[1:] and kinds[0] != "answer"
        accepted = None
        if drafted:
            kept = max(0, len(self.tokens) - before)
            accepted = self.speculation.record(drafted=drafted, kept=kept, emitted=len(emitted))
        if finish is not None:
            self._conclude(finish, stop_reason)
        return accepted

    def finish(self, reason: str, failure: Exception | None = None) -> None:
        """End the request from outside of its text, which is kept so far. Nothing happens if it has finished.

        Raises nothing: a text that cannot be spelled ends where its spelling failed, with "error".
        """
        if self.finished:
            return
        try:
            held = self.output_ids[self._transcript.tokens :]
            if held and failure is None:  # what might have become a marker never will
                self._transcript.add("reasoning" if self.constraint.phase is Phase.THINKING else "answer", held)
            self._transcript.finish()
        except Exception as error:
            reason, failure = "error", failure or error
        self._end(reason, failure=failure)

    def tell(self) -> None:
        """Tell the listener what is new: tokens and text that are certain, and the output of a finished request."""
        request = self.request
        certain = len(self.tokens) if self.finished else len(request.prompt) + self._transcript.tokens
        tokens = self.tokens[len(request.prompt) + self._told : certain]
        self._told += len(tokens)
        if tokens or self.finished:
            request.tell(StreamOutput(self._transcript.take(), tokens, request.output))

    def _conclude(self, reason: str, stop_reason: str | int | None) -> None:
        """End the request where its own text ends."""
        self._transcript.finish()
        error = None
        if reason == "stop" and self._check is not None and (problem := self._check(self._transcript.text)):
            reason, error = "constraint", f"structured_outputs: the finished text is not valid: {problem}"
        self._end(reason, stop_reason, error=error)

    def _end(
        self,
        reason: str,
        stop_reason: str | int | None = None,
        *,
        error: str | None = None,
        failure: Exception | None = None,
    ) -> None:
        self.request.end(
            reason,
            text=self._transcript.text,
            reasoning=self._transcript.reasoning,
            token_ids=self.output_ids,
            stop_reason=stop_reason,
            speculation=self.speculation,
            forced_ends=self.forced_ends,
            error=error,
            failure=failure,
        )
