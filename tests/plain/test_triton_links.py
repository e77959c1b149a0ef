"""A model of Triton links to its bundle by a path that leads there, through whatever links the repository has."""

from pathlib import Path

import pytest

from tandemrt.export.triton import config
from tandemrt.export.triton.repository import write_model
from tests.plain.test_bundle import write_bundle


@pytest.mark.parametrize("linked", ["", "repository", "parent"])
@pytest.mark.parametrize("copy", [False, True])
def test_a_model_leads_to_its_bundle_also_in_a_repository_behind_a_link(
    linked: str, copy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "model_config", lambda *_, **__: None)
    monkeypatch.setattr(config, "write_config", lambda _, file: file.touch())
    bundle = write_bundle(tmp_path / "bundles" / "sample")
    place = tmp_path / "deep" / "er" / "models"
    place.mkdir(parents=True)
    repository = {"": place, "repository": tmp_path / "link", "parent": tmp_path / "link" / "models"}[linked]
    if linked:
        (tmp_path / "link").symlink_to(place if linked == "repository" else place.parent)
    for _ in range(2):  # the second replaces the first
        link = write_model(bundle, repository, copy=copy) / "1" / "bundle"
        assert (link / "bundle.json").read_bytes() == (bundle.folder / "bundle.json").read_bytes()
        assert link.is_symlink() != copy
