"""Options of RuntimeOptions in Python, on the command line and in a server's configuration."""

import inspect
import re
from contextlib import nullcontext
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
from tandemrt.engines.bundle.manifest import Limits
from tandemrt.engines.options.command_options import help_of
from tandemrt.engines.options.deployment import Deployment
from tandemrt.engines.options.options import (
    OpeningOptions,
    RuntimeOptions,
    ServedOptions,
    TorchDevice,
    draft_tokens_from_text,
    draft_tokens_to_text,
)
from tandemrt.engines.options.text_options import OptionsFromText
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.cli.server_options import option_name
from tandemrt.runtime.servers.http.config import ServerConfig
from tests.command_line import app

FIELDS = RuntimeOptions.model_fields
GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"
LEFT_OUT = {
    ("run",): {"queue_limit", "profile"},
    ("bench",): {"queue_limit", "profile"},
    ("calibrate",): {"queue_limit", "profile", "adaptive_draft_tokens", "lookup"},
    ("check",): {"queue_limit", "profile"}
    | {"grammar_timeout_s", "fill_timeout_s", "max_grammar_bytes", "max_prompt_bytes", "prompt_timeout_s"}
    | {"max_images", "max_image_bytes", "max_image_pixels", "max_image_memory", "allowed_media_domains"},
    ("export", "triton"): set(),  # has its own --device
}


def kinds(hint: Any) -> set[Any]:
    """Return the types of a hint, without None and pydantic's metadata."""
    if get_origin(hint) in (UnionType, Union):
        return set().union(*map(kinds, get_args(hint))) - {NoneType}
    return kinds(get_args(hint)[0]) if get_origin(hint) is Annotated else {hint}


def parameters(command: tuple[str, ...]) -> dict[str, click.Parameter]:
    group: Any = typer.main.get_command(app)
    for name in command:
        group = group.commands[name]
    return {parameter.name: parameter for parameter in group.params}


def test_llm_takes_every_option_with_its_default() -> None:
    taken = dict(inspect.signature(LLM).parameters)
    assert taken.pop("bundle").kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    for own in ("trace", "max_model_len", "dtype", "draft"):
        assert taken.pop(own).default is None
    assert taken.pop("warm_up_later").default is False
    assert {name: parameter.default for name, parameter in taken.items()} == {
        name: field.default for name, field in FIELDS.items()
    }


def test_type_checkers_see_the_same_options_and_types() -> None:
    seen = get_type_hints(OpeningOptions)
    assert set(seen) == set(FIELDS)
    assert set(get_type_hints(ServedOptions)) == set(FIELDS) - {"device"}
    for name, field in FIELDS.items():
        assert kinds(seen[name]) - {TorchDevice} == kinds(field.annotation), name


@pytest.mark.parametrize("command", LEFT_OUT, ids=" ".join)
def test_a_command_has_every_option_that_it_does_not_leave_out(command: tuple[str, ...]) -> None:
    options = parameters(command)
    expected = set(FIELDS) - LEFT_OUT[command]
    assert expected == set(FIELDS) & set(options)
    for name in expected - {"device"}:
        assert options[name].help == help_of(name)  # type: ignore[attr-defined]
        assert options[name].default is None


def test_the_defaults_of_serve_are_those_of_a_server() -> None:
    options, server = parameters(("serve",)), ServerConfig()
    for name, value in vars(server).items():
        assert options[option_name(name)].default == (None if value == () else value), name  # an empty list
    guide = (Path(__file__).parents[2] / "docs" / "openai.md").read_text()
    assert f"http://{server.host}:{server.port}/v1" in guide.replace("localhost", server.host)


def test_a_served_model_has_every_option_except_the_device() -> None:
    assert set(Deployment.model_fields) == set(FIELDS) | {"bundle", "tandemrt_version"}
    values = {
        "num_draft_tokens": {1: 4, 9: 0},
        "profile": True,
        "grammar_timeout_s": 0.5,
        "overlap": False,
        "threads": 2,
    }
    deployment = Deployment(bundle="b", tandemrt_version="1", **values)  # type: ignore[arg-type]
    assert Deployment.read(deployment.parameters()) == deployment
    assert deployment.llm_arguments() == values
    with pytest.raises(BadRequest, match="device: must not be a parameter: instance_group sets the device"):
        Deployment(bundle="b", tandemrt_version="1", device="cuda")


def test_options_are_read_from_texts() -> None:
    options = OptionsFromText(threads="2", overlap="true", num_draft_tokens="1:4,33:2", fill_timeout_s="0.5")  # type: ignore[arg-type]
    assert options.arguments() == {
        "threads": 2,
        "overlap": True,
        "num_draft_tokens": {1: 4, 33: 2},
        "fill_timeout_s": 0.5,
    }
    with pytest.raises(BadRequest, match="threads: must be at least 1, received 0"):
        OptionsFromText(threads="0")  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="num_draft_tokens: must be a number, or a table"):
        OptionsFromText(num_draft_tokens="many")


