"""RuntimeOptions from texts: the parameters of a served model, and the arguments of ``serve run``."""

from typing import Any

from pydantic import ConfigDict, model_validator

from tandemrt.engines.options.options import RuntimeOptions, draft_tokens_from_text


class OptionsFromText(RuntimeOptions):
    """RuntimeOptions whose values may be texts, such as ``2``, ``true`` and ``1:4,33:2``."""

    model_config = ConfigDict(strict=False)

    @model_validator(mode="before")
    @classmethod
    def _parse_draft_tokens(cls, data: Any) -> Any:
        text = data.get("num_draft_tokens")
        return data | {"num_draft_tokens": draft_tokens_from_text(text)} if isinstance(text, str) else data
