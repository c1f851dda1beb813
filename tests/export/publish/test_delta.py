"""A delta holds what an export of the changed model would store, as a whole or not at all."""

import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from safetensors.numpy import load, save_file

from export import ExportConfig, ExportError, Sharding, WeightDtype, export_model, publish_changes, publish_delta
from export.errors import ParityError, PublishError, QuantizeError
from export.publish.changes import StoredRows, stored_rows
from export.publish.lineage import Lineage
from serving.bundle import open_bundle
from serving.bundle.lineage import delta_signature, lineage_of
from serving.errors import BundleError, ConfigurationError
from tests.support.commands import tbe_export
from tests.support.deltas import listed
from tests.support.hosts import export_hosts
from tests.support.long_cases import one_in
from tests.support.managed_collision import dealt
from tests.support.models import MIXED, MIXED_CONFIG, SUM, Spec, collection
from tests.support.mutable_tables import changed_rows
from tests.support.servers import tbe_serve

CHANGED = {"a": ([7, 3], np.ones((2, 8), np.float32))}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    export_model(collection(SUM), tmp_path / "r", "m")
    return tmp_path / "r"


def test_rows_are_those_of_an_export_of_the_changed_model(tmp_path: Path) -> None:
    """Of every dtype, byte for byte."""
    model = collection(MIXED)
    export_model(model, tmp_path / "r", "m", MIXED_CONFIG)
    changed = changed_rows(model, np.random.default_rng(1), lambda _: 7)
    delta = publish_delta(tmp_path / "r", "m", changed)
    anew = open_bundle(export_model(model, tmp_path / "r", "m", MIXED_CONFIG))
    tensors = load(delta.path.read_bytes())
    bytes_ = (anew.path / "weights.0.bin").read_bytes()
    shards = {shard.table: shard for shard in anew.manifest.plan.shards}
    for table in anew.manifest.tables:
        ids = tensors[f"{table.name}/ids"]
        np.testing.assert_array_equal(ids, np.sort(changed[table.name][0]))
        for number, row in zip(ids.tolist(), tensors[f"{table.name}/rows"], strict=True):
            start = shards[table.name].offset_bytes + number * table.row_bytes
            assert row.tobytes() == bytes_[start : start + table.row_bytes]
    assert delta.rows == 7 * len(changed)


def test_the_command_notes_that_no_server_of_the_model_takes_deltas(repository: Path, tmp_path: Path) -> None:
    save_file({"a/ids": np.array([1]), "a/rows": np.ones((1, 8), np.float32)}, tmp_path / "rows.safetensors")
    command = "delta", str(repository / "m"), "--rows", str(tmp_path / "rows.safetensors")
    mend = f"tbe-serve configure {repository / 'm'} --weights-memory live"
    assert tbe_export(*command).stdout.endswith(f"\nno server applies it until you run `{mend}`\n")
    assert tbe_serve(*mend.split()[1:]).returncode == 0
    assert tbe_export(*command).stdout.endswith("1 row, delta 2 of version 1\n")


