"""What the engine generates for an HTTP request, for the layers around the application."""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandemrt.runtime.requests.request import Request

_KEY = "tandemrt.generated"  # of a scope


@dataclass(frozen=True)
class Generated:
    """The requests to ``model`` that belong to one HTTP request, one for each prompt."""

    model: str
    requests: Sequence[Request]

    def outputs(self) -> list[Request]:
        """Return the request of each output."""
        every = (each for request in self.requests for each in (request, *request.others))
        return [each for each in every if not each.scores_prompt]

    def attach(self, scope: MutableMapping[str, Any]) -> None:
        """Let the layers around the application find it."""
        scope[_KEY] = self


def generated_of(scope: MutableMapping[str, Any]) -> Generated | None:
    """Return what is generated for the HTTP request of ``scope``, or None."""
    return scope.get(_KEY)
