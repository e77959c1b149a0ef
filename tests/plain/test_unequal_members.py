"""Each of several members counts for itself: not the first for all, and not all up to the first."""

import re
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from jinja2.exceptions import SecurityError

from tandemrt.engines.bundle.manifest import Limits
from tandemrt.engines.contract.vision import VisionEntry
from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.engines.text.template_meter import MeteredTemplate
from tandemrt.engines.text.template_sandbox import environment
from tandemrt.engines.validation.errors import BadCheckpoint, NotQuick
from tandemrt.export.bundle import vision
from tandemrt.export.bundle.capacity import Capacity
from tandemrt.export.bundle.publish import Published
from tandemrt.export.cli.progress import console
from tandemrt.export.cli.quantize_report import print_published
from tandemrt.export.cli.report import _fitting
from tandemrt.export.model.rotary import head_order
from tandemrt.export.quantize.gguf.split import vision_files
from tandemrt.export.read.rope import Rope
from tandemrt.runtime.check.decoder_run import DecodePlan
from tandemrt.runtime.check.memory import measure_memory
from tandemrt.runtime.check.texts import GeneratedTexts, _first_error
from tandemrt.runtime.constraints.ordinary import OrdinaryTokens
from tandemrt.runtime.grammars import bitmask
from tandemrt.runtime.grammars.regex.python_form import python_form
from tandemrt.runtime.grammars.sources import read
from tandemrt.runtime.grammars.tag_grammar import split_at_token
from tandemrt.runtime.grammars.unique.token_index import first_allowed
from tandemrt.runtime.requests.images import Image, PromptImages
from tandemrt.runtime.requests.prompt_logprobs import ReplayGrammar
from tandemrt.runtime.servers.batch import batches
from tandemrt.runtime.servers.batch.files import StoredFile
from tandemrt.runtime.servers.http.spans import _phases
from tandemrt.runtime.workers.ranks import Link
from tests.plain.test_bundle import write_bundle


def test_every_new_token_of_a_round_is_decided() -> None:
    asked = list[int]()
    ordinary = OrdinaryTokens(6, lambda token: (asked.append(token), token % 2 == 0)[1])
    tokens = np.array([[4, 1, 2], [-1, 6, 4]])
    assert ordinary.among(tokens).tolist() == [[True, False, True], [False, False, True]]
    assert ordinary.among(tokens).tolist() == [[True, False, True], [False, False, True]]
    assert sorted(asked) == [1, 2, 4]


def test_a_copy_of_a_replay_goes_on_from_where_it_is_and_alone() -> None:
    grammar = ReplayGrammar([3, 1, 2])
    assert grammar.accept(3)
    copy = grammar.fork()
    assert (copy.accept(3), copy.accept(1)) == (False, True)
    for each, token in ((grammar, 1), (copy, 2)):
        row = np.zeros(1, np.int32)
        each.fill_row(row)
        assert [at for at in range(5) if bitmask.allows(row, at)] == [token] == each.fast_forward_tokens()[:1]


def test_the_oldest_ended_batches_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_ENDED", 2)
    store = batches.BatchStore(tmp_path)
    file = StoredFile("file-1", "me", 0, "in.jsonl", "batch", 1)
    added = [store.add(file, "/v1/completions", None) for _ in range(5)]
    for batch in (added[3], *added[:3]):  # not in the order in which they end
        store.update(batch, "completed")
    store.add(file, "/v1/completions", None)
    assert [batch.id for batch in store.records][:3] == [added[2].id, added[3].id, added[4].id]


@pytest.mark.parametrize("at", [0, 1])
def test_no_weight_of_a_tower_is_quantized(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["first", "second"]
    tensors = {
        name: SimpleNamespace(dtype="int8" if name == names[at] else "float32", file="f", name=name) for name in names
    }
    monkeypatch.setattr(vision, "read_tower", lambda *_: None)
    monkeypatch.setattr(vision, "tower_tensors", lambda _: tensors)
    target = cast("Any", SimpleNamespace(source=None, spec=SimpleNamespace(hidden=8)))
    with pytest.raises(BadCheckpoint, match=f"weights should not be quantized, '{names[at]}' is"):
        vision.VisionTower.open(target, standard=False)


def test_layers_are_listed_by_number(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"model.layers.{layer}.{kind}" for layer in (10, 9, 2) for kind in ("mlp.up_proj", "mlp.down_proj")]
    errors = {name: at / 100 for at, name in enumerate(names, 1) if at != 4}
    print_published(Published(Path("out"), errors, 3_000_000, 1_500_000))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if row[:1] and row[0].isdigit()] == [
        ["2", "5.00", "6.00"], ["9", "3.00"], ["10", "1.00", "2.00"],
    ]  # fmt: skip
    assert "3.0 MB to 1.5 MB" in " ".join(" ".join(row) for row in rows)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rotated", "head_dim"), [(8, 8), (4, 8), (4, 6), (2, 8), (0, 4)])
