"""Deltas in an object store, on a real S3 server: published by several machines, brought and applied by others."""

import errno
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
from safetensors.numpy import save_file

from export import (
    ExportConfig,
    Sharding,
    WeightDtype,
    compact,
    export_model,
    export_next,
    publish_changes,
    publish_delta,
    squash,
)
from export.errors import PublishError
from export.publish.lineage import Lineage
from export.publish.published import prune_squashed
from export.publish.push import push
from serving.bundle.delta import ChangedRows
from serving.bundle.lineage import Step, delta_path, steps_in
from serving.bundle.load import open_bundle
from serving.client import LookupClient
from serving.delta_store import DeltaStore, LiveLineage, lineages
from serving.engine import Engine
from serving.errors import ConfigurationError, ServerUnavailable
from serving.log import server_log
from serving.model.settings import ServingSettings, WeightsMemory
from serving.server.delta_service import DeltaService
from serving.store import Store
from tests.support.commands import tbe_export
from tests.support.deltas import listed
from tests.support.host_faults import until
from tests.support.hosts import export_hosts, in_one_process
from tests.support.models import SUM, collection, random_bags
from tests.support.mutable_tables import PATIENCE_S, changed_rows, published, wait_until_applied
from tests.support.s3 import BUCKET, S3, s3_server
from tests.support.servers import FREE_PORTS, metric, page, running, scrape, start_tbe_serve, tbe_serve

DIM = 16
pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture
def machine(s3: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Be another machine: one with a cache of its own."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)

    def become(name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machines" / name))

    become("first")
    return become


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """A repository in the store that has nothing yet."""
    return f"s3://{BUCKET}/{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]}/models"


def key_of(url: str, path: Path) -> str:
    return "/".join((f"{url.removeprefix(f's3://{BUCKET}/')}.deltas", *path.parts[-3:]))


def publish(bundle: Path, url: str, number: float, ids: list[int], **options: Any) -> Path:
    rows = np.full((len(ids), DIM), number, np.float32)
    delta = publish_delta(bundle.parent.parent, "m", {"t": (ids, rows)}, deltas=f"{url}.deltas", **options)
    return delta.path


def lineage(bundle: Path) -> LiveLineage:
    (only,) = lineages(bundle.parent)
    return only


def brought(bundle: Path, url: str) -> list[int]:
    """The numbers of the deltas that another machine has once it has brought what is there."""
    store, bundle_lineage = DeltaStore(f"{url}.deltas"), lineage(bundle)
    store.refresh(bundle_lineage)
    return listed(store.folder / bundle_lineage.model / bundle_lineage.name)


@pytest.mark.promise("Machines that publish deltas to one store concurrently each get a number")
def test_machines_that_publish_at_once_each_get_a_number(machine: Callable[[str], None], tmp_path: Path) -> None:
    """In a folder, which creates at once, as S3 does: moto's server looks first and then writes."""
    url = f"file://{tmp_path}/models"
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32)
    stores = []
    for name in ("first", "second", "third"):
        machine(name)
        stores.append(DeltaStore(f"{url}.deltas"))
    opened = open_bundle(bundle)
    name = opened.lineage

    def publish_ten(number: int) -> list[int]:
        publisher = Lineage.of_bundle(opened, stores[number].folder, stores[number])
        rows = ChangedRows(np.array([number]), np.full((1, DIM), number, np.float32).view(np.uint8))
        return [publisher.publish({"t": rows}, None).sequence for _ in range(10)]

    with ThreadPoolExecutor(3) as pool:
        numbers = [number for sequences in pool.map(publish_ten, range(3)) for number in sequences]
    assert sorted(numbers) == [*range(1, 31)]
    machine("fourth")
    assert brought(bundle, url) == [*range(1, 31)]
    # As bytes: the machine that wrote one has what the others are given.
    for store in stores:
        store.refresh(LiveLineage("m", name, 0))
    for number in range(1, 31):
        contents = {delta_path(store.folder / "m" / name, number).read_bytes() for store in stores}
        assert len(contents) == 1


def test_a_signature_is_there_before_its_delta(url: str, s3: S3, signed_repository: Path, tmp_path: Path) -> None:
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32)
    key = signed_repository / "key.pem"
    path = publish(bundle, url, 1, [3], signing_key=key)
    (signature,) = path.parent.glob("*.sig")
    put = [key for method, key in s3.requests() if method == "PUT" and key.startswith(key_of(url, path)[:12])]
    assert put == [key_of(url, signature), key_of(url, path)]


