"""Steps that an export of one bundle shares with an export of several."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec
import torch

from export.config import ExportConfig
from export.errors import PublishError
from export.parity.answers import Answers
from export.parity.limits import check_parity
from export.parity.trained_answers import compare_trained, trained_answers
from export.program.compile import save_program
from export.progress import Progress, float_bytes
from export.rows.digests_behind import DigestsBehind
from export.rows.store_blocks import store_rows
from export.rows.table_error import TableError
from export.scores.dense_part import Scored, compare_scores, save_scores
from export.trained.checkpoint import Checkpoint
from export.trained.tables import Trained, TrainedTable
from serving.bundle.digests import FileDigest, digest_file
from serving.bundle.manifest import MANIFEST, MODEL, PROGRAM, Manifest, Parity, write_manifest
from serving.bundle.opening import Bundle, open_bundle
from serving.bundle.scores import SCORES, DensePart
from serving.errors import BundleError
from serving.model.template import model_py


def store(
    files_of_ranks: Mapping[int, Path],
    trained: Sequence[TrainedTable],
    manifest: Manifest,
    weights: Checkpoint,
    progress: Callable[[Progress], None],
) -> tuple[dict[str, TableError], dict[int, FileDigest]]:
    """Write the weights files of some ranks.

    Args:
        files_of_ranks: where the rows of each rank go, by its number. Rows of other ranks are not read.
        trained: the tables.
        manifest: tables and plan.
        weights: the checkpoint with the rows.
        progress: called as rows are stored.

    Returns:
        How far the rows of each table moved, among those that were read; and the digests of the files, by rank.
    """
    errors: dict[str, TableError] = {}
    total = float_bytes(*trained)
    done = 0
    with DigestsBehind(files_of_ranks, manifest) as digests:
        for stored in store_rows(files_of_ranks, trained, manifest, weights):
            digests.written(stored.table, stored.stop)
            errors[stored.table] = stored.error
            done += 4 * stored.elements
            progress(Progress(stored.table, done, total))
        return errors, digests.finish()


def write_program(
    directory: Path,
    manifest: Manifest,
    program: torch.jit.ScriptModule,
    known: Mapping[str, FileDigest] = MappingProxyType({}),
    scored: Scored | None = None,
) -> Manifest:
    """Complete a draft: what Triton starts, the programs, and a manifest with the digests of all files.

    Args:
        directory: of the draft. Its weights are there.
        manifest: of the draft.
        program: the compiled program.
        known: digests of files that need not be read again, by name.
        scored: the dense part, if there is one.

    Returns:
        That manifest.
    """
    (directory / MODEL).write_text(model_py())
    save_program(program, directory / PROGRAM)
    if scored is not None:
        save_scores(scored.program, directory / SCORES)
    names = sorted(path.name for path in directory.iterdir() if path.name != MANIFEST)
    files = {name: known.get(name) or digest_file(directory / name) for name in names}
    manifest = msgspec.structs.replace(manifest, files=files)
    write_manifest(directory, manifest)
    return manifest


def parity_of(
    manifest: Manifest,
    errors: Mapping[str, TableError],
    limits: Mapping[str, float | None],
    answers: Answers,
    runnable: Trained | None,
) -> tuple[Parity, ...]:
    """Compare all answers to the probe; also those of the trained module, where it is `runnable`.

    Args:
        manifest: features and tables.
        errors: of each table.
        limits: of each table, `ExportConfig.max_error`.
        answers: to the probe.
        runnable: the trained module; None where it cannot be run.

    Raises:
        ParityError: a table moved further than its limit, or the module itself answers otherwise.
    """
    parity = check_parity(manifest, errors, limits, answers)
    own = {} if runnable is None else trained_answers(runnable, manifest, answers.probe)
    agreements = compare_trained(own, manifest, answers, errors)
    return tuple(msgspec.structs.replace(each, trained=agreements.get(each.table)) for each in parity)


def scores_of(scored: Scored | None, answers: Answers) -> DensePart | None:
    """The dense part for the manifest: how far scores from stored rows are from those of the trained model."""
    return None if scored is None else compare_scores(scored, answers.embeddings)


def limits_of(manifest: Manifest, config: ExportConfig) -> dict[str, float | None]:
    """The limit that `config` sets for each table; None where it sets none."""
    return {table.name: config.max_error_of(table.name) for table in manifest.tables}


def read_back(directory: Path) -> Bundle:
    """Open a draft as serving does, so that no bundle is published that serving would refuse.

    Raises:
        PublishError: it cannot be opened.
    """
    try:
        return open_bundle(directory)
    except BundleError as error:
        raise PublishError(f"the draft of this version could not be served: {error}") from error
