"""Images from web addresses: of allowed domains, within limits, never from private networks."""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.requests.media import MediaFetcher

BODY = b"picture " * 4000
PATHS: list[str] = []  # that were asked for, the last one at the end


class Answers(BaseHTTPRequestHandler):
    """Answers by path: a body, a redirect, an error, or a body that never ends."""

    def do_GET(self) -> None:  # its name
        PATHS.append(self.path)
        kind, _, rest = self.path.lstrip("/").partition("/")
        if kind == "to":
            self.send_response(302)
            self.send_header("location", rest)
            self.end_headers()
        elif kind == "missing":
            self.send_error(404)
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(BODY)
            self.wfile.flush()
            for _ in range(9 * (kind == "endless")):
                time.sleep(0.1)
                self.wfile.write(b".")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield int(server.server_address[1])
        server.shutdown()
        thread.join()


def fetcher(port: int, addresses: Sequence[str] = ("8.8.8.8",), **limits: Any) -> MediaFetcher:
    """A fetcher whose connections all go to the server of the test."""

    def connect(place: tuple[str, int], timeout: float) -> socket.socket:
        assert place == (addresses[0], 80)
        return socket.create_connection(("127.0.0.1", port), timeout)

    limits = {"most": len(BODY), "timeout_s": 5.0, **limits}
    return MediaFetcher(("example.org",), resolve=lambda *_: addresses, connect=connect, **limits)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("http://example.org/a.png?b=c", "/a.png?b=c"),
        ("http://images.EXAMPLE.org./", "/"),
        ("http://example.org:80/to//a.png", "/a.png"),
        ("http://example.org/to/http://images.example.org/b", "/b"),
    ],
)
def test_an_allowed_address_is_fetched(port: int, url: str, path: str) -> None:
    assert fetcher(port).fetch(url) == BODY
    assert PATHS[-1] == path


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://example.com/a.png", r"from example.org alone \(allowed_media_domains\)"),
        ("http://badexample.org/", "from example.org alone"),
        ("http://127.0.0.1/", "from example.org alone"),
        ("ftp://example.org/", "must be an http or https URL"),
        ("file:///etc/passwd", "must be an http or https URL"),
        ("http://user@example.org/", "must be an http or https URL"),
        ("http://example.org:8080/", "with the usual port"),
        ("http://example.org:x/", "could not be fetched"),
        ("http://example.org/a b\r\nx: y", "could not be fetched|status 200"),
        ("http://example.org/to/http://example.com/", "from example.org alone"),
        ("http://example.org/to/file:///etc/passwd", "must be an http or https URL"),
        ("http://example.org/" + "to//" * 5, "at most 3 redirects"),
        ("http://example.org/missing", "status 200, received 404"),
    ],
)
def test_any_other_address_is_refused(port: int, url: str, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        fetcher(port).fetch(url)


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.0.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "224.0.0.1",
        ),
        *("::1", "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "ff02::1"),
    ],
)
def test_a_private_address_is_never_connected(port: int, address: str) -> None:
    for addresses in ((address,), ("8.8.8.8", address)):
        with pytest.raises(BadRequest, match="must have public addresses only"):
            fetcher(port, addresses).fetch("http://example.org/")


def test_a_large_file_and_a_slow_one_are_refused(port: int) -> None:
    with pytest.raises(BadRequest, match=rf"at most {len(BODY) - 1} bytes \(max_image_bytes\)"):
        fetcher(port, most=len(BODY) - 1).fetch("http://example.org/")
    with pytest.raises(BadRequest, match=r"could not be fetched: .*too long"):
        fetcher(port, most=1 << 20, timeout_s=0.3).fetch("http://example.org/endless")
