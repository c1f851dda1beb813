"""What is deployed: manifests that Kubernetes takes, a Dockerfile without known faults, and the same words as ours."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from export.__main__ import app as export_app
from serving.__main__ import app
from serving.server.health_state import HealthState
from serving.triton.command_line import exit_timeout_of
from tests.requirements.test_setup import pins
from tests.serving.server.test_health_http import listening

DEPLOY = Path(__file__).parents[2] / "deploy"
_SERVING = ["serve.txt", "torch-cpu.txt", "torch-pypi.txt"]
# Of each image, the locks that it is built from.
LOCKS = {
    "Dockerfile": _SERVING,
    "debian.Dockerfile": ["triton.txt", *_SERVING],
    "export.Dockerfile": ["export.txt", *_SERVING],
    "client.Dockerfile": ["client.txt"],
}
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
# The oldest that is still supported, and the newest that the schemas know.
VERSIONS = ("1.33", kubernetes_validate.latest_version())


def manifests() -> list[dict[str, Any]]:
    return [document for path in KUBERNETES for document in yaml.safe_load_all(path.read_text())]


def of_kind(kind: str) -> dict[str, Any]:
    (only,) = [manifest for manifest in manifests() if manifest["kind"] == kind]
    return only


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", manifests(), ids=lambda document: f"{document['kind']}")
def test_each_manifest_is_valid_for_kubernetes(manifest: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_the_validator_refuses_a_misspelled_key() -> None:
    wrong = of_kind("Deployment")
    wrong["spec"]["template"]["spec"]["containers"][0]["prots"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_labels_ports_and_names_in_the_manifests_agree() -> None:
    deployment, service = of_kind("Deployment"), of_kind("Service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    assert of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    ports = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    scaled = of_kind("HorizontalPodAutoscaler")["spec"]
    assert scaled["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    (rule,) = yaml.safe_load(of_kind("ConfigMap")["data"]["config.yaml"])["rules"]
    assert scaled["metrics"][0]["pods"]["metric"]["name"] == rule["name"]["as"]


def test_the_container_runs_unprivileged_on_a_read_only_root() -> None:
    pod = of_kind("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert mounts["/repository"]["readOnly"] is True
    assert mounts["/tls"]["readOnly"] is True
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"]["medium"] == "Memory"


def test_only_what_was_verified_and_signed_is_served() -> None:
    """The gate reads what the server does, by the same keys; the server's copy lies where nobody else writes."""
    pod = of_kind("Deployment")["spec"]["template"]["spec"]
    (gate,), (container,) = pod["initContainers"], pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for container_ in (gate, container):
        mounts = {mount["mountPath"]: mount for mount in container_["volumeMounts"]}
        assert mounts["/repository"]["readOnly"] is True
        assert mounts["/keys"]["readOnly"] is True
        assert volumes[mounts["/keys"]["name"]]["configMap"]["name"] == "lookup-trusted-keys"
        assert container_["securityContext"] == container["securityContext"]
    assert "--trusted-keys=/keys/trusted.pem" in container["args"]
    assert "--private-folder=/private" in container["args"]
    assert "emptyDir" in volumes[mounts["/private"]["name"]]
    result = CliRunner().invoke(export_app, gate["args"])
    assert result.exit_code == 1
    assert "/keys/trusted.pem: trusted keys: cannot be read: No such file or directory" in result.output
    _, repository, *_ = gate["args"]
    assert Path(repository).name == "movies"


