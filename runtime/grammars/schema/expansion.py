"""What the steps of an expansion ask of it, so that they need not import the expander, which imports them."""

from typing import Protocol

from tandemrt.runtime.grammars.schema.document import Document
from tandemrt.runtime.grammars.schema.shapes import AllOf, Shape, String


class Expansion(Protocol):
    """The expansion of a document's schemas (``Expander``). Methods raise UnsupportedSchema.

    Attributes:
        document: the schema to expand.
        closed: objects with ``properties`` allow no other names unless ``additionalProperties`` does.
        loose: drop unsupported keywords, because the finished text is validated.
    """

    document: Document
    closed: bool
    loose: bool

    def complement(self, expressions: list[str], place: str) -> str | None:
        """Return ``regex.complement`` of ``expressions``."""

    def names(self, all_of: AllOf, place: str) -> String | list[str]:
        """Return the property names that a ``propertyNames`` schema allows: a string shape, or a list."""

    def resolved(self, all_of: AllOf) -> list[Shape]:
        """Return the shapes of a conjunction with all references to others resolved."""
