"""Find contradictions in a manifest about its dense part."""

from collections.abc import Iterator, Sequence

from serving.bundle.manifest import Manifest
from serving.bundle.scores import (
    ITEMS_PROGRAM,
    SCORES_FILES,
    USER_PROGRAM,
    DenseDtype,
    DenseFormat,
    DensePart,
    JaggedKind,
    wrong_names,
)

# numpy arrays have at most 32 dimensions, and an input has two more than a sample: [1, B, *shape].
_MOST_SIZES = 30


def dense_part_errors(manifest: Manifest) -> Iterator[str]:
    """Find contradictions in the dense part, if the manifest has one. Tables and features were checked."""
    part = manifest.dense_part
    if part is None:
        return
    if manifest.part_of is not None:
        yield "dense_part: expected none in a host's bundle: its answers are partial sums"
    if not part.outputs:
        yield "dense_part: outputs: expected at least one"
    if part.mixed_by is not None and not part.mixes_samples:
        yield "dense_part: mixed_by: expected it where mixes_samples is true alone"
    yield from wrong_names([tensor.name for tensor in part.inputs], [output.name for output in part.outputs])
    for tensor in part.inputs:
        yield from _shape_errors(f"dense input {tensor.name!r}", tensor.shape)
    for output in part.outputs:
        yield from _shape_errors(f"dense output {output.name!r}", output.shape)
    for tensor in part.inputs:
        if tensor.rows is not None and (tensor.rows < 1 or not tensor.dtype.is_integer):
            yield f"dense input {tensor.name!r}: rows: expected a number > 0, of integers alone, got {tensor.rows}"
    yield from _by_id(manifest, part)
    yield from _jagged_errors(manifest, part)
    yield from _length_errors(manifest, part)
    yield from _file_errors(part)
    yield from _user_side_errors(manifest, part)


def _by_id(manifest: Manifest, part: DensePart) -> Iterator[str]:
    """Find contradictions in inputs and outputs with a row for each id of a key."""
    for kind, name, key in (
        *(("input", tensor.name, tensor.key) for tensor in part.inputs),
        *(("output", output.name, output.key) for output in part.outputs),
    ):
        if key is not None and key not in manifest.keys:
            yield f"dense {kind} {name!r}: key: expected one of the bundle's, got {key!r}"
    numbers = [jagged.name for jagged in part.jagged if jagged.kind is JaggedKind.NUMBERS]
    if sorted(numbers) != sorted(part.by_id):
        yield f"dense_part: jagged: expected NUMBERS of {sorted(part.by_id)}, once each, got {sorted(numbers)}"
        return
    keys = manifest.key_of_feature
    keys_with_rows = {
        part.key_of(jagged, keys)
        for jagged in part.jagged
        if jagged.kind is not JaggedKind.LENGTHS and (jagged.kind is not JaggedKind.ROWS or jagged.name in keys)
    }
    for output in part.outputs:
        if output.key is not None and output.key not in keys_with_rows:
            yield f"dense output {output.name!r}: expected a jagged input with a row for each id of {output.key!r}"


def _jagged_errors(manifest: Manifest, part: DensePart) -> Iterator[str]:
    tables = zip(manifest.features, manifest.feature_tables, strict=True)
    names_of_kind = {
        JaggedKind.ROWS: {feature.name for feature, table in tables if table.is_sequence},
        JaggedKind.WEIGHTS: {*manifest.weighted_keys},
        JaggedKind.NUMBERS: {*part.by_id},
    }
    for jagged in part.jagged:
        names = names_of_kind.get(jagged.kind, manifest.keys.keys())
        if jagged.name not in names or part.jagged.count(jagged) > 1:
            what = "a feature that is not pooled" if jagged.kind is JaggedKind.ROWS else "a key that has them"
            yield f"dense_part: jagged: {jagged.kind.value} of {jagged.name!r}: expected {what}, once"


def _length_errors(manifest: Manifest, part: DensePart) -> Iterator[str]:
    """Find contradictions in the rules for the lengths of keys."""
    for key, length in part.fixed_lengths.items():
        if key not in manifest.keys or not 1 <= length < 2**31:
            yield f"dense_part: fixed_lengths: {key!r}: expected a key, and a length > 0, got {length}"
    grouped = [key for group in part.together for key in group]
    if (
        not manifest.keys.keys() >= {*grouped}
        or len({*grouped}) < len(grouped)
        or min(map(len, part.together), default=2) < 2
    ):
        yield f"dense_part: together: expected groups of two keys or more, each key in one, got {part.together}"


def _file_errors(part: DensePart) -> Iterator[str]:
    names = [file.name for file in part.files]
    for file in part.files:
        is_free = file.name not in (USER_PROGRAM, ITEMS_PROGRAM) and names.count(file.name) == 1
        if not SCORES_FILES.fullmatch(file.name) or not is_free:
            yield f"dense_part: files: expected a name that begins with 'scores.', once, got {file.name!r}"
        if file.relative_time is not None and not file.relative_time > 0:
            yield f"dense_part: files: {file.name!r}: relative_time: expected a number > 0, got {file.relative_time}"
        is_native = file.format is DenseFormat.AOTINDUCTOR
        if {file.instructions is not None, file.torch is not None} != {is_native}:
            yield (
                f"dense_part: files: {file.name!r}: expected {'both' if is_native else 'neither'} instructions "
                f"{'and' if is_native else 'nor'} torch for {file.format.value}, got {file.instructions!r} and "
                f"{file.torch!r}"
            )
    if part.files and all(file.format is DenseFormat.AOTINDUCTOR for file in part.files):
        yield "dense_part: files: expected another format beside AOTINDUCTOR, for other processors"


def _user_side_errors(manifest: Manifest, part: DensePart) -> Iterator[str]:
    side = part.user_side
    if side is None:
        return
    names = {*manifest.keys, *(tensor.name for tensor in part.by_sample)}
    if not side.names or not names >= {*side.names} or len({*side.names}) < len(side.names):
        yield f"dense_part: user_side: names: expected keys and dense inputs, each once, got {list(side.names)}"
    if not 0 <= side.per_user <= side.operators:
        yield f"dense_part: user_side: per_user: expected 0 to {side.operators}, got {side.per_user}"
    if side.fewest_items is not None and side.fewest_items < 1:
        yield f"dense_part: user_side: fewest_items: expected a number > 0, got {side.fewest_items}"
    if part.mixes_samples or part.dtype is not DenseDtype.FP32:
        yield "dense_part: user_side: expected it only with FP32 weights, and samples that do not mix"


def _shape_errors(where: str, shape: Sequence[int]) -> Iterator[str]:
    if any(size < 1 for size in shape):
        yield f"{where}: expected sizes > 0, got {list(shape)}"
    if len(shape) > _MOST_SIZES:
        yield f"{where}: expected at most {_MOST_SIZES} sizes, got {len(shape)}"
