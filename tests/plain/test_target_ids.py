"""Target ids of a draft's vocabulary: an invalid file is rejected before a device reads it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import TARGET_IDS
from tandemrt.engines.contract.draft_kinds import Eagle3Entry
from tandemrt.engines.validation.errors import BadBundle
from tandemrt.runtime.drafters.target_ids import read_target_ids
from tests.plain.test_bundle import write_bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """Return a bundle of 96 tokens with a draft that covers three."""
    written = write_bundle(tmp_path)
    (tmp_path / TARGET_IDS).parent.mkdir()
    return replace(written, manifest=written.manifest.model_copy(update={"draft": Eagle3Entry(kind="eagle3", vocab=3)}))


def test_ids_round_trip(bundle: Bundle) -> None:
    np.save(bundle.folder / TARGET_IDS, np.array([0, 7, 95], np.int32))
    ids = read_target_ids(bundle)
    assert ids is not None
    assert ids.tolist() == [0, 7, 95]


def test_a_draft_with_the_whole_vocabulary_has_no_file(tmp_path: Path) -> None:
    assert read_target_ids(write_bundle(tmp_path)) is None


@pytest.mark.parametrize(
    ("ids", "received"),
    [
        (np.array([0, 7, 95]), r"int64 \[3\]"),
        (np.array([0, 7], np.int32), r"int32 \[2\]"),
        (np.array([[0, 7, 95]], np.int32), r"int32 \[1, 3\]"),
        (np.array([0, 7, 96], np.int32), "0 to 96"),
        (np.array([-1, 7, 95], np.int32), "-1 to 95"),
        (np.array([0, 95, 7], np.int32), "0 to 95, not all above the one before"),
        (np.array([0, 7, 7], np.int32), "0 to 7, not all above the one before"),
    ],
    ids=str,
)
def test_invalid_ids_are_rejected_with_the_reason(bundle: Bundle, ids: Any, received: str) -> None:
    np.save(bundle.folder / TARGET_IDS, ids)
    with pytest.raises(BadBundle, match=rf"must be int32 \[3\], ids below 96, ascending; got {received}"):
        read_target_ids(bundle)


@pytest.mark.parametrize("content", [b"", b"no array", b"\x93NUMPY"], ids=str)
def test_a_file_that_is_not_an_array_is_rejected(bundle: Bundle, content: bytes) -> None:
    (bundle.folder / TARGET_IDS).write_bytes(content)
    with pytest.raises(BadBundle, match="must be an array of numpy; got "):
        read_target_ids(bundle)


def test_objects_are_never_unpickled(bundle: Bundle) -> None:
    np.save(bundle.folder / TARGET_IDS, np.array([print, print, print]), allow_pickle=True)
    with pytest.raises(BadBundle, match="must be an array of numpy"):
        read_target_ids(bundle)
