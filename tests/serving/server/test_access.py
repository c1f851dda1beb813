"""Who may reach a server: what tritonserver is told, and what is refused before it is."""

import re
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from serving.errors import ConfigurationError
from serving.server import Access, ServerTls
from serving.server.tls import expect_usable
from serving.triton.command_line import RESTRICTED
from tests.support.certificates import write_certificates

KEY = "0123456789abcdef"


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_certificates(tmp_path_factory.mktemp("pems"), server="lookup.test", other="lookup.test")


def options(access: Access) -> dict[str, str]:
    pairs = (option.removeprefix("--").partition("=") for option in access.options(KEY))
    return {name: value for name, _, value in pairs}


def test_the_default_is_loopback_and_lookups_only() -> None:
    assert "http-address" not in options(Access())
    flags = options(Access(http=True))
    assert {flags[f"{name}-address"] for name in ("grpc", "http")} == {"127.0.0.1"}
    closed = f"model-repository,shared-memory,trace,logging:tbe-serving-key={KEY}"
    assert flags["grpc-restricted-protocol"] == flags["http-restricted-api"] == closed


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3"])
def test_other_addresses_need_tls_or_insecure(host: str, pems: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"--host {re.escape(host)}: others could listen in: expected --tls-cert"
    ):
        Access(host=host)
    tls = ServerTls(certificate=pems / "server.pem", private_key=pems / "server.key")
    flags = options(Access(host=host, http=True, tls=tls))
    # Triton speaks HTTP in the clear alone: it stays.
    assert (flags["grpc-address"], flags["http-address"]) == (host, "127.0.0.1")
    assert flags["grpc-use-ssl"] == "true"
    flags = options(Access(host=host, http=True, insecure=True))
    assert (flags["grpc-address"], flags["http-address"]) == (host, host)
    assert "grpc-use-ssl" not in flags


@pytest.mark.parametrize("host", ["localhost", "lookup.example", "::1", "10.1.2", ""])
def test_a_host_that_triton_would_misread_is_refused(host: str) -> None:
    expected = rf"host {re.escape(host)}: expected an IPv4 address, such as 0\.0\.0\.0"
    with pytest.raises(ConfigurationError, match=f"--{expected}"):
        Access(host=host, insecure=True)
    with pytest.raises(ConfigurationError, match=f"--operations-{expected}"):
        Access(operations_host=host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9"])
def test_loopback_needs_no_tls(host: str) -> None:
    assert options(Access(host=host))["grpc-address"] == host


def test_certificates_of_clients_are_asked_for(pems: Path) -> None:
    tls = ServerTls(certificate=pems / "server.pem", private_key=pems / "server.key", client_root=pems / "root.pem")
    flags = options(Access(tls=tls))
    assert flags["grpc-use-ssl-mutual"] == "true"
    assert flags["grpc-root-cert"] == str(pems / "root.pem")


def test_allowed_protocols_are_unrestricted_and_unknown_ones_refused() -> None:
    flags = options(Access(allow=("shared-memory", "trace")))
    assert flags["grpc-restricted-protocol"].partition(":")[0] == "model-repository,logging"
    assert "grpc-restricted-protocol" not in options(Access(allow=RESTRICTED))
    with pytest.raises(
        ConfigurationError, match="--allow inference: expected one of model-repository, shared-memory"
    ):
        Access(allow=("inference",))


@pytest.mark.parametrize(
    ("certificate", "key", "root"),
    [
        pytest.param("nowhere.pem", "server.key", None, id="no certificate"),
        pytest.param("server.pem", "nowhere.key", None, id="no key"),
        pytest.param("server.pem", "other.key", None, id="another's key"),
        pytest.param("server.key", "server.pem", None, id="swapped"),
        pytest.param("server.pem", "server.key", "server.key", id="a key for a root"),
    ],
)
def test_certificates_that_do_not_work_are_named(pems: Path, certificate: str, key: str, root: str | None) -> None:
    wrong = (
        f"--tls-client-ca: .*{root}: expected cert"
        if root
        else f"--tls-cert, --tls-key: .*{certificate}: expected .*{key}: "
    )
    with pytest.raises(ConfigurationError, match=wrong):
        ServerTls(
            certificate=pems / certificate, private_key=pems / key, client_root=None if root is None else pems / root
        )


NOW, DAY = datetime.now(UTC), timedelta(days=1)
GOOD, EXPIRED, TO_COME = (NOW - DAY, NOW + DAY), (NOW - 2 * DAY, NOW - DAY), (NOW + DAY, NOW + 2 * DAY)


def pem(valid: tuple[datetime, datetime], *, is_authority: bool) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "lookup.test")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, *valid)
    builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    ("leaves", "authorities", "is_usable"),
    [
        ([GOOD], [GOOD], True),
        ([EXPIRED], [], False),
        ([TO_COME], [], False),
        ([EXPIRED], [GOOD], False),
        ([GOOD], [EXPIRED], False),  # a chain: all of it is shown
        ([], [EXPIRED, GOOD], True),  # authorities: one of them has signed
        ([], [EXPIRED, TO_COME], False),
    ],
)
def test_only_currently_valid_certificates_are_accepted(
    leaves: list[tuple[datetime, datetime]],
    authorities: list[tuple[datetime, datetime]],
    is_usable: bool,
    tmp_path: Path,
) -> None:
    path = tmp_path / "chain.pem"
    parts = [pem(leaf, is_authority=False) for leaf in leaves] + [
        pem(authority, is_authority=True) for authority in authorities
    ]
    path.write_bytes(b"".join(parts))
    with nullcontext() if is_usable else pytest.raises(ConfigurationError, match=r"chain\.pem: is not valid now"):
        expect_usable(path)


def test_keys_are_not_parsed_and_files_that_are_no_pem_are_named(pems: Path, tmp_path: Path) -> None:
    expect_usable(pems / "server.key")
    (tmp_path / "x.pem").write_text("no certificate")
    for missing in ("x.pem", "nowhere.pem"):
        with pytest.raises(ConfigurationError, match=rf"{missing}: expected certificates or a key in PEM"):
            expect_usable(tmp_path / missing)
