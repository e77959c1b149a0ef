"""Strict, frozen pydantic models with readable errors: the base of recipes, manifests and options."""

from collections.abc import Collection
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from tandemrt.engines.validation.errors import clipped, quoted

MOST_LINES = 20


class Record(BaseModel):
    """A frozen record without type coercion and without unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class Section(Record):
    """A record that a person writes: the error for an unknown key suggests the nearest known one."""

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown_keys(cls, data: Any) -> Any:
        unknown = [key for key in data if key not in cls.model_fields] if isinstance(data, dict) else []
        if unknown:
            raise PydanticCustomError("unknown_key", "{text}", {"text": _unknown(unknown, list(cls.model_fields))})
        return data


def reject(text: str) -> PydanticCustomError:
    """Return the error that a validator raises; ``text`` is its complete message without the key."""
    return PydanticCustomError("contradiction", "{text}", {"text": text})


def explain(error: ValidationError, *, tags: Collection[str] = ()) -> str:
    """Return one line per violation, at most ``MOST_LINES``: the key, the rule and the value received.

    ``tags`` are the names of a discriminated union's kinds. pydantic adds them to the key; a file does not have them.
    """
    errors = [details for details in error.errors(include_url=False) if not _counts_valid_items_only(details)]
    lines = [_line(details, tags) for details in errors[:MOST_LINES]]
    return "\n".join([*lines, f"and {len(errors) - MOST_LINES} more"] if len(errors) > MOST_LINES else lines)


def nearest(name: str, known: list[str]) -> str:
    """Return " (did you mean 'x'?)" for the known name closest to ``name``, or "" if none is close."""
    from difflib import get_close_matches  # only errors need it

    close = get_close_matches(clipped(name), known, n=1)
    return f" (did you mean {quoted(close[0])}?)" if close else ""


def _inside_the_folder(path: str) -> str:
    if "\\" in path or not {"", ".", ".."}.isdisjoint(path.split("/")):
        raise reject(f"a file of a bundle must have a plain relative path inside the bundle; got {quoted(path)}")
    return path


RelativePath = Annotated[str, AfterValidator(_inside_the_folder)]  # the path of a file in a bundle

_RULES = {
    "extra_forbidden": "is not a known key",
    "missing": "is required and missing",
    "model_type": "must be a table",
    "path_type": "must be a path",
    "tuple_type": "must be a list",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "too_long": "must have at most {max_length} items",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_pattern_mismatch": "must match {pattern}",
    "union_tag_invalid": "must be one of {expected_tags}",
    "union_tag_not_found": "is required and missing",
}
_NO_VALUE = ("missing", "union_tag_not_found")


def _counts_valid_items_only(details: Any) -> bool:
    """Return whether a list is reported as too short because pydantic counts no invalid items, which it reports too."""
    return details["type"] == "too_short" and bool(len(details["input"]) >= details["ctx"]["min_length"])


def _line(details: Any, tags: Collection[str]) -> str:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "value_error":  # from a nested record: its message is complete
        return str(context["error"])
    parts = [clipped(part) for part in details["loc"] if part not in tags]
    if kind.startswith("union_tag"):
        parts.append(context["discriminator"].strip("'"))
        value = context.get("tag")
    key = ".".join(parts)
    if kind == "unknown_key":
        key += "".join(f" {quoted(part)}" for part in details["loc"] if part in tags)
    prefix = f"{key}: " if key else ""
    if kind in ("unknown_key", "contradiction"):
        return f"{prefix}{details['msg']}"
    rule = _RULES[kind].format(**context) if kind in _RULES else details["msg"].replace("Input should", "must")
    return f"{prefix}{rule}" if kind in _NO_VALUE else f"{prefix}{rule}; got {quoted(value)}"


def _unknown(keys: list[Any], known: list[str]) -> str:
    parts = [f"unknown key {quoted(str(key))}{nearest(str(key), known)}" for key in keys[:MOST_LINES]]
    if len(keys) > MOST_LINES:
        parts.append(f"and {len(keys) - MOST_LINES} more")
    return f"{', '.join(parts)}; known keys: {', '.join(known)}"
