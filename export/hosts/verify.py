"""Check a published bundle; of a router, with the bundles of its hosts."""

from dataclasses import replace
from pathlib import Path

from export.errors import ModelError
from export.hosts.assembled import answer_assembled
from export.parity.answers import answer_probe
from export.parity.fresh_process import FreshProcess
from export.parity.verify import Verification, compare
from export.scores.verify import verify_scores
from export.trained.checkpoint import WeightSource, open_weights
from export.trained.tables import Trained
from serving.bundle.digests import FileDigest
from serving.bundle.hosts import FIRST_WEIGHTS, path_of
from serving.bundle.opening import Bundle, open_bundle, verify_digests
from serving.bundle.signature import TrustedKeys
from serving.bundle.weights import weights_path, weights_paths
from serving.errors import BundleError
from serving.ranks.program import load_program


def verify(
    path: Path,
    trained: Trained | None = None,
    checkpoint: WeightSource = None,
    trusted: TrustedKeys | None = None,
) -> Verification:
    """Read every byte of a bundle, compare its copies, and answer a probe: by numpy, uncompiled, compiled, reloaded.

    Scores are made of that answer, for requests together and alone. Of a router, the bundles of its hosts are read,
    too, and the probe is answered with all of them in one process. Where one is not in the router's repository, the
    router's own files are read, and no answers are compared.

    Args:
        path: the bundle, <model>/<version>.
        trained: what it was exported from. Every stored row is compared with its float one, and scores with scores.
        checkpoint: has the weights of `trained`; None: the module itself has them.
        trusted: one of these keys must have signed the bundles. None: anybody may have made them.

    Raises:
        BundleError: none of the keys signed it, a file differs from its digest, the bundle cannot be opened, or its
            manifest lacks the parity of a table; a host's bundle is not the one that the router's names.
        ModelError: the bundle holds other tables or scores than `trained`; with `trained`, the bundle is a host's, or
            a host's bundle is not there.
        CheckpointError: the weights are not all there.
        ParityError: a fresh process cannot answer from it.
    """
    bundle = open_bundle(path, trusted)
    manifest = bundle.manifest
    if manifest.part_of is not None and trained is not None:
        raise ModelError(
            f"{path}: holds shards of {manifest.part_of.model!r}: give the bundle of that to compare float rows"
        )
    with FreshProcess() as fresh:
        verify_digests(bundle)
        program = load_program(bundle)
        if absent := _absent_hosts(bundle):
            if trained is not None:
                raise ModelError(f"{absent[0]}: expected the bundles of all hosts there, to compare float rows")
            return Verification(bundle, manifest.parity, (), False, absent, manifest.dense_part)
        if manifest.hosts:
            files, digests = weights_paths(path, manifest), _digests(bundle, trusted)
            answers = answer_assembled(path, manifest, program, files, digests, fresh)
        else:
            answers = answer_probe(path, manifest, program, fresh)
    weights = None
    if trained is not None and checkpoint is not None:
        weights = open_weights(trained.module, trained.tables, checkpoint)
    verification = compare(bundle, answers, trained, weights)
    if manifest.dense_part is None:
        return verification
    part, failures = verify_scores(bundle, manifest.dense_part, answers.embeddings, trained, weights)
    return replace(verification, dense_part=part, failures=(*verification.failures, *failures))


def _digests(router: Bundle, trusted: TrustedKeys | None) -> dict[int, FileDigest]:
    """The digest of each rank's file, once the bundles of all hosts were read."""
    manifest = router.manifest
    digests = {0: manifest.files[weights_path(router.path, manifest, 0).name]}
    for host in manifest.hosts:
        part = open_bundle(path_of(router.path, host), trusted)
        if part.digest != host.manifest:
            raise BundleError(f"{part.path}: expected a manifest with SHA-256 {host.manifest}, got {part.digest}")
        verify_digests(part)
        digests[manifest.plan.rank_of_host[host.host]] = part.manifest.files[FIRST_WEIGHTS]
    return digests


def _absent_hosts(router: Bundle) -> tuple[Path, ...]:
    """The bundles of a router's hosts that are not in its repository."""
    paths = (path_of(router.path, host) for host in router.manifest.hosts)
    return tuple(path for path in paths if not path.is_dir())
