"""Deltas behind a real server: fresh rows within a second, through recoveries, switches, and what cannot be applied."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from export import ExportConfig, Sharding, WeightDtype, compact, export_model, publish_changes, publish_delta
from export.publish.published import prune
from serving.client import LookupClient
from serving.engine import Engine
from serving.errors import ServingError
from serving.model.settings import ServingSettings, WeightsMemory
from tests.support.commands import tbe_export
from tests.support.models import MIXED, MIXED_CONFIG, collection, random_bags
from tests.support.mutable_tables import PATIENCE_S, changed_rows, publish_number, published
from tests.support.servers import Running, metric, page, running, stubs, tbe_serve, wait_for_answer

DIM = 16
# A copy that no model has used for so long is removed, in seconds (serving/tables/delta_writer.py).
UNUSED_S = 10.0


def wait_for_number(client: LookupClient, number: float, row: int = 3) -> None:
    """Until the row has that number in every element."""
    deadline = time.monotonic() + PATIENCE_S
    while (answered := client.lookup({"x": [[row]]})["x"][0]).tolist() != [number] * DIM:
        assert time.monotonic() < deadline, answered
        time.sleep(0.01)


def wait_for_page(server: Running, path: str, text: str) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while text not in (body := page(server, path)):
        assert time.monotonic() < deadline, text
        time.sleep(0.05)
    return body


def test_answers_are_those_of_an_export_of_the_changed_model(tmp_path: Path) -> None:
    """Bit for bit: of all dtypes, with rows, columns and copies on two ranks, by two instances."""
    model = collection(MIXED)
    plan = {"user": "column_wise", "item": "row_wise", "genre": "data_parallel", "word": "table_wise"}
    config = ExportConfig(
        dtype=MIXED_CONFIG.dtype,
        id_policy=MIXED_CONFIG.id_policy,
        sharding=Sharding(ranks=2, types=plan),
        serving=ServingSettings(weights_memory="live", instances=2),
    )
    export_model(model, tmp_path / "r", "m", config)
    random = np.random.default_rng(0)
    changes = [changed_rows(model, random, lambda rows: rows // 3) for _ in range(3)]
    expected = Engine.open(export_model(model, tmp_path / "anew", "m", config))
    requests = [dict(random_bags(random, MIXED, 20)) for _ in range(10)]
    answers = [expected.lookup(request) for request in requests]
    for changed in changes[:2]:  # before the server is there
        publish_delta(tmp_path / "r", "m", changed)
    with running(tmp_path / "r") as server, LookupClient(server.grpc, "m", 60) as client:
        assert metric(server, "tbe_delta_sequence", model="m", version="1") == 2
        publish_delta(tmp_path / "r", "m", changes[2])
        wait_for_page(server, "/metrics", 'tbe_delta_sequence{model="m",version="1"} 3\n')
        for request, answer in zip(requests * 2, answers * 2, strict=True):
            updated = client.lookup(request)
            for name in answer:
                np.testing.assert_array_equal(updated[name], answer[name])
        rows = sum(len(ids) for changed in changes for ids, _ in changed.values())
        assert metric(server, "tbe_delta_rows_total", model="m", version="1") == rows
        assert publish_changes(tmp_path / "r", "m", model) is None  # all rows are there


@pytest.mark.promise("A restarted model process or tritonserver finds the mutable tables with all deltas")
def test_a_restarted_model_process_finds_the_copy_with_all_deltas(tmp_path: Path) -> None:
    """It need not be copied again: `tbe-serve run` holds it, and tritonserver may die, too."""
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32)
    with running(tmp_path / "r") as server, LookupClient(server.grpc, "m", 60) as client:
        publish_number(bundle, 7, [3, 4], DIM)
        wait_for_number(client, 7)
        (copy,) = copies_of(server)
        inode, unused_s = copy.stat().st_ino, []
        for processes in (stubs(server.triton, "m"), [server.triton]):
            killed_at = time.monotonic()
            for process in processes:
                process.kill()
            wait_for_answer(client)
            wait_for_number(client, 7)
            unused_s.append(time.monotonic() - killed_at)
        publish_number(bundle, 8, [3], DIM)
        wait_for_number(client, 8)
        assert client.lookup({"x": [[4]]})["x"][0, 0] == 7
        # On a machine that takes longer to start a process, the copy has been removed, and is made again.
        assert copy.stat().st_ino == inode or max(unused_s) > UNUSED_S


def copies_of(server: Running) -> list[Path]:
    """The live copies that the processes of the server's models have mapped."""
    paths = set()
    for stub in stubs(server.triton, "m"):
        paths |= {mapping.path for mapping in stub.memory_maps() if "tbe-live-" in mapping.path}
    return [Path(path) for path in sorted(paths)]


