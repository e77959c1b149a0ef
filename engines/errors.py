"""The one family of errors.

Every message names the argument, the rule, the value received and what to do about it.
"""


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