def test_a_delta_whose_response_was_lost_keeps_its_number(
    url: str, machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, signed_repository: Path, tmp_path: Path
) -> None:
    """The second try finds it there: its signature stays, and it is not published twice."""
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32)
    key = signed_repository / "key.pem"

    def put_twice(*args: Any, **options: Any) -> Any:
        put(*args, **options)
        return put(*args, **options)

    put = obstore.put
    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", put_twice)
        assert publish(bundle, url, 1, [3], signing_key=key).stem == "000000000001"
    machine("second")
    assert brought(bundle, url) == [1]
    folder = DeltaStore(f"{url}.deltas").folder / "m" / lineage(bundle).name
    assert sorted(path.suffix for path in folder.glob("0*")) == [".safetensors", ".sig"]


def test_a_failed_fetch_counts_as_never_read(
    url: str, machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where a role may list and not read."""
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32)
    publish(bundle, url, 1, [3])
    machine("second")
    store, bundle_lineage = DeltaStore(f"{url}.deltas"), lineage(bundle)

    def refused(*_: Any) -> None:
        raise obstore.exceptions.PermissionDeniedError("403")

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "get", refused)
        with pytest.raises(ServerUnavailable, match="403"):
            store.refresh(bundle_lineage)
    assert store.last_read(bundle_lineage) is None
    store.refresh(bundle_lineage)
    assert store.last_read(bundle_lineage) is not None


def test_a_delta_is_published_even_if_it_cannot_be_read_afterwards(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32)
    put, listed_by = obstore.put, obstore.list

    def last(*args: Any, **options: Any) -> Any:
        put(*args, **options)
        monkeypatch.setattr(obstore, "list", refused)

    def refused(*_: Any, **__: Any) -> None:
        raise obstore.exceptions.GenericError("503")

    monkeypatch.setattr(obstore, "put", last)
    assert publish(bundle, url, 1, [3]).stem == "000000000001"
    monkeypatch.setattr(obstore, "put", put)
    monkeypatch.setattr(obstore, "list", listed_by)
    assert publish(bundle, url, 2, [3]).stem == "000000000002"
    assert brought(bundle, url) == [1, 2]


HANGS = """
import sys, threading, time
from serving import delta_store
delta_store.DeltaStore._listed = lambda *_: {"000000000001.safetensors": delta_store._Seen(1, 1)}
delta_store.DeltaStore._blocks = lambda *_: time.sleep(600)
store = delta_store.DeltaStore(sys.argv[1])
threading.Thread(target=store.bring, args=("m", "l", 0), daemon=True).start()
time.sleep(1)
print("ends", flush=True)
"""


def test_a_hanging_fetch_does_not_delay_the_end_of_a_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HANGS, f"file://{tmp_path}/models.deltas"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.stdout, done.returncode) == ("ends\n", 0), done.stderr


def test_a_full_cache_is_reported(
    url: str, machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32)
    publish(bundle, url, 1, [3])
    machine("second")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ConfigurationError, match=r"cannot be written: .*No space left"):
            brought(bundle, url)
    assert brought(bundle, url) == [1]


def full(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_deltas_are_fetched_and_removed_as_in_the_store(
    url: str, machine: Callable[[str], None], s3: S3, tmp_path: Path
) -> None:
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32)
    paths = [publish(bundle, url, number, [3]) for number in (1, 2, 3)]
    machine("second")
    assert brought(bundle, url) == [1, 2, 3]
    calls_before = len(s3.requests())
    assert brought(bundle, url) == [1, 2, 3]
    assert [key for method, key in s3.requests()[calls_before:] if key.endswith(".safetensors")] == []
    second = publish(bundle, url, 4, [3])  # knows the numbers of the first machine
    machine("first")
    assert brought(bundle, url) == [1, 2, 3, 4]
    # Removed and published anew, as the runbook says: machines that had the others get these.
    for path in (*paths[1:], second):
        s3.delete(key_of(url, path))
    assert brought(bundle, url) == [1]
    assert publish(bundle, url, 22, [5]).name == paths[1].name
    machine("second")
    assert brought(bundle, url) == [1, 2]
    assert delta_path(DeltaStore(f"{url}.deltas").folder / "m" / lineage(bundle).name, 2).read_bytes() == s3.get(
        key_of(url, paths[1])
    )


def test_a_machine_fetches_squashed_deltas_instead_of_single_ones(
    url: str, machine: Callable[[str], None], s3: S3, tmp_path: Path
) -> None:
    """And one that has them all brings nothing again. Who publishes has each, for rows to be rolled back."""
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32)
    paths = [publish(bundle, url, number, [3]) for number in range(1, 8)]
    machine("up to date")
    brought(bundle, url)
    machine("first")
    for last in (4, 6):
        squash(tmp_path / "r", "m", until=last, deltas=f"{url}.deltas")
    bundle_lineage = lineage(bundle)

    def gotten() -> list[str]:
        """What is brought now, and no more when it is asked for again."""
        calls_before, store = len(s3.requests()), DeltaStore(f"{url}.deltas")
        store.refresh(bundle_lineage)
        names = [
            key.rpartition("/")[2]
            for method, key in s3.requests()[calls_before:]
            if method == "GET" and "safetensors" in key
        ]
        calls_before = len(s3.requests())
        store.refresh(bundle_lineage)
        assert [key for method, key in s3.requests()[calls_before:] if "safetensors" in key] == []
        return sorted(names)

    machine("up to date")
    assert gotten() == []
    machine("new")
    needed = ["000000000006.safetensors", "000000000006.since-0.safetensors", "000000000007.safetensors"]
    assert gotten() == needed
    for path in paths[:6]:  # by a rule of the store, as they grow old
        s3.delete(key_of(url, path))
    machine("newer")
    assert gotten() == [needed[1], needed[2]]
    machine("first")
    assert publish(bundle, url, 8, [3]).name == "000000000008.safetensors"
    squashed = squash(tmp_path / "r", "m", deltas=f"{url}.deltas").path
    machine("newer")
    assert gotten() == ["000000000008.safetensors", squashed.name]
    assert steps_in(DeltaStore(f"{url}.deltas").folder / "m" / bundle_lineage.name) == [
        Step(6, 0),
        Step(7, 6),
        Step(8, 0),
        Step(8, 7),
    ]


def test_pruned_deltas_are_kept_while_a_server_may_need_them(
    url: str, machine: Callable[[str], None], s3: S3, tmp_path: Path
) -> None:
    """Those that were removed there otherwise, or replaced, do not."""
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32)
    paths = [publish(bundle, url, number, [3]) for number in range(1, 8)]
    machine("server")
    assert brought(bundle, url) == [*range(1, 8)]
    machine("first")
    squash(tmp_path / "r", "m", until=5, deltas=f"{url}.deltas")
    assert prune_squashed(bundle.parent, deltas=f"{url}.deltas") == 4
    machine("server")
    store, bundle_lineage = DeltaStore(f"{url}.deltas"), lineage(bundle)
    folder = store.folder / "m" / bundle_lineage.name
    store.bring("m", bundle_lineage.name, 2)  # of a server that is at 3
    assert listed(folder) == [*range(1, 8)]
    store.refresh_all(bundle.parent)  # as before a server starts
    assert Step(5, 0) in steps_in(folder)
    assert listed(folder) == [*range(1, 8)]
    content = paths[5].read_bytes()
    s3.put(key_of(url, paths[2]), content)  # another history, of which 3 is squashed, and 6 and 7 are no more
    for path in paths[5:]:
        s3.delete(key_of(url, path))
    store.refresh_all(bundle.parent)
    assert listed(folder) == [1, 2, 4, 5]


@pytest.mark.parametrize("until", [2, 4])
def test_a_machine_with_squashed_deltas_can_roll_back_to_one_in_between(
    until: int, url: str, machine: Callable[[str], None], tmp_path: Path
) -> None:
    """The store has each."""
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32)
    for number in range(1, 7):
        publish(bundle, url, number, [number])
    squash(tmp_path / "r", "m", deltas=f"{url}.deltas")
    machine("server")
    assert brought(bundle, url) == [6]
    squash(tmp_path / "r", "m", until=until, deltas=f"{url}.deltas")
    version = compact(tmp_path / "r", "m", until=until, deltas=f"{url}.deltas")
    with Engine.open(version) as engine, Engine.open(bundle) as before:
        ids = [*range(1, 7)]
        expected = [number if number <= until else before.rows("t", [number])[0, 0] for number in ids]
        assert engine.rows("t", ids)[:, 0].tolist() == expected


def test_a_server_that_starts_beside_a_pruned_store_has_all_deltas(
    url: str, machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its cache has each delta, of which the store has no more than what they come to."""
    bundle = published(tmp_path, 1000, DIM, WeightDtype.FP32)
    for number in range(1, 13):
        publish(bundle, url, number, [*range(1000)])
    machine("server")
    brought(bundle, url)
    machine("first")
    squash(tmp_path / "r", "m", until=10, deltas=f"{url}.deltas")
    prune_squashed(bundle.parent, deltas=f"{url}.deltas")
    machine("server")
    store = DeltaStore(f"{url}.deltas")
    (folder,) = (store.folder / "m").iterdir()
    for number in range(1, 10):  # is one of these read, the server stops
        delta_path(folder, number).write_bytes(b"nothing")
    copies = DeltaService(store.folder, {}, server_log(tmp_path / "log"))
    for name, value in copies.environment.items():
        monkeypatch.setenv(name, value)
    with (
        copies.running(),
        copies.fetching(store, [bundle.parent], lambda *_: None),
        Engine.open(bundle, memory=WeightsMemory.LIVE) as engine,
    ):
        assert (engine.rows("t", range(1000)) == 12).all()
        status = wait_until_applied(copies, 12)
        assert (status.rows, status.stopped) == (3000, "")


def test_squashed_deltas_are_pruned_in_the_store_and_here(url: str, signed_repository: Path, tmp_path: Path) -> None:
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32, signing_key=signed_repository / "key.pem")
    deltas = f"{url}.deltas"
    paths = [publish(bundle, url, number, [3], signing_key=signed_repository / "key.pem") for number in range(1, 6)]
    squash(tmp_path / "r", "m", until=4, deltas=deltas, signing_key=signed_repository / "key.pem")
    squash(tmp_path / "r", "m", until=3, deltas=deltas, signing_key=signed_repository / "key.pem")
    before = {path.name for path in paths[0].parent.glob("[0-9]*")}
    assert len(before) == 14  # each with its signature
    assert prune_squashed(bundle.parent, deltas=deltas, dry_run=True) == 4
    assert len({*paths[0].parent.glob("[0-9]*")}) == 14
    assert prune_squashed(bundle.parent, deltas=deltas) == 4
    remaining = {name for name in before if int(name[:12]) >= 4}
    assert len(remaining) == 6
    assert {path.name for path in paths[0].parent.glob("[0-9]*")} == remaining
    shutil.rmtree(paths[0].parent)
    DeltaStore(deltas).bring("m", paths[0].parent.name, 0, all_files=True)
    assert {path.name for path in paths[0].parent.glob("[0-9]*")} == remaining


