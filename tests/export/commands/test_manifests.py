"""`tbe-export manifests`."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from export import ExportConfig, export_model
from serving.bundle.signature import read_signing_key, sign
from serving.model.settings import ServingSettings
from tests.export.kubernetes.conftest import IMAGE
from tests.support.commands import tbe_export
from tests.support.models import SUM, collection


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("ours", "theirs"):
        key = folder / f"{name}.key"
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
        subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", folder / f"{name}.pem"], check=True)
    return folder


@pytest.fixture(scope="module")
def signed(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signed model."""
    repository = tmp_path_factory.mktemp("signed") / "repository"
    return export_model(collection(SUM), repository, "m", signing_key=keys / "ours.key").parent


def options_for(out: Path, *more: str) -> list[str]:
    return ["--out", str(out), "--image", IMAGE, "--claim", "models", *more]


def test_the_command_writes_a_base_and_lists_what_it_needs(signed: Path, keys: Path, tmp_path: Path) -> None:
    out = tmp_path / "k8s"
    done = tbe_export("manifests", str(signed), *options_for(out, "--trusted-keys", str(keys / "ours.pem")))
    assert done.exit_code == 0, done.stderr
    assert f"kubectl apply -k {out}" in done.stdout
    assert "needed: PersistentVolumeClaim models" in done.stdout
    assert "needed: Secret m-tls" in done.stdout
    assert 'pods labelled m-client: "true" may call m:8001' in done.stdout
    assert yaml.safe_load((out / "kustomization.yaml").read_text())["resources"] == [
        "lookup.yaml",
        "trusted-keys.yaml",
    ]
    config_map = yaml.safe_load((out / "trusted-keys.yaml").read_text())
    assert config_map["data"]["trusted.pem"] == (keys / "ours.pem").read_text()


def test_a_bundle_without_a_trusted_signature_is_not_deployed(signed: Path, keys: Path, tmp_path: Path) -> None:
    out = tmp_path / "k8s"
    done = tbe_export("manifests", str(signed), *options_for(out, "--trusted-keys", str(keys / "theirs.pem")))
    assert done.exit_code == 1
    assert "expected a signature by a key of" in done.stderr
    assert not out.exists()


def test_a_signed_bundle_that_pods_would_not_check_is_noted(signed: Path, tmp_path: Path) -> None:
    done = tbe_export("manifests", str(signed / "1"), *options_for(tmp_path / "k8s"))
    assert done.exit_code == 0, done.stderr
    assert "note: the bundle is signed, but pods do not check it without --trusted-keys" in done.stdout


