"""What a recipe and a manifest share: strict, frozen pydantic models whose errors read like ours."""

from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError


class Record(BaseModel):
    """A frozen record that takes no value of a neighbouring type and no key it does not know."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Section(Record):
    """A record that a person wrote: an unknown key is answered with the nearest known one."""

    @model_validator(mode="before")
    @classmethod
    def _know_every_key(cls, data: Any) -> Any:
        unknown = [key for key in data if key not in cls.model_fields] if isinstance(data, dict) else []
        if unknown:
            raise PydanticCustomError("unknown_key", "{text}", {"text": _unknown(unknown, list(cls.model_fields))})
        return data


def refuse(text: str) -> PydanticCustomError:
    """Return the error a validator raises when values contradict each other; ``text`` says all there is to say."""
    return PydanticCustomError("contradiction", "{text}", {"text": text})


def explain(error: ValidationError) -> str:
    """Return one line per violation: the key, the rule and the value received."""
    return "\n".join(_line(details) for details in error.errors(include_url=False))


def nearest(name: str, known: list[str]) -> str:
    """Return " (did you mean 'x'?)" for the known name closest to ``name``, or nothing when none is close."""
    close = get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _line(details: Any) -> str:
    key = ".".join(map(str, details["loc"]))
    prefix = f"{key}: " if key else ""
    kind, value = details["type"], details["input"]
    if kind in ("unknown_key", "contradiction"):
        return f"{prefix}{details['msg']}"
    if kind == "extra_forbidden":
        return f"{prefix}is not a known key"
    if kind == "missing":
        return f"{prefix}is required and missing"
    if kind.startswith("union_tag"):
        options = details["ctx"].get("expected_tags", "a known value")
        name = str(details["ctx"]["discriminator"]).strip("'")
        received = repr(details["ctx"]["tag"]) if kind == "union_tag_invalid" else "nothing"
        return f"{key}.{name}: must be one of {options}; got {received}"
    return f"{prefix}{details['msg'].replace('Input should', 'must').replace('should', 'must', 1)}; got {value!r}"


def _unknown(keys: list[Any], known: list[str]) -> str:
    parts = [f"unknown key {str(key)!r}{nearest(str(key), known)}" for key in keys]
    return f"{', '.join(parts)}; known keys: {', '.join(known)}"
