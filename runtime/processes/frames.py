"""Messages over a socket: their length in eight bytes, then they themselves."""

import socket
import struct
import time

_LENGTH = struct.Struct("!Q")


def write(pipe: socket.socket, message: bytes, end: float | None = None) -> None:
    """Send ``message``. Raises TimeoutError at ``end`` (seconds of ``time.monotonic``), OSError if nobody is there."""
    pipe.settimeout(_left(end))
    pipe.sendall(_LENGTH.pack(len(message)) + message)


def read(pipe: socket.socket, end: float | None = None) -> bytes | None:
    """Return the next message; None if the other side has closed. Raises as ``write`` does."""
    head = _exactly(pipe, _LENGTH.size, end)
    return None if head is None else _exactly(pipe, _LENGTH.unpack(head)[0], end)


def _exactly(pipe: socket.socket, size: int, end: float | None) -> bytes | None:
    received = bytearray()
    while len(received) < size:
        pipe.settimeout(_left(end))
        part = pipe.recv(min(size - len(received), 1 << 20))
        if not part:
            return None
        received += part
    return bytes(received)


def _left(end: float | None) -> float | None:
    if end is None:
        return None
    if (left := end - time.monotonic()) <= 0:
        raise TimeoutError
    return left
