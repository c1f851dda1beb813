"""A model whose pods bring it from an object store, run from generated manifests by podman. `make kube` runs this."""

from pathlib import Path
from typing import Any

import pytest

from export import export_model
from export.publish.push import push
from serving.client import LookupClient
from serving.engine import Engine
from serving.store import Store
from tests.support.commands import tbe_export
from tests.support.models import SUM, collection
from tests.support.pods import BRIDGE, Volumes, image, pods
from tests.support.s3 import BUCKET, S3, s3_server

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]


def test_a_pod_brings_its_model_from_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, bags = f"s3://{BUCKET}/models", {"x": [[1, 2], [3]]}
    bundle = export_model(collection(SUM), tmp_path / "r", "movies")
    export_model(collection(SUM, seed=1), tmp_path / "r", "other")
    arguments = ("--out", str(tmp_path / "k8s"), "--image", image(), "--store", url, "--insecure")
    assert (written := tbe_export("manifests", str(bundle.parent), *arguments)).exit_code == 0, written.stderr
    with pods(tmp_path / "k8s", {}, Volumes({}, {}), tmp_path / "playing") as every:
        (pod,) = every["movies"]
        with s3_server(tmp_path, host=BRIDGE) as s3:
            for name, value in s3.environment.items():
                monkeypatch.setenv(name, value)
            for model in ("movies", "other"):
                list(push(tmp_path / "r" / model, Store(url)))
            let_read(pod.manifest, s3)
            pod.play()
        pod.wait_until_ready()
        assert sorted(pod.files("/repository")) == ["movies"]
        assert sorted(pod.files("/repository/movies")) == ["1", "config.pbtxt"]
        with LookupClient(f"{pod.address}:8001", "movies", 5) as client:
            assert client.lookup(bags)["x"].tolist() == Engine.open(bundle).lookup(bags)["x"].tolist()


def let_read(manifest: Any, s3: S3) -> None:
    """What a patch of kustomize's does: the container that brings the model may read the store."""
    (container,) = [each for each in manifest["spec"]["initContainers"] if each["name"] == "pull"]
    container["env"] = [{"name": name, "value": value} for name, value in s3.environment.items()]
