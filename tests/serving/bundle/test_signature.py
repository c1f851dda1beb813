"""Who published a bundle is known before anything of it runs; OpenSSL says the same of the same files."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key

from export import export_model
from serving.bundle.load import open_bundle
from serving.bundle.manifest import MANIFEST
from serving.bundle.signature import TrustedKeys, read_signing_key
from serving.errors import BundleError, ConfigurationError
from tests.support.models import SUM, collection

SIGNATURE = "manifest.sig"
# What is signed: docs/decisions/0004-publishing.md
STATEMENT = b'tbe-serving/1 manifest.json "m" "1"\n'
PEM, RAW = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo


def openssl(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with key.pem, trusted.pem, other.pem (private) and others.pem (public), made by OpenSSL."""
    folder = tmp_path_factory.mktemp("keys")
    for private, public in (("key.pem", "trusted.pem"), ("other.pem", "others.pem")):
        openssl("genpkey", "-algorithm", "ed25519", "-out", folder / private)
        openssl("pkey", "-in", folder / private, "-pubout", "-out", folder / public)
    return folder


@pytest.fixture(scope="module")
def published(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(collection(SUM), tmp_path_factory.mktemp("signed") / "r", "m", signing_key=keys / "key.pem")


@pytest.fixture
def bundle(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "m" / "1"))


def test_a_signed_bundle_opens_with_its_key_alone_or_among_others(bundle: Path, keys: Path, tmp_path: Path) -> None:
    open_bundle(bundle, TrustedKeys.read(keys / "trusted.pem"))
    both = tmp_path / "both.pem"
    both.write_text("rotated in May\n" + (keys / "others.pem").read_text() + (keys / "trusted.pem").read_text())
    open_bundle(bundle, TrustedKeys.read(both))
    open_bundle(bundle)


def test_signatures_are_interchangeable_with_openssl_s(bundle: Path, keys: Path) -> None:
    """A signature of ours is one of OpenSSL's, and the other way round."""
    statement = bundle.parent / "statement"
    statement.write_bytes(STATEMENT + (bundle / MANIFEST).read_bytes())
    files = ("-in", statement, "-sigfile", bundle / SIGNATURE)
    verified = openssl("pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", keys / "trusted.pem", *files)
    assert "Signature Verified Successfully" in verified.stdout
    refused = openssl("pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", keys / "others.pem", *files)
    assert refused.returncode != 0
    out = ("-in", statement, "-out", bundle / SIGNATURE)
    openssl("pkeyutl", "-sign", "-rawin", "-inkey", keys / "other.pem", *out)
    open_bundle(bundle, TrustedKeys.read(keys / "others.pem"))


def by_another(bundle: Path) -> None:
    content = STATEMENT + (bundle / MANIFEST).read_bytes()
    (bundle / SIGNATURE).write_bytes(Ed25519PrivateKey.generate().sign(content))


def change(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        pytest.param(lambda b: (b / SIGNATURE).unlink(), r"manifest\.sig: cannot be read: .*export with --signing-key", id="unsigned"),
        pytest.param(by_another, r"manifest\.sig: expected a signature by a key of .*trusted\.pem over manifest\.json of model 'm', version 1, got another", id="by another"),
        pytest.param(lambda b: (b / SIGNATURE).write_bytes(b""), r"manifest\.sig: expected a signature", id="empty signature"),
        pytest.param(lambda b: (b / SIGNATURE).write_bytes(bytes(64)), r"manifest\.sig: expected a signature", id="zeros"),
        pytest.param(lambda b: change(b / SIGNATURE, 5), r"manifest\.sig: expected a signature", id="flipped signature"),
        pytest.param(lambda b: change(b / MANIFEST, -3), r"manifest\.sig: expected a signature", id="a space of the manifest"),
        pytest.param(lambda b: change(b / "program.pt", 100), r"program\.pt: expected SHA-256", id="program"),
        pytest.param(lambda b: change(b / "model.py", 3), r"model\.py: expected SHA-256", id="model.py"),
    ],
)  # fmt: skip
def test_unsigned_bundles_and_files_changed_after_signing_are_refused(
    bundle: Path, keys: Path, harm: Callable[[Path], None], message: str
) -> None:
    harm(bundle)
    with pytest.raises(BundleError, match=message):
        open_bundle(bundle, TrustedKeys.read(keys / "trusted.pem"))


