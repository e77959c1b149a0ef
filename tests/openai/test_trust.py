"""What a client may not choose: its address, the server's name, the type of a body, the cached prefixes of others."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.engines.validation.records import MOST_LINES
from tandemrt.runtime.servers.http.config import ServerConfig
from tests.openai.client import Served, post_head
from tests.openai.conftest import serving
from tests.openai.test_connections import connected
from tests.openai.test_raw_http import response_of
from tests.waiting import eventually

LOGGER = "tandemrt.runtime.servers.http.access_log"
ESCAPE = "\x1b[31m"
COMPLETION = {"prompt": [70] * 300, "max_tokens": 1, "seed": 1}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def proxied(demo_bundle: Path) -> Iterator[Served]:
    config = ServerConfig(
        port=0, trusted_proxies=("127.0.0.0/8",), allowed_hosts=("box.example",), salt_cache_by="address", grace_s=10
    )
    with serving(demo_bundle, config, RuntimeOptions(threads=1)) as running:
        yield running


def logged_client(served: Served, caplog: pytest.LogCaptureFixture, path: str) -> str:
    with caplog.at_level(logging.INFO, LOGGER):
        served.ask(path, headers={"X-Forwarded-For": f"198.51.100.7{ESCAPE}"})
        assert eventually(lambda: any(path in line for line in caplog.messages))
    [line] = [line for line in caplog.messages if path in line]
    return line.split(" GET ")[0]


def test_a_forwarded_address_is_not_trusted(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    assert logged_client(served, caplog, "/untrusted") == "127.0.0.1"


def test_a_forwarded_address_of_a_trusted_proxy_is_logged_quoted(
    proxied: Served, caplog: pytest.LogCaptureFixture
) -> None:
    assert logged_client(proxied, caplog, "/trusted") == repr(f"198.51.100.7{ESCAPE}")


@pytest.mark.parametrize("proxies", [("proxy.example",), ("127.0.0.1", "10.0.0.0/33"), ("*",), ("",)])
def test_a_trusted_proxy_is_an_address_or_a_network(proxies: tuple[str, ...]) -> None:
    with pytest.raises(BadRequest, match="trusted_proxies: must be addresses or networks"):
        ServerConfig(trusted_proxies=proxies)
    assert ServerConfig(trusted_proxies=("127.0.0.1", "10.0.0.1/8", "2001:db8::/32")).trusted_proxies


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:80", 200),
        ("192.0.2.1", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("[evil.example]", 403),
        ("", 403),
    ],
)
def test_a_server_of_this_machine_has_no_other_names(served: Served, host: str, status: int) -> None:
    with connected(served) as connection:
        connection.sendall(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        answered, body, _ = response_of(connection)
    assert answered == status
    assert status == 200 or json.loads(body)["error"]["code"] == "unknown_host"


@pytest.mark.parametrize(("host", "status"), [("box.example:1", 200), ("Box.Example", 200), ("other.example", 403)])
def test_allowed_hosts_are_names_of_the_server(proxied: Served, host: str, status: int) -> None:
    assert proxied.ask("/health", headers={"Host": host})[0] == status


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (ServerConfig(), ("127.0.0.1",)),
        (ServerConfig(host="::1"), ("::1",)),
        (ServerConfig(host="localhost"), ("localhost",)),
        (ServerConfig(host="0.0.0.0"), None),
        (ServerConfig(host="box.example"), None),
        (ServerConfig(host="box.example", allowed_hosts=("a.example",)), ("a.example", "box.example")),
        (ServerConfig(allowed_hosts=("*",)), None),
    ],
)
def test_a_server_on_other_addresses_may_have_any_name(config: ServerConfig, names: tuple[str, ...] | None) -> None:
    assert config.host_names == names


@pytest.mark.parametrize("path", ["/v1/models/", "/health/", "/v1/completions/", "/metrics/"])
def test_a_path_with_a_slash_is_not_redirected_to_the_host_of_the_request(served: Served, path: str) -> None:
    status, _, headers = served.ask(path, headers={"Host": "192.0.2.9"})
    assert (status, "location" in headers) == (404, False)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=application/json", "", None],
)
def test_a_body_that_a_web_page_may_send_is_refused(served: Served, path: str, kind: str | None) -> None:
    body = json.dumps(CHAT).encode()
    head = post_head(len(body), path).replace(
        b"Content-Type: application/json\r\n", b"" if kind is None else f"Content-Type: {kind}\r\n".encode()
    )
    with connected(served) as connection:
        connection.sendall(head + body)
        status, text, _ = response_of(connection)
    assert (status, "Content-Type: must be application/json" in text) == (415, True)


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
def test_a_body_of_json_is_read(served: Served, path: str, kind: str) -> None:
    body = CHAT if path.startswith("/v1") else {"prompt": "x"}
    assert served.ask(path, body, headers={"Content-Type": kind})[0] == 200


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
def test_other_posts_require_json_too(served: Served, path: str) -> None:
    assert served.ask(path, b"{}", headers={"Content-Type": "text/plain"})[0] == 415


def cached_tokens(served: Served, source: str, **more: Any) -> int:
    headers = {"X-Forwarded-For": source, **more.pop("headers", {})}
    status, answer, _ = served.ask("/v1/completions", {**COMPLETION, **more}, headers=headers)
    assert status == 200
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_cached_prefixes_are_those_of_an_address(proxied: Served) -> None:
    assert cached_tokens(proxied, "192.0.2.1") == 0
    assert cached_tokens(proxied, "192.0.2.1") > 0
    assert cached_tokens(proxied, "192.0.2.2") == 0
    assert cached_tokens(proxied, "192.0.2.2") > 0
    assert cached_tokens(proxied, "192.0.2.2", cache_salt="own") == 0
    assert cached_tokens(proxied, "192.0.2.2", cache_salt="own") > 0
    assert cached_tokens(proxied, "192.0.2.1", cache_salt="own") == 0


def test_cached_prefixes_are_those_of_a_key(demo_bundle: Path) -> None:
    with serving(demo_bundle, ServerConfig(port=0, salt_cache_by="key"), RuntimeOptions(threads=1)) as running:
        first, second = {"Authorization": "Bearer a"}, {"x-api-key": "b"}
        assert cached_tokens(running, "192.0.2.1", headers=first) == 0
        assert cached_tokens(running, "192.0.2.2", headers=first) > 0
        assert cached_tokens(running, "192.0.2.1", headers=second) == 0
        assert cached_tokens(running, "192.0.2.2", headers=second) > 0


def test_a_key_that_no_client_can_send_is_refused_at_start(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from tandemrt.cli import main; main()", "serve", str(tmp_path), "--port", "0"]
    environment = {**os.environb, b"TANDEMRT_API_KEY": b"\xff\xfe"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode != 0
    assert "api_key: must be UTF-8 without control characters" in " ".join(done.stderr.split())
    assert ServerConfig(api_key="ключ").api_key == "ключ"


@pytest.mark.parametrize("key", ["\udcff\udcfe", "a\ud800", "\udfffb"])
def test_a_key_of_lone_surrogates_is_refused(key: str) -> None:
    with pytest.raises(BadRequest, match=r"api_key: must be UTF-8 .* received 2 characters"):
        ServerConfig(api_key=key)


SURROGATE = "a\ud800"
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/responses", {"metadata": {"key": SURROGATE}}, "metadata"),
        ("/v1/responses", {"metadata": {SURROGATE: "x"}}, "metadata"),
        ("/v1/responses", {"instructions": SURROGATE}, "instructions"),
        ("/v1/responses", {"user": SURROGATE}, "user"),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"title": SURROGATE}}}},
            "text",
        ),
        ("/v1/responses", {"tools": [{**FUNCTION, "description": SURROGATE}]}, "tools"),
        ("/v1/responses", {"tools": [{**FUNCTION, "parameters": {"maximum": float("inf")}}]}, None),
        ("/v1/messages", {"stop_sequences": [SURROGATE]}, "stop_sequences"),
        ("/v1/messages", {"system": SURROGATE}, "system"),
        ("/v1/chat/completions", {"stop": [SURROGATE]}, "stop"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"a": SURROGATE}}, "chat_template_kwargs"),
        ("/v1/completions", {"stop": [SURROGATE]}, "stop"),
        ("/v1/completions", {"cache_salt": SURROGATE}, "cache_salt"),
    ],
)
def test_fields_that_an_answer_could_not_repeat_are_refused_before_it_is_generated(
    served: Served, path: str, fields: dict[str, Any], param: str | None
) -> None:
    prompt = {"/v1/responses": {"input": "x"}, "/v1/completions": {"prompt": "x"}}.get(path, CHAT)
    body = json.dumps({**prompt, **fields}).replace("Infinity", "1e400").encode()
    before = served.metrics().get("tandemrt_requests_total", 0)
    status, answer, _ = served.ask(path, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert ("UTF-8 can encode" in answer["error"]["message"]) == (param is not None)
    assert served.metrics().get("tandemrt_requests_total", 0) == before


def test_a_pair_of_escaped_surrogates_is_a_character(served: Served) -> None:
    body = {"input": "x", "metadata": {"key": "\U0001f600"}, "max_output_tokens": 1}
    status, answer, _ = served.ask("/v1/responses", json.dumps(body).encode())
    assert (status, answer["metadata"]) == (200, {"key": "\U0001f600"})


@pytest.mark.parametrize("number", [MOST_LINES - 1, MOST_LINES, MOST_LINES + 1, 1000])
def test_warnings_about_variables_are_bounded(served: Served, number: int) -> None:
    variables = {f"unread_{index}": 1 for index in range(number)}
    status, answer, _ = served.ask("/v1/chat/completions", {**CHAT, "chat_template_kwargs": variables})
    assert (status, len(answer["warnings"])) == (200, min(number, MOST_LINES))
    assert "unread_0" in answer["warnings"][0]
