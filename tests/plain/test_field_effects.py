"""Every field of a published config changes what is read from it, is rejected, or is known to say nothing."""

import json
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.read.spec import ModelSpec
from tests.plain.test_families import PUBLISHED

_TEXT = {"text_config", "llm_config"}  # where vision-language models have the fields of a text model
_OTHERS = {"vision_config", "audio_config", "quantization_config", "task_specific_params", "auto_map"}

_NEVER, _SOMETIMES = (Path(__file__).parent / "fields_without_effect.txt").read_text().split("\n\n")
NEVER = frozenset(_NEVER.split())  # fields of training, of other programs, of towers, of parts that are not read
# Fields that say nothing in these configs, or in all that have them but these.
SOMETIMES = dict(line.split(": ") for line in _SOMETIMES.replace("\n  ", " ").splitlines())


def says_nothing(field: str, name: str) -> bool:
    where, among = SOMETIMES.get(field, ""), name in SOMETIMES.get(field, "").removeprefix("not ").split("; ")
    return field in NEVER or among != where.startswith("not ")


def leaves(config: Any, *path: str | int) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Each value of a config and its place; of a list, the last one."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            yield from leaves(value, *path, name)
    elif isinstance(config, list):
        if config:
            yield from leaves(config[-1], *path, len(config) - 1)
    elif config is not None:
        yield path, config


def another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + {int: 1, float: 0.25, str: "x"}[type(value)]


def has_effect(config: dict[str, Any], spec: ModelSpec, path: tuple[str | int, ...], value: Any) -> bool:
    *outer, last = path
    reduce(lambda inner, at: inner[at], outer, config)[last] = another(value)
    try:
        return ModelSpec.from_hf(config) != spec
    except BadCheckpoint:
        return True
    finally:
        reduce(lambda inner, at: inner[at], outer, config)[last] = value


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_other_field_of_a_config_has_an_effect(name: str) -> None:
    config = json.loads(PUBLISHED[name][0])
    spec, without, expected = ModelSpec.from_hf(config), set(), set()
    for path, value in list(leaves(config)):
        field = ".".join(part for part in path if isinstance(part, str) and part not in _TEXT)
        if path[0] not in _OTHERS:
            without |= set() if has_effect(config, spec, path, value) else {field}
            expected |= {field} if says_nothing(field, name) else set()
    assert without == expected