def test_the_halves_of_a_head_are_its_pairs(rotated: int, head_dim: int, interleaved: bool) -> None:
    rope = Rope("default", 1e4, tuple([0.5] * (rotated // 2)), interleaved=interleaved)
    order = head_order(rope, head_dim)
    assert sorted(order) == [*range(head_dim)]
    pairs = [*zip(order[: head_dim // 2], order[head_dim // 2 :], strict=True)]
    assert pairs[: rotated // 2] == [
        (2 * at, 2 * at + 1) if interleaved else (at, at + rotated // 2) for at in range(rotated // 2)
    ]


@pytest.mark.parametrize(
    "source",
    [
        "{% set n = namespace(_x=1) %}",
        "{% set n = namespace({'_x': 1}) %}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
    ],
)
def test_a_namespace_takes_no_hidden_name_however_it_is_set(source: str) -> None:
    with pytest.raises(SecurityError, match="starts with an underscore, got _x"):
        environment().from_string(source).render()
    assert environment().from_string(source.replace("_x", "x") + "{{ n.x }}").render() == "1"


def test_a_warning_is_logged_for_each_misspelled_keyword(caplog: pytest.LogCaptureFixture) -> None:
    schema = {"type": "string", "maxlength": 3, "minlength": 1}
    read(StructuredOutputs(json=schema))
    assert [re.search("'(m\\w+)'", message).group(1) for message in caplog.messages] == ["maxLength", "minLength"]


def test_the_rows_of_a_checked_decoder_have_prompts_and_steps_of_their_own() -> None:
    plan = DecodePlan.within(Limits(batch=4, length=128, capacity=160, num_draft_tokens=3, prefill_chunk=16), 50)
    assert len({*plan.prompts}) == len({*plan.tokens}) == 3
    assert any(len({*advance}) == 3 for _, advance in plan.steps)


@pytest.mark.parametrize("at", [0, 3])
def test_a_check_shows_the_error_of_any_text_of_any_run(at: int) -> None:
    outputs = [SimpleNamespace(finish_reason="error" if each == at else "stop", error=f"E{each}") for each in range(4)]
    runs = [GeneratedTexts(cast("Any", outputs[each : each + 2]), 1.0, 1, 1.0) for each in (0, 2)]
    assert _first_error(*runs) == f"E{at}"


def test_a_report_counts_the_tokens_of_all_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = write_bundle(tmp_path / "sample").manifest
    fits = Capacity(memory=1 << 30, gpus=1, weights=1, rounds=2, token=3, tokens=4, requests=5)
    for limits, has in (
        (manifest.limits.model_copy(update={"cache_blocks": 5}), f"320, shared by {manifest.limits.batch} slots"),
        (manifest.limits, f"{manifest.limits.batch} slots of {manifest.limits.capacity}"),
    ):
        console.print(_fitting(manifest.model_copy(update={"limits": limits}), fits))
        assert f"4 (this bundle's caches hold {has})" in " ".join(capsys.readouterr().out.split())


def test_a_vision_part_belongs_to_the_only_model_of_its_folder(tmp_path: Path) -> None:
    for name in ("a.gguf", "mmproj-1.gguf", "mmproj-0.gguf"):
        (tmp_path / name).touch()
    assert vision_files(tmp_path / "a.gguf") == ["mmproj-0.gguf", "mmproj-1.gguf"]
    (tmp_path / "b.gguf").touch()
    assert vision_files(tmp_path / "a.gguf") == vision_files(tmp_path / "b.gguf") == []


def test_each_image_of_a_prompt_has_its_own_digest_rows_and_positions() -> None:
    entry = VisionEntry(
        image_token=9, position_rows=3, patch_values=1, patch_size=1, merge_size=1, resize="bounds", max_pixels=100,
        resample="bicubic", mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0),
    )  # fmt: skip
    wide, tall = (Image(np.full((6, 1), colour, np.uint8), rows, 6 // rows, entry) for colour, rows in ((1, 2), (2, 3)))
    images = PromptImages([wide, tall], [1, 8], [5, *[9] * 6, 5, *[9] * 6, 5, 5])
    assert images.spans == [(1, 7, wide.digest), (8, 14, tall.digest)]
    assert wide.digest != tall.digest
    assert images.rows.tolist() == [0, *range(1, 7), 0, *range(7, 13), 0, 0]
    assert images.positions.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5, 5, 5, 5, 5, 5, 8, 9],
        [0, 1, 1, 1, 2, 2, 2, 4, 5, 5, 6, 6, 7, 7, 8, 9],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 5, 6, 5, 6, 8, 9],
    ]


@pytest.mark.parametrize("source", ["{% set y = x + '' %}", "{% set y = '' + x %}"])
def test_both_sides_of_a_sum_are_metered(source: str) -> None:
    template = MeteredTemplate(source, environment())
    assert template.render({"x": "a" * 100}, budget=1000) == ""
    with pytest.raises(NotQuick):
        template.render({"x": "a" * 1100}, budget=1000)


def test_no_part_of_a_template_is_computed_while_it_compiles() -> None:
    sandbox, rendered = environment(), list[object]()
    sandbox.filters["noted"] = lambda value: rendered.append(value) or value
    template = sandbox.from_string("{{ 1|noted }}{{ 'a' ~ (2|noted) }}{% set x = 3|noted %}{% if 4|noted %}{% endif %}")
    assert rendered == []
    template.render()
    assert rendered == [1, 2, 3, 4]


def test_a_rank_runs_every_command_up_to_zeros() -> None:
    seen = list[list[int]]()
    done = threading.Semaphore(0)
    commands = bytearray([1, 0, 0, 2, 0, 0, 3, 3])
    link = Link(1, None, (), commands, 2, threading.Semaphore(9), done, None)
    link.run_commands(lambda command: seen.append(command.tolist()))
    assert seen == [[1, 0], [0, 2]]
    assert [done.acquire(blocking=False) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a<x>b<y>", ("a", [1, "b", 2])),
        ("<y><x>b", ("", [2, 1, "b"])),
        ("a<xy>b", ("a", [3, "b"])),  # the longest name
        ("ab", ("ab", [])),
    ],
)
def test_a_text_is_split_at_each_of_its_control_tokens(text: str, parts: tuple[str, list[str | int]]) -> None:
    assert split_at_token(text, {"<x>": 1, "<y>": 2, "<xy>": 3}) == parts


def test_the_memory_of_every_cache_is_counted_in_bytes() -> None:
    caches = [SimpleNamespace(tensors={"k": np.zeros((2, 3), kind), "v": np.zeros(5, kind)}) for kind in ("f2", "f4")]
    loop = SimpleNamespace(
        target=SimpleNamespace(cache=caches[0]),
        drafter=SimpleNamespace(caches=caches[1:]),
        streams=SimpleNamespace(device=SimpleNamespace(type="cpu")),
    )
    llm = cast("Any", SimpleNamespace(loop=loop))
    measured = measure_memory(llm, {"cpu": 2_000_000}, {"cpu": 9_000_000, "cuda": 1})
    assert measured.numbers == {"caches": 11 * 2 + 11 * 4, "opened": 7_000_000}
    assert measured.result.startswith("7 MB taken by opening")
    assert measure_memory(llm, {"cuda": 1}, {"cuda": 2}).numbers == {"caches": 66}


@pytest.mark.parametrize("count", range(6))
def test_at_most_so_many_tokens_of_all_words_are_first(count: int) -> None:
    tokens = [1, 31, 32, 70, 95]
    row = np.zeros(3, np.uint32)
    for token in tokens:
        row[token // 32] |= np.uint32(1 << token % 32)
    assert list(first_allowed(row.view(np.int32), count)) == tokens[:count]


def test_every_named_group_is_written_as_in_python() -> None:
    assert python_form(r"(?<a>x)(?<b>y)\k<a>") == r"(?P<a>x)(?P<b>y)\k<a>"


@pytest.mark.parametrize(("times", "ended"), [((), None), ((2.0,), 5.0), ((2.0, 3.0), None), ((2.0, 3.0), 5.0)])
def test_the_phases_of_a_request_end_with_it(times: tuple[float, ...], ended: float | None) -> None:
    joined, first = (*times, None, None)[:2]
    request = cast("Any", SimpleNamespace(submitted=1.0, joined=joined, first_token_time=first, ended=ended))
    assert [(begin, until) for _, begin, until in _phases(request, 9.0)] == [*pairwise((1.0, *times, ended or 9.0))]
