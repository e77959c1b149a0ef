"""The sources of an output's tokens, in step with its stream: ``stream_options.include_token_sources``."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.servers.request_stream import OutputDelta
from tandemrt.runtime.trace.data import TokenTexts


class TokenSources:
    """Reads the tokens of one output from its trace, as its deltas arrive."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request = request
        self._texts = TokenTexts(tokenizer)
        self._count = 0  # tokens read

    def take(self, delta: OutputDelta) -> Sequence[dict[str, Any]]:
        """Return the tokens of ``delta``, with the fields of a trace page (runtime/trace/data.py)."""
        trace = self._request.trace
        assert trace is not None
        begin, self._count = self._count, self._count + len(delta.token_ids)
        return [
            {
                **token._asdict(),
                "text": self._texts.push(token.id, last=delta.output is not None and at == self._count),
            }
            for at, token in enumerate(trace.tokens(begin, self._count), start=begin + 1)
        ]
