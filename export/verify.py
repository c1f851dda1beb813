"""Is a published bundle what was exported? Its files, and its answers."""

from pathlib import Path

from export.errors import ParityError
from export.probe import make_probe, pool, run_reloaded
from serving.bundle import Bundle, open_bundle, verify_digests


def verify_bundle(path: Path) -> Bundle:
    """Read every byte of the bundle at `path`, and compare what it answers in a fresh process with numpy's answers.

    Raises:
        BundleError: a file differs from its digest, or the bundle cannot be opened.
        ParityError: a table's answers are further from numpy's than rounding explains.
    """
    bundle = open_bundle(path)
    verify_digests(bundle)
    probe = make_probe(bundle.manifest)
    pooled = pool(path, bundle.manifest, probe)
    if refusals := pooled.refusals(bundle.manifest, run_reloaded(path, probe)):
        raise ParityError("\n".join(refusals))
    return bundle
