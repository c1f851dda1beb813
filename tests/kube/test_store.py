"""Pods that bring a model and its deltas from an object store, or have deltas on a volume. `make kube` runs this."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import ExportConfig, export_model, publish_delta
from export.publish.push import push
from serving.bundle.load import open_bundle
from serving.client import LookupClient
from serving.engine import Engine
from serving.model.settings import ServingSettings
from serving.store import Store
from tests.support.commands import tbe_export
from tests.support.host_faults import until
from tests.support.models import SUM, collection
from tests.support.pods import BRIDGE, Volumes, image, pods
from tests.support.s3 import BUCKET, S3, s3_server

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]


def test_a_pod_brings_its_model_from_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, bags = f"s3://{BUCKET}/models", {"x": [[1, 2], [4]]}
    live = ExportConfig(serving=ServingSettings(weights_memory="live"))
    bundle = export_model(collection(SUM), tmp_path / "r", "movies", live)
    export_model(collection(SUM, seed=1), tmp_path / "r", "other")
    arguments = ("--out", str(tmp_path / "k8s"), "--image", image(), "--store", url, "--insecure")
    assert (written := tbe_export("manifests", str(bundle.parent), *arguments)).exit_code == 0, written.stderr
    with pods(tmp_path / "k8s", {}, Volumes({}, {}), tmp_path / "playing") as every:
        (pod,) = every["movies"]
        with s3_server(tmp_path, host=BRIDGE) as s3:
            for name, value in s3.environment.items():
                monkeypatch.setenv(name, value)
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
            for model in ("movies", "other"):
                list(push(tmp_path / "r" / model, Store(url)))
            change(bundle, 1, f"{url}.deltas")
            let_read(pod.manifest, s3)
            pod.play()
            pod.wait_until_ready()
            with LookupClient(f"{pod.address}:8001", "movies", 5) as client:
                assert {*client.lookup({"x": [[3]]})["x"][0].tolist()} == {1.0}  # ready is fresh
                change(bundle, 2, f"{url}.deltas")
                until(lambda: {*client.lookup({"x": [[3]]})["x"][0].tolist()} == {2.0}, "the delta is applied")
        assert sorted(pod.files("/repository")) == ["movies"]
        assert sorted(pod.files("/repository/movies")) == ["1", "config.pbtxt"]
        with LookupClient(f"{pod.address}:8001", "movies", 5) as client:
            assert client.lookup(bags)["x"].tolist() == Engine.open(bundle).lookup(bags)["x"].tolist()


def test_a_pod_applies_the_deltas_of_a_claim(tmp_path: Path) -> None:
    live = ExportConfig(serving=ServingSettings(weights_memory="live"))
    bundle, deltas = export_model(collection(SUM), tmp_path / "r", "movies", live), tmp_path / "r.deltas"
    change(bundle, 1, str(deltas))
    arguments = ("--out", str(tmp_path / "k8s"), "--image", image(), "--claim", "models", "--deltas-claim", "deltas")
    written = tbe_export("manifests", str(bundle.parent), *arguments, "--insecure")
    assert written.exit_code == 0, written.stderr
    volumes = Volumes({"models": tmp_path / "r", "deltas": deltas}, {})
    with pods(tmp_path / "k8s", {}, volumes, tmp_path / "playing") as every:
        (pod,) = every["movies"]
        pod.play()
        pod.wait_until_ready()
        with LookupClient(f"{pod.address}:8001", "movies", 5) as client:
            assert {*client.lookup({"x": [[3]]})["x"][0].tolist()} == {1.0}  # ready is fresh
            change(bundle, 2, str(deltas))
            until(lambda: {*client.lookup({"x": [[3]]})["x"][0].tolist()} == {2.0}, "the delta is applied")


def change(bundle: Path, number: float, deltas: str) -> None:
    """A delta of the row that `x` reads at 3, with that number in every element."""
    manifest = open_bundle(bundle).manifest
    of_key = zip((feature.key for feature in manifest.features), manifest.feature_tables, strict=True)
    table = dict(of_key)["x"]
    rows = np.full((1, table.dim), number, np.float32)
    publish_delta(bundle.parent.parent, "movies", {table.name: ([3], rows)}, deltas=deltas)


def let_read(manifest: Any, s3: S3) -> None:
    """What a patch of kustomize's does: the containers that bring the model and its deltas may read the store."""
    containers = [container for container in manifest["spec"]["initContainers"] if container["name"] == "pull"]
    for container in (*containers, *manifest["spec"]["containers"]):
        container["env"] += [{"name": name, "value": value} for name, value in s3.environment.items()]
