"""What an export recorded in a manifest of how far numbers moved. Anybody may have written it."""

from collections import Counter

from serving.bundle.manifest import MANIFEST, Parity
from serving.bundle.opening import Bundle
from serving.errors import BundleError


def recorded_parity(bundle: Bundle) -> dict[str, Parity]:
    """What the export of `bundle` recorded, by table.

    Raises:
        BundleError: it is not that of each table once. No engine needs it: the bundle can be served all the same.
    """
    tables = {table.name for table in bundle.manifest.tables}
    recorded = Counter(each.table for each in bundle.manifest.parity)
    for name in sorted({*tables, *recorded}):
        if name not in recorded:
            wrong = f"no table {name!r}"
        elif name not in tables:
            wrong = f"another table {name!r}"
        elif recorded[name] > 1:
            wrong = f"table {name!r} twice"
        else:
            continue
        raise BundleError(
            f"{bundle.path / MANIFEST}: parity: expected each table once, got {wrong}: "
            "it is not what an export wrote; export it again"
        )
    return {each.table: each for each in bundle.manifest.parity}
