"""Contradictions in what a manifest says of its dense part."""

from collections.abc import Iterator, Sequence

from serving.bundle.manifest import Manifest
from serving.bundle.scores import DensePart, JaggedKind, wrong_names

# numpy has arrays of at most 32 dimensions. An input has two more than a sample: [1, B, *shape].
_MOST_SIZES = 30


def in_dense_part(manifest: Manifest) -> Iterator[str]:
    """Find contradictions in the dense part, if there is one. Tables and features are right."""
    part = manifest.dense_part
    if part is None:
        return
    if manifest.part_of is not None:
        yield "dense_part: expected none in a host's bundle: its answers are partial sums"
    if not part.outputs:
        yield "dense_part: outputs: expected at least one"
    if part.mixed_by is not None and not part.mixes_samples:
        yield "dense_part: mixed_by: expected it where mixes_samples is true alone"
    yield from wrong_names([each.name for each in part.inputs], [each.name for each in part.outputs])
    for kind, name, shape in (
        *(("input", each.name, each.shape) for each in part.inputs),
        *(("output", each.name, each.shape) for each in part.outputs),
    ):
        yield from _in_shape(f"dense {kind} {name!r}", shape)
    for each in part.inputs:
        if each.rows is not None and (each.rows < 1 or not each.dtype.is_integer):
            yield f"dense input {each.name!r}: rows: expected a number > 0, of integers alone, got {each.rows}"
    yield from _by_id(manifest, part)
    yield from _in_jagged(manifest, part)


def _by_id(manifest: Manifest, part: DensePart) -> Iterator[str]:
    """What is wrong with inputs and outputs that have a row for each id of a key."""
    for kind, name, key in (
        *(("input", each.name, each.key) for each in part.inputs),
        *(("output", each.name, each.key) for each in part.outputs),
    ):
        if key is not None and key not in manifest.keys:
            yield f"dense {kind} {name!r}: key: expected one of the bundle's, got {key!r}"
    taken = [each.name for each in part.jagged if each.kind is JaggedKind.NUMBERS]
    if sorted(taken) != sorted(part.by_id):
        yield f"dense_part: jagged: expected NUMBERS of {sorted(part.by_id)}, once each, got {sorted(taken)}"
        return
    features = {each.name: each.key for each in manifest.features}
    known = {
        part.key_of(each, features)
        for each in part.jagged
        if each.kind is not JaggedKind.LENGTHS and (each.kind is not JaggedKind.ROWS or each.name in features)
    }
    for output in part.outputs:
        if output.key is not None and output.key not in known:
            yield f"dense output {output.name!r}: expected a jagged input with a row for each id of {output.key!r}"


def _in_jagged(manifest: Manifest, part: DensePart) -> Iterator[str]:
    tables = zip(manifest.features, manifest.feature_tables, strict=True)
    names = {
        JaggedKind.ROWS: {feature.name for feature, table in tables if table.is_sequence},
        JaggedKind.WEIGHTS: {*manifest.weighted_keys},
        JaggedKind.NUMBERS: {*part.by_id},
    }
    for each in part.jagged:
        known = names.get(each.kind, manifest.keys.keys())
        if each.name not in known or part.jagged.count(each) > 1:
            what = "a feature that is not pooled" if each.kind is JaggedKind.ROWS else "a key that has them"
            yield f"dense_part: jagged: {each.kind.value} of {each.name!r}: expected {what}, once"
    for key, length in part.fixed_lengths.items():
        if key not in manifest.keys or not 1 <= length < 2**31:
            yield f"dense_part: fixed_lengths: {key!r}: expected a key, and a length > 0, got {length}"
    every = [key for group in part.together for key in group]
    if (
        not manifest.keys.keys() >= {*every}
        or len({*every}) < len(every)
        or min(map(len, part.together), default=2) < 2
    ):
        yield f"dense_part: together: expected groups of two keys or more, each key in one, got {part.together}"


def _in_shape(where: str, shape: Sequence[int]) -> Iterator[str]:
    if any(size < 1 for size in shape):
        yield f"{where}: expected sizes > 0, got {list(shape)}"
    if len(shape) > _MOST_SIZES:
        yield f"{where}: expected at most {_MOST_SIZES} sizes, got {len(shape)}"
