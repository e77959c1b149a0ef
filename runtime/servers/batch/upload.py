"""Read an upload: a form with one file, within limits of size and time."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.runtime.servers.batch.files import MAX_FILE
from tandemrt.runtime.servers.http.body import MIN_BODY_RATE
from tandemrt.runtime.servers.http.config import ServerConfig
from tandemrt.runtime.servers.http.connections import client_network
from tandemrt.runtime.servers.openai.errors import (
    BodyTimeout,
    BodyTooLarge,
    ClientDisconnected,
    Overloaded,
    UnsupportedMediaType,
)

MAX_UPLOADS = 4  # at a time
_FORM = 64 << 10  # bytes of a form besides its file


class Uploads:
    """Reads uploads, at most MAX_UPLOADS at a time. A form is spooled to the folder of temporary files."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._running: list[str] = []  # networks of the clients

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[UploadFile]:
        """Yield the file of a form with the fields ``file`` and ``purpose``, which must be ``batch``."""
        media_type = request.headers.get("content-type", "")
        if media_type.partition(";")[0].strip().lower() != "multipart/form-data":
            raise UnsupportedMediaType(f"Content-Type: must be multipart/form-data, received {quoted(media_type)}")
        self._require_origin(request)
        network = client_network(request.client.host if request.client else "")
        if len(self._running) >= MAX_UPLOADS or self._running.count(network) >= MAX_UPLOADS // 2:
            raise Overloaded(
                f"the server reads {MAX_UPLOADS} uploads at a time, half of them of one address; send it again later"
            )
        self._running.append(network)
        try:
            parser = MultiPartParser(
                request.headers, self._parts(request), max_files=1, max_fields=8, max_part_size=1024
            )
            try:
                form = await parser.parse()
            except MultiPartException as error:
                raise BadRequest(f"the body must be a form with one file: {error.message}") from error
            try:
                yield _checked(dict(form))
            finally:
                await form.close()
        finally:
            self._running.remove(network)

    def _require_origin(self, request: Request) -> None:
        """Raise BadRequest for a form of another origin's page, which a browser sends without asking the server."""
        origin, allowed = request.headers.get("origin"), self._config.allowed_origins or ()
        if origin is None or origin in allowed or "*" in allowed:
            return
        if urlsplit(origin).netloc != request.headers.get("host"):
            raise BadRequest(f"Origin: must be this server's or one of --allowed-origins, received {quoted(origin)}")

    async def _parts(self, request: Request) -> AsyncGenerator[bytes, None]:
        limit, loop = MAX_FILE + _FORM, asyncio.get_running_loop()
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit:
            raise _too_large()
        size, start, stream = 0, loop.time(), request.stream()
        try:
            while True:
                # As read_body: a third of the time, then a rate.
                async with asyncio.timeout_at(start + self._config.body_timeout_s / 3 + size / MIN_BODY_RATE):
                    part = await anext(stream, None)
                if part is None:
                    return
                size += len(part)
                if size > limit:
                    raise _too_large()
                yield part
        except TimeoutError:
            raise BodyTimeout(
                f"an upload must come at {MIN_BODY_RATE} bytes per second or faster, received {size}; send it faster"
            ) from None
        except ClientDisconnect:
            raise ClientDisconnected("the client closed the connection") from None


def _checked(form: dict[str, object]) -> UploadFile:
    for name in form:
        if name not in ("file", "purpose"):
            raise BadRequest(
                f"{name[:100]}: is not supported in an upload, whose fields are file and purpose; leave it out"
            )
    if form.get("purpose") != "batch":
        raise BadRequest(f"purpose: must be 'batch', received {quoted(form.get('purpose'))}; correct it")
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise BadRequest("file: must be a file with requests, received none; add it")
    return file


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(f"file: must have at most {MAX_FILE} bytes, received more; split it")
