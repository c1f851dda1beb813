"""The certificates of a server: PEM files, checked before tritonserver reads them."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from serving.arguments import check_arguments
from serving.errors import ConfigurationError
from serving.pem import check_certificate_chain, check_root_certificates
from serving.triton.command_line import tls_options

if TYPE_CHECKING:
    from cryptography import x509


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerTls:
    """TLS on the gRPC port, with PEM files.

    Attributes:
        certificate: the server's certificate, with its chain.
        private_key: its private key, without a password.
        client_root: root certificates for the certificates of clients, or None if clients need no certificate.

    Raises:
        ConfigurationError: a file cannot be read, or is not such a certificate or key.
    """

    certificate: Path
    private_key: Path
    client_root: Path | None = None

    def __post_init__(self) -> None:
        check_arguments(self)
        try:
            check_certificate_chain(self.certificate, self.private_key)
        except ConfigurationError as error:
            raise ConfigurationError(f"--tls-cert, --tls-key: {error}") from error
        try:
            if self.client_root is not None:
                check_root_certificates(self.client_root)
        except ConfigurationError as error:
            raise ConfigurationError(f"--tls-client-ca: {error}") from error

    def expires(self) -> float:
        """When the first certificate of the chain expires, in Unix time.

        Raises:
            OSError, ValueError: the file can no longer be read.
        """
        from cryptography import x509  # clients have none

        chain = x509.load_pem_x509_certificates(self.certificate.read_bytes())
        return min(certificate.not_valid_after_utc.timestamp() for certificate in chain)

    @property
    def files(self) -> list[Path]:
        """All files."""
        return [path for path in (self.certificate, self.private_key, self.client_root) if path is not None]

    @property
    def options(self) -> list[str]:
        """The options of tritonserver."""
        return tls_options(self.certificate, self.private_key, self.client_root)


def expect_usable(path: Path) -> None:
    """Refuse certificates that clients would reject now.

    Args:
        path: a PEM file. Of a chain, all certificates must be valid now; of authorities, at least one. It may also be
            a private key.

    Raises:
        ConfigurationError: the file cannot be read, or its certificates are not valid now.
    """
    from cryptography import x509  # clients have none

    try:
        content = path.read_bytes()
        certificates = [] if b"PRIVATE KEY" in content else x509.load_pem_x509_certificates(content)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: expected certificates or a key in PEM: {error}") from error
    now = datetime.now(UTC)
    late = [
        certificate
        for certificate in certificates
        if not certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc
    ]
    if late and (len(late) == len(certificates) or not _is_authority(certificates[0])):
        since, until = (
            f"{moment:%Y-%m-%d %H:%M}" for moment in (late[0].not_valid_before_utc, late[0].not_valid_after_utc)
        )
        raise ConfigurationError(f"{path}: is not valid now: a certificate is from {since} to {until} UTC")


def _is_authority(certificate: "x509.Certificate") -> bool:
    from cryptography import x509

    try:
        return bool(certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca)
    except x509.ExtensionNotFound:
        return False
