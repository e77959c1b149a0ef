"""What browsers need of a server beyond its own pages: other origins (CORS), and HTTPS."""

import http.client
import json
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.servers.http.config import ServerConfig
from tests.openai.client import Served, endless, events
from tests.openai.conftest import serving
from tests.waiting import PATIENCE_S
from tools.browser import BROWSER, Page

ORIGIN = "https://example.org"
KEY = {"authorization": "Bearer a key"}
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")


@pytest.fixture(scope="module")
def shared(demo_bundle: Path) -> Iterator[Served]:
    config = ServerConfig(port=0, grace_s=10, api_key="a key", allowed_origins=[ORIGIN])
    with serving(demo_bundle, config, RuntimeOptions(threads=1)) as running:
        yield running


def preflight(server: Served, origin: str) -> tuple[int, dict[str, str]]:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    status, _, headers = server.ask("/v1/chat/completions", method="OPTIONS", headers={"origin": origin, **asked})
    return status, {name: value for name, value in headers.items() if name.startswith("access-control-allow-")}


def test_a_page_of_an_allowed_origin_may_ask(shared: Served) -> None:
    status, allowed = preflight(shared, ORIGIN)
    assert (status, allowed["access-control-allow-origin"]) == (200, ORIGIN)
    assert "POST" in allowed["access-control-allow-methods"]
    assert allowed["access-control-allow-headers"] == "authorization,content-type"
    answer = shared.ask("/v1/completions", endless(max_tokens=2), headers={"origin": ORIGIN, **KEY})
    assert (answer[0], answer[2]["access-control-allow-origin"]) == (200, ORIGIN)
    rejected = shared.ask("/v1/completions", endless(max_tokens=2), headers={"origin": ORIGIN})
    assert (rejected[0], rejected[2]["access-control-allow-origin"]) == (401, ORIGIN), "an error can be read too"


def test_a_stream_to_an_allowed_origin_may_be_read(shared: Served) -> None:
    connection = shared.send("/v1/completions", endless(max_tokens=4, stream=True), headers={"origin": ORIGIN, **KEY})
    response = connection.getresponse()
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert list(events(response))[-1]["choices"][0]["finish_reason"] == "length"
    connection.close()


def test_other_origins_may_not_ask(shared: Served, served: Served) -> None:
    status, allowed = preflight(shared, "https://example.com")
    assert status == 400
    assert "access-control-allow-origin" not in allowed
    status, allowed = preflight(served, ORIGIN)
    assert (status, allowed) == (405, {}), "no origin is allowed by default"


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", '["*"]', "https://a.org,https://b.org", ""])
def test_an_origin_has_a_scheme_a_host_and_no_path(origin: str) -> None:
    with pytest.raises(BadRequest, match="allowed_origins: must be"):
        ServerConfig(allowed_origins=[origin])


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate of 127.0.0.1, and its key."""
    return new_certificate(tmp_path_factory.mktemp("tls"))


def new_certificate(folder: Path, password: str | None = None) -> tuple[Path, Path]:
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    command += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=tandemrt"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@needs_openssl
def test_a_server_with_a_certificate_speaks_https(demo_bundle: Path, certificate: tuple[Path, Path]) -> None:
    config = ServerConfig(port=0, grace_s=10, ssl_certfile=certificate[0], ssl_keyfile=certificate[1])
    with serving(demo_bundle, config, RuntimeOptions(threads=1)) as server:
        address = urlsplit(server.url)
        assert address.scheme == "https"
        assert address.hostname is not None
        context = ssl.create_default_context(cafile=str(certificate[0]))
        connection = http.client.HTTPSConnection(address.hostname, address.port, timeout=PATIENCE_S, context=context)
        json_type = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(endless(max_tokens=4, stream=True)), json_type)
        assert list(events(connection.getresponse()))[-1]["choices"][0]["finish_reason"] == "length"
        connection.close()
        with openai.OpenAI(
            base_url=server.url,
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(verify=context),
        ) as client:
            assert client.models.list().data[0].id == "demo"
        plain = http.client.HTTPConnection(address.hostname, address.port, timeout=PATIENCE_S)
        plain.request("GET", "/health")
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            plain.getresponse()
        plain.close()
        if BROWSER is not None:
            with Page() as page:
                page.call("Security.setIgnoreCertificateErrors", ignore=True)  # the certificate is self-signed
                page.open(server.url.removesuffix("v1"))
                page.wait_for("$('state').className === 'live'")


@needs_openssl
def test_a_certificate_that_cannot_be_used_is_rejected_before_a_model_opens(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    locked = new_certificate(tmp_path, password="a password")
    for files, message in (
        ((None, certificate[1]), "ssl_keyfile: must come with ssl_certfile"),
        ((tmp_path / "none.pem", None), "ssl_certfile: must be a PEM file"),
        ((certificate[0], tmp_path), "ssl_keyfile: must be a PEM file"),
        ((certificate[0], None), "ssl_certfile: must be a certificate in PEM with its private key"),
        ((certificate[0], locked[1]), "needs a password"),
        ((locked[0], certificate[1]), "ssl_certfile: must be a certificate in PEM with its private key"),
    ):
        with pytest.raises(BadRequest, match=message):
            ServerConfig(ssl_certfile=files[0], ssl_keyfile=files[1])


@needs_openssl
def test_one_file_may_hold_the_certificate_and_its_key(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(certificate[0].read_text() + certificate[1].read_text())
    assert ServerConfig(ssl_certfile=both).ssl_keyfile is None
