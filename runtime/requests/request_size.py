"""Limits of what all outputs of all prompts of one request ask for together."""

from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.engines.validation.errors import BadRequest

MAX_LISTED = 1 << 18  # banned and allowed token ids, if there are several outputs
MAX_LOGPROBS = 1 << 18  # values, if there are several outputs: tokens times listed logprobs
MAX_PROMPT_LOGPROBS = 1 << 16  # values: the engine loop passes those of a prompt to the listener in one call


class RequestSize:
    """Counts what the prompts of one request ask for. A request to the Python API or to Triton has one prompt."""

    def __init__(self) -> None:
        self._outputs = self._listed = self._logprobs = self._prompt_logprobs = 0

    def add(self, params: SamplingParams, prompt_tokens: int, max_tokens: int) -> None:
        """Count another prompt. Raises BadRequest if the request is too large."""
        self._outputs += params.n
        self._listed += params.n * (len(params.banned_token_ids or ()) + len(params.allowed_token_ids or ()))
        if self._outputs > 1 and self._listed > MAX_LISTED:
            raise BadRequest(
                f"n: outputs times banned_token_ids and allowed_token_ids must be at most {MAX_LISTED}, received "
                f"{self._listed}; ask for fewer outputs at a time"
            )
        if params.logprobs is not None:
            self._logprobs += params.n * max_tokens * (params.logprobs + 1)
        if self._outputs > 1 and self._logprobs > MAX_LOGPROBS:
            raise BadRequest(
                f"n: outputs times max_tokens times logprobs + 1 must be at most {MAX_LOGPROBS}, received "
                f"{self._outputs} x {max_tokens} x {(params.logprobs or 0) + 1} = {self._logprobs}; ask for fewer of "
                "them"
            )
        if params.prompt_logprobs is not None:
            self._prompt_logprobs += params.n * prompt_tokens * (params.prompt_logprobs + 1)
        if self._prompt_logprobs > MAX_PROMPT_LOGPROBS:
            raise BadRequest(
                f"prompt_logprobs: outputs times prompt tokens times logprobs must be at most {MAX_PROMPT_LOGPROBS}, "
                f"received {self._prompt_logprobs}; ask for fewer of them, or for shorter or fewer prompts"
            )
