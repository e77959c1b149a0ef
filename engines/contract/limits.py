"""Bounds on what a recipe or a manifest may ask for, far above any model. Work and memory grow with these sizes."""

from typing import Annotated

from pydantic import Field, StringConstraints

MAX_DELIMITERS = 64
VocabSize = Annotated[int, Field(ge=1, le=1 << 24)]
DelimiterText = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
DelimiterTexts = Annotated[tuple[DelimiterText, ...], Field(strict=False, max_length=MAX_DELIMITERS)]
