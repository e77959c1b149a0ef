"""The shape of a round's calls: one value that keys bound calls and CUDA graphs."""

from typing import NamedTuple

from tandemrt.engines.contract.calls import NO_PROMPTS, Packed


class RoundShape(NamedTuple):
    """Two rounds of equal shape run the same calls on the same tensors; only the contents of the tensors differ.

    Attributes:
        batch: rows of the calls, slots [0, batch).
        window: drafted tokens per row.
        needs_probs: see Engine.bind.
        keep_probs: whether drafting stores its probabilities (``draft_probs``) for verification.
        prompts: the prompt tokens in the same call; NO_PROMPTS over a linear cache.
    """

    batch: int
    window: int
    needs_probs: bool = False
    keep_probs: bool = False
    prompts: Packed = NO_PROMPTS

    @property
    def size(self) -> "RoundShape":
        """The part that the calls of a decoder depend on: batch, window and prompts."""
        return RoundShape(self.batch, self.window, prompts=self.prompts)

    @property
    def without_prompts(self) -> "RoundShape":
        """The same shape without prompts."""
        return self if self.prompts == NO_PROMPTS else self._replace(prompts=NO_PROMPTS)

    @property
    def query(self) -> int:
        """Tokens per row: the newest one and the drafted ones."""
        return self.window + 1
