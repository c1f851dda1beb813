"""Bundles of hosts that other machines published: whether they are the set that a router needs."""

from collections.abc import Mapping
from pathlib import Path

from export.errors import PublishError
from export.hosts.part import part_models, table_of_part
from export.parity.recorded import recorded_parity
from export.rows.table_error import TableError
from export.rows.tally import Tally
from serving.bundle.manifest import Agreement, Manifest
from serving.bundle.opening import Bundle, open_bundle, verify_digests
from serving.errors import BundleError


def open_parts(repository: Path, router: Manifest, name: str, version: int) -> dict[int, Bundle]:
    """The bundles of all hosts, by rank. Every file was compared with its digest.

    Args:
        repository: Triton's model repository.
        router: the router's manifest.
        name: the router's model.
        version: of all bundles.

    Raises:
        PublishError: a line for each bundle that is missing, damaged, or part of another plan.
    """
    found: dict[int, Bundle] = {}
    wrong: list[str] = []
    for rank, model in part_models(router, name).items():
        path = repository / model / str(version)
        host = router.plan.ranks[rank].host
        try:
            found[rank] = bundle = open_bundle(path)
            verify_digests(bundle)
            recorded_parity(bundle)
        except BundleError as error:
            wrong.append(f"host {host}: {error}")
            continue
        part = bundle.manifest.part_of
        if part is None or (part.model, part.host, part.plan) != (name, host, router.layout):
            wrong.append(
                f"host {host}: {path}: expected a part of this plan of {name!r}, got one of another: "
                "export it again with the same options, --memory-per-rank among them"
            )
    if wrong:
        raise PublishError("\n".join(["the set is not whole:", *wrong]))
    return found


def recorded_errors(router: Manifest, parts: Mapping[int, Bundle]) -> dict[str, TableError]:
    """How far the rows of each table moved, as the hosts' bundles say.

    Args:
        router: the router's manifest.
        parts: the bundles, by rank.

    Returns:
        By table of the router. The cosine is the mean of the parts', by their elements.
    """
    errors: dict[str, TableError] = {}
    for rank, bundle in parts.items():
        parity = recorded_parity(bundle)
        tables = table_of_part(router, rank)
        for table in bundle.manifest.tables:
            error = TableError(table.dtype)
            error.tally = _tally(parity[table.name].quantized, table.rows * table.dim)
            error.bound = parity[table.name].limit
            name = tables[table.name]
            if name in errors:
                errors[name].join(error)
            else:
                errors[name] = error
    return errors


def _tally(agreement: Agreement, elements: int) -> Tally:
    """Sums that give the figures of `agreement` again."""
    return Tally(
        largest=agreement.largest,
        worst_row=agreement.worst_row,
        elements=elements,
        absolute=agreement.mean * elements,
        squared=2 * (1 - agreement.cosine) * elements,
        squared_a=elements,
        squared_b=elements,
    )