@pytest.mark.promise("A delta that cannot be applied is named and stops later deltas, and the model keeps serving")
def test_an_inapplicable_delta_stops_later_ones_and_is_named(tmp_path: Path) -> None:
    """The model serves on, a server that starts meanwhile, too; when another takes its place, all go on."""
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32)
    with running(tmp_path / "r") as server, LookupClient(server.grpc, "m", 60) as client:
        publish_number(bundle, 1, [3], DIM)
        wait_for_number(client, 1)
        for number in (2, 3):
            publish_number(bundle, number, [3], DIM)
            wait_for_number(client, number)
        (folder,) = (tmp_path / "r.deltas" / "m").iterdir()
        bad = folder / "000000000004.safetensors"
        bad.write_bytes((folder / "000000000003.safetensors").read_bytes())
        said = wait_for_page(server, "/readyz?verbose", "stopped: ")
        assert said.startswith(
            f"ready\nstopped: m 1: deltas are applied up to 3: {bad}: expected delta 4 of lineage "
        )
        publish_number(bundle, 5, [3], DIM)
        assert metric(server, "tbe_delta_stopped", model="m") == 1
        assert metric(server, "tbe_delta_refused_total", model="m") == 1
        assert client.lookup({"x": [[3]]})["x"][0, 0] == 3
        assert f"m 1  no further delta is applied: {bad}: expected" in tbe_serve("status", server.grpc).stdout
        (model,) = json.loads(tbe_serve("status", server.grpc, "--json").stdout)["models"]
        assert model["versions"][0]["deltas"].items() >= {"sequence": 3, "rows": 3}.items()
        with running(tmp_path / "r") as other, LookupClient(other.grpc, "m", 60) as other_client:
            assert other_client.lookup({"x": [[3]]})["x"][0, 0] == 3
        bad.unlink()
        wait_for_page(server, "/readyz?verbose", f"{bad} is missing, and 5 is there\n")
        (folder / "000000000005.safetensors").unlink()
        publish_number(bundle, 4, [3], DIM)
        wait_for_number(client, 4)


def test_a_version_has_its_own_copy_and_its_own_deltas(tmp_path: Path) -> None:
    """Until it is unloaded. What is published for another version does not change it."""
    first = published(tmp_path, 100, DIM, WeightDtype.FP32)
    publish_number(first, 1, [3], DIM)
    with running(tmp_path / "r") as server, LookupClient(server.grpc, "m", 60) as client:
        wait_for_number(client, 1)
        second = published(tmp_path, 100, DIM, WeightDtype.FP32)
        assert second.name == "2"
        publish_number(second, 20, [3], DIM)
        publish_number(first, 2, [3], DIM)
        wait_for_number(client, 2)
        (old,) = copies_of(server)
        assert tbe_serve("load", "m", "--url", server.grpc).stdout == "m: version 1 → 2\n"
        wait_for_number(client, 20)
        publish_number(first, 3, [3], DIM)
        publish_number(second, 21, [3], DIM)
        wait_for_number(client, 21)
        deadline = time.monotonic() + PATIENCE_S
        while old.exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        (new,) = copies_of(server)
    assert not new.exists()


