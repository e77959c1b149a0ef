"""Chunks of responses have the bytes that h11 writes."""

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.runtime.servers.http.framing import StrictConnection

REQUEST = b"%s / HTTP/1.%d\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"6")], [(b"Transfer-Encoding", b"chunked")]])
@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_parts_of_every_kind_of_body_equal_those_of_h11(
    headers: list[tuple[bytes, bytes]], version: int, method: bytes
) -> None:
    connections = StrictConnection(1 << 14), h11.Connection(h11.SERVER)
    parts = [b"", b"abc", b"\r\ndef"[2:], b""] if method == b"GET" else [b""]
    for _ in range(2 if version else 1):  # the second response of a connection, too
        sent = []
        for connection in connections:
            connection.receive_data(REQUEST % (method, version))
            while connection.next_event() is not h11.NEED_DATA and connection.their_state is not h11.DONE:
                pass
            events = [h11.Response(status_code=200, headers=headers), *map(_data, parts), h11.EndOfMessage()]
            sent.append([connection.send(event) for event in events])
            if connection.our_state is h11.DONE and connection.their_state is h11.DONE:
                connection.start_next_cycle()
        assert sent[0] == sent[1]


@given(st.lists(st.binary()))
def test_a_client_reads_the_parts_of_a_response(parts: list[bytes]) -> None:
    server, client = StrictConnection(1 << 14), h11.Connection(h11.CLIENT)
    server.receive_data(client.send(h11.Request(method="GET", target="/", headers=[("host", "localhost")])))
    assert type(server.next_event()) is h11.Request
    for event in (h11.Response(status_code=200, headers=[]), *map(_data, parts), h11.EndOfMessage()):
        if sent := server.send(event):
            client.receive_data(sent)
    received = b""
    while type(event := client.next_event()) is not h11.EndOfMessage:
        received += bytes(event.data) if isinstance(event, h11.Data) else b""
    assert received == b"".join(parts)


def test_no_part_follows_the_end_of_a_response() -> None:
    connection = StrictConnection(1 << 14)
    connection.receive_data(REQUEST % (b"GET", 1))
    connection.next_event()
    for event in (h11.Response(status_code=200, headers=[]), h11.EndOfMessage()):
        connection.send(event)
    with pytest.raises(h11.LocalProtocolError):
        connection.send(_data(b"late"))


def _data(part: bytes) -> h11.Data:
    return h11.Data(data=part)