@pytest.mark.parametrize(("model", "version"), [("m", 2), ("other", 1)])
def test_a_signature_is_of_one_model_and_version(bundle: Path, keys: Path, model: str, version: int) -> None:
    elsewhere = bundle.parent.parent / model / str(version)
    elsewhere.parent.mkdir(exist_ok=True)
    bundle.rename(elsewhere)
    with pytest.raises(BundleError, match=f"over manifest.json of model '{model}', version {version}, got another"):
        open_bundle(elsewhere, TrustedKeys.read(keys / "trusted.pem"))


def test_an_old_signature_is_refused_with_what_to_do(bundle: Path, keys: Path) -> None:
    """It was over the manifest alone."""
    out = ("-in", bundle / MANIFEST, "-out", bundle / SIGNATURE)
    openssl("pkeyutl", "-sign", "-rawin", "-inkey", keys / "key.pem", *out)
    with pytest.raises(BundleError, match=r"of an earlier tbe-serving: sign it again: export with --signing-key"):
        open_bundle(bundle, TrustedKeys.read(keys / "trusted.pem"))


def test_the_signature_names_the_assigned_version(keys: Path, tmp_path: Path) -> None:
    trusted = TrustedKeys.read(keys / "trusted.pem")
    for version in (None, 7, None):
        published = export_model(collection(SUM), tmp_path / "r", "m", version=version, signing_key=keys / "key.pem")
        open_bundle(published, trusted)
    assert published.name == "8"
    assert sorted(path.name for path in published.iterdir()) == [
        "manifest.json", "manifest.sig", "model.py", "program.pt", "weights.0.bin",
    ]  # fmt: skip


def rsa_public() -> bytes:
    return generate_private_key(65537, 2048).public_key().public_bytes(PEM, RAW)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "expected Ed25519 public keys in PEM, got none", id="empty"),
        pytest.param(os.urandom(100), "expected Ed25519 public keys in PEM, got none", id="noise"),
        pytest.param(rsa_public(), "expected Ed25519 public keys in PEM, got a key of another kind", id="RSA"),
        pytest.param(b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----", "got PUBLIC KEY: ", id="damaged"),
    ],
)
def test_trusted_keys_are_read_strictly(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t.pem").write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        TrustedKeys.read(tmp_path / "t.pem")


@pytest.mark.promise("A private key is refused as a trusted key and is not shown")
def test_a_private_key_is_refused_as_a_trusted_one_and_not_shown(keys: Path) -> None:
    with pytest.raises(ConfigurationError, match="got PRIVATE KEY") as refused:
        TrustedKeys.read(keys / "key.pem")
    secret = (keys / "key.pem").read_text().splitlines()[1]
    assert secret not in str(refused.value)


def test_an_unusable_signing_key_publishes_nothing(keys: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked.pem"
    openssl("pkey", "-in", keys / "key.pem", "-aes256", "-passout", "pass:hunter2", "-out", locked)
    for path, message in (
        (keys / "trusted.pem", "expected an Ed25519 private key in PEM"),
        (tmp_path / "nowhere.pem", "cannot be read"),
        (locked, "without a password"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            export_model(collection(SUM), tmp_path / "r", "m", signing_key=path)
    assert not (tmp_path / "r").exists()
    rsa = tmp_path / "rsa.pem"
    openssl("genrsa", "-out", rsa, "2048")
    with pytest.raises(ConfigurationError, match="got another kind"):
        read_signing_key(rsa)
