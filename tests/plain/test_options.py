"""One definition of how a bundle is opened: Python, the command line and a server's configuration all follow it."""

import inspect
import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import click
import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st

from tandemrt import LLM
from tandemrt.cli import app
from tandemrt.engines.command_options import help_of
from tandemrt.engines.deployment import Deployment
from tandemrt.engines.errors import BadRequest
from tandemrt.engines.manifest import Limits
from tandemrt.engines.options import (
    Device,
    OpeningOptions,
    RuntimeOptions,
    ServedOptions,
    window_from_text,
    window_to_text,
)

FIELDS = RuntimeOptions.model_fields
GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"
LEFT_OUT = {
    ("run",): {"queue_limit", "profile"},
    ("bench",): {"queue_limit", "profile"},
    ("calibrate",): {"queue_limit", "profile", "adaptive_window"},
    ("export", "check"): {"queue_limit", "profile"}
    | {"grammar_timeout_s", "fill_timeout_s", "max_grammar_bytes", "max_prompt_bytes", "prompt_timeout_s"},
    ("export", "triton"): set(),  # --device is there, with a meaning of its own
}


def kinds(hint: Any) -> set[Any]:
    """The types that a hint allows beside None, without what pydantic checks of them."""
    if get_origin(hint) in (UnionType, Union):
        return set().union(*map(kinds, get_args(hint))) - {NoneType}
    return kinds(get_args(hint)[0]) if get_origin(hint) is Annotated else {hint}


def parameters(command: tuple[str, ...]) -> dict[str, click.Parameter]:
    found: Any = typer.main.get_command(app)
    for name in command:
        found = found.commands[name]
    return {parameter.name: parameter for parameter in found.params}


def test_python_takes_every_option_by_its_name_with_its_default() -> None:
    taken = dict(inspect.signature(LLM).parameters)
    assert taken.pop("bundle").kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert taken.pop("trace").default is None
    assert {name: parameter.default for name, parameter in taken.items()} == {
        name: field.default for name, field in FIELDS.items()
    }


def test_a_type_checker_sees_the_same_options_of_the_same_types() -> None:
    seen = get_type_hints(OpeningOptions)
    assert set(seen) == set(FIELDS)
    assert set(get_type_hints(ServedOptions)) == set(FIELDS) - {"device"}
    for name, field in FIELDS.items():
        assert kinds(seen[name]) - {Device} == kinds(field.annotation), name


@pytest.mark.parametrize("command", LEFT_OUT, ids=" ".join)
def test_a_command_has_every_option_it_does_not_leave_out_with_its_help(command: tuple[str, ...]) -> None:
    found = parameters(command)
    expected = set(FIELDS) - LEFT_OUT[command]
    assert expected == set(FIELDS) & set(found)
    for name in expected - {"device"}:
        assert found[name].help == help_of(name)  # type: ignore[attr-defined]
        assert found[name].default is None


def test_a_served_model_has_every_option_but_where_it_runs() -> None:
    assert set(Deployment.model_fields) == set(FIELDS) | {"bundle", "tandemrt_version"}
    values = {"window": {1: 4, 9: 0}, "profile": True, "grammar_timeout_s": 0.5, "overlap": False, "threads": 2}
    deployment = Deployment(bundle="b", tandemrt_version="1", **values)  # type: ignore[arg-type]
    assert Deployment.read(deployment.parameters()) == deployment
    assert deployment.llm_arguments() == values
    with pytest.raises(BadRequest, match="device: instance_group says where"):
        Deployment(bundle="b", tandemrt_version="1", device="cuda")


def test_the_guide_describes_every_option() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", GUIDE.read_text(), re.MULTILINE))
    assert rows == {name: help_of(name) for name in FIELDS}


@given(st.one_of(st.integers(0, 99), st.dictionaries(st.integers(1, 99), st.integers(0, 16), min_size=1)))
def test_a_window_survives_its_text_form(window: int | dict[int, int]) -> None:
    assert window_from_text(window_to_text(window)) == window


@pytest.mark.parametrize("text", ["", "four", "1:", "1:4,", "1:4:2", ":", "1:4,1:2", "1;4"])
def test_a_text_that_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="window: must be a number, or a table such as"):
        window_from_text(text)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_a_device_may_be_torchs_own(device: str) -> None:
    assert RuntimeOptions(device=torch.device(device)).device == device


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cuda_graph": True},
            r"unknown key 'cuda_graph' \(did you mean 'cuda_graphs'\?\); known keys: device",
        ),
        ({"threads": "2"}, "threads: must be a valid integer; got '2'"),
        ({"threads": 0}, "threads: at least one is needed, received 0; None gives one per core"),
        ({"threads": 10**12}, "threads: at most 1024 can be started, received 1000000000000; None gives one per core"),
        ({"queue_limit": 0}, "queue_limit: at least one request must be able to wait, received 0"),
        ({"grammar_timeout_s": 0.0}, r"grammar_timeout_s: must be greater than 0; got 0\.0"),
        ({"overlap": "yes"}, "overlap: must be a valid boolean; got 'yes'"),
        ({"profile": 1}, "profile: must be a valid boolean; got 1"),
        ({"window": -1}, "window: must be 0 or more drafted tokens per round, received -1"),
        ({"window": {2: 1}}, "window: a table must map numbers of requests, 1 among them"),
        ({"cache_tokens": 0}, "cache_tokens: a cache must hold at least one token, received 0"),
        ({"device": "cuda:٣"}, "device: must be 'cpu', 'cuda' or 'cuda:N', received 'cuda:٣'"),
        ({"device": "cuda:300"}, "device: must be 'cpu', 'cuda' or 'cuda:N', received 'cuda:300'"),
        ({"device": "cuda:0,1"}, "device: must be 'cpu', 'cuda' or 'cuda:N', received 'cuda:0,1'"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        RuntimeOptions(**options)


def test_what_a_bundle_cannot_do_is_refused_from_its_limits_alone() -> None:
    limits = Limits(batch=2, length=32, capacity=37, window=4, prefill_chunk=8)
    RuntimeOptions(window={1: 4, 2: 0}).require_fit(limits)
    with pytest.raises(BadRequest, match=r"window: the bundle was built for 0\.\.4 drafted tokens .* received 5"):
        RuntimeOptions(window={1: 4, 2: 5}).require_fit(limits)
    with pytest.raises(BadRequest, match=r"cache_tokens: this bundle's cache is linear, .* received 64"):
        RuntimeOptions(cache_tokens=64).require_fit(limits)
    RuntimeOptions(cache_tokens=64).require_fit(limits.model_copy(update={"cache_blocks": 2}))
