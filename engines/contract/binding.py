"""A named tensor with dtype and shape: the element of contracts, operators and decoders."""

from collections.abc import Mapping
from dataclasses import dataclass

Dim = int | str


@dataclass(frozen=True)
class Binding:
    """One named tensor. ``dtype`` is a numpy-style name or ``bfloat16``; a shape mixes integers and symbols."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]

    def resolve(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the concrete shape. Raises KeyError if ``sizes`` lacks a symbol."""
        return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in self.shape)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join(map(str, self.shape))}]"
