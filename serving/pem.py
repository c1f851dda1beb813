"""Check PEM files with OpenSSL, because Triton and gRPC would accept invalid files and then fail every connection."""

import ssl
from pathlib import Path

from serving.errors import ConfigurationError


def check_certificate_chain(chain: Path, private_key: Path | None) -> None:
    """Check a certificate chain and its private key, which must not have a password.

    Raises:
        ConfigurationError: a file cannot be read or is not PEM, or the key does not fit the certificate.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, private_key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl's own errors are OSErrors
        raise ConfigurationError(
            f"{chain}: expected a certificate in PEM, and its key in {private_key}: {error}"
        ) from error


def check_root_certificates(path: Path) -> None:
    """Check a file of root certificates.

    Raises:
        ConfigurationError: the file cannot be read, or is not PEM.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: expected certificates in PEM: {error}") from error


def _no_password() -> str:
    raise ValueError("the key has a password, which gRPC does not support")