@pytest.mark.promise("A compacted version continues after the deltas that it contains")
def test_a_compacted_version_continues_after_the_deltas_in_it(tmp_path: Path) -> None:
    """They are pruned; a delta writer that is killed, and a server that starts, do without them."""
    first = published(tmp_path, 100, DIM, WeightDtype.FP32)
    for number in (1, 2):
        publish_number(first, number, [3], DIM)
    with running(tmp_path / "r") as server, LookupClient(server.grpc, "m", 60) as client:
        second = compact(tmp_path / "r", "m")
        assert tbe_serve("load", "m", "--url", server.grpc).stdout == "m: version 1 → 2\n"
        wait_for_number(client, 2)
        deadline = time.monotonic() + PATIENCE_S
        while [*prune(tmp_path / "r" / "m", 1)][-1].kept_because is not None:  # until tritonserver has let it go
            assert time.monotonic() < deadline
            time.sleep(0.1)
        (writer,) = (
            child
            for child in psutil.Process(server.process.pid).children()
            if "serving.tables.delta_writer" in child.cmdline()
        )
        writer.kill()
        publish_number(second, 3, [3], DIM)
        wait_for_number(client, 3)
        assert metric(server, "tbe_delta_sequence", model="m", version="2") == 3
    assert [path.name for path in sorted(tmp_path.glob("r.deltas/m/*/*"))] == ["000000000003.safetensors"]
    with running(tmp_path / "r") as server, LookupClient(server.grpc, "m", 60) as client:
        wait_for_number(client, 3)
        assert metric(server, "tbe_delta_sequence", model="m", version="2") == 3


def test_only_deltas_that_a_trusted_key_signed_are_applied(tmp_path: Path) -> None:
    for name in ("key", "other"):
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", tmp_path / f"{name}.pem"], check=True)
    trusted = tmp_path / "trusted.pem"
    subprocess.run(["openssl", "pkey", "-in", tmp_path / "key.pem", "-pubout", "-out", trusted], check=True)
    config = ExportConfig(serving=ServingSettings(weights_memory="live"))
    export_model(collection(MIXED[:1]), tmp_path / "r", "m", config, signing_key=tmp_path / "key.pem")
    (spec,) = MIXED[:1]

    def publish(number: int, key: str | None) -> Path:
        rows = np.full((1, spec.dim), number, np.float32)
        signing_key = None if key is None else tmp_path / f"{key}.pem"
        return publish_delta(tmp_path / "r", "m", {spec.name: ([3], rows)}, signing_key=signing_key).path

    publish(1, "key")
    options = "--trusted-keys", str(trusted)
    with running(tmp_path / "r", *options) as server, LookupClient(server.grpc, "m", 60) as client:
        assert client.lookup({"user_id": [[3]]})["user_id"][0, 0] == 1
        for key, said in ((None, "cannot be read"), ("other", "expected a signature by a key of")):
            bad = publish(2, key)
            body = wait_for_page(server, "/readyz?verbose", said)
            assert "deltas are applied up to 1: " in body
            assert client.lookup({"user_id": [[3]]})["user_id"][0, 0] == 1
            bad.unlink()
        publish(3, "key")
        wait_for_page(server, "/metrics", 'tbe_delta_sequence{model="m",version="1"} 2\n')
        assert client.lookup({"user_id": [[3]]})["user_id"][0, 0] == 3
        # Keys are changed while it runs.
        other = subprocess.run(
            ["openssl", "pkey", "-in", tmp_path / "other.pem", "-pubout"], check=True, capture_output=True
        )
        publish(4, "other")
        wait_for_page(server, "/readyz?verbose", "expected a signature by a key of")
        trusted.write_bytes(trusted.read_bytes() + other.stdout)
        wait_for_page(server, "/metrics", 'tbe_delta_sequence{model="m",version="1"} 3\n')
        assert client.lookup({"user_id": [[3]]})["user_id"][0, 0] == 4
        # A signature may be brought behind its delta.
        shutil.copytree(tmp_path / "r.deltas", tmp_path / "elsewhere")
        rows = {spec.name: ([3], np.full((1, spec.dim), 5, np.float32))}
        key_file = tmp_path / "key.pem"
        late = publish_delta(tmp_path / "r", "m", rows, deltas=tmp_path / "elsewhere", signing_key=key_file).path
        shutil.copy(late, bad.parent)
        wait_for_page(server, "/readyz?verbose", "cannot be read")
        (signature,) = late.parent.glob(f"{late.stem}.*.sig")
        shutil.copy(signature, bad.parent)
        wait_for_page(server, "/metrics", 'tbe_delta_sequence{model="m",version="1"} 4\n')
        assert client.lookup({"user_id": [[3]]})["user_id"][0, 0] == 5


