"""Certificates of a test's own."""

from datetime import datetime
from pathlib import Path

import trustme


def write_certificates(folder: Path, expires: datetime | None = None, **identities: str) -> Path:
    """`root.pem`, and `NAME.pem` and `NAME.key` for each NAME=IDENTITY, signed by it; all in `folder`."""
    folder.mkdir(exist_ok=True)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "root.pem")
    for name, identity in identities.items():
        certificate = authority.issue_cert(identity, not_after=expires)
        certificate.private_key_pem.write_to_path(folder / f"{name}.key")
        certificate.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
    return folder