def test_objects_with_other_names_are_ignored_and_gaps_are_kept(
    url: str, machine: Callable[[str], None], s3: S3, tmp_path: Path
) -> None:
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32)
    paths = [publish(bundle, url, number, [3]) for number in (1, 2, 3)]
    content = s3.get(key_of(url, paths[1]))
    s3.delete(key_of(url, paths[1]))
    for odd in ("000000000004.safetensors/x", "4.safetensors", "000000000004.tmp"):
        s3.put(key_of(url, paths[0]).replace(paths[0].name, odd), b"x")
    machine("second")
    assert brought(bundle, url) == [1, 3]
    with pytest.raises(PublishError, match="is missing, and 3 is there"):
        publish(bundle, url, 4, [3])
    s3.put(key_of(url, paths[1]), content)
    assert brought(bundle, url) == [1, 2, 3]
    assert publish(bundle, url, 4, [3]).stem == "000000000004"


def test_an_unreachable_store_is_reported_and_nothing_is_lost(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32)
    publish(bundle, url, 1, [3])
    address = "http://127.0.0.1:1"
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", address)
        with pytest.raises(ServerUnavailable, match="cannot be read or written"):
            publish(bundle, url, 2, [3])
    assert brought(bundle, url) == [1]
    assert publish(bundle, url, 2, [3]).stem == "000000000002"