def test_live_without_a_server_is_refused_by_name(tmp_path: Path) -> None:
    bundle = published(tmp_path, 100, DIM, WeightDtype.FP32)
    with pytest.raises(ServingError, match="weights-memory 'live': deltas are applied by `tbe-serve run`"):
        Engine.open(bundle, memory=WeightsMemory.LIVE)


def test_the_command_publishes_rows_and_what_changed(tmp_path: Path) -> None:
    live = ExportConfig(serving=ServingSettings(weights_memory="live"))
    bundle = export_model(collection(), tmp_path / "r", "m", live)
    rows = {"user/ids": np.array([5, 2]), "user/rows": np.ones((2, 16), np.float32)}
    save_file(rows, tmp_path / "rows.safetensors")
    done = tbe_export("delta", str(bundle.parent), "--rows", str(tmp_path / "rows.safetensors"))
    assert done.exit_code == 0, done.output
    assert "000000000001.safetensors: 2 rows, delta 1 of version 1" in done.output
    # The module's own rows differ from the delta's, and from nothing else.
    done = tbe_export("delta", str(bundle.parent), "--model", "tests.support.models:collection")
    assert "000000000002.safetensors: 2 rows, delta 2 of version 1" in done.output
    done = tbe_export("delta", str(bundle.parent), "--model", "tests.support.models:collection")
    assert "no row differs from the stored ones; nothing was published" in done.output
    (folder,) = (tmp_path / "r.deltas" / "m").iterdir()
    assert "deltas: 2, up to 2, " in " ".join(tbe_export("inspect", str(bundle)).output.split())
    # Versions take their deltas with them.
    export_model(collection(), tmp_path / "r", "m")
    publish_delta(tmp_path / "r", "m", {"user": ([1], np.ones((1, 16), np.float32))})
    assert tbe_export("prune", str(bundle.parent), "--keep", "1").stderr == ""
    (tmp_path / "r.deltas").rename(tmp_path / "elsewhere")
    assert (
        "its deltas are not beside the repository, and are kept: name their folder with --deltas"
        in tbe_export("prune", str(bundle.parent), "--keep", "1").stderr
    )
    (tmp_path / "elsewhere").rename(tmp_path / "r.deltas")
    (remaining,) = (tmp_path / "r.deltas" / "m").iterdir()
    assert remaining != folder
    for wrong, said in (
        ((), "expected either --rows or --model"),
        (("--rows", str(bundle.parent / "config.pbtxt")), "expected safetensors"),
        (("--model", "tests.support.models:summed"), "expected the tables of"),
        (("--rows", str(tmp_path / "rows.safetensors"), "--max-error", "user"), "expected TABLE=X"),
        (("--rows", str(tmp_path / "rows.safetensors"), "--version", "9"), "cannot be read"),
    ):
        done = tbe_export("delta", str(bundle.parent), *wrong)
        assert done.exit_code == 1
        assert said in " ".join(done.output.split())
