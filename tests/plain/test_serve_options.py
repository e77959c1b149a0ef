"""Every option of ``tandemrt serve`` reaches the server's configuration, and one that is left out has its default."""

import threading
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.cli import serve
from tandemrt.runtime.servers.http import addresses
from tandemrt.runtime.servers.http.config import ServerConfig
from tandemrt.runtime.servers.http.connections import allow_connections
from tests.command_line import app
from tests.plain.test_bundle import write_bundle

# field of the configuration: the option, the value it is given, and what the field becomes
OPTIONS: dict[str, tuple[str, str, Any]] = {
    "host": ("--host", "127.0.0.9", "127.0.0.9"),
    "port": ("--port", "1234", 1234),
    "api_key": ("--api-key", "k", "k"),
    "metrics_without_key": ("--metrics-without-key", "", True),
    "dashboard_texts": ("--dashboard-texts", "", True),
    "allowed_origins": ("--allowed-origins", "https://example.org", ["https://example.org"]),
    "max_body": ("--max-body", "77", 77),
    "max_bodies": ("--max-bodies", "99999999", 99999999),
    "max_answer": ("--max-answer", "78", 78),
    "max_connections": ("--max-connections", "79", 79),
    "max_connections_per_address": ("--max-connections-per-address", "80", 80),
    "header_timeout_s": ("--header-timeout", "1.5", 1.5),
    "body_timeout_s": ("--body-timeout", "2.5", 2.5),
    "write_timeout_s": ("--write-timeout", "3.5", 3.5),
    "otlp_traces_endpoint": ("--otlp-traces-endpoint", "http://127.0.0.1:1", "http://127.0.0.1:1"),
    "allowed_hosts": ("--allowed-hosts", "a.example, b.example,", ("a.example", "b.example")),
    "trusted_proxies": ("--trusted-proxies", "10.0.0.0/8,10.1.1.1", ("10.0.0.0/8", "10.1.1.1")),
    "salt_cache_by": ("--salt-cache-by", "key", "key"),
    "grace_s": ("--grace", "81", 81),
    "batch_folder": ("--batch-folder", "f", Path("f")),
    "batch_bytes": ("--batch-bytes", "82", 82),
    "log_level": ("--log-level", "error", "error"),
}
FILES = {"ssl_certfile": "--ssl-certfile", "ssl_keyfile": "--ssl-keyfile"}


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """The configurations of servers that would bind their addresses."""
    configurations: list[ServerConfig] = []

    def bind(config: ServerConfig) -> NoReturn:
        configurations.append(config)
        raise BadRequest("not bound")

    monkeypatch.setattr(addresses, "bind", bind)
    monkeypatch.delenv("TANDEMRT_API_KEY", raising=False)
    return configurations


def test_the_table_has_every_field() -> None:
    assert OPTIONS.keys() | FILES.keys() == {field.name for field in fields(ServerConfig)}


@pytest.mark.parametrize("name", [None, *OPTIONS])
def test_an_option_sets_its_field_and_no_other(configured: list[ServerConfig], name: str | None) -> None:
    arguments, changes = [], {}
    if name is not None:
        option, value, changes[name] = OPTIONS[name]
        arguments = [option, value] if value else [option]
    CliRunner().invoke(app, ["serve", "bundle", *arguments])
    assert configured == [ServerConfig(**{"port": 8000, "max_connections": allow_connections(None), **changes})]


@pytest.mark.parametrize("name", FILES)
def test_the_file_of_a_certificate_is_read(configured: list[ServerConfig], name: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "bundle", FILES[name], str(tmp_path / "missing.pem")])
    assert not configured
    assert name in f"{result.output} {result.exception}"


def test_a_key_in_the_environment_is_used_without_the_option(
    configured: list[ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEMRT_API_KEY", "of the environment")
    for arguments in ([], ["--api-key", "of the option"]):
        CliRunner().invoke(app, ["serve", "bundle", *arguments])
    assert [config.api_key for config in configured] == ["of the environment", "of the option"]


@pytest.mark.parametrize(
    ("models", "device", "imported"),
    [
        (["sample"], None, []),
        (["sample"], "cpu", []),
        (["a=sample"], "cuda", ["torch"]),
        (["missing"], "cuda", []),
        (["missing", "a=sample", "b=sample"], "cuda", ["torch"]),
    ],
)
def test_torch_is_imported_early_for_a_gpu_only(
    models: list[str], device: str | None, imported: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(tmp_path / "sample")
    monkeypatch.chdir(tmp_path)
    modules: list[str] = []
    monkeypatch.setattr(serve, "import_module", modules.append)
    serve._import_for_gpu(models, RuntimeOptions(device=device))
    for thread in threading.enumerate():
        if thread.name == "tandemrt-import":
            thread.join()
    assert modules == imported
