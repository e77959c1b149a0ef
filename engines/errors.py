"""The one family of errors.

Every message names the argument, the rule, the value received and what to do about it. Of what was received it quotes
at most ``QUOTED`` characters: an error must not carry a prompt of megabytes into logs and responses.
"""

from itertools import islice
from typing import Any

QUOTED = 200


class TandemError(Exception):
    """Base of every error that TandemRT raises on purpose."""


class BadCheckpoint(TandemError):
    """A checkpoint folder is incomplete, damaged or of a kind that the exporter does not understand."""


class BadRecipe(TandemError):
    """A recipe file has an unknown key, a missing value or limits that contradict each other."""


class BadBundle(TandemError):
    """A bundle is incomplete, changed, of another manifest version, or its engines break the contract."""


class BadRepository(TandemError):
    """A model repository cannot be written there, or what it holds cannot be served by this version."""


class BadRequest(TandemError, ValueError):
    """A request that cannot be served as asked; refused at admission, nothing else is touched."""


class BackendUnavailable(TandemError):
    """A backend cannot build or run on this machine; the message says what is missing."""


class QueueFull(TandemError):
    """The waiting queue is at its limit; try again later or raise ``queue_limit``."""


class InternalError(TandemError):
    """An invariant of TandemRT itself does not hold. Always a bug: please report it."""


class ProcessLost(TandemError):
    """A process that worked for a request was killed from outside; send the request again."""


class Closed(TandemError):
    """A runtime was used after it was closed; open the bundle again."""


class NotQuick(Exception):
    """What is asked for is not known to be quick, and belongs into a process (runtime/processes). Reaches no caller."""


def quoted(value: Any) -> str:
    """Spell a value that was received for a message, as Python would, in at most ``QUOTED`` characters."""
    try:
        return clipped(repr(_beginning(value)))
    except ValueError:  # of an integer with more digits than Python likes to spell
        return f"{type(value).__name__} with a number of thousands of digits"
    except Exception:  # whatever the author of a class wrote
        return f"{type(value).__name__} that cannot be shown"


def clipped(text: Any) -> str:
    """Return ``str(text)``, or its beginning and an ellipsis where it has more than ``QUOTED`` characters."""
    spelled = str(text)
    return spelled if len(spelled) <= QUOTED else f"{spelled[: QUOTED - 3]}..."


def named(error: BaseException) -> str:
    """Spell an error for people: its kind, and what it says, whatever its author wrote.

    One that is not ours may quote all that it was given, so of that there is only the beginning.
    """
    try:
        return f"{type(error).__name__}: {error if isinstance(error, TandemError) else clipped(error)}"
    except BaseException:  # an error that cannot be spelled must not hide that there was one
        return f"{type(error).__name__}: cannot be shown"


def _beginning(value: Any) -> Any:
    """What of a value fills ``QUOTED`` characters, so that megabytes are not spelled to be cut off."""
    if isinstance(value, str | bytes | list | tuple):
        return value[: QUOTED + 1]
    if type(value) is dict:
        return dict(islice(value.items(), QUOTED + 1))
    return value
