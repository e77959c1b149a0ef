"""The size of an answer, estimated before it is generated, and counted afterwards if that is not possible."""

from tandemrt.engines.validation.errors import BadRequest
from tandemrt.engines.validation.sizes import text_bytes
from tandemrt.runtime.requests.request import Request, RequestOutput
from tandemrt.runtime.servers.openai.request_body import CompletionRequest

_LOGPROB = 80  # bytes of one value with its token, about
_TOKEN_ID = 7


class AnswerSize:
    """Adds up what each prompt of a request makes its answer hold besides generated texts.

    The logprobs of a single streamed output are not counted: they take the time of their tokens. Those of a whole one
    without ``max_tokens`` are counted at its end, before the answer is written.
    """

    def __init__(self, parsed: CompletionRequest, limit: int) -> None:
        self._limit = limit
        self._ids = parsed.return_token_ids
        self._echoes = [text_bytes(prompt) if parsed.echo else 0 for prompt in parsed.prompts]
        single = len(self._echoes) * parsed.params.n == 1
        self._counts_whole = single and not parsed.stream and parsed.params.max_tokens is None
        self._estimates = not single or not (parsed.stream or self._counts_whole)
        self._total = 0

    def add(self, request: Request) -> None:
        """Count the outputs of the next prompt, whose first ``request`` is queued. Raises BadRequest."""
        params, prompt, echo = request.params, len(request.prompt), self._echoes.pop(0)
        top = params.logprobs if self._estimates else None
        fields = {
            "logprobs": 0 if top is None else _LOGPROB * request.max_tokens * (top + 1),
            "prompt_logprobs": 0
            if params.prompt_logprobs is None
            else _LOGPROB * prompt * (params.prompt_logprobs + 1),
            "return_token_ids": _TOKEN_ID * (prompt + request.max_tokens) if self._ids else 0,
            "echo": echo,
        }
        self._total += params.n * sum(fields.values())
        self._require_small(max(fields, key=lambda name: fields[name]), "tokens or prompts at a time")

    def count(self, output: RequestOutput) -> None:
        """Count the logprobs of a whole output whose length was not known. Raises BadRequest."""
        if self._counts_whole:
            self._total += _LOGPROB * sum(len(token.top) + 1 for token in output.logprobs or ())
            self._require_small("logprobs", "tokens by max_tokens, or a stream")

    def _require_small(self, field: str, fewer: str) -> None:
        if self._total > self._limit:
            raise BadRequest(
                f"{field}: the answer must have at most {self._limit} bytes besides its texts (--max-answer), "
                f"received a request for about {self._total}; ask for fewer outputs, {fewer}"
            )