def test_settings_changed_after_signing_are_not_deployed(signed: Path, keys: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(signed, tmp_path / "m"))
    (model / "config.pbtxt").write_bytes((model / "config.pbtxt").read_bytes() + b"\n")
    arguments = ["manifests", str(model), *options_for(tmp_path / "k8s", "--trusted-keys", str(keys / "ours.pem"))]
    assert tbe_export(*arguments).exit_code == 1
    sign(model / "config.pbtxt", (model / "config.pbtxt").read_bytes(), read_signing_key(keys / "ours.key"), "m")
    assert tbe_export(*arguments).exit_code == 0


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--image", "registry.example/tbe-serving:0.1.0", "--image: expected an image by digest"),
        ("--image", f"x@sha256:{'g' * 64}", "--image: expected an image by digest"),
        ("--image", f"x@sha256:{'0' * 64}\n", "--image: expected an image by digest"),
        ("--claim", "Models", "--claim: expected the name of a PersistentVolumeClaim"),
        ("--metrics-from", "a.b", "--metrics-from: expected the name of a namespace"),
        ("--deltas-claim", "Deltas", "--deltas-claim: expected the name of a PersistentVolumeClaim"),
        ("--deltas-claim", "deltas", "--deltas-claim: expected a model that takes deltas: `tbe-serve configure"),
        ("--replicas-of", "3", "--replicas-of 3: expected HOST=N"),
        ("--replicas-of", "x=3", "--replicas-of x=3: expected HOST=N"),
        ("--replicas-of", "0=1", "--replicas-of: expected hosts of the plan, [], got 0"),
        ("--replicas-of", "3=0", "--replicas-of 3: expected at least 1, got 0"),
        ("--replicas", "0", "--replicas: expected at least 1, got 0"),
        ("--routers", "0", "--routers: expected at least 1, got 0"),
        ("--routers", "9", "--most-routers: expected at least --routers, 9, got 8"),
        ("--scale-on-queue-ms", "0", "--scale-on-queue-ms: expected at least 1, got 0"),
        ("--name", "M", "--name: expected a name that Kubernetes takes"),
        ("--hosts-also", "1", "--hosts-also: expected a router"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_by_name(
    signed: Path, tmp_path: Path, option: str, value: str, said: str
) -> None:
    arguments = dict(zip(*[iter(options_for(tmp_path / "k8s"))] * 2, strict=True)) | {option: value}
    done = tbe_export("manifests", str(signed), *(word for pair in arguments.items() for word in pair))
    assert done.exit_code == 1, done.output
    assert said in done.stderr
    assert not (tmp_path / "k8s").exists()


def test_pods_have_the_repository_from_a_claim_or_a_store(signed: Path, tmp_path: Path) -> None:
    arguments = options_for(tmp_path / "k8s")
    position = arguments.index("--claim")
    for wrong in (
        (*arguments[:position], *arguments[position + 2 :]),
        (*arguments, "--store", "s3://bucket/models"),
        (*arguments[:position], *arguments[position + 2 :], "--store", "bucket/models"),
        (*arguments[:position], *arguments[position + 2 :], "--store", "s3://bucket/models", "--copy"),
    ):
        done = tbe_export("manifests", str(signed), *wrong)
        assert (done.exit_code, "--store: expected" in done.stderr) == (1, True), done.stderr
    done = tbe_export(
        "manifests", str(signed), *arguments[:position], *arguments[position + 2 :], "--store", "s3://bucket/models"
    )
    assert done.exit_code == 0, done.stderr
    assert "needed: s3://bucket/models, with the repository (`tbe-export push`)" in done.stdout


@pytest.mark.parametrize("option", ["--image", "--out"])
def test_options_without_a_default_are_required(signed: Path, tmp_path: Path, option: str) -> None:
    arguments = options_for(tmp_path / "k8s")
    position = arguments.index(option)
    done = tbe_export("manifests", str(signed), *arguments[:position], *arguments[position + 2 :])
    assert done.exit_code == 2
    assert option in done.output


def test_pods_of_a_live_model_mount_deltas_and_have_memory_for_the_copy(tmp_path: Path) -> None:
    config = ExportConfig(serving=ServingSettings(weights_memory="live"))
    bundle = export_model(collection(SUM), tmp_path / "r", "m", config)
    out = tmp_path / "k8s"
    done = tbe_export("manifests", str(bundle), *options_for(out))
    assert done.exit_code == 1
    assert "m: weights-memory: is 'live': say where its deltas are, --deltas-claim" in done.stderr
    assert tbe_export("manifests", str(bundle), *options_for(out), "--deltas-claim", "deltas").exit_code == 0
    (deployment,) = (
        document
        for path in out.glob("*.yaml")
        for document in yaml.safe_load_all(path.read_text())
        if document and document["kind"] == "Deployment"
    )
    pod = deployment["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    assert "--deltas=/deltas" in server["args"]
    assert {"name": "deltas", "mountPath": "/deltas", "readOnly": True} in server["volumeMounts"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["deltas"]["persistentVolumeClaim"] == {"claimName": "deltas", "readOnly": True}
    (instance_mib,) = (int(arg.partition("=")[2]) for arg in server["args"] if arg.startswith("--shm-mib="))
    assert volumes["shared-memory"]["emptyDir"]["sizeLimit"] == f"{2 * instance_mib + 4}Mi"
