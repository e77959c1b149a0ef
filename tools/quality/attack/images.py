"""Requests with hostile image files, for bundles whose target reads images."""

import io
import random
import struct
import zlib
from base64 import b64encode
from collections.abc import Callable
from functools import cache
from typing import Any

from PIL import Image

from tools.quality.attack.requests import Fields, Make

_HEAD = 33  # bytes of a PNG file's signature and first chunk


@cache
def image_requests() -> dict[str, Make]:
    """Return a factory for each request by name, as ``requests`` does. Its files are made before any attack."""
    files: dict[str, Callable[[], bytes]] = {
        "49 megapixels, PNG": lambda: _file(7000, 7000),
        "49 megapixels, JPEG": lambda: _file(7000, 7000, "JPEG"),
        "49 megapixels, WebP": lambda: _file(7000, 7000, "WEBP"),
        "49 megapixels, transparent": lambda: _file(7000, 7000, mode="RGBA"),
        "81 megapixels": lambda: _file(9000, 9000),
        "sides of 2 billion": lambda: _file()[:16] + struct.pack(">II", 2**31 - 1, 2**31 - 1) + _file()[24:],
        "20,000 x 2": lambda: _file(20_000, 2),
        "a comment that unpacks to 300 MB": lambda: _with_chunks(b"zTXt", b"k\0\0" + _packed(300), 1),
        "a profile that unpacks to 300 MB": lambda: _with_chunks(b"iCCP", b"k\0\0" + _packed(300), 1),
        "50,000 comments": lambda: _with_chunks(b"tEXt", b"a\0b", 50_000),
        "EXIF of 64 kB": lambda: _file(form="JPEG", exif=b"Exif\0\0" + b"\xff" * 60_000),
        "cut off": lambda: _file(2000, 2000)[:-2000],
        "300 frames": lambda: _animation(300),
        "noise of 2 MB": lambda: random.Random(1).randbytes(2 << 20),
    }
    return {
        **{f"image: {name}": _asks(file) for name, file in files.items()},
        "images: 16 of 49 megapixels": _asks(lambda: _file(7000, 7000), 16),
        "images: 16 small ones": _asks(_file, 16),
        "images: 1,000 small ones": _asks(_file, 1000),
        "image: no base64": lambda: _messages(["data:image/png;base64," + "!" * (2 << 20)]),
        "image: a web address": lambda: _messages(["http://127.0.0.1:9/a.png"]),
    }


def _asks(file: Callable[[], bytes], number: int = 1) -> Make:
    url = f"data:image/png;base64,{b64encode(file()).decode()}"
    return lambda: _messages([url] * number)


def _messages(urls: list[str]) -> Fields:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}], "max_tokens": 20}


def _file(width: int = 64, height: int = 64, form: str = "PNG", mode: str = "RGB", **more: Any) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, form, **more)
    return file.getvalue()


def _animation(frames: int) -> bytes:
    file = io.BytesIO()
    first, *others = (Image.new("P", (500, 500), number % 255) for number in range(frames))
    first.save(file, "GIF", save_all=True, append_images=others)
    return file.getvalue()


def _with_chunks(kind: bytes, content: bytes, number: int) -> bytes:
    file, checksum = _file(), struct.pack(">I", zlib.crc32(kind + content))
    chunk = struct.pack(">I", len(content)) + kind + content + checksum
    return file[:_HEAD] + chunk * number + file[_HEAD:]


def _packed(megabytes: int) -> bytes:
    return zlib.compress(bytes(megabytes << 20), 9)
