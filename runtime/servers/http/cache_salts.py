"""Keep the prefix cache of a client to itself: else ``cached_tokens`` tells what other clients have sent."""

import hashlib

from fastapi import Request

from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.runtime.servers.http.config import SaltBy


def salted(params: SamplingParams, by: SaltBy | None, request: Request, network: str) -> SamplingParams:
    """Return ``params`` with a salt of the client: of its ``network`` or of the key that it sends. None: unchanged.

    A request's own ``cache_salt`` applies within its client.
    """
    if by is None:
        return params
    headers = request.headers
    key = headers.get("authorization", "") or headers.get("x-api-key", "")
    identity = repr((by, network if by == "address" else key, params.cache_salt))
    return params.model_copy(update={"cache_salt": hashlib.sha256(identity.encode()).hexdigest()})
