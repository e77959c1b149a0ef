"""Read the certificate of a server before anything slow starts."""

import ssl
from pathlib import Path

from tandemrt.engines.validation.errors import BadRequest, clipped


def require_certificate(certificate: Path | None, key: Path | None) -> None:
    """Raise BadRequest unless ``certificate`` is the chain of the private key in ``key``, or in itself."""
    if certificate is None:
        raise BadRequest(f"ssl_keyfile: must come with ssl_certfile, received {clipped(key)}; set --ssl-certfile too")
    for name, file in (("ssl_certfile", certificate), ("ssl_keyfile", key)):
        if file is not None and not file.is_file():
            raise BadRequest(f"{name}: must be a PEM file, received {clipped(file)}, which is no file; name another")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:  # OSError: also ssl.SSLError
        raise BadRequest(
            f"ssl_certfile: must be a certificate in PEM with its private key, received {clipped(certificate)} and "
            f"{clipped(key)}: {clipped(error)}; a private key must not need a password"
        ) from error


def _no_password() -> str:
    raise ValueError("the private key needs a password")
