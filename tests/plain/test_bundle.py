"""Bundles: checks on opening, validation of manifests, and round trips of manifests."""

import json
import shutil
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.digest import combined_digest, file_digest
from tandemrt.engines.bundle.manifest import (
    TARGET_IDS,
    Delimiter,
    EngineEntry,
    File,
    Limits,
    Manifest,
    Provenance,
    ReasoningDelimiters,
)
from tandemrt.engines.contract import contract
from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.contract.draft_kinds import DRAFT_KINDS, NgramEntry
from tandemrt.engines.validation.errors import BadBundle, InternalError
from tandemrt.export.bundle.sources import is_usable

WEIGHTS = "target/model.safetensors"
ENGINES = ("target", "adjust", "verify", "verify_probs")


def write_bundle(folder: Path) -> Bundle:
    """Write a folder with the files of a bundle. Opening it does not read the engines."""
    contents = {
        "target/model.onnx": b"graph of the target",
        WEIGHTS: b"weights " * 100,
        "adjust.onnx": b"graph of biases and penalties",
        "verify.onnx": b"graph of verification",
        "verify_probs.onnx": b"graph of verification with draft probabilities",
        "tokenizer/tokenizer.json": b"{}",
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "bundle.json").write_text(manifest(folder, contents).to_json())
    return Bundle.open(folder)


def manifest(folder: Path, names: Any) -> Manifest:
    decoder = contract.decoder(layers=2, kv_heads=2, head_dim=8, capacity=37, vocab=96, dtype="float32")
    delimiter = Delimiter(text="</think>", ids=(91,))
    contracts = {"target": decoder, "adjust": contract.adjust(vocab=96, dtype="float32")} | {
        name: contract.verify(vocab=96, dtype="float32", draft_probs=name != "verify") for name in ENGINES[2:]
    }
    return Manifest(
        manifest_version=7,
        name="sample",
        limits=Limits(batch=4, length=32, capacity=37, num_draft_tokens=4, prefill_chunk=16),
        vocab=96,
        valid_tokens=92,
        stop_ids=(89,),
        reasoning=ReasoningDelimiters(
            think_start=Delimiter(text="<think>", ids=(90,)), think_ends=(delimiter,), forced_end=delimiter
        ),
        draft=NgramEntry(kind="ngram", ngram_min=2, ngram_max=4),
        specs={"target": {"family": "qwen3", "rope": {"theta": 1e4}, "window": None}},
        engines={
            name: EngineEntry(
                file="target/model.onnx" if name == "target" else f"{name}.onnx",
                backend="onnxruntime-cpu",
                built_for="cpu",
                dtype="float32",
                contract=contracts[name],
            )
            for name in ENGINES
        },
        files={name: File(sha256=file_digest(folder / name), size=(folder / name).stat().st_size) for name in names},
        provenance=Provenance(
            created="2026-01-01T00:00:00+00:00",
            tandemrt="0.1.0",
            commit=None,
            dirty=None,
            python="3.11.0",
            packages={"onnx": "1.20.0"},
            recipe="0" * 64,
            checkpoints={"target": "1" * 64},
        ),
    )


def edit(folder: Path, *path: str | int, value: Any) -> None:
    """Set one value of the folder's bundle.json."""
    data = json.loads((folder / "bundle.json").read_text())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (folder / "bundle.json").write_text(json.dumps(data))


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write_bundle(tmp_path / "sample")


def test_an_opened_bundle_has_the_values_of_its_manifest(bundle: Bundle) -> None:
    assert bundle.path("target") == bundle.folder / "target/model.onnx"
    assert bundle.contract("verify") == contract.verify(vocab=96, dtype="float32", draft_probs=False)
    assert bundle.tokenizer_dir == bundle.folder / "tokenizer"
    assert (bundle.name, bundle.vocab, bundle.valid_tokens, bundle.stop_ids) == ("sample", 96, 92, (89,))
    assert bundle.reasoning is not None
    assert bundle.reasoning.think_ends[0].ids == (91,)
    assert (bundle.limits.capacity, bundle.draft.kind) == (37, "ngram")