def test_commands_that_read_deltas_read_those_of_a_store(
    url: str, machine: Callable[[str], None], tmp_path: Path
) -> None:
    """On a machine that has none of them: what changed is compared with them, and they are compacted."""
    model = collection(SUM)
    config = ExportConfig(dtype={"*": WeightDtype.INT8}, serving=ServingSettings(weights_memory="live"))
    export_model(model, tmp_path / "r", "m", config)
    random, deltas = np.random.default_rng(0), f"{url}.deltas"
    publish_delta(tmp_path / "r", "m", changed_rows(model, random, lambda rows: rows // 2), deltas=deltas)
    machine("second")
    assert publish_changes(tmp_path / "r", "m", model, deltas=deltas) is None
    changed_rows(model, random, lambda rows: rows // 3)
    delta = publish_changes(tmp_path / "r", "m", model, deltas=deltas)
    assert delta is not None
    assert delta.sequence == 2
    machine("third")
    said = tbe_export("compact", str(tmp_path / "r" / "m"), "--deltas", deltas)
    assert said.exit_code == 0, said.output
    assert "rows of version 1, and deltas up to 2; delta 3 is next" in said.output
    expected = Engine.open(export_model(model, tmp_path / "anew", "m", config))
    request = dict(random_bags(random, SUM, 20))
    answer, compacted = expected.lookup(request), Engine.open(tmp_path / "r" / "m" / "2").lookup(request)
    for name in answer:
        np.testing.assert_array_equal(compacted[name], answer[name])
    machine("fourth")
    changed_rows(model, random, lambda rows: rows // 3)
    export_next(model, tmp_path / "r", "m", config, deltas=deltas)
    assert brought(tmp_path / "r" / "m" / "1", url) == [1, 2, 3]  # what changed is a delta first
    said = tbe_export("prune", str(tmp_path / "r" / "m"), "--keep", "1", "--deltas", deltas)
    assert "removed, and 3 deltas that no version needs" in said.output
    machine("fifth")
    assert brought(tmp_path / "r" / "m" / "3", url) == []


@pytest.mark.promise(
    "A server is ready once it has applied all deltas of its store, and continues when the store is unreachable"
)
def test_a_server_applies_deltas_of_its_store_and_outlives_the_store(
    machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = f"s3://{BUCKET}/models"
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32)
    (tmp_path / "own").mkdir()
    with s3_server(tmp_path / "own") as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        list(push(bundle.parent, Store(url)))
        assert tbe_export("release", f"{url}/m", "1").exit_code == 0
        publish(bundle, url, 1, [3])
        machine("server")
        options = ("--follow", "--unload-after-s", "0", "--every-s", "0.3")
        with running(url, *options) as server, LookupClient(server.grpc, "m", PATIENCE_S) as client:

            def row(number: int) -> float:
                values = client.lookup({"x": [[number]]})["x"][0]
                assert len({*values.tolist()}) == 1
                return float(values[0])

            assert row(3) == 1  # ready is fresh
            machine("trainer")
            publish(bundle, url, 2, [3, 4])
            until(lambda: row(3) == 2, "the delta is applied")
            assert row(4) == 2
            # A version with the deltas in its rows goes on with the same ones.
            compact(tmp_path / "r", "m", deltas=f"{url}.deltas")
            publish(bundle, url, 3, [5], version=2)
            list(push(bundle.parent, Store(url)))
            assert tbe_export("release", f"{url}/m", "2").exit_code == 0
            until(lambda: metric(server, "tbe_delta_sequence", model="m", version="2") == 3, "the new one is served")
            assert (row(3), row(4), row(5)) == (2, 2, 3)
            # What is wrong in the store is named as that, not as the copy of it here.
            s3.put(f"models.deltas/m/{lineage(bundle).name}/000000000004.safetensors", b"bad")
            bad = f"{url}.deltas/m/{lineage(bundle).name}/000000000004.safetensors: expected"
            until(lambda: bad in page(server, "/readyz?verbose"), "the bad delta is named")
            s3.delete(f"models.deltas/m/{lineage(bundle).name}/000000000004.safetensors")
            until(lambda: "stopped" not in page(server, "/readyz?verbose"), "it is gone")
            assert f'tbe_store_read_timestamp_seconds{{store="{url}.deltas"}} 1' in scrape(server)
            s3.process.terminate()
            s3.process.wait()
            assert server.process.stderr is not None
            while "cannot pull deltas" not in (first := server.process.stderr.readline()):
                pass
            time.sleep(2)
            assert (row(3), row(5)) == (2, 3)
            server.process.terminate()
            lines = [first, *server.process.stderr]
            failures = [line.partition(" pull_failed: ")[2] for line in lines if " pull_failed: " in line]
            assert len(failures) == len({*failures}), failures  # each is said once, and not at each look
    # A server that starts now has what was brought before, and tells how old that is.
    machine("server")
    down = time.time() - 1
    with running(url, *options) as server, LookupClient(server.grpc, "m", PATIENCE_S) as client:
        assert client.lookup({"x": [[3], [5]]})["x"][:, 0].tolist() == [2, 3]
        assert metric(server, "tbe_store_read_timestamp_seconds", store=f"{url}.deltas") < down


def test_a_server_without_fetched_deltas_does_not_start_without_the_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who knows what there is?"""
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32)
    with s3_server(tmp_path) as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
    refused = tbe_serve("run", str(bundle.parent.parent), "--deltas", f"s3://{BUCKET}/models.deltas")
    assert (refused.returncode, "cannot be read or written" in refused.stderr) == (1, True)


def test_a_hanging_store_delays_neither_start_nor_stop(
    url: str, machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32)
    repository, deltas = bundle.parent.parent, f"{url}.deltas"
    publish(bundle, url, 1, [3])
    list(push(bundle.parent, Store(url)))
    machine("server")
    assert brought(bundle, url) == [1]
    with socket.create_server(("127.0.0.1", 0)) as hangs:  # the kernel takes connections, and nobody reads
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{hangs.getsockname()[1]}")
        monkeypatch.setenv("AWS_TIMEOUT", "1s")
        with (
            running(repository, "--deltas", deltas) as server,
            LookupClient(server.grpc, "m", PATIENCE_S) as client,
        ):
            assert client.lookup({"x": [[3]]})["x"][0, 0] == 1
        for arguments in ((str(repository), "--deltas", deltas), (url,)):
            with start_tbe_serve(*arguments, *FREE_PORTS) as process:
                time.sleep(4)  # it asks
                assert process.poll() is None
                process.send_signal(signal.SIGINT)
                assert process.wait(PATIENCE_S) != 0


def test_a_signature_that_may_not_be_removed_stays(
    url: str, machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, signed_repository: Path, tmp_path: Path
) -> None:
    """Of a publisher that was not the first, in a store where it may not delete."""
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32)
    key = signed_repository / "key.pem"
    store = DeltaStore(f"{url}.deltas")
    machine("second")
    publish(bundle, url, 1, [3], signing_key=key)

    def refused(*_: Any) -> None:
        raise obstore.exceptions.PermissionDeniedError("403")

    monkeypatch.setattr(obstore, "delete", refused)
    folder = store.folder / "m" / lineage(bundle).name
    folder.mkdir(parents=True)
    path = delta_path(folder, 1)
    assert not store.add([(folder / f"000000000001.{'0' * 16}.sig", b"signed"), (path, b"another")])
    assert not path.exists()


@pytest.mark.long
def test_deltas_of_a_model_on_hosts_go_through_a_store(
    url: str, machine: Callable[[str], None], tmp_path: Path
) -> None:
    """Its repository is a folder, as one that a volume or an image has."""
    model, deltas = collection(SUM), f"{url}.deltas"
    config = ExportConfig(
        sharding=Sharding(ranks=2, ranks_per_host=1, types={"a": "row_wise", "b": "column_wise"}),
        serving=ServingSettings(weights_memory="live"),
    )
    router = export_hosts(tmp_path, model, config)
    random = np.random.default_rng(0)
    name = router.parent.name
    publish_delta(tmp_path / "r", name, changed_rows(model, random, lambda rows: rows // 2), deltas=deltas)
    machine("servers")
    with (
        running(tmp_path / "r", "--local-hosts", "--deltas", deltas) as server,
        LookupClient(server.grpc, name, PATIENCE_S) as client,
    ):
        machine("trainer")
        publish_delta(tmp_path / "r", name, changed_rows(model, random, lambda rows: rows // 2), deltas=deltas)
        memory = ExportConfig(sharding=config.sharding)
        request = dict(random_bags(random, SUM, 10))
        with Engine.open(in_one_process(tmp_path, model, memory, router)) as engine:
            answer = engine.lookup(request)
        deadline = time.monotonic() + PATIENCE_S
        while not all(np.array_equal(client.lookup(request)[name], answer[name]) for name in answer):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_folder_can_be_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32)
    url = f"file://{tmp_path}/models"
    publish(bundle, url, 1, [3])
    path = publish(bundle, url, 2, [3])
    shutil.rmtree(tmp_path / "first")
    assert brought(bundle, url) == [1, 2]
    there = tmp_path / "models.deltas" / "m" / lineage(bundle).name / path.name
    assert there.read_bytes() == path.read_bytes()


def test_the_command_says_where_in_the_store_a_delta_is(url: str, tmp_path: Path) -> None:
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32)
    save_file({"t/ids": np.array([3]), "t/rows": np.ones((1, DIM), np.float32)}, tmp_path / "rows.safetensors")
    said = tbe_export(
        "delta", str(bundle.parent), "--rows", str(tmp_path / "rows.safetensors"), "--deltas", f"{url}.deltas"
    )
    assert said.exit_code == 0, said.output
    assert said.output == (
        f"{url}.deltas/m/{lineage(bundle).name}/000000000001.safetensors: 1 row, delta 1 of version 1\n"
    )
    said = tbe_export(
        "delta", str(bundle.parent), "--rows", str(tmp_path / "rows.safetensors"), "--deltas", f"{url}.deltas/"
    )
    assert said.output.startswith(f"{url}.deltas/m/{lineage(bundle).name}/000000000002.safetensors: ")
