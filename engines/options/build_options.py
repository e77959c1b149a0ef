"""Choices of a user for a checkpoint that is built without a recipe."""

from dataclasses import dataclass, fields
from typing import get_args

from tandemrt.engines.contract.draft_kinds import DRAFT_KINDS
from tandemrt.engines.validation.errors import BadRequest, quoted


@dataclass(frozen=True)
class BuildOptions:
    """Choices for the default recipe of a checkpoint; None: TandemRT chooses for this machine. Raises BadRequest.

    Attributes:
        max_model_len: tokens of prompt plus output, the recipe's ``limits.length``.
        dtype: the recipe's ``target.dtype``.
        draft: "ngram", "none", a checkpoint of a smaller model, or KIND:CHECKPOINT, such as "eagle3:OWNER/NAME".
    """

    max_model_len: int | None = None
    dtype: str | None = None
    draft: str | None = None

    def __post_init__(self) -> None:
        if self.dtype is None:
            return
        from tandemrt.engines.recipe.models import Dtype  # takes long to import, and a bundle has no choices

        if self.dtype not in get_args(Dtype):
            raise BadRequest(f"dtype: must be one of {', '.join(get_args(Dtype))}, received {quoted(self.dtype)}")

    def chosen(self) -> dict[str, int | str]:
        """Return the choices that were made, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


NO_CHOICES = BuildOptions()


def draft_option(draft: str | None) -> tuple[str, str | None]:
    """Return the kind of a draft option and its checkpoint, if it has one. Raises BadRequest."""
    draft = "ngram" if draft is None else draft
    kinds = [name for name, needs in DRAFT_KINDS.items() if needs.engines]
    modelless = [name for name in DRAFT_KINDS if name not in kinds]
    if draft in modelless:
        return draft, None
    kind, colon, checkpoint = draft.partition(":")
    if not colon:
        return "model", kind
    if kind not in kinds or not checkpoint:
        raise BadRequest(
            f"draft: must be {', '.join(modelless)}, a checkpoint, or KIND:CHECKPOINT with a kind of "
            f"{', '.join(kinds)}, received {quoted(draft)}"
        )
    return kind, checkpoint
