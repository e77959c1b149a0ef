"""Reading a request's body: within a size, within a time."""

import asyncio

from fastapi import Request

from tandemrt.runtime.serve.errors import TooLarge, TooSlow

BODY_S = 30.0


async def read(request: Request, limit: int) -> bytes:
    """Return the body of at most ``limit`` bytes. Raises TooLarge, before it has come, or TooSlow."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit, announced)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(limit, f"{size} and more")
                parts.append(part)
    except TimeoutError:
        raise TooSlow(f"the body must come within {BODY_S:.0f} seconds, received {size} bytes") from None
    return b"".join(parts)


def _too_large(limit: int, received: str) -> TooLarge:
    return TooLarge(f"the body must have at most {limit} bytes (--max-body), received {received[:20]}; send less")
