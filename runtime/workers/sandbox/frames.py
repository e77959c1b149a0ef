"""Length-prefixed messages over a socket: eight bytes of length, then the message."""

import socket
import struct
import time
from typing import Any, NamedTuple

_LENGTH = struct.Struct("!Q")


class WithBytes(NamedTuple):
    """The result of a task with bytes, which stay out of its JSON: parsing would stop all threads of this process."""

    result: Any
    content: bytes | memoryview


def write(pipe: socket.socket, message: bytes, deadline: float | None = None) -> None:
    """Send ``message``. Raises TimeoutError at ``deadline`` (``time.monotonic``), OSError if the peer is gone."""
    pipe.settimeout(_remaining(deadline))
    pipe.sendall(_LENGTH.pack(len(message)) + message)


def read(pipe: socket.socket, deadline: float | None = None) -> bytearray | None:
    """Return the next message; None if the peer has closed. Raises as ``write`` does."""
    head = _read_exactly(pipe, _LENGTH.size, deadline)
    return None if head is None else _read_exactly(pipe, _LENGTH.unpack(head)[0], deadline)


def _read_exactly(pipe: socket.socket, size: int, deadline: float | None) -> bytearray | None:
    received = bytearray()
    while len(received) < size:
        pipe.settimeout(_remaining(deadline))
        part = pipe.recv(min(size - len(received), 1 << 20))
        if not part:
            return None
        received += part
    return received


def _remaining(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left