def test_the_guide_describes_every_option() -> None:
    section = GUIDE.read_text().partition("\n## Open it\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE))
    assert rows == {name: help_of(name) for name in FIELDS}


@given(st.one_of(st.integers(0, 99), st.dictionaries(st.integers(1, 99), st.integers(0, 16), min_size=1)))
def test_num_draft_tokens_round_trip_as_text(window: int | dict[int, int]) -> None:
    assert draft_tokens_from_text(draft_tokens_to_text(window)) == window


@pytest.mark.parametrize("text", ["", "four", "1:", "1:4,", "1:4:2", ":", "1:4,1:2", "1;4"])
def test_invalid_text_of_num_draft_tokens_is_rejected(text: str) -> None:
    with pytest.raises(BadRequest, match="num_draft_tokens: must be a number, or a table such as"):
        draft_tokens_from_text(text)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_a_device_may_be_a_torch_device(device: str) -> None:
    assert RuntimeOptions(device=torch.device(device)).device == device


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cuda_graph": True},
            r"unknown key 'cuda_graph' \(did you mean 'cuda_graphs'\?\); known keys: device",
        ),
        ({"threads": "2"}, "threads: must be a valid integer; got '2'"),
        ({"threads": 0}, "threads: must be at least 1, received 0; None gives one thread per core"),
        ({"threads": 10**12}, "threads: must be at most 1024, received 1000000000000; None gives one thread per core"),
        ({"queue_limit": 0}, "queue_limit: must be at least 1 waiting request, received 0"),
        ({"grammar_timeout_s": 0.0}, r"grammar_timeout_s: must be greater than 0; got 0\.0"),
        ({"overlap": "yes"}, "overlap: must be a valid boolean; got 'yes'"),
        ({"profile": 1}, "profile: must be a valid boolean; got 1"),
        ({"num_draft_tokens": -1}, "num_draft_tokens: must be 0 or more drafted tokens per round, received -1"),
        ({"num_draft_tokens": {2: 1}}, "num_draft_tokens: a table must map numbers of requests, 1 among them"),
        ({"cache_tokens": 0}, "cache_tokens: must be at least 1 token, received 0"),
        ({"device": "cuda:٣"}, "device: must be 'cpu', 'cuda' or 'cuda:N', received 'cuda:٣'"),
        ({"device": "cuda:300"}, "device: must be 'cpu', 'cuda' or 'cuda:N', received 'cuda:300'"),
        ({"device": "cuda:0,1"}, "device: must be 'cpu', 'cuda' or 'cuda:N', received 'cuda:0,1'"),
    ],
)
def test_an_invalid_option_is_rejected_with_its_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        RuntimeOptions(**options)


@pytest.mark.parametrize(
    ("options", "limits", "message"),
    [
        ({"num_draft_tokens": 4}, {}, None),
        ({"num_draft_tokens": 5}, {}, r"num_draft_tokens: the bundle was built for 0\.\.4 .* received 5"),
        ({"num_draft_tokens": {1: 4, 2: 0}}, {}, None),
        ({"num_draft_tokens": {1: 4, 2: 5}}, {}, r"num_draft_tokens: the bundle was built for 0\.\.4 .* received 5"),
        ({"prefill_chunk": 8}, {}, None),
        ({"prefill_chunk": 9}, {}, "prefill_chunk: the bundle was built for at most 8 prompt tokens .* received 9"),
        ({"cache_tokens": 65}, {}, "cache_tokens: this bundle's cache is linear, .* received 65"),
        # A request takes 65 tokens, two blocks.
        ({"cache_tokens": 64}, {"cache_blocks": 2}, "cache_tokens: must hold one request .* 65 tokens .* received 64"),
        ({"cache_tokens": 65}, {"cache_blocks": 2}, None),
        # With fewer drafts it fits one block, unless the draft's engine writes more tokens than are drafted.
        ({"cache_tokens": 64, "num_draft_tokens": 3}, {"cache_blocks": 2}, None),
        ({"cache_tokens": 64, "num_draft_tokens": {1: 3, 2: 4}}, {"cache_blocks": 2}, "cache_tokens: must hold one"),
        (
            {"cache_tokens": 64, "num_draft_tokens": 3},
            {"cache_blocks": 2, "capacity": 66},
            "cache_tokens: must hold one request .* 65 tokens .* received 64; give at least 128",
        ),
        ({"cache_tokens": 64, "num_draft_tokens": 2}, {"cache_blocks": 2, "capacity": 66}, None),
    ],
    ids=str,
)
def test_options_beyond_the_limits_of_a_bundle_are_rejected_without_an_engine(
    options: dict[str, Any], limits: dict[str, int], message: str | None
) -> None:
    sizes = {"batch": 2, "length": 60, "capacity": 65, "num_draft_tokens": 4, "prefill_chunk": 8} | limits
    with nullcontext() if message is None else pytest.raises(BadRequest, match=message):
        RuntimeOptions(**options).require_fit(Limits(**sizes))


@pytest.mark.parametrize(("max_prompt_bytes", "most"), [(None, 16 * 60), (7, 7)])
def test_a_prompt_has_at_most_16_bytes_per_token_of_the_bundle_unless_an_option_says_how_many(
    max_prompt_bytes: int | None, most: int
) -> None:
    limits = Limits(batch=2, length=60, capacity=65, num_draft_tokens=4, prefill_chunk=8)
    assert RuntimeOptions(max_prompt_bytes=max_prompt_bytes).prompt_bytes(limits) == most


@pytest.mark.parametrize("option", ["adaptive_draft_tokens", "draft_masks", "lookup"])
@pytest.mark.parametrize(
    ("asked", "built", "rejected"),
    [(0, 4, True), ({1: 0}, 4, True), (None, 0, True), ({1: 0, 2: 1}, 4, False), (1, 4, False)],
)
def test_an_option_about_drafts_is_rejected_without_drafted_tokens(
    option: str, asked: Any, built: int, rejected: bool
) -> None:
    limits = Limits(batch=2, length=32, capacity=37, num_draft_tokens=built, prefill_chunk=8)
    options = RuntimeOptions(num_draft_tokens=asked, **{option: True})
    if not rejected:
        options.require_fit(limits)
        return
    with pytest.raises(BadRequest, match=f"{option}: needs drafts, received True with num_draft_tokens 0; leave one"):
        options.require_fit(limits)
