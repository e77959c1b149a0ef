"""Keep what is cached of a client to itself: else ``cached_tokens``, or time, tells what other clients have sent."""

import hashlib

from fastapi import Request

from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.runtime.servers.http.config import SaltBy


def salted(params: SamplingParams, by: SaltBy | None, request: Request, network: str) -> SamplingParams:
    """Return ``params`` with a salt of the client: of its ``network`` or of the key that it sends. None: unchanged.

    A request's own ``cache_salt`` applies within its client.
    """
    salt = client_salt(by, request, network, params.cache_salt)
    return params if by is None else params.model_copy(update={"cache_salt": salt})


def client_salt(by: SaltBy | None, request: Request, network: str, own: str | None = None) -> str | None:
    """Return the salt of the client, within which the request's ``own`` applies; None: there is none."""
    if by is None:
        return None
    headers = request.headers
    key = headers.get("authorization", "") or headers.get("x-api-key", "")
    identity = repr((by, network if by == "address" else key, own))
    return hashlib.sha256(identity.encode()).hexdigest()
