"""Certificates of a test's own."""

from pathlib import Path

import trustme


def write_certificates(folder: Path, **identities: str) -> Path:
    """`root.pem`, and `NAME.pem` and `NAME.key` for each NAME=IDENTITY, signed by it; all in `folder`."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "root.pem")
    for name, identity in identities.items():
        certificate = authority.issue_cert(identity)
        certificate.private_key_pem.write_to_path(folder / f"{name}.key")
        certificate.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
    return folder
