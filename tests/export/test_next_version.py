"""The next version of a lineage: byte for byte what an export of the changed model writes, and rows rolled back."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from msgspec.structs import replace as replace_struct
from torchrec import EmbeddingBagCollection

from export import (
    ExportConfig,
    ExportError,
    OutputDtype,
    Sharding,
    WeightDtype,
    compact,
    export_model,
    export_next,
    publish_changes,
    publish_delta,
    squash,
)
from export.config import Progress
from export.errors import PublishError
from export.parity.verify import verify
from export.publish import delta
from export.publish.lineage import Lineage, PublishedDelta
from export.publish.published import prune
from serving.bundle import Bundle, open_bundle
from serving.bundle.lineage import delta_path, deltas_folder
from serving.bundle.scores import SCORES
from serving.bundle.signature import TrustedKeys
from serving.engine import Engine
from serving.errors import BundleError, ConfigurationError, ServingError
from serving.model.settings import ServingSettings
from tests.support.commands import tbe_export
from tests.support.deltas import listed
from tests.support.hosts import MODEL, edit_manifest, export_hosts
from tests.support.managed_collision import dealt
from tests.support.models import MIXED, MIXED_CONFIG, SUM, collection
from tests.support.mutable_tables import changed_rows
from tests.support.ranker import Ranker, ranker

CONFIG = ExportConfig(
    dtype=MIXED_CONFIG.dtype,
    id_policy=MIXED_CONFIG.id_policy,
    sharding=Sharding(
        ranks=2,
        types={"user": "column_wise", "item": "row_wise", "genre": "data_parallel", "word": "table_wise"},
    ),
)


def weights_of(bundle: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(bundle.glob("weights.*.bin"))}


def names(bundle: Bundle) -> str:
    return bundle.lineage


def ones(rows: int = 1, dim: int = 8) -> npt.NDArray[np.float32]:
    return np.ones((rows, dim), np.float32)


@pytest.mark.promise(
    "A version compacted from a version and its deltas equals an export of the changed model byte for byte"
)
def test_a_compacted_version_equals_an_export_of_the_changed_model(tmp_path: Path) -> None:
    """Of all dtypes, in all ways to cut tables; and its lineage goes on."""
    model = collection(MIXED)
    r = tmp_path / "r"
    first = open_bundle(export_model(model, r, "m", CONFIG))
    for seed in range(3):
        publish_delta(r, "m", changed_rows(model, np.random.default_rng(seed), lambda rows: rows // 3))
    steps: list[Progress] = []
    second = open_bundle(compact(r, "m", progress=steps.append))
    assert second.path.name == "2"
    assert [step.done for step in steps] == sorted(step.done for step in steps)
    assert (steps[-1].done, {step.total for step in steps}) == (steps[-1].total, {steps[-1].total})
    assert weights_of(second.path) == weights_of(export_model(model, tmp_path / "anew", "m", CONFIG))
    assert second.manifest.compacted is not None
    assert (names(second), second.manifest.sequence) == (names(first), 3)
    assert publish_changes(r, "m", model) is None
    fourth = publish_delta(r, "m", changed_rows(model, np.random.default_rng(4), lambda _: 2))
    assert (fourth.sequence, fourth.version) == (4, 2)
    third = open_bundle(compact(r, "m"))  # of what was compacted, and of version 1 with all deltas
    assert weights_of(third.path) == weights_of(compact(r, "m", version=1))
    assert (names(third), third.manifest.sequence) == (names(first), 4)
    assert publish_changes(r, "m", model) is None


@pytest.mark.promise("Rolled-back rows take no later delta of the training that made them")
def test_rows_are_rolled_back_by_a_version_that_takes_no_later_delta(tmp_path: Path) -> None:
    model = collection(SUM)
    r = tmp_path / "r"
    first = open_bundle(export_model(model, r, "m"))
    before = weights_of(first.path)
    publish_delta(r, "m", changed_rows(model, np.random.default_rng(0), lambda _: 5))
    right = weights_of(export_model(model, tmp_path / "anew", "m"))
    publish_delta(r, "m", changed_rows(model, np.random.default_rng(1), lambda _: 5))  # a bad one
    second = open_bundle(compact(r, "m", version=1, until=1))
    assert weights_of(second.path) == right
    assert second.manifest.compacted is None
    assert names(second) != names(first)
    assert publish_delta(r, "m", {"a": ([0], ones())}).sequence == 1
    assert weights_of(compact(r, "m", version=1, until=0)) == before
    said = tbe_export("compact", str(r / "m"), "--version", "1", "--until", "2").stdout
    assert said == f"{r / 'm' / '4'}: rows of version 1, and deltas up to 2; it begins a lineage of its own\n"
    said = tbe_export("compact", str(r / "m"), "--version", "2").stdout
    assert said.endswith("rows of version 2, and deltas up to 1; delta 2 is next\n")


def test_scores_are_those_of_the_changed_rows(tmp_path: Path) -> None:
    model = ranker()
    r = tmp_path / "r"
    export_model(model, r, "m", ExportConfig(scores=True))
    publish_delta(r, "m", changed_rows(model.embeddings, np.random.default_rng(0), lambda rows: rows))
    request = {"x": [[1, 2], [3]], "y": [[4], []], "z": [[5], [6]]}
    dense = {"user": np.ones((2, 3), np.float32), "item": np.ones((2, 2), np.float32)}
    scores = Engine.open(compact(r, "m")).score(request, dense)
    expected = Engine.open(export_model(model, tmp_path / "anew", "m", ExportConfig(scores=True))).score(
        request, dense
    )
    for name, numbers in expected.items():
        np.testing.assert_array_equal(scores[name], numbers)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_pruning_removes_deltas_that_no_version_needs(elsewhere: bool, tmp_path: Path) -> None:
    r = tmp_path / "r"
    where = tmp_path / "elsewhere" if elsewhere else None
    first = open_bundle(export_model(collection(SUM), r, "m"))
    folder = (where or deltas_folder(r)) / "m" / names(first)
    for row in range(4):
        publish_delta(r, "m", {"a": ([row], ones())}, deltas=where)
        if row == 2:
            compact(r, "m", deltas=where)
    (folder / "000000000002.0123456789abcdef.sig").touch()
    rows = weights_of(compact(r, "m", version=1, deltas=where))
    shutil.rmtree(r / "m" / "3")
    assert [fate.version for fate in prune(r / "m", 2, deltas=where)] == [2, 1]
    assert listed(folder) == [1, 2, 3, 4]  # version 1 needs them
    for dry_run in (True, False):
        fates = [(fate.kept_because, fate.deltas) for fate in prune(r / "m", 1, dry_run=dry_run, deltas=where)]
        assert fates == [("among the newest 1", 0), (None, 3)]
    assert [path.name for path in folder.iterdir()] == ["000000000004.safetensors"]
    assert weights_of(compact(r, "m", deltas=where)) == rows
    assert publish_delta(r, "m", {"a": ([9], ones())}, deltas=where).sequence == 5
    [*prune(r / "m", 1, deltas=where)]
    assert listed(folder) == [5]
    compact(r, "m", until=5, deltas=where)  # of a lineage of its own
    [*prune(r / "m", 1, deltas=where)]
    assert not folder.exists()


def test_a_failed_compaction_names_its_cause_and_leaves_nothing(tmp_path: Path) -> None:
    r = tmp_path / "r"
    bundle = export_model(collection(SUM), r, "m")

    def refusal(error: type[ServingError | ExportError], **options: Any) -> str:
        with pytest.raises(error) as refused:
            compact(r, "m", **options)
        assert sorted(path.name for path in (r / "m").iterdir()) == ["1", "config.pbtxt"]
        assert {path.name for path in tmp_path.iterdir()} <= {"r", "r.deltas"}
        return str(refused.value)

    assert "expected deltas of" in refusal(PublishError)
    paths = [publish_delta(r, "m", {"a": ([row], ones())}).path for row in range(3)]
    assert "until: expected a delta of" in refusal(ConfigurationError, until=4)
    content = paths[1].read_bytes()
    paths[1].unlink()
    assert f"{paths[1]}: is missing" in refusal(PublishError)
    paths[1].write_bytes(content[:-1])
    assert str(paths[1]) in refusal(BundleError)
    paths[1].write_bytes(content)
    weights = bundle / "weights.0.bin"
    damaged = bytearray(weights.read_bytes())
    damaged[100] ^= 1
    weights.write_bytes(damaged)
    assert "weights.0.bin" in refusal(BundleError)


HOSTS_OF_TWO = ExportConfig(sharding=Sharding(ranks=2, ranks_per_host=1, types={"a": "row_wise", "b": "column_wise"}))
ON_HOSTS = replace(HOSTS_OF_TWO, sharding=replace(HOSTS_OF_TWO.sharding, hosts_as_models=True))
HOSTS = replace(CONFIG, sharding=replace(CONFIG.sharding, ranks=3, ranks_per_host=1))


def bundles(repository: Path, version: int) -> dict[str, Path]:
    """Of a router and its hosts, by model."""
    return {model.name: model / str(version) for model in repository.iterdir() if (model / str(version)).exists()}


@pytest.mark.promise(
    "A version compacted from a version and its deltas equals an export of the changed model byte for byte"
)
def test_a_compacted_version_over_hosts_equals_an_export_of_the_model(tmp_path: Path) -> None:
    """The router's and each host's; and their lineages go on."""
    model = collection(MIXED)
    r = tmp_path / "r"
    export_hosts(tmp_path, model, HOSTS)
    first = {name: open_bundle(path) for name, path in bundles(r, 1).items()}
    assert len(first) == 4
    for seed in range(3):
        publish_delta(r, MODEL, changed_rows(model, np.random.default_rng(seed), lambda rows: rows // 3))
    assert compact(r, MODEL) == r / MODEL / "2"
    export_hosts(tmp_path / "anew", model, HOSTS)
    anew, second = bundles(tmp_path / "anew" / "r", 1), bundles(r, 2)
    assert second.keys() == first.keys() == anew.keys()
    for name, path in second.items():
        assert weights_of(path) == weights_of(anew[name])
        assert names(open_bundle(path)) == names(first[name])
        assert open_bundle(path).manifest.sequence == 3
    verification = verify(second[MODEL])
    assert (verification.absent, verification.failures) == ((), ())
    for host in verification.bundle.manifest.hosts:
        assert (host.version, host.lineage) == (2, names(first[host.model]))
    assert publish_changes(r, MODEL, model) is None
    fourth = publish_delta(r, MODEL, changed_rows(model, np.random.default_rng(4), lambda _: 2))
    assert (fourth.sequence, fourth.version) == (4, 2)
    for name, path in bundles(r, 2).items():
        assert listed(deltas_folder(r) / name / names(open_bundle(path))) == [1, 2, 3, 4]
    compact(r, MODEL)  # of what was compacted, and of version 1 with all deltas, which are squashed
    squash(r, MODEL, version=1)
    for name, path in bundles(r, 2).items():
        for number in range(1, 5):
            delta_path(deltas_folder(r) / name / names(open_bundle(path)), number).unlink()
    compact(r, MODEL, version=1)
    for name, path in bundles(r, 3).items():
        assert weights_of(path) == weights_of(r / name / "4")
    assert publish_changes(r, MODEL, model) is None


def test_rows_on_hosts_are_rolled_back(tmp_path: Path) -> None:
    model = collection(SUM)
    r = tmp_path / "r"
    export_hosts(tmp_path, model, HOSTS_OF_TWO)
    publish_delta(r, MODEL, changed_rows(model, np.random.default_rng(0), lambda _: 5))
    export_hosts(tmp_path / "anew", model, HOSTS_OF_TWO)
    publish_delta(r, MODEL, changed_rows(model, np.random.default_rng(1), lambda _: 5))  # a bad one
    compact(r, MODEL, until=1)
    for name, path in bundles(r, 2).items():
        assert weights_of(path) == weights_of(tmp_path / "anew" / "r" / name / "1")
        assert open_bundle(path).manifest.compacted is None
        assert names(open_bundle(path)) != names(open_bundle(r / name / "1"))
    assert publish_delta(r, MODEL, {"a": ([0], ones())}).sequence == 1
    for host in open_bundle(r / MODEL / "2").manifest.hosts:
        assert host.lineage is None


def test_a_missing_or_damaged_host_delta_leaves_no_version_on_any_host(tmp_path: Path) -> None:
    model = collection(SUM)
    r = tmp_path / "r"
    export_hosts(tmp_path, model, HOSTS_OF_TWO)
    publish_delta(r, MODEL, {"a": ([0, 49], ones(2))})
    (name, _) = sorted(path.name for path in r.iterdir() if path.name != MODEL)
    (delta,) = (deltas_folder(r) / name).rglob("*.safetensors")
    content = delta.read_bytes()
    delta.write_bytes(content[:-1])
    with pytest.raises(BundleError, match=re.escape(str(delta))):
        compact(r, MODEL)
    delta.unlink()
    with pytest.raises(PublishError, match=re.escape(f"{delta}: is missing: restore it")):
        compact(r, MODEL)
    delta.write_bytes(content)
    host = (r / name).rename(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match=rf"{name}/1/manifest.json: cannot be read"):
        compact(r, MODEL)
    assert bundles(r, 2) == {}
    assert {path.name for path in tmp_path.iterdir()} == {"r", "r.deltas", "elsewhere"}
    host.rename(r / name)
    compact(r, MODEL)
    assert bundles(r, 2).keys() == bundles(r, 1).keys()
    hosts = open_bundle(r / MODEL / "2").manifest.hosts
    edit_manifest(r / MODEL / "2", hosts=[replace_struct(host, lineage="0" * 32) for host in hosts])
    with pytest.raises(BundleError, match=f"expected the lineage {'0' * 32}, which .* names"):
        compact(r, MODEL, until=1)


@pytest.mark.promise("`compact` and `squash` sign nothing that was not signed")
def test_compaction_signs_nothing_that_was_not_signed(tmp_path: Path) -> None:
    for name in ("key", "other"):
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", tmp_path / f"{name}.pem"], check=True)
        subprocess.run(
            ["openssl", "pkey", "-in", tmp_path / f"{name}.pem", "-pubout", "-out", tmp_path / f"{name}.pub"],
            check=True,
        )
    key, other = tmp_path / "key.pem", tmp_path / "other.pem"
    r = tmp_path / "r"
    export_model(collection(SUM), r, "m", signing_key=key)
    publish_delta(r, "m", {"a": ([0], ones())}, signing_key=key)
    open_bundle(compact(r, "m", signing_key=key), TrustedKeys.read(tmp_path / "key.pub"))
    with pytest.raises(BundleError, match="expected a signature by a key of"):
        compact(r, "m", version=1, signing_key=other)
    compact(r, "m", version=1, signing_key=other, trusted_keys=tmp_path / "key.pub")
    unsigned = publish_delta(r, "m", {"a": ([0], ones())}, version=2)
    with pytest.raises(BundleError, match=rf"{unsigned.path.stem}\.[0-9a-f]+\.sig: cannot be read"):
        compact(r, "m", version=2, signing_key=key)


def test_rows_changed_by_many_deltas_are_those_of_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what came before is let go of meanwhile."""
    monkeypatch.setattr(delta, "_LEAST_ROWS", 4)
    model = collection(SUM)
    export_model(model, tmp_path / "r", "m")
    for seed in range(8):
        publish_delta(tmp_path / "r", "m", changed_rows(model, np.random.default_rng(seed), lambda rows: rows // 2))
    assert publish_changes(tmp_path / "r", "m", model) is None


REQUEST = {"x": [[1, 2], [3]], "y": [[4], []], "z": [[5], [6]]}
DENSE = {"user": np.ones((2, 3), np.float32), "item": np.ones((2, 2), np.float32)}


def expect_scores(bundle: Path, model: Ranker, tmp_path: Path) -> None:
    """Those of an export of the model."""
    expected = Engine.open(export_model(model, tmp_path / "anew", "m", ExportConfig(scores=True)))
    scores = Engine.open(bundle).score(REQUEST, DENSE)
    for name, numbers in expected.score(REQUEST, DENSE).items():
        np.testing.assert_array_equal(scores[name], numbers)


def test_a_further_trained_dense_part_continues_the_lineage(tmp_path: Path) -> None:
    """Those that its training changed meanwhile are a delta, for both versions."""
    model = ranker()
    r = tmp_path / "r"
    first = open_bundle(export_model(model, r, "m", ExportConfig(scores=True)))
    with torch.no_grad():
        model.top.weight += 1
    second = open_bundle(export_next(model, r, "m", ExportConfig(scores=True)))
    assert (names(second), second.manifest.sequence) == (names(first), 0)
    assert not deltas_folder(r).exists()  # no row changed
    expect_scores(second.path, model, tmp_path)
    random = np.random.default_rng(0)
    publish_delta(r, "m", changed_rows(model.embeddings, random, lambda _: 3))
    with torch.no_grad():
        model.of_user.weight -= 1
    changed_rows(model.embeddings, random, lambda _: 3)
    third = open_bundle(export_next(model, r, "m", ExportConfig(scores=True)))
    assert (names(third), third.manifest.sequence) == (names(first), 2)
    expect_scores(third.path, model, tmp_path)
    for version in (1, 2):
        assert weights_of(compact(r, "m", version=version)) == weights_of(third.path)
    assert publish_delta(r, "m", {"a": ([0], ones())}).sequence == 3


def test_a_delta_published_concurrently_comes_first_in_the_lineage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = collection(SUM)
    r = tmp_path / "r"
    export_model(model, r, "m")
    changed_rows(model, np.random.default_rng(0), lambda _: 3)
    publish, deltas = Lineage.publish, []

    def after_another(lineage: Lineage, *arguments: Any) -> PublishedDelta:
        monkeypatch.setattr(Lineage, "publish", publish)
        deltas.append(publish_delta(r, "m", {"a": ([7], ones())}))
        return publish(lineage, *arguments)

    monkeypatch.setattr(Lineage, "publish", after_another)
    second = open_bundle(export_next(model, r, "m"))
    assert [other.sequence for other in deltas] == [1]
    assert second.manifest.sequence == 3  # the second does not have row 7
    assert weights_of(compact(r, "m", version=1)) == weights_of(second.path)


def test_an_export_that_cannot_continue_a_lineage_leaves_nothing(tmp_path: Path) -> None:
    r = tmp_path / "r"
    model = collection(SUM)
    export_model(model, r, "m")
    changed_rows(model, np.random.default_rng(0), lambda _: 3)
    with pytest.raises(ConfigurationError, match=r"expected the tables of .* with the same rows, columns, dtypes"):
        export_next(model, r, "m", ExportConfig(dtype={"a": WeightDtype.FP16}))
    assert sorted(path.name for path in (r / "m").iterdir()) == ["1", "config.pbtxt"]
    assert [path.name for path in tmp_path.iterdir()] == ["r"]
    with pytest.raises(PublishError, match="expected the schema of the versions already there"):
        export_next(model, r, "m", ExportConfig(output_dtype=OutputDtype.FP16))
    with pytest.raises(PublishError, match="exists; published versions are never changed"):
        export_next(model, r, "m", version=1)
    assert [path.name for path in tmp_path.iterdir()] == ["r"]  # no delta either


def test_a_dense_part_over_hosts_continues_the_lineage_of_each_host(tmp_path: Path) -> None:
    model = ranker()
    r = tmp_path / "r"
    config = replace(ON_HOSTS, scores=True, serving=ServingSettings(weights_memory="live"))
    export_model(model, r, MODEL, config)
    first = {name: open_bundle(path) for name, path in bundles(r, 1).items()}
    with torch.no_grad():
        model.top.weight += 1
    assert export_next(model, r, MODEL, config) == r / MODEL / "2"
    random = np.random.default_rng(0)
    publish_delta(r, MODEL, changed_rows(model.embeddings, random, lambda _: 3))
    with torch.no_grad():
        model.of_user.weight -= 1
    changed_rows(model.embeddings, random, lambda _: 3)
    export_next(model, r, MODEL, config)
    export_model(model, tmp_path / "anew" / "r", MODEL, config)
    for version, sequence in ((2, 0), (3, 2)):
        paths = bundles(r, version)
        assert paths.keys() == first.keys()
        for name, path in paths.items():
            bundle = open_bundle(path)
            assert (names(bundle), bundle.manifest.sequence) == (names(first[name]), sequence)
            for weights in bundle.manifest.weights_files:  # linked where no row of it had changed
                before = r / name / "1" / weights
                assert (path / weights).samefile(before) == ((path / weights).read_bytes() == before.read_bytes())
        verification = verify(paths[MODEL])
        assert (verification.absent, verification.failures) == ((), ())
        for host in verification.bundle.manifest.hosts:
            assert (host.version, host.lineage) == (version, names(first[host.model]))
    anew = bundles(tmp_path / "anew" / "r", 1)
    for name, path in bundles(r, 3).items():
        assert weights_of(path) == weights_of(anew[name])
        assert weights_of(r / name / "2") == weights_of(r / name / "1")
    assert (r / MODEL / "3" / SCORES).read_bytes() != (r / MODEL / "2" / SCORES).read_bytes()
    assert publish_delta(r, MODEL, {"a": ([0], ones())}).sequence == 3
    for name, path in bundles(r, 3).items():
        assert listed(deltas_folder(r) / name / names(open_bundle(path))) == [1, 2, 3]


def test_a_lineage_cannot_continue_with_another_sharding_or_dtype(tmp_path: Path) -> None:
    """Deltas are cut by host: those of one cut are not those of another."""
    model = collection(SUM)
    r = tmp_path / "r"
    export_model(model, r, MODEL, ON_HOSTS)
    changed_rows(model, np.random.default_rng(0), lambda _: 3)
    for other in (
        None,
        replace(ON_HOSTS, sharding=replace(ON_HOSTS.sharding, types={"a": "column_wise"})),
        replace(ON_HOSTS, dtype={"a": WeightDtype.FP16}),
    ):
        with pytest.raises(ConfigurationError, match=r"expected the tables of .*/1, sharded over the same hosts"):
            export_next(model, r, MODEL, other)
    export_model(model, r, "whole")
    with pytest.raises(ConfigurationError, match=r"expected the tables of .*/1, sharded over the same hosts"):
        export_next(model, r, "whole", ON_HOSTS)
    assert bundles(r, 2) == {}
    assert [path.name for path in tmp_path.iterdir()] == ["r"]  # no delta either


def test_tables_of_raw_ids_are_exported_whole_without_a_delta(tmp_path: Path) -> None:
    module = dealt()
    first = open_bundle(export_model(module, tmp_path / "r", "m"))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 1
    second = open_bundle(export_next(module, tmp_path / "r", "m"))
    assert names(second) == names(first)
    assert not deltas_folder(tmp_path / "r").exists()
    assert weights_of(second.path) != weights_of(first.path)


def test_the_command_continues_a_lineage(tmp_path: Path) -> None:
    r, model = tmp_path / "r", "tests.export.test_next_version:further"
    first = open_bundle(export_model(collection(SUM), r, "m"))
    command = "model", "--model", model, "--repository", str(r), "--name", "m"
    done = tbe_export(*command, "--continue-deltas", "--deltas", str(tmp_path / "elsewhere"))
    assert done.exit_code == 0, done.output
    second = open_bundle(r / "m" / "2")
    assert (names(second), second.manifest.sequence) == (names(first), 1)
    assert len(listed(tmp_path / "elsewhere" / "m" / names(first))) == 1
    assert "--deltas: expected --continue-deltas" in tbe_export(*command, "--deltas", str(tmp_path)).output


def further() -> EmbeddingBagCollection:
    model = collection(SUM)
    changed_rows(model, np.random.default_rng(0), lambda _: 3)
    return model
