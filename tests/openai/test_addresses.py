"""The address and the key of ``tandemrt serve``: errors come before a bundle is opened, in one line."""

import errno
import gc
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandemrt.cli import main
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.servers.http.addresses import bind, unavailable
from tandemrt.runtime.servers.http.config import ServerConfig
from tandemrt.runtime.servers.http.server import Server, open_models


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run ``tandemrt serve`` on a bundle that does not exist; return the error that it prints."""

    def serve(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["tandemrt", "serve", "a-bundle-that-does-not-exist", *options])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        assert gc.isenabled(), "a start pauses garbage collection"
        return capsys.readouterr().err

    return serve


def test_a_taken_port_is_named_before_anything_is_opened(refused, taken: int) -> None:
    assert refused("--port", str(taken)) == (
        f"BadRequest: --port: must be free on 127.0.0.1, received {taken}, which another program uses; choose another, "
        "or 0 for a free one\n"
    )


def test_a_host_that_is_not_here_is_named(refused) -> None:
    rule = "BadRequest: --host: must be an address of this machine, received "
    assert refused("--host", "192.0.2.1", "--port", "0").startswith(rule + "'192.0.2.1': Cannot assign")
    assert refused("--host", "no such host", "--port", "0").startswith(rule + "'no such host'")


def test_a_port_without_permission_is_named() -> None:
    error = unavailable(ServerConfig(port=80), PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    assert str(error).startswith("--port: must be one that this user may take, received 80; choose one above 1023")


def test_a_server_that_listened_first_is_named_too(ngram_bundle: Path) -> None:
    (bound,) = bind(ServerConfig(port=0))
    with bound, bind(ServerConfig(port=bound.getsockname()[1]))[0] as other:
        other.listen()
        config = ServerConfig(port=bound.getsockname()[1])
        with (
            open_models({"demo": ngram_bundle}, RuntimeOptions(threads=1)) as models,
            pytest.raises(BadRequest, match=r"--port: must be free on 127\.0\.0\.1"),
        ):
            Server(models, config, on_ready=pytest.fail).run([bound])


@pytest.mark.parametrize("key", ["", " key", "key ", "key\n"])
def test_a_key_that_no_client_can_send_is_rejected(refused, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    rule = "BadRequest: api_key: must be UTF-8 without control characters, "
    assert refused("--api-key", key).startswith(rule)
    monkeypatch.setenv("TANDEMRT_API_KEY", key)
    error = refused()
    assert error.startswith(rule)
    assert "received 4 characters" in error or "received an empty text" in error, "a message must not show the key"


def test_the_option_has_precedence_over_the_environment(refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEMRT_API_KEY", "")
    assert "BadBundle: " in refused("--api-key", "secret", "--port", "0")