def test_delta_numbers_count_up_in_a_folder_beside_the_repository(repository: Path) -> None:
    deltas = [publish_delta(repository, "m", CHANGED) for _ in range(3)]
    lineage = lineage_of(open_bundle(repository / "m" / "1").digest)
    folder = repository.parent / "r.deltas" / "m" / lineage
    assert [delta.sequence for delta in deltas] == [1, 2, 3]
    assert sorted(folder.iterdir()) == [delta.path for delta in deltas]
    assert [*repository.iterdir()] == [repository / "m"]
    export_model(collection(SUM, seed=1), repository, "m")
    assert publish_delta(repository, "m", CHANGED).sequence == 1  # another lineage
    assert publish_delta(repository, "m", CHANGED, version=1).sequence == 4
    assert publish_delta(repository, "m", CHANGED, deltas=repository.parent / "d").sequence == 1
    assert publish_delta(repository, "m", CHANGED, deltas=str(repository.parent / "d")).sequence == 2
    for limit in (-1.0, 0.0, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="max_error 'a': expected a finite number > 0"):
            publish_delta(repository, "m", CHANGED, max_error={"a": limit})


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "no such table": ({"c": CHANGED["a"]}, ConfigurationError, "table 'c': expected one of the model's, a, b"),
    "nothing": ({}, ConfigurationError, "at least one row"),
    "no rows": ({"a": ([], np.ones((0, 8), np.float32))}, ConfigurationError, "at least one row"),
    "a row twice": ({"a": ([7, 7], np.ones((2, 8), np.float32))}, ConfigurationError, "row 7 twice"),
    "beyond": ({"a": ([50, 1], np.ones((2, 8), np.float32))}, ConfigurationError, r"\[0, 50\), got 50"),
    "below": ({"a": ([1, -1], np.ones((2, 8), np.float32))}, ConfigurationError, r"\[0, 50\), got -1"),
    "floats as ids": (
        {"a": ([1.0], np.ones((1, 8), np.float32))},
        ConfigurationError,
        r"integers \[n\], got float64",
    ),
    "narrow": ({"a": ([1], np.ones((1, 7), np.float32))}, ConfigurationError, r"\[1, 8\], got float32 \[1, 7\]"),
    "doubles": ({"a": ([1], np.ones((1, 8)))}, ConfigurationError, "float32 or float16"),
    "NaN": ({"a": ([9, 4], np.array([[np.nan] * 8, [0] * 8], np.float32))}, QuantizeError, "row 9 holds NaN"),
    "infinity": ({"a": ([9, 4], np.array([[0] * 8, [np.inf] * 8], np.float32))}, QuantizeError, "row 4 holds NaN or"),
    "beyond FP16": ({"a": ([9, 4], np.array([[1e6] * 8, [0] * 8], np.float32))}, QuantizeError, "row 9 has a scale"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_failed_publication_names_its_cause_and_leaves_nothing(what: str, repository: Path) -> None:
    changed, error, said = WRONG[what]
    right = {} if said == "at least one row" else {"b": ([1], np.ones((1, 12), np.float32))}
    with pytest.raises(error, match=said):
        publish_delta(repository, "m", right | changed)
    assert not [*repository.parent.glob("r.deltas/**/*.safetensors")]


def test_a_row_that_would_move_too_far_is_named(repository: Path) -> None:
    rows = np.zeros((2, 8), np.float32)
    rows[1] = np.linspace(0, 200, 8)
    assert publish_delta(repository, "m", {"a": ([5, 3], rows)}).rows == 2
    with pytest.raises(ParityError, match=r"table 'a': INT8 moves an element of row 3 by .*, expected at most 0\.1"):
        publish_delta(repository, "m", {"a": ([5, 3], rows)}, max_error={"a": 0.1})


def test_raw_ids_and_models_of_hosts_are_refused_by_name(tmp_path: Path) -> None:
    config = ExportConfig(sharding=Sharding(ranks=2, ranks_per_host=1, hosts_as_models=True, router_bytes=1))
    router = export_hosts(tmp_path, collection(SUM), config).parent.name
    with pytest.raises(PublishError, match=f"is a host of '{router}': publish deltas of that"):
        publish_delta(tmp_path / "r", f"{router}-host-0", CHANGED)
    export_model(dealt(), tmp_path / "raw", "m")
    with pytest.raises(PublishError, match="table 'dealt': its rows are named by raw ids"):
        publish_delta(tmp_path / "raw", "m", {"dealt": ([0], np.ones((1, 8), np.float32))})


def test_a_delta_over_hosts_has_one_number_after_a_writer_was_killed(tmp_path: Path) -> None:
    config = ExportConfig(sharding=Sharding(ranks=2, ranks_per_host=1, hosts_as_models=True, router_bytes=1))
    router = export_hosts(tmp_path, collection(SUM), config).parent.name
    models = [f"{router}-host-0", f"{router}-host-1", router]
    assert publish_delta(tmp_path / "r", router, CHANGED).sequence == 1
    folders = [next((tmp_path / "r.deltas" / model).iterdir()) for model in models]
    # A writer that was killed between two of them.
    (folders[2] / "000000000001.safetensors").unlink()
    (folders[1] / "000000000001.safetensors").unlink()
    assert publish_delta(tmp_path / "r", router, CHANGED).sequence == 2
    assert [listed(folder) for folder in folders] == [[1, 2]] * 3
    assert load((folders[1] / "000000000001.safetensors").read_bytes()) == {}


@pytest.mark.parametrize("dtype", [WeightDtype.INT8, *one_in(3, [WeightDtype.FP16, WeightDtype.INT4])])
def test_changed_rows_are_published_across_hosts_and_the_router(dtype: WeightDtype, tmp_path: Path) -> None:
    """Rows of `a` on two hosts, columns of `b`, and `c` on the router or a host: as one process would store them."""
    specs = (SUM[0], Spec("b", 10, 24, "SUM", ("z",)), Spec("c", 20, 8, "SUM", ("w",)))
    model = collection(specs)
    kinds = {"a": "row_wise", "b": "column_wise"}
    config = ExportConfig(
        dtype={"*": dtype},
        sharding=Sharding(ranks=3, ranks_per_host=1, types=kinds, hosts_as_models=True, router_bytes=900),
    )
    router = export_hosts(tmp_path, model, config)
    repository, name = tmp_path / "r", router.parent.name
    assert publish_changes(repository, name, model) is None
    random = np.random.default_rng(0)
    for take in (2, 3):  # the first ones are published as they are named; then others change, and some of them again
        named = {}
        for table, rows in tables_of(model).items():
            ids = random.permutation(len(rows))[: len(rows) // take]
            rows[ids] += 1.0
            named[table] = (ids, rows[ids])
        if take == 2:
            publish_delta(repository, name, named)
    # A writer was killed: what one host has got of the first delta is lost, and another has it.
    lost = next((tmp_path / "r.deltas" / f"{name}-host-1").rglob("*.safetensors"))
    lost.unlink()
    published = publish_changes(repository, name, model)
    assert published is not None
    assert published.sequence == 2
    bundle = export_model(model, tmp_path / "one", "m", ExportConfig(dtype={"*": dtype}))
    exported, now = StoredRows(open_bundle(bundle)), stored_rows(Lineage.of(repository, name, None, None))
    for described in open_bundle(bundle).manifest.tables:
        for block in ((0, described.rows), (3, described.rows - 2)):  # blocks begin and end anywhere
            assert np.array_equal(now.rows(described, *block), exported.rows(described, *block)), described.name
    assert publish_changes(repository, name, model) is None


def tables_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: bag.weight.data for name, bag in model.embedding_bags.items()}


@pytest.mark.promise("Concurrent or killed publishers of deltas leave whole deltas, each with a number of its own")
def test_concurrent_writers_publish_whole_deltas_with_different_numbers(repository: Path) -> None:
    def publish(value: int) -> int:
        return publish_delta(repository, "m", {"a": ([value], np.full((1, 8), value, np.float32))}).sequence

    with ThreadPoolExecutor(8) as pool:
        numbers = [*pool.map(publish, range(24))]
    assert sorted(numbers) == [*range(1, 25)]
    (folder,) = (repository.parent / "r.deltas" / "m").iterdir()
    assert listed(folder) == [*range(1, 25)]
    for value, number in enumerate(numbers):
        tensors = load((folder / f"{number:012d}.safetensors").read_bytes())
        assert tensors["a/ids"].tolist() == [value]
    assert len([*folder.iterdir()]) == 24


def test_a_gap_that_servers_would_wait_for_is_named(repository: Path) -> None:
    paths = [publish_delta(repository, "m", CHANGED).path for _ in range(3)]
    paths[1].unlink()
    with pytest.raises(PublishError, match=r"000000000002\.safetensors: is missing, and 3 is there"):
        publish_delta(repository, "m", CHANGED)
    paths[2].unlink()
    assert publish_delta(repository, "m", CHANGED).sequence == 2
    with pytest.raises(BundleError):
        publish_delta(repository, "m", CHANGED, version=0)


@pytest.mark.promise("Concurrent or killed publishers of deltas leave whole deltas, each with a number of its own")
def test_a_killed_publisher_leaves_whole_deltas_or_none(repository: Path) -> None:
    program = f"""
import numpy as np
from export import publish_delta
while True:
    publish_delta({str(repository)!r}, "m", {{"a": (np.arange(50), np.ones((50, 8), np.float32))}})
"""
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        while len([*repository.parent.glob("r.deltas/m/*/*.safetensors")]) < 3:
            assert process.poll() is None
            time.sleep(0.001)
        process.kill()
    (folder,) = (repository.parent / "r.deltas" / "m").iterdir()
    numbers = listed(folder)
    assert numbers == [*range(1, len(numbers) + 1)]
    for number in numbers:
        assert load((folder / f"{number:012d}.safetensors").read_bytes())["a/ids"].size == 50
    assert publish_delta(repository, "m", CHANGED).sequence == len(numbers) + 1


def test_a_delta_is_signed_for_its_model_lineage_and_number(repository: Path, tmp_path: Path) -> None:
    """OpenSSL's statement, as the page says it."""
    key = Ed25519PrivateKey.generate()
    (tmp_path / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    delta = publish_delta(repository, "m", CHANGED, signing_key=tmp_path / "key.pem")
    content = delta.path.read_bytes()
    statement = tmp_path / "statement"
    lineage = delta.path.parent.name
    statement.write_bytes(f'tbe-serving/1 000000000001.safetensors "m" "{lineage}"\n'.encode() + content)
    public = tmp_path / "public.pem"
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    command = ["openssl", "pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", public, "-in", statement, "-sigfile"]
    subprocess.run([*map(str, command), str(delta_signature(delta.path, content))], check=True)


def test_a_full_disk_is_reported_and_leaves_nothing(repository: Path) -> None:
    """A limit on the size of files stands in for the disk: the kernel refuses the write in the same way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with pytest.raises(PublishError, match="cannot be written: File too large"):
            publish_delta(repository, "m", {"a": (range(50), np.ones((50, 8), np.float32))})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (folder,) = (repository.parent / "r.deltas" / "m").iterdir()
    assert [*folder.iterdir()] == []
    assert publish_delta(repository, "m", CHANGED).sequence == 1


def test_a_folder_that_cannot_be_written_to_is_named(repository: Path) -> None:
    (repository.parent / "r.deltas").write_text("a file")
    with pytest.raises(PublishError, match=r"r\.deltas/m/.*: cannot be written: .*--deltas"):
        publish_delta(repository, "m", CHANGED)
    assert issubclass(PublishError, ExportError)