def test_only_grpc_and_operations_ports_are_open_and_egress_is_blocked() -> None:
    policy = of_kind("NetworkPolicy")["spec"]
    assert policy["podSelector"] == of_kind("Deployment")["spec"]["selector"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == []
    assert [[port["port"] for port in rule["ports"]] for rule in policy["ingress"]] == [["grpc"], ["operations"]]
    assert all(rule["from"] for rule in policy["ingress"])
    exposed = [port["port"] for port in of_kind("Service")["spec"]["ports"]]
    assert exposed == [8001, 8002]


def test_probes_ask_the_operations_port_and_start_nothing() -> None:
    (container,) = of_kind("Deployment")["spec"]["template"]["spec"]["containers"]
    probes = {name: probe["httpGet"] for name, probe in container.items() if name.endswith("Probe")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/readyz",
        "readinessProbe": "/readyz",
        "livenessProbe": "/livez",
    }
    (port,) = {probe["port"] for probe in probes.values()}
    assert {"name": port, "containerPort": 8002} in container["ports"]


def test_the_operations_port_listens_on_all_interfaces() -> None:
    assert "--operations-host=0.0.0.0" in arguments_of_kubernetes()
    for image in ("Dockerfile", "debian.Dockerfile"):
        arguments = arguments_of_the_image(image)
        assert arguments[arguments.index("--operations-host") + 1] == "0.0.0.0"


def test_a_pod_and_a_container_have_time_to_drain() -> None:
    pod = of_kind("Deployment")["spec"]["template"]["spec"]
    (drain_s,) = [
        float(argument.partition("=")[2])
        for argument in arguments_of_kubernetes()
        if argument.startswith("--drain-s")
    ]
    probe = pod["containers"][0]["readinessProbe"]
    assert drain_s / 2 >= probe["periodSeconds"]  # a first look, until it refuses new connections
    assert pod["terminationGracePeriodSeconds"] >= drain_s + exit_timeout_of([])
    for image in ("Dockerfile", "debian.Dockerfile"):
        arguments = arguments_of_the_image(image)
        assert float(arguments[arguments.index("--drain-s") + 1]) <= 10 - 3  # of `docker stop`


def arguments_of_kubernetes() -> list[str]:
    (container,) = of_kind("Deployment")["spec"]["template"]["spec"]["containers"]
    arguments: list[str] = container["args"]
    return arguments


def arguments_of_the_image(name: str) -> list[str]:
    (line,) = [line for line in (DEPLOY / name).read_text().splitlines() if line.startswith("CMD ")]
    report: list[str] = json.loads(line.removeprefix("CMD "))
    return report


@pytest.mark.parametrize(
    "arguments",
    [arguments_of_kubernetes(), arguments_of_the_image("Dockerfile"), arguments_of_the_image("debian.Dockerfile")],
    ids=["kubernetes", "image", "debian"],
)
def test_deployed_options_are_accepted_and_a_certificate_is_required(arguments: list[str]) -> None:
    """Here there is none: that is what it has to fail for, once its options were understood."""
    result = CliRunner().invoke(app, ["run", "/repository", *arguments])
    assert result.exit_code == 1, result.output
    assert (
        "--tls-cert, --tls-key: /tls/tls.crt: expected a certificate in PEM, and its key in /tls/tls.key"
        in result.output
    )


@pytest.mark.parametrize("name", sorted(LOCKS))
def test_the_dockerfile_has_no_known_fault(name: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DEPLOY / name], capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert done.returncode == 0


@pytest.mark.parametrize("name", sorted(LOCKS))
def test_the_dockerfile_copies_existing_paths(name: str) -> None:
    lines = (DEPLOY / name).read_text().splitlines()
    copied = [source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]]
    assert copied
    for source in copied:
        assert (DEPLOY.parent / source).exists(), source
    assert "USER 1000:1000" in lines


def test_dockerignore_sends_only_the_copied_paths() -> None:
    """By .dockerignore: all is left out but what is named."""
    first, *rest = [line for line in (DEPLOY.parent / ".dockerignore").read_text().splitlines() if line[0] != "#"]
    sent = {other.removeprefix("!") for other in rest if other.startswith("!")}
    text = "".join((DEPLOY / name).read_text() for name in LOCKS)
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()}
    assert first == "*"
    assert sent == {path.partition("/")[0] for path in copied}
    assert [other for other in rest if not other.startswith("!")] == ["**/__pycache__"]


def test_the_health_check_of_an_image_follows_the_operations_port() -> None:
    """Asked of a port of a test's own in its place."""
    (said,) = {
        line.strip()
        for name in ("Dockerfile", "debian.Dockerfile")
        for line in (DEPLOY / name).read_text().splitlines()
        if line.strip().startswith('CMD ["bash"')
    }
    health = HealthState()
    with listening(health) as (host, port):
        command = [
            argument.replace("127.0.0.1/8002", f"{host}/{port}") for argument in json.loads(said.removeprefix("CMD "))
        ]
        assert any(str(port) in word for word in command)
        assert subprocess.run(command, check=False).returncode == 1
        health.server_problem = None
        assert subprocess.run(command, check=False).returncode == 0
    assert subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 1


def test_the_image_is_a_production_release_above_the_security_floor() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    (image,) = [line for line in lines if line.startswith("ARG TRITON_IMAGE=")]
    release = image.partition("tritonserver:")[2].removesuffix("-py3")
    year, month = release.split(".")
    assert (int(year), int(month)) >= (26, 4), "below the security floor"
    assert f"Run the official container **{release}**" in (DEPLOY.parent / "docs" / "versions.md").read_text()
    assert {"ARG TRITON_DIGEST", "FROM ${TRITON_IMAGE}@${TRITON_DIGEST}"} <= set(lines), "a tag can be moved"


def test_the_image_s_pins_are_the_environment_s() -> None:
    requirements = DEPLOY.parent / "requirements"
    for name, expected in LOCKS.items():
        (copied,) = re.findall(r"^COPY (requirements/.*) \S+$", (DEPLOY / name).read_text(), re.MULTILINE)
        scripts = ["torch.sh"] if "torch-cpu.txt" in expected else []
        assert sorted(copied.replace("requirements/", "").split()) == sorted([*expected, *scripts])
        assert all(pins(requirements / lock) for lock in expected)
    assert {"fbgemm-gpu-cpu", "grpcio", "msgspec"} <= pins(requirements / "serve.txt").keys()
    client = pins(requirements / "client.txt")
    assert client.items() <= pins(requirements / "serve.txt").items()
    assert "torch" not in client
