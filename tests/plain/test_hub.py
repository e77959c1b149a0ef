"""Checkpoints with hub names: from the hub's cache, or fetched into it, or rejected with the reason.

The hub's real client runs against a local server defined in this file, which implements the requests of the client.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants as hub
import pytest

from tandemrt.engines.options.build_listener import SILENT
from tandemrt.engines.options.build_options import BuildOptions
from tandemrt.engines.recipe.recipe import Recipe, locate
from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe
from tandemrt.export.bundle.build import build
from tandemrt.export.bundle.sources import CheckpointSource
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.hub import resolve_checkpoints
from tests.listeners import Recorded
from tests.makers import tiny_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A repository ``someone/tiny``, one without a tokenizer, one of pickles, and a gated ``someone/gated``."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        files |= dict.fromkeys(("README.md", "original/params.json", "onnx/model.safetensors"), b"not wanted")
        files |= {"additional_chat_templates/rag.jinja": b"{{ documents }}"}
        head = {name: files[name] for name in ("config.json", "model.safetensors")}
        pickled = {"config.json": b"{}", "pytorch_model.bin": b"a pickle"}
        repositories = {"someone/tiny": files, "someone/head": head, "someone/pickled": pickled}
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = unquote(urlsplit(self.path).path)
                asked.append(path)
                name = next((name for name in repositories if name in path), None)
                if name is None:
                    self.answer(
                        403 if "gated" in path else 404, error="GatedRepo" if "gated" in path else "RepoNotFound"
                    )
                elif "/tree/" in path:
                    files = repositories[name].items()
                    self.answer(200, json.dumps([entry(file, data) for file, data in files]).encode())
                elif path.startswith("/api/"):
                    self.answer(200, json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode())
                else:
                    self.answer(200, repositories[name][path.split(f"/resolve/{COMMIT}/")[1]])

            do_HEAD = do_GET  # noqa: N815

            def answer(self, status: int, data: bytes = b"{}", error: str = "") -> None:
                self.send_response(status)
                headers = {"Content-Length": str(len(data)), "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
                headers |= {"X-Repo-Commit": COMMIT, "X-Error-Code": error, "Content-Type": "application/json"}
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


def entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    served = Hub(tiny_checkpoint(tmp_path_factory.mktemp("hub") / "tiny"))
    thread = threading.Thread(target=served.server.serve_forever)
    thread.start()
    yield served
    served.server.shutdown()
    thread.join()
    served.server.server_close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, repository: Hub, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hub, "ENDPOINT", repository.url)
    monkeypatch.setattr(hub, "HUGGINGFACE_CO_URL_TEMPLATE", repository.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "HF_HUB_DISABLE_XET", True)
    return tmp_path / "cache"


def recipe(folder: Path, checkpoint: str, draft: str = 'kind = "none"') -> Recipe:
    folder.mkdir(exist_ok=True)
    file = folder / "r.toml"
    limits = f"[limits]\nlength = 64\nbatch = 1\n[draft]\n{draft}\n"
    file.write_text(f'name = "r"\n[target]\ncheckpoint = "{checkpoint}"\n{limits}')
    return Recipe.load(file)


def test_a_hub_name_is_fetched_built_and_found_again_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Recorded()
    asked = recipe(tmp_path / "recipes", "someone/tiny")
    resolved = resolve_checkpoints(asked, heard)
    assert heard.titles == ["Fetch someone/tiny from the Hugging Face hub"]
    assert heard.details
    assert heard.details[-1][1] <= heard.details[-1][2]
    names = {path.name for path in resolved.target.checkpoint.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not {"README.md", "original", "onnx"} & names
    assert (resolved.target.checkpoint / "additional_chat_templates" / "rag.jinja").is_file()

    monkeypatch.setattr(hub, "ENDPOINT", "http://127.0.0.1:9")
    heard.titles.clear()
    report = build(asked, tmp_path / "bundle", listener=heard)
    assert not any("Fetch" in step for step in heard.titles)
    assert report.manifest.files
    assert resolve_checkpoints(recipe(tmp_path / "others", "someone/tiny@main")).target == resolved.target


def test_an_incomplete_cache_folder_is_completed(tmp_path: Path, cache: Path) -> None:
    kept = cache / "models--someone--tiny"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(COMMIT)
    (kept / "snapshots" / COMMIT).mkdir(parents=True)
    (kept / "snapshots" / COMMIT / "config.json").write_text("{}")
    folder = resolve_checkpoints(recipe(tmp_path, "someone/tiny")).target.checkpoint
    assert (folder / "model.safetensors").is_file()


def test_a_draft_head_is_complete_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = recipe(tmp_path, "someone/tiny", 'kind = "eagle3"\ncheckpoint = "someone/head"\nnum_draft_tokens = 2')
    resolved = resolve_checkpoints(asked)
    monkeypatch.setattr(hub, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    assert resolve_checkpoints(asked).checkpoints() == resolved.checkpoints()
    model = recipe(tmp_path, "someone/tiny", 'kind = "model"\ncheckpoint = "someone/head"\nnum_draft_tokens = 2')
    with pytest.raises(BadRecipe, match=r"draft\.checkpoint: .* is not complete in the hub's cache"):
        resolve_checkpoints(model)


def test_a_repository_of_pickles_is_rejected_with_its_format(tmp_path: Path) -> None:
    with pytest.raises(BadRecipe, match=r"'someone/pickled' holds weights as PyTorch pickles \(pytorch_model\.bin\)"):
        resolve_checkpoints(recipe(tmp_path, "someone/pickled"))


@pytest.mark.parametrize("revision", ["main", "refs/pr/7", "v1.0", COMMIT])
def test_a_revision_may_be_a_branch_a_tag_a_commit_or_a_pull_request(
    tmp_path: Path, cache: Path, revision: str
) -> None:
    folder = resolve_checkpoints(recipe(tmp_path, f"someone/tiny@{revision}")).target.checkpoint
    assert folder == cache / "models--someone--tiny" / "snapshots" / COMMIT
    assert revision == COMMIT or (cache / "models--someone--tiny" / "refs" / revision).read_text() == COMMIT


def test_the_cache_folder_itself_is_rejected_with_advice(tmp_path: Path, cache: Path) -> None:
    resolve_checkpoints(recipe(tmp_path, "someone/tiny"))
    with pytest.raises(BadCheckpoint, match=r"as the Hugging Face hub's cache keeps it; name it as the hub does"):
        Checkpoint.open(cache / "models--someone--tiny")


def test_an_existing_folder_is_used_without_requests_to_the_hub(tmp_path: Path, repository: Hub) -> None:
    folder = tmp_path / "someone" / "tiny"
    folder.mkdir(parents=True)
    before = len(repository.asked)
    assert resolve_checkpoints(recipe(tmp_path, "someone/tiny")).target.checkpoint == folder
    assert len(repository.asked) == before


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("someone/gated", "ask for access on its page, then log in: hf auth login"),
        ("someone/nothing", "the hub has no such repository"),
        ("someone/run--3", "could not be fetched"),
    ],
)
def test_errors_of_the_hub_are_reported_with_advice(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(BadRecipe) as caught:
        resolve_checkpoints(recipe(tmp_path, name))
    assert f"target.checkpoint: must be an existing folder or a name of the Hugging Face hub; got '{name}'" in str(
        caught.value
    )
    assert reason in str(caught.value)


def test_a_model_that_the_hub_does_not_have_is_reported_as_the_argument_model() -> None:
    with pytest.raises(BadRecipe, match=r"^model: must be an existing folder or a name of .*got 'someone/nothing'"):
        CheckpointSource.find("someone/nothing", BuildOptions(), SILENT)


def test_an_uncached_name_is_rejected_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(BadRecipe, match="is not complete in the hub's cache, and could not be fetched"):
        resolve_checkpoints(recipe(tmp_path, "someone/tiny"))


@pytest.mark.parametrize("path", ["tiny", "a/b/tiny", "../someone/tiny", "/someone/tiny", "some one/tiny", "./x/-y"])
def test_other_paths_are_never_requested_from_the_hub(tmp_path: Path, repository: Hub, path: str) -> None:
    before = len(repository.asked)
    with pytest.raises(BadRecipe, match="must be an existing folder; got"):
        resolve_checkpoints(recipe(tmp_path / "recipes", path))
    assert len(repository.asked) == before


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ("someone/tiny", "someone/tiny"),
        ("someone/tiny@main", "someone/tiny@main"),
        ("someone/tiny@refs/7", "someone/tiny@refs/7"),
        ("someone/tiny@refs/pr/7", "someone/tiny@refs/pr/7"),
        ("tiny", None),
        ("someone/tiny/more", None),
        ("some@one/tiny/more", None),
        ("/someone/tiny", None),
    ],
)
def test_a_hub_name_has_two_parts_and_perhaps_a_revision(tmp_path: Path, checkpoint: str, name: str | None) -> None:
    asked = recipe(tmp_path, checkpoint)
    assert asked.hub_name(asked.target.checkpoint) == name


@pytest.mark.parametrize("name", ["qwen3-8b", "llama-3.1-8b"])
def test_included_recipes_of_published_pairs_name_the_hub(name: str) -> None:
    pair = Recipe.load(locate(name))
    for checkpoint in pair.checkpoints().values():
        assert (said := pair.hub_name(checkpoint)) is not None
        assert said.split("/")[0] in ("Qwen", "meta-llama", "RedHatAI")
