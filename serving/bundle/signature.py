"""Ed25519 signatures of the files that determine what is served. A signature is a file beside the file that it signs.

A signature signs a statement: a line that says what the file is, a newline, and the bytes of the file. So a file
cannot be passed off as the file of another model, version or purpose. The line is one of::

    tbe-serving/1 manifest.json "movies" "3"    version 3 of the model `movies`
    tbe-serving/1 config.pbtxt "movies"         the model `movies`, all versions
    tbe-serving/1 warm_up.jsonl "movies"
    tbe-serving/1 movies.release.json "movies"  the release: the versions to serve
    tbe-serving/1 000000000001.safetensors "movies" "0f3c…"    a delta of a lineage, see serving/bundle/delta.py

Names are written as in JSON. The manifest holds the SHA-256 of all other files of its version. A signature is the 64
bytes of RFC 8032, in `manifest.sig`, `config.sig`, `warm_up.sig` or `movies.release.sig`. Keys are PEM files. OpenSSL
makes and checks both::

    openssl genpkey -algorithm ed25519 -out key.pem
    openssl pkey -in key.pem -pubout -out trusted.pem
    (echo 'tbe-serving/1 manifest.json "movies" "3"'; cat manifest.json) > statement
    openssl pkeyutl -sign -rawin -inkey key.pem -in statement -out manifest.sig
    openssl pkeyutl -verify -rawin -pubin -inkey trusted.pem -in statement -sigfile manifest.sig
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from serving.errors import BundleError, ConfigurationError
from serving.files import SMALL, read_file, replacing

# The environment variable with the path of the trusted keys, for the models of a server.
TRUSTED_KEYS = "TBE_SERVING_TRUSTED_KEYS"

_PEM = re.compile(rb"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----", re.DOTALL)
_SIGNATURE_BYTES = 64
_EXPORT = "export with --signing-key"
_DELTA = "publish it with --signing-key"


def signature_of(path: Path) -> Path:
    """The path of the signature of the file at `path`."""
    return path.with_suffix(".sig")


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """Public keys, one of which must have signed a file. There are several while keys are being replaced."""

    path: Path
    keys: tuple[Ed25519PublicKey, ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        """The keys of a PEM file.

        Raises:
            ConfigurationError: the file cannot be read, has no keys, or has keys other than Ed25519 public keys.
        """
        expected = f"{path}: trusted keys: expected Ed25519 public keys in PEM"
        try:
            content = read_file(path, follow=True)  # Kubernetes mounts Secrets as symbolic links
        except OSError as error:
            raise ConfigurationError(f"{path}: trusted keys: cannot be read: {error.strerror}") from error
        keys = []
        for match in _PEM.finditer(content):
            try:
                key = load_pem_public_key(match.group())
            except (ValueError, UnsupportedAlgorithm) as error:
                raise ConfigurationError(f"{expected}, got {match.group(1).decode()}: {error}") from error
            if not isinstance(key, Ed25519PublicKey):
                raise ConfigurationError(f"{expected}, got a key of another kind")
            keys.append(key)
        if not keys:
            raise ConfigurationError(f"{expected}, got none")
        return cls(path, tuple(keys))

    @classmethod
    def of_environment(cls) -> Self | None:
        """The keys of the file that the environment names, or None.

        Raises:
            ConfigurationError: as for `read`.
        """
        path = os.environ.get(TRUSTED_KEYS)
        return cls.read(Path(path)) if path else None

    def read_version(self, manifest: Path) -> bytes:
        """The content of a version's manifest.

        Args:
            manifest: <model>/<version>/manifest.json. It must be signed as the model and version in this path.

        Raises:
            BundleError: as for `read_signed`.
        """
        version = Path(os.path.abspath(manifest)).parent
        return self.read_signed(manifest, version.parent.name, version.name, again=_EXPORT)

    def read_signed(
        self,
        path: Path,
        model: str,
        version: str | None = None,
        most_bytes: int = SMALL,
        again: str = "`tbe-serve configure --signing-key`",
    ) -> bytes:
        """The content of a signed file.

        Args:
            path: the file.
            model: the model that it must be signed for.
            version: the version that it must be signed for, or None if it is signed for the whole model.
            most_bytes: larger files are refused.
            again: the command that signs such a file, for error messages.

        Raises:
            BundleError: the file cannot be read, or has no signature by one of the keys.
        """
        content = _read(path, most_bytes, f"is {path.parent} what tbe-export made?")
        signature_path = signature_of(path)
        signature = _read(
            signature_path, _SIGNATURE_BYTES, f"only what a key of {self.path} signed is served: sign it: {again}"
        )
        if self._signed(signature, _statement(path.name, model, version) + content):
            return content
        if self._signed(signature, content):
            raise BundleError(
                f"{signature_path}: expected a signature that says which model and version it is for, got one of an "
                f"earlier tbe-serving: sign it again: {again}"
            )
        raise BundleError(
            f"{signature_path}: expected a signature by a key of {self.path} over {path.name} of model {model!r}"
            f"{f', version {version}' if version else ''}, got another: it was changed after it was signed, is "
            f"another model's or version's, or somebody else's: sign it again: {again}"
        )

    def check_delta(self, path: Path, content: bytes, signature: Path, model: str, lineage: str) -> None:
        """Refuse a delta without a signature by one of the keys.

        Args:
            path: the file of the delta.
            content: its bytes.
            signature: the path of its signature.
            model, lineage: the model and lineage that it must be signed for.

        Raises:
            BundleError: the signature is missing or wrong.
        """
        content_of_signature = _read(
            signature, _SIGNATURE_BYTES, f"only what a key of {self.path} signed is served: {_DELTA}"
        )
        if not self._signed(content_of_signature, _statement(path.name, model, lineage) + content):
            raise BundleError(
                f"{signature}: expected a signature by a key of {self.path} over {path.name} of model {model!r}, "
                f"lineage {lineage}, got another: {_DELTA}"
            )

    def _signed(self, signature: bytes, message: bytes) -> bool:
        return any(_is_by(key, signature, message) for key in self.keys)


def read_signing_key(path: Path) -> Ed25519PrivateKey:
    """The private key of a PEM file without a password.

    Raises:
        ConfigurationError: the file cannot be read, or has no such key.
    """
    try:
        key = load_pem_private_key(read_file(path, follow=True), password=None)
    except OSError as error:
        raise ConfigurationError(f"{path}: signing key: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(
            f"{path}: signing key: expected an Ed25519 private key in PEM, without a password: {error}"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigurationError(f"{path}: signing key: expected an Ed25519 private key, got another kind")
    return key


def keys_of(
    signing_key: Path | None, trusted_keys: Path | None
) -> tuple[Ed25519PrivateKey | None, TrustedKeys | None]:
    """The key that signs results that are made of signed files, and the keys that must have signed these files.

    If only `signing_key` is named, that key must have signed the files, or it would vouch for unsigned ones.

    Args:
        signing_key: a PEM file with an Ed25519 private key, or None to sign nothing.
        trusted_keys: a PEM file with Ed25519 public keys.

    Raises:
        ConfigurationError: a file cannot be read.
    """
    key = None if signing_key is None else read_signing_key(signing_key)
    if trusted_keys is not None:
        return key, TrustedKeys.read(trusted_keys)
    return key, None if key is None or signing_key is None else TrustedKeys(signing_key, (key.public_key(),))


def sign(path: Path, content: bytes, key: Ed25519PrivateKey, model: str, version: int | None = None) -> None:
    """Write the signature of a file.

    Args:
        path: the file.
        content: its content.
        key: the key to sign with.
        model: the model that it is signed for.
        version: the version that it is signed for, or None if it is signed for the whole model.

    Raises:
        OSError: the signature cannot be written.
    """
    statement = _statement(path.name, model, None if version is None else str(version))
    with replacing(signature_of(path)) as file:
        file.write(key.sign(statement + content))


def delta_signature_of(name: str, content: bytes, key: Ed25519PrivateKey, model: str, lineage: str) -> bytes:
    """The signature of a delta, which covers the name of its file, its model, its lineage and its content."""
    return key.sign(_statement(name, model, lineage) + content)


def _statement(file: str, model: str, version: str | None) -> bytes:
    names = [model] if version is None else [model, version]
    return f"{' '.join(['tbe-serving/1', file, *map(json.dumps, names)])}\n".encode()


def _read(path: Path, most_bytes: int, advice: str) -> bytes:
    try:
        return read_file(path, most_bytes)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}: {advice}") from error


def _is_by(key: Ed25519PublicKey, signature: bytes, message: bytes) -> bool:
    try:
        key.verify(signature, message)
    except InvalidSignature:
        return False
    return True
