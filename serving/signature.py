"""Who published a bundle: an Ed25519 signature over manifest.json, which holds the SHA-256 of every other file.

The signature is the 64 bytes of RFC 8032, in `manifest.sig`; keys are PEM files. OpenSSL makes and checks both::

    openssl genpkey -algorithm ed25519 -out key.pem
    openssl pkey -in key.pem -pubout -out trusted.pem
    openssl pkeyutl -sign -rawin -inkey key.pem -in manifest.json -out manifest.sig
    openssl pkeyutl -verify -rawin -pubin -inkey trusted.pem -in manifest.json -sigfile manifest.sig
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from serving.errors import BundleError, ConfigurationError

SIGNATURE = "manifest.sig"
# Names the file of trusted keys to the models of a server.
TRUSTED_KEYS = "TBE_SERVING_TRUSTED_KEYS"

_PEM = re.compile(rb"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """Public keys, one of which must have signed a bundle; more than one while keys change."""

    path: Path
    keys: tuple[Ed25519PublicKey, ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        """The keys of a PEM file.

        Raises:
            ConfigurationError: it cannot be read, or holds something else than Ed25519 public keys.
        """
        expected = f"{path}: trusted keys: expected Ed25519 public keys in PEM"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"{path}: trusted keys: cannot be read: {error.strerror}") from error
        keys = []
        for found in _PEM.finditer(content):
            try:
                key = load_pem_public_key(found.group())
            except (ValueError, UnsupportedAlgorithm) as error:
                raise ConfigurationError(f"{expected}, got {found.group(1).decode()}: {error}") from error
            if not isinstance(key, Ed25519PublicKey):
                raise ConfigurationError(f"{expected}, got a key of another kind")
            keys.append(key)
        if not keys:
            raise ConfigurationError(f"{expected}, got none")
        return cls(path, tuple(keys))

    @classmethod
    def of_environment(cls) -> Self | None:
        """The keys that the environment names; None where it names none.

        Raises:
            ConfigurationError: as `read`.
        """
        path = os.environ.get(TRUSTED_KEYS)
        return cls.read(Path(path)) if path else None

    def check(self, manifest: Path, content: bytes) -> None:
        """Refuse a manifest that none of the keys signed.

        Args:
            manifest: where it is; its signature lies beside it.
            content: what is in it.

        Raises:
            BundleError: there is no signature, or it is not by one of the keys over this content.
        """
        path = manifest.with_name(SIGNATURE)
        try:
            signature = path.read_bytes()
        except OSError as error:
            raise BundleError(
                f"{path}: cannot be read: {error.strerror}: only bundles signed by a key of {self.path} are served: "
                "export with --signing-key"
            ) from error
        if not any(_signed(key, signature, content) for key in self.keys):
            raise BundleError(
                f"{path}: expected a signature over {manifest.name} by a key of {self.path}, got another: it was "
                "changed after it was signed, or signed by somebody else"
            )


def read_signing_key(path: Path) -> Ed25519PrivateKey:
    """The private key of a PEM file without a password.

    Raises:
        ConfigurationError: it cannot be read, or is something else.
    """
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ConfigurationError(f"{path}: signing key: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(
            f"{path}: signing key: expected an Ed25519 private key in PEM, without a password: {error}"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigurationError(f"{path}: signing key: expected an Ed25519 private key, got another kind")
    return key


def sign(manifest: Path, key: Ed25519PrivateKey) -> None:
    """Write the signature of the manifest at `manifest` beside it."""
    manifest.with_name(SIGNATURE).write_bytes(key.sign(manifest.read_bytes()))


def _signed(key: Ed25519PublicKey, signature: bytes, content: bytes) -> bool:
    try:
        key.verify(signature, content)
    except InvalidSignature:
        return False
    return True
