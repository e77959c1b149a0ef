"""Length-prefixed messages over a socket: eight bytes of length, then the message."""

import socket
import struct
import time

_LENGTH = struct.Struct("!Q")


def write(pipe: socket.socket, message: bytes, deadline: float | None = None) -> None:
    """Send ``message``. Raises TimeoutError at ``deadline`` (``time.monotonic``), OSError if the peer is gone."""
    pipe.settimeout(_remaining(deadline))
    pipe.sendall(_LENGTH.pack(len(message)) + message)


def read(pipe: socket.socket, deadline: float | None = None) -> bytes | None:
    """Return the next message; None if the peer has closed. Raises as ``write`` does."""
    head = _read_exactly(pipe, _LENGTH.size, deadline)
    return None if head is None else _read_exactly(pipe, _LENGTH.unpack(head)[0], deadline)


def _read_exactly(pipe: socket.socket, size: int, deadline: float | None) -> bytes | None:
    received = bytearray()
    while len(received) < size:
        pipe.settimeout(_remaining(deadline))
        part = pipe.recv(min(size - len(received), 1 << 20))
        if not part:
            return None
        received += part
    return bytes(received)


def _remaining(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left
