"""The exceptions of TandemRT.

A message names the argument, the rule, the value received and the remedy. It quotes at most ``QUOTED`` characters of a
value, because a prompt of megabytes must not reach logs and responses.
"""

from itertools import islice
from typing import Any

QUOTED = 200


class TandemError(Exception):
    """Base of every error that TandemRT raises on purpose."""


class BadCheckpoint(TandemError):
    """A checkpoint folder is incomplete, damaged or of a kind that the exporter does not support."""


class BadRecipe(TandemError):
    """A recipe file has an unknown key, a missing value or values that contradict each other."""


class BadBundle(TandemError):
    """A bundle is incomplete, changed or of another manifest version, or its engines differ from their contracts."""


class BadRepository(TandemError):
    """A Triton model repository cannot be written, or this version cannot serve its contents."""


class BadRequest(TandemError, ValueError):
    """A request is invalid. Admission rejects it; other requests are not affected."""


class ContextLengthExceeded(BadRequest):
    """Prompt and output are longer than the engine's length; shorten one of them.

    Attributes:
        length: the engine's length in tokens.
        prompt_tokens: number of tokens of the prompt, estimated where it was too long to tokenize.
        max_tokens: the output that was asked for; 0: the prompt alone is too long.
    """

    length = prompt_tokens = max_tokens = 0

    @classmethod
    def of(
        cls, field: str, problem: str, *, length: int, prompt_tokens: int, max_tokens: int = 0
    ) -> "ContextLengthExceeded":
        """Return the error of ``field``. Its message begins like OpenAI's, by which clients know to shorten a chat."""
        error = cls(f"{field}: This model's maximum context length is {length} tokens. However, {problem}")
        error.length, error.prompt_tokens, error.max_tokens = length, prompt_tokens, max_tokens
        return error


class BackendUnavailable(TandemError):
    """A backend cannot build or run on this machine; the message names what is missing."""


class QueueFull(TandemError):
    """The waiting queue is at its limit; try again later or raise ``queue_limit``."""


class InternalError(TandemError):
    """An invariant of TandemRT does not hold. This is always a bug; please report it."""


class ProcessLost(TandemError):
    """Another program killed a worker process of the request; send the request again."""


class RankFailed(TandemError):
    """A rank of a tensor-parallel target ended, failed or does not answer; open the bundle again."""


class Closed(TandemError):
    """A runtime was used after it was closed; open the bundle again."""


class NotQuick(Exception):
    """The work may take long and must run in a worker process (runtime/workers/sandbox). Callers never see it."""


def quoted(value: Any) -> str:
    """Return ``repr(value)`` for an error message, in at most ``QUOTED`` characters. Never raises."""
    try:
        return clipped(repr(_beginning(value)))
    except ValueError:  # an integer above Python's limit for conversion to text
        return f"{type(value).__name__} with a number of thousands of digits"
    except Exception:  # from a __repr__ of any class
        return f"{type(value).__name__} that cannot be shown"


def clipped(text: Any) -> str:
    """Return ``str(text)``, or its beginning and an ellipsis where it has more than ``QUOTED`` characters."""
    shown = str(text)
    return shown if len(shown) <= QUOTED else f"{shown[: QUOTED - 3]}..."


def named(error: BaseException) -> str:
    """Return the kind and message of an error for people. Never raises.

    The message of a foreign error is clipped: it may quote all of its input.
    """
    try:
        return f"{type(error).__name__}: {error if isinstance(error, TandemError) else clipped(error)}"
    except BaseException:  # from a __str__ of any class: the kind is still reported
        return f"{type(error).__name__}: cannot be shown"


def _beginning(value: Any) -> Any:
    """Return as much of a value as fills ``QUOTED`` characters, so that ``repr`` does not format megabytes."""
    if isinstance(value, str | bytes | list | tuple):
        return value[: QUOTED + 1]
    if type(value) is dict:
        return dict(islice(value.items(), QUOTED + 1))
    return value