def test_a_manifest_round_trips(bundle: Bundle) -> None:
    assert Manifest.read(bundle.folder) == bundle.manifest
    assert json.loads(bundle.manifest.to_json())["engines"]["target"]["contract"] == bundle.contract("target").to_json()


KERNELS = {"kernels/attention.ptx": "compute_80", "kernels/swiglu.ptx": "compute_80"}


def paged_manifest(bundle: Bundle, steps: list[Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Return manifest data with kernels and a one-layer target in steps; ``files`` lists all their files."""
    data = bundle.manifest.model_dump(mode="json")
    decoder = steps_of_one_layer()
    if steps is not None:
        decoder["steps"] = steps
    files = [decoder["constants"]["file"], *(f"target/subgraph.{i:02}.onnx" for i in range(3))]
    kernels = dict.fromkeys(("kernels/attention.sm_90.cubin", "kernels/swiglu.sm_90.cubin"), "sm_90")
    extra = dict.fromkeys((*files, *kernels), data["files"]["verify.onnx"])
    paged = contract.decoder(layers=1, kv_heads=2, head_dim=8, capacity=37, vocab=96, dtype="float32", cache="paged")
    data["engines"]["target"] |= {"file": None, "decoder": decoder, "contract": paged.to_json()}
    data |= {"files": data["files"] | extra, "kernels": kernels}
    return data | changes


def subgraph(index: int, inputs: list[str], outputs: list[str]) -> dict[str, Any]:
    return {"file": f"target/subgraph.{index:02}.onnx", "inputs": inputs, "outputs": outputs}


SAID = {"heads": 4, "kv_heads": 2, "sliding_window": 0, "value_norm": 0, "scale": 0.2, "epsilon": 1e-6}


def attention(**changes: Any) -> dict[str, Any]:
    place = ["block_table", "write_index", "prompt_rows", "prompt_starts", "prompt_index", "prompt_table"]
    inputs = ["qkv.0", "past_key.0", "past_value.0", *place, "cosine", "sine"]
    outputs = ["mixed.0", "present_key.0", "present_value.0"]
    return {"name": "window_attention", "inputs": inputs, "outputs": outputs, "attributes": SAID} | changes


def swiglu(**changes: Any) -> dict[str, Any]:
    return {"name": "swiglu", "inputs": ["gate_up.0"], "outputs": ["activated.0"], "attributes": {}} | changes


def adjusting(value: str, result: str) -> dict[str, Any]:
    """Return an operator that updates ``value`` in place."""
    return {"name": "adjust_logits", "inputs": [value, *["token_ids"] * 9], "outputs": [result], "attributes": {}}


FIRST, SECOND = subgraph(0, ["token_ids"], ["hidden.0", "qkv.0"]), subgraph(1, ["hidden.0", "mixed.0"], ["gate_up.0"])
LAST = subgraph(2, ["activated.0", "score_rows"], ["logits"])


def steps_of_one_layer() -> dict[str, Any]:
    widths = {"hidden.0": 16, "qkv.0": 64, "mixed.0": 32, "gate_up.0": 40, "activated.0": 20}
    values = [{"name": name, "dtype": "float32", "shape": ["tokens", width]} for name, width in widths.items()]
    tables = [{"name": name, "dtype": "float32", "shape": [64, 4]} for name in ("cosine", "sine")]
    return {
        "constants": {"file": "target/constants.onnx", "inputs": [], "outputs": ["cosine", "sine"]},
        "steps": [FIRST, attention(), SECOND, swiglu(), LAST],
        "values": tables + values,
    }


def test_a_manifest_with_subgraphs_and_kernels_round_trips(bundle: Bundle) -> None:
    written = Manifest.model_validate_json(json.dumps(paged_manifest(bundle)))
    (bundle.folder / "bundle.json").write_text(written.to_json())
    assert Manifest.read(bundle.folder) == written
    with pytest.raises(InternalError, match=r"engine 'target' of bundle .* is a decoder in steps, not one file"):
        replace(bundle, manifest=written).path("target")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"steps": [attention(), FIRST, SECOND, swiglu(), LAST]},
            r"decoder\.steps\.0\.inputs must be written before they are read; got 'qkv\.0'",
        ),
        (
            {"steps": [FIRST, attention(), SECOND, swiglu(), swiglu(), LAST]},
            r"decoder\.steps\.4\.outputs must be written once; got 'activated\.0'",
        ),
        (
            {"steps": [FIRST, attention(), SECOND, swiglu(outputs=["other"]), LAST]},
            r"decoder\.steps\.3\.outputs must be among values or the contract's outputs; got 'other'",
        ),
        (
            {"steps": [FIRST, attention(), SECOND, swiglu()]},
            "decoder.steps must write every output of the contract; 'logits' is not written",
        ),
        (
            {"steps": [FIRST, attention(), subgraph(1, ["mixed.0"], ["logits"])]},
            "decoder.steps must write every value; 'gate_up.0' is not written",
        ),
        (
            {"steps": [FIRST, attention(), attention(outputs=["gate_up.0", "activated.0", "logits"])]},
            r"decoder\.steps\.2\.inputs must be written before they are read; got 'past_key\.0'",
        ),
        (
            {"steps": [FIRST, attention(), SECOND, swiglu(name="swigle"), LAST]},
            r"decoder\.steps\.3\.name must be an operator \(did you mean 'swiglu'\?\); got 'swigle'",
        ),
        (
            {"steps": [FIRST, attention(), SECOND, swiglu(attributes={"limit": 7.0}), LAST]},
            r"decoder\.steps\.3\.attributes must be swiglu's none; got {'limit': 7\.0}",
        ),
        (
            {"steps": [FIRST, attention(attributes=SAID | {"heads": 4.0}), SECOND, swiglu(), LAST]},
            r"decoder\.steps\.1\.attributes must be window_attention's heads \(int\), .*; got {'heads': 4\.0, ",
        ),
        (
            {"steps": [FIRST, attention(), SECOND, swiglu(inputs=["gate_up.0", "gate_up.0"]), LAST]},
            r"decoder\.steps\.3\.inputs must be swiglu's gate_up; got \['gate_up\.0', 'gate_up\.0'\]",
        ),
        (
            {"steps": [FIRST, attention(inputs=["qkv.0", None]), SECOND, swiglu(), LAST]},
            r"decoder\.steps\.1\.inputs must be window_attention's qkv, key_cache, .*; got \['qkv\.0', None\]",
        ),
        (
            {"steps": [FIRST, adjusting("cosine", "mixed.0"), SECOND, swiglu(), LAST]},
            r"decoder\.steps\.1 must not update constants in place; got 'cosine'",
        ),
        (
            {"steps": [FIRST, attention(outputs=["mixed.0", "present_value.0", "present_key.0"]), SECOND]},
            "must write every output",
        ),
        (
            {
                "steps": [
                    FIRST,
                    attention(outputs=["mixed.0", "present_value.0", "present_key.0"]),
                    SECOND,
                    swiglu(),
                    LAST,
                ]
            },
            "must update in place exactly the contract's aliases; got 'present_key.0' for 'past_key.0'",
        ),
        ({"kernels": KERNELS}, "kernels must be among files; got 'kernels/attention.ptx'"),
        ({"kernels": {}}, "kernels must hold attention, swiglu for the operators of its decoders; got none"),
        ({"kernels": {"kernels/verify.ptx": "compute_80"}}, "attention, swiglu .*; got verify"),
        ({"kernels": {"verify.onnx": "hopper"}}, "should match pattern"),
        (
            {
                "limits": {
                    "batch": 1,
                    "length": 100,
                    "capacity": 101,
                    "num_draft_tokens": 0,
                    "prefill_chunk": 1,
                    "cache_blocks": 1,
                }
            },
            "cache_blocks must hold one full row, 2 blocks; got 1",
        ),
    ],
)
def test_inconsistent_subgraphs_kernels_and_blocks_are_rejected(
    bundle: Bundle, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Manifest.model_validate_json(json.dumps(paged_manifest(bundle, **changes)))


LIMITS = {"batch": 2, "length": 100, "capacity": 128, "num_draft_tokens": 20, "prefill_chunk": 100}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"capacity": 120}, "capacity must be at least .* = 121; got 120"),
        ({"capacity": 121}, None),
        ({"capacity": 122}, None),
        ({"prefill_chunk": 99}, None),
        ({"prefill_chunk": 100}, None),
        ({"prefill_chunk": 101}, "prefill_chunk must be at most 100, .*; got 101"),
        ({"cache_blocks": 1}, "cache_blocks must hold one full row, 2 blocks; got 1"),
        ({"cache_blocks": 2}, None),
        ({"cache_blocks": 3}, None),
        ({"capacity": 129, "cache_blocks": 2}, "cache_blocks must hold one full row, 3 blocks; got 2"),
        ({"capacity": 129, "cache_blocks": 3}, None),
        ({"cache_blocks": 2, "prefill_chunk": 200}, None),
        ({"cache_blocks": 2, "prefill_chunk": 201}, "prefill_chunk must be at most 200, .*; got 201"),
        ({"batch": 0}, "batch"),
        ({"num_draft_tokens": 0}, None),
        ({"num_draft_tokens": -1}, "num_draft_tokens"),
    ],
    ids=str,
)
def test_limits_hold_at_exactly_their_bounds(limits: dict[str, int], message: str | None) -> None:
    values = LIMITS | limits
    if message is None:
        assert Limits(**values).model_dump(exclude_none=True) == values
    else:
        with pytest.raises(ValueError, match=message):
            Limits(**values)


@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 2), (2, 2), (3, 4), (0, 0), (0, 1), (2, 1), (5, 4)])
def test_ngram_bounds_may_be_equal_and_must_be_ordered(low: int, high: int) -> None:
    if 1 <= low <= high:
        entry = NgramEntry(kind="ngram", ngram_min=low, ngram_max=high)
        assert (entry.ngram_min, entry.ngram_max) == (low, high)
    else:
        with pytest.raises(ValueError, match="ngram_m"):
            NgramEntry(kind="ngram", ngram_min=low, ngram_max=high)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("valid_tokens",), 96, None),
        (("valid_tokens",), 97, "valid_tokens must not exceed vocab 96; got 97"),
        (("stop_ids",), [89, 91], None),
        (("stop_ids",), [89, 92], "must be below valid_tokens 92; got 92"),
        (("reasoning", "think_ends", 0, "ids"), [3, 91], None),
        (("reasoning", "think_ends", 0, "ids"), [3, 92], "must be below valid_tokens 92; got 92"),
        (("reasoning", "forced_end", "ids"), [3, 92], "must be below valid_tokens 92; got 92"),
        (("reasoning", "implicit_ends"), [{"text": "a", "ids": [3]}, {"text": "b", "ids": [92]}], "got 92"),
    ],
    ids=str,
)
def test_token_ids_of_a_manifest_hold_at_exactly_their_bounds(
    bundle: Bundle, path: tuple[str | int, ...], value: Any, message: str | None
) -> None:
    data = bundle.manifest.model_dump(mode="json")
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    if message is None:
        assert Manifest.model_validate_json(json.dumps(data)).model_dump(mode="json") == data
    else:
        with pytest.raises(ValueError, match=message):
            Manifest.model_validate_json(json.dumps(data))


def drafting_manifest(bundle: Bundle, draft: dict[str, Any], limits: dict[str, int] | None = None) -> dict[str, Any]:
    """Return manifest data with the engines and files that ``draft`` needs."""
    data = bundle.manifest.model_dump(mode="json")
    return data | {
        "draft": draft,
        "limits": data["limits"] | (limits or {}),
        "engines": data["engines"] | dict.fromkeys(DRAFT_KINDS[draft["kind"]].engines, data["engines"]["verify"]),
        "files": data["files"] | {TARGET_IDS: data["files"]["verify.onnx"]},
    }


BLOCK = {"kind": "dflash", "mask_token": 95}
ANCHOR = {"kind": "dspark", "mask_token": 95, "sample_from_anchor": True}


@pytest.mark.parametrize(
    ("draft", "limits", "message"),
    [
        ({"kind": "pard", "mask_token": 95}, {"capacity": 40}, None),
        ({"kind": "pard", "mask_token": 96}, {"capacity": 40}, "draft.mask_token must be below vocab 96; got 96"),
        ({"kind": "pard", "mask_token": 0}, {"capacity": 39}, "limits.capacity must be at least 40 .*'pard'; got 39"),
        ({"kind": "peagle", "mask_token": 95}, {"capacity": 40}, None),
        ({"kind": "peagle", "mask_token": 96}, {"capacity": 40}, "draft.mask_token must be below vocab 96; got 96"),
        ({"kind": "peagle", "mask_token": 0}, {"capacity": 39}, "limits.capacity must be at least 40 for .*; got 39"),
        ({"kind": "model"}, {"capacity": 37}, None),
        ({"kind": "eagle3"}, {"capacity": 37}, None),
        ({"kind": "mtp"}, {"capacity": 40}, None),
        ({"kind": "mtp"}, {"capacity": 39}, "limits.capacity must be at least 40 for draft.kind 'mtp'; got 39"),
        (BLOCK | {"block": 5}, {"capacity": 49}, None),
        (BLOCK | {"block": 5}, {"capacity": 48}, "limits.capacity must be at least 49 for draft.kind 'dflash'; got 48"),
        (BLOCK | {"block": 5}, {"capacity": 33, "num_draft_tokens": 0}, None),
        (BLOCK | {"block": 5, "mask_token": 96}, {"capacity": 49}, "draft.mask_token must be below vocab 96; got 96"),
        (BLOCK | {"block": 4}, {"capacity": 49}, "limits.num_draft_tokens must not exceed 3 for draft.block 4; got 4"),
        (BLOCK | {"block": 4}, {"capacity": 49, "num_draft_tokens": 3}, None),
        (ANCHOR | {"block": 4}, {"capacity": 49}, None),
        (ANCHOR | {"block": 3}, {"capacity": 49}, "limits.num_draft_tokens must not exceed 3 for draft.block 3; got 4"),
        ({"kind": "eagle3", "vocab": 95}, {}, None),
        ({"kind": "eagle3", "vocab": 96}, {}, "draft.vocab must be below vocab 96, .*; got 96"),
    ],
    ids=str,
)
def test_the_draft_of_a_manifest_fits_its_limits_and_vocabulary_at_exactly_their_bounds(
    bundle: Bundle, draft: dict[str, Any], limits: dict[str, int], message: str | None
) -> None:
    data = drafting_manifest(bundle, draft, limits)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        Manifest.model_validate_json(json.dumps(data))


def test_a_draft_with_a_part_of_the_vocabulary_needs_its_target_ids(bundle: Bundle) -> None:
    data = drafting_manifest(bundle, {"kind": "eagle3", "vocab": 95})
    del data["files"][TARGET_IDS]
    with pytest.raises(ValueError, match=r"files must hold draft/target_ids\.npy where draft.vocab is set"):
        Manifest.model_validate_json(json.dumps(data))


@pytest.mark.parametrize("name", ["hidden.0", "token_ids"])
def test_a_value_that_is_declared_twice_is_rejected(bundle: Bundle, name: str) -> None:
    data = paged_manifest(bundle)
    values = data["engines"]["target"]["decoder"]["values"]
    values.append({"name": name, "dtype": "float32", "shape": ["tokens", 7]})
    with pytest.raises(
        ValueError, match=f"values must have distinct names that the contract does not have; got '{name}'"
    ):
        Manifest.model_validate_json(json.dumps(data))


def test_a_subgraph_that_is_not_among_the_files_is_rejected(bundle: Bundle) -> None:
    data = paged_manifest(bundle)
    del data["files"]["target/subgraph.01.onnx"]
    with pytest.raises(
        ValueError, match=r"engines\.target\.decoder must be among files; got 'target/subgraph\.01\.onnx'"
    ):
        Manifest.model_validate_json(json.dumps(data))


def test_a_written_manifest_matches_its_json_schema(bundle: Bundle) -> None:
    schema = Manifest.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    written = json.loads((bundle.folder / "bundle.json").read_text())
    del written["manifest_sha256"]
    jsonschema.validate(written, schema)


def test_a_moved_bundle_opens(bundle: Bundle, tmp_path: Path) -> None:
    shutil.move(bundle.folder, tmp_path / "moved")
    assert Bundle.open(tmp_path / "moved", verify=True).path("target").is_file()


def test_a_missing_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadBundle, match=r"bundle: '.*none' does not exist. Correct the path, or build it: tandemrt"):
        Bundle.open(tmp_path / "none")
    with pytest.raises(BadBundle, match=r"bundle\.json must be readable: No such file"):
        Bundle.open(tmp_path)


def test_a_missing_engine_is_rejected_with_its_name(bundle: Bundle) -> None:
    with pytest.raises(BadBundle, match="must hold engine 'draft'; it holds target, adjust, verify, verify_probs"):
        bundle.path("draft")


@pytest.mark.parametrize("name", ["target/model.onnx", "verify.onnx", "tokenizer/tokenizer.json"])
def test_opening_detects_a_changed_byte(bundle: Bundle, name: str) -> None:
    original = (bundle.folder / name).read_bytes()
    (bundle.folder / name).write_bytes(bytes([original[0] ^ 1]) + original[1:])
    with pytest.raises(
        BadBundle, match=rf"build it again or copy it anew:\n{name} must have sha256 \w{{64}}; it has \w"
    ):
        Bundle.open(bundle.folder)
    (bundle.folder / name).write_bytes(original)
    Bundle.open(bundle.folder)


def test_verify_detects_a_changed_byte_of_the_weights(bundle: Bundle) -> None:
    original = (bundle.folder / WEIGHTS).read_bytes()
    (bundle.folder / WEIGHTS).write_bytes(original[:-1] + bytes([original[-1] ^ 128]))
    Bundle.open(bundle.folder)
    with pytest.raises(BadBundle, match=f"{WEIGHTS} must have sha256"):
        Bundle.open(bundle.folder, verify=True)
    (bundle.folder / WEIGHTS).write_bytes(original)
    Bundle.open(bundle.folder, verify=True)


def test_opening_detects_truncated_weights_without_reading_them(bundle: Bundle) -> None:
    (bundle.folder / WEIGHTS).write_bytes(b"weights ")
    with pytest.raises(BadBundle, match=f"{WEIGHTS} must have 800 bytes; it has 8"):
        Bundle.open(bundle.folder)


def test_missing_and_added_files_are_both_reported(bundle: Bundle) -> None:
    (bundle.folder / "verify.onnx").rename(bundle.folder / "tokenizer/chat_template.jinja")
    with pytest.raises(BadBundle) as caught:
        Bundle.open(bundle.folder)
    assert "verify.onnx must exist; it is missing" in str(caught.value)
    assert "tokenizer/chat_template.jinja must be in the manifest; it was added" in str(caught.value)


def test_a_symbolic_link_is_rejected_even_if_its_target_is_correct(bundle: Bundle, tmp_path: Path) -> None:
    for name in ("tokenizer/tokenizer.json", WEIGHTS):
        (bundle.folder / name).rename(tmp_path / "elsewhere")
        (bundle.folder / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(BadBundle, match=f"{name} must be a regular file or folder; it is a symbolic link"):
            Bundle.open(bundle.folder)
        (tmp_path / "elsewhere").replace(bundle.folder / name)
    (bundle.folder / "tokenizer").rename(tmp_path / "folder")
    (bundle.folder / "tokenizer").symlink_to(tmp_path / "folder")
    assert "tokenizer must be a regular file or folder; it is a symbolic link" in bundle.problems()


def test_an_unreadable_file_is_rejected(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> str:
        raise PermissionError(13, "Permission denied", "verify.onnx")

    monkeypatch.setattr("tandemrt.engines.bundle.digest.file_digest", refuse)
    with pytest.raises(BadBundle, match=r"every file of bundle .* must be readable; verify.onnx: Permission denied"):
        Bundle.open(bundle.folder)


def test_hidden_files_of_a_file_manager_are_ignored(bundle: Bundle) -> None:
    (bundle.folder / "target/.DS_Store").write_text("")
    Bundle.open(bundle.folder)


def test_a_newer_manifest_is_rejected_with_the_remedy(bundle: Bundle) -> None:
    edit(bundle.folder, "manifest_version", value=8)
    with pytest.raises(BadBundle, match=r"must be at most 7; got 8\. Update tandemrt, or build"):
        Bundle.open(bundle.folder)


def test_a_newer_manifest_is_rejected_before_its_keys_are_read(bundle: Bundle) -> None:
    edit(bundle.folder, "paged", value=True)
    edit(bundle.folder, "manifest_version", value=8)
    with pytest.raises(BadBundle, match="Update tandemrt"):
        Bundle.open(bundle.folder)


def test_a_bundle_of_version_1_must_be_built_again(bundle: Bundle) -> None:
    edit(bundle.folder, "manifest_version", value=1)
    edit(bundle.folder, "engines", "adjust", value=None)
    with pytest.raises(BadBundle, match=r"manifest_version must be 7; got 1\. Build the bundle again"):
        Bundle.open(bundle.folder)


def test_a_bundle_of_version_2_must_be_built_again(bundle: Bundle) -> None:
    edit(bundle.folder, "manifest_version", value=2)
    edit(bundle.folder, "engines", "target", "segments", value={"files": ["target/segment.00.onnx"]})
    with pytest.raises(BadBundle, match=r"manifest_version must be 7; got 2\. Build the bundle again"):
        Bundle.open(bundle.folder)


@pytest.mark.parametrize("version", [0, -1, True, "7", 7.0, None])
def test_any_other_manifest_version_is_rejected(bundle: Bundle, version: Any) -> None:
    edit(bundle.folder, "manifest_version", value=version)
    with pytest.raises(BadBundle, match="manifest_version must be 7; got "):
        Bundle.open(bundle.folder)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("paged",), True, "paged: is not a known key"),
        (("vocab",), "96", "vocab: must be a valid integer; got '96'"),
        (("vocab",), 64, "valid_tokens must not exceed vocab 64; got 92"),
        (("stop_ids",), [], "stop_ids: must not be empty"),
        (("stop_ids",), [92], "stop_ids and ids of reasoning must be below valid_tokens 92; got 92"),
        (("reasoning", "think_start", "ids"), [95], "must be below valid_tokens 92; got 95"),
        (("limits", "capacity"), 36, r"capacity must be at least length \+ num_draft_tokens \+ 1 = 37; got 36"),
        (
            ("draft", "kind"),
            "medusa",
            "draft.kind: must be one of 'model', 'pard', 'eagle3', 'peagle', 'mtp', 'assistant', 'dflash', 'dflash2', "
            "'dspark', 'ngram', 'none'",
        ),
        (("draft", "kind"), "pard", "draft.mask_token: is required and missing\ndraft.ngram_min: is not a known key"),
        (("draft", "mask_token"), 3, "draft.mask_token: is not a known key; got 3"),
        (("draft", "vocab"), 3, "draft.vocab: is not a known key; got 3"),
        (("draft", "layers"), 2, "draft.layers: is not a known key; got 2"),
        (("draft", "ngram_min"), 5, r"draft: ngram_min must not exceed ngram_max; got \(5, 4\)"),
        (("draft",), {"kind": "model", "greedy_below": 101.0}, "draft.greedy_below: must be at most 100.0"),
        (
            ("draft",),
            {"kind": "model"},
            "engines must be adjust, draft, propose, propose_probs, target, verify, verify_probs",
        ),
        (("engines", "target", "file"), "target/other.onnx", "engines.target.file must be among files"),
        (("engines", "target", "file"), "/etc/model.onnx", "must have a plain relative path inside"),
        (("engines", "target", "file"), "target/../../model.onnx", "must have a plain relative path inside"),
        (("engines", "target", "contract", "inputs", 0, "dtype"), 1, "inputs.0.dtype: must be a valid string; got 1"),
        (("engines", "target", "contract", "aliases", 0), ["a"], "aliases.0"),
        (("files", WEIGHTS, "sha256"), "12", "sha256: must match"),
        (("files", WEIGHTS, "size"), -1, "size: must be at least 0; got -1"),
        (("provenance", "recipe"), None, "provenance.recipe: must be a valid string; got None"),
    ],
)
def test_a_manifest_with_an_invalid_value_is_rejected_with_its_key(
    bundle: Bundle, path: tuple[str | int, ...], value: Any, message: str
) -> None:
    edit(bundle.folder, *path, value=value)
    with pytest.raises(BadBundle, match=message):
        Bundle.open(bundle.folder)


def test_a_manifest_has_a_line_for_a_value(bundle: Bundle) -> None:
    assert f'  "name": "{bundle.name}",' in bundle.manifest.to_json().splitlines()


@given(length=st.integers(0, 10_000))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_manifest_truncated_anywhere_is_rejected(bundle: Bundle, length: int) -> None:
    text = bundle.manifest.to_json()
    cut = text[: min(length, len(text.rstrip()) - 1)]
    (bundle.folder / "bundle.json").write_text(cut)
    with pytest.raises(BadBundle, match=r"bundle.json must be JSON: .*The file is damaged; build the bundle again"):
        Bundle.open(bundle.folder)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_changed_byte_of_the_manifest_is_rejected_or_has_no_effect(bundle: Bundle, data: st.DataObject) -> None:
    content = bytearray(bundle.manifest.to_json().encode())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    (bundle.folder / "bundle.json").write_bytes(content)
    with suppress(BadBundle):
        assert Manifest.read(bundle.folder) == bundle.manifest


def test_a_manifest_edited_into_a_valid_one_is_rejected(bundle: Bundle) -> None:
    edit(bundle.folder, "stop_ids", value=[88])
    with pytest.raises(BadBundle, match=r"manifest_sha256 must be \w{64}; got .* changed after the build; build"):
        Bundle.open(bundle.folder)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_verify_detects_any_changed_byte(bundle: Bundle, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(bundle.manifest.files)))
    original = (bundle.folder / name).read_bytes()
    content = bytearray(original)
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    (bundle.folder / name).write_bytes(content)
    assert [line.split()[0] for line in bundle.problems(verify=True)] == [name]
    (bundle.folder / name).write_bytes(original)
    assert bundle.problems(verify=True) == []


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
bindings = st.builds(
    Binding,
    names,
    st.sampled_from(["float32", "bfloat16", "int64"]),
    st.lists(st.one_of(st.integers(1, 2**40), st.sampled_from(["batch", "window+1"])), max_size=4).map(tuple),
)
contracts = st.builds(
    Contract,
    st.lists(bindings, max_size=4).map(tuple),
    st.lists(bindings, max_size=4).map(tuple),
    st.lists(st.tuples(names, names), max_size=3).map(tuple),
)


@given(text=names, contract=contracts, ids=st.lists(st.integers(0, 91), min_size=1, max_size=9).map(tuple))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_texts_ids_and_contracts_round_trip(
    bundle: Bundle, text: str, contract: Contract, ids: tuple[int, ...]
) -> None:
    delimiter = Delimiter(text=text, ids=ids)
    delimiters = ReasoningDelimiters(
        think_start=delimiter, think_ends=(delimiter, delimiter), forced_end=delimiter, implicit_ends=(delimiter,)
    )
    entry = bundle.engine("target").model_copy(update={"contract": contract})
    engines = {**bundle.manifest.engines, "target": entry}
    changed = bundle.manifest.model_copy(update={"reasoning": delimiters, "stop_ids": ids, "engines": engines})
    (bundle.folder / "bundle.json").write_text(changed.to_json(), encoding="utf-8")
    assert Manifest.read(bundle.folder) == changed


def test_a_combined_digest_depends_on_names_and_digests_but_not_on_order() -> None:
    one = combined_digest({"a": "1", "b": "2"})
    assert one == combined_digest({"b": "2", "a": "1"})
    assert len({one, combined_digest({"a": "2", "b": "1"}), combined_digest({"a": "1", "c": "2"})}) == 3


def test_a_folder_is_usable_if_its_manifest_is(tmp_path: Path) -> None:
    assert not is_usable(tmp_path)
    assert is_usable(write_bundle(tmp_path / "sample").folder)
    (tmp_path / "sample" / "bundle.json").write_text("{}")
    assert not is_usable(tmp_path / "sample")
