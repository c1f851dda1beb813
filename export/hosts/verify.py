"""Check a published bundle; of a router, with the bundles of its hosts."""

from pathlib import Path

from export.errors import ModelError
from export.hosts.assembled import answer_assembled
from export.parity.verify import Verification, compare, verify_bundle
from export.trained.checkpoint import Checkpoint
from export.trained.tables import TrainedTable
from serving.bundle.hosts import FIRST_WEIGHTS, path_of
from serving.bundle.opening import Bundle, open_bundle, verify_digests
from serving.bundle.signature import TrustedKeys
from serving.bundle.weights import weights_path, weights_paths
from serving.errors import BundleError
from serving.ranks.program import load_program


def verify(
    path: Path,
    trained: tuple[TrainedTable, ...] | None = None,
    weights: Checkpoint | None = None,
    trusted: TrustedKeys | None = None,
) -> Verification:
    """As `export.parity.verify.verify_bundle`; of a router, the bundles of its hosts are read, too.

    A router's probe is answered with all of them in one process. Where one is not in the router's repository, the
    router's own files are read, and no answers are compared.

    Raises:
        BundleError: as `verify_bundle`; a host's bundle is not the one that the router's names.
        ModelError: as `verify_bundle`; with `trained`, the bundle is a host's, or a host's bundle is not there.
        CheckpointError, ParityError: as `verify_bundle`.
    """
    bundle = open_bundle(path, trusted)
    manifest = bundle.manifest
    if manifest.part_of is not None and trained is not None:
        raise ModelError(
            f"{path}: holds shards of {manifest.part_of.model!r}: give the bundle of that to compare float rows"
        )
    if not manifest.hosts:
        return verify_bundle(path, trained, weights, trusted)
    verify_digests(bundle)
    program = load_program(bundle)
    if absent := _absent_hosts(bundle):
        if trained is not None:
            raise ModelError(f"{absent[0]}: expected the bundles of all hosts there, to compare float rows")
        return Verification(bundle, manifest.parity, (), measured=False, absent=absent)
    digests = {0: manifest.files[weights_path(path, manifest, 0).name]}
    for host in manifest.hosts:
        part = open_bundle(path_of(path, host), trusted)
        if part.digest != host.manifest:
            raise BundleError(f"{part.path}: expected a manifest with SHA-256 {host.manifest}, got {part.digest}")
        verify_digests(part)
        digests[manifest.plan.rank_of_host[host.host]] = part.manifest.files[FIRST_WEIGHTS]
    answers = answer_assembled(path, manifest, program, weights_paths(path, manifest), digests)
    return compare(bundle, answers, trained, weights)


def _absent_hosts(router: Bundle) -> tuple[Path, ...]:
    """The bundles of a router's hosts that are not in its repository."""
    paths = (path_of(router.path, host) for host in router.manifest.hosts)
    return tuple(path for path in paths if not path.is_dir())
