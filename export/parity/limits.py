"""Check how far numbers may move in an export: refuse errors beyond the limits, and note risks."""

import math
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from export.errors import ParityError
from export.parity.answers import Answers, by_id, ids_in_bags
from export.plan.sharding import Sharding
from export.rows.table_error import TableError, Tally, finite
from export.trained.tables import Trained
from export.trained.trained_answers import trained_answers
from serving.bundle.formats import FP16_SUBNORMAL, FP32_UNIT
from serving.bundle.manifest import Agreement, Manifest, Parity
from serving.bundle.tables import OutputDtype, Pooling, Table


def check_parity(
    manifest: Manifest,
    errors: Mapping[str, TableError],
    limits: Mapping[str, float | None],
    answers: Answers,
    runnable: Trained | None,
) -> tuple[Parity, ...]:
    """Check every table, and return its parity.

    Args:
        manifest: features and tables.
        errors: of each table, float rows compared with stored rows.
        limits: of each table, `ExportConfig.max_error`. None: what rounding explains.
        answers: to one probe.
        runnable: the trained module, whose answers are compared with them; None if it cannot be run.

    Raises:
        ParityError: a line for each table that is off by more than its limit, with the step; or for each feature that
            the module answers differently.
    """
    failures = answers.refusals(manifest)
    parity = []
    for table in manifest.tables:
        error = errors[table.name]
        limit = error.bound if (max_error := limits[table.name]) is None else max_error
        failures += _refusals(table, error, limit)
        if max_error is None and (lost := error.coarse.refusal()) is not None:
            failures.append(
                f"table {table.name!r}: {lost}: store the table as FP32, or set max_error, the largest allowed error"
            )
        parity.append(answers.parity(manifest, table, error.tally.agreement, limit))
    if failures:
        raise ParityError("\n".join(failures))
    agreements: dict[str, Agreement] = {}
    if runnable is not None:
        largest = {name: error.tally.largest for name, error in errors.items()}
        agreements, failures = compare_trained(runnable, manifest, answers, largest)
    if failures:
        raise ParityError("\n".join(failures))
    return tuple(msgspec.structs.replace(row, trained=agreements.get(row.table)) for row in parity)


def _refusals(table: Table, error: TableError, limit: float) -> list[str]:
    """A line for each reason to refuse a table's stored rows."""
    refusals = []
    if error.unexplained_row is not None:
        refusals.append(f"table {table.name!r}: row {error.unexplained_row} moved further than rounding explains")
    if not error.tally.largest <= limit:  # also NaN
        refusals.append(
            f"table {table.name!r}: {table.dtype.value} moves an element by {error.tally.largest:.3g}, "
            f"expected at most {limit:.3g}: store it as a wider dtype"
        )
    return refusals


def coarse_notes(errors: Mapping[str, TableError]) -> Iterator[str]:
    """A line for each table with rows that are too small for FP16."""
    for table, error in errors.items():
        if (note := error.coarse.note(error.dtype)) is not None:
            yield f"table {table!r}: {note}"


# Smaller numbers have at most 5 bits of precision in FP16.
_SMALL = 2.0**-19
_LARGEST = float(np.finfo(np.float16).max)
# How many times longer than the declared average a bag is assumed to be.
_LONGER = 100


def overflow_notes(manifest: Manifest, errors: Mapping[str, TableError], sharding: Sharding) -> Iterator[str]:
    """A line for each table whose answers may be infinity in FP16, or are too small for it.

    A mean is at most the largest element. A sum is at most the largest element times the number of ids in a bag,
    which is assumed to be up to 100 times the declared pooling factor. Weights of ids are assumed to be 1.

    Args:
        manifest: features, tables and output dtype.
        errors: of some tables, with the largest element of each.
        sharding: has the declared pooling factors.
    """
    if manifest.output_dtype is not OutputDtype.FP16:
        return
    for table in manifest.tables:
        if table.name not in errors:
            continue
        largest = errors[table.name].largest
        readers = sum(feature.table == table.name for feature in manifest.features)
        factor = max(sharding.pooling_factors_of(table.name, readers), default=1.0)
        longest = 1 if table.pooling is Pooling.MEAN else math.ceil(_LONGER * factor)
        if 0 < largest < _SMALL:
            yield (
                f"table {table.name!r}: FP16 answers are coarse, or 0: its largest element is {largest:.3g}, and the "
                f"smallest number of FP16 is {2 * FP16_SUBNORMAL:.3g}: export with --output-dtype fp32"
            )
        if largest * longest > _LARGEST:
            ids = max(1, math.ceil(_LARGEST / largest))
            yield (
                f"table {table.name!r}: FP16 answers can be infinity: its largest element is {largest:.3g}, and "
                f"{ids:,} of it are beyond {_LARGEST:,.0f}: export with --output-dtype fp32"
            )


def compare_trained(
    runnable: Trained, manifest: Manifest, answers: Answers, largest_errors: Mapping[str, float]
) -> tuple[dict[str, Agreement], list[str]]:
    """Compare the answers of the published files with those of the trained module.

    An answer may be off by what rounding explains, plus the largest error of an element of its table for each id of
    the bag.

    Args:
        runnable: the module, which answers the same probe.
        manifest: features and tables.
        answers: of the published files.
        largest_errors: of each table, the largest error of an element of its stored rows.

    Returns:
        The agreement of each table that could be run, and a line for each feature whose answers are further off.
    """
    trained = trained_answers(runnable, manifest, answers.probe)
    failures: list[str] = []
    tallies: dict[str, Tally] = {}
    bounds = dict(zip(answers.pooled.features, answers.pooled.bounds, strict=True))
    ids = ids_in_bags(manifest, answers.probe)
    for feature, table in zip(manifest.features, manifest.feature_tables, strict=True):
        if (expected := trained.get(feature.name)) is None:
            continue
        served, counts = answers.reloaded[feature.name].astype(np.float64), ids[feature.name]
        error = np.abs(np.subtract(*finite(served, expected.numbers.astype(np.float64))))
        bound = bounds[feature.name] * (1 + expected.unit / FP32_UNIT)
        bound += counts * largest_errors[table.name] * (1 + 1e-6)
        if not ((error <= bound) | np.isinf(bound)).all():
            failures.append(
                f"table {table.name!r}: the trained module answers differently for feature {feature.name!r}, by "
                f"{error.max():.3g}: something around the table changes ids, weights or how it is pooled"
            )
        # Elements whose sum may leave the range of its dtype are not compared.
        numbers = (np.where(np.isinf(bound), 0, answer) for answer in (expected.numbers, served))
        tallies.setdefault(table.name, Tally()).add(0, *by_id(counts, *numbers))
    return {name: tally.agreement for name, tally in tallies.items()}, failures
