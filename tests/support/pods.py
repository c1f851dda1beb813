"""Kubernetes' pods, played by podman: each in a network namespace of its own, all on one bridge.

podman plays Pods. So a pod is made of each Deployment's and StatefulSet's template. Volumes become folders of this
machine, and the records of headless Services become lines of /etc/hosts. Probes are run by whoever wants to know.
"""

import copy
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import yaml

# What requirements/kube.sh makes.
FOLDER = Path(__file__).parents[2] / ".bench" / "kube"
IMAGE = "localhost/tbe-serving"
_PREFIX = "tbe-kube"
_NETWORK = "10.231.0"
# The address of this process on the network of the pods.
BRIDGE = f"{_NETWORK}.1"


def image() -> str:
    """The image, by digest."""
    digest = podman("image", "inspect", f"{IMAGE}:kube", "--format", "{{.Digest}}").stdout.strip()
    return f"{IMAGE}@{digest}"


def podman(*arguments: str, within: tuple[str, ...] = (), check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run podman as requirements/kube.sh set it up."""
    environment = os.environ | {"CONTAINERS_CONF": str(FOLDER / "containers.conf")}
    command = [*within, "podman", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done


@dataclass(frozen=True)
class Volumes:
    """Folders of this machine.

    Attributes:
        claims: of PersistentVolumeClaims, by name.
        secrets: of Secrets and ConfigMaps, by name.
    """

    claims: Mapping[str, Path]
    secrets: Mapping[str, Path]


@dataclass(frozen=True)
class Pod:
    """A pod that is played.

    Attributes:
        server: its container, as Kubernetes would have it.
        manifest: the pod, as podman takes it.
        file: where podman reads that.
    """

    name: str
    address: str
    server: Mapping[str, Any]
    manifest: Mapping[str, Any]
    file: Path

    @property
    def namespace(self) -> str:
        return f"{_PREFIX}-{self.address.rpartition('.')[2]}"

    def play(self) -> None:
        """Start it; returns when what runs before its server has ended."""
        self.file.write_text(yaml.safe_dump(self.manifest))
        podman("kube", "play", "--replace", "--log-driver", "k8s-file", str(self.file), within=self._inside)

    def wait_until_ready(self) -> None:
        """Run its readiness probe until it succeeds."""
        deadline = time.monotonic() + 120
        while not self.is_ready():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.5)

    def kill(self) -> None:
        """Kill all its processes, as a node that is lost does."""
        podman("pod", "kill", self.name)

    def remove(self) -> None:
        podman("pod", "rm", "--force", "--time", "5", self.name, check=False)

    def is_ready(self) -> bool:
        """Make its readiness probe."""
        return self.probe("readinessProbe") == 200

    def probe(self, name: str) -> int | None:
        """Ask what a probe asks, as the kubelet does; the status. None: nobody listens."""
        probe, ports = self.server[name]["httpGet"], self.server["ports"]
        (port,) = (port["containerPort"] for port in ports if port["name"] == probe["port"])
        try:
            with urlopen(f"http://{self.address}:{port}{probe['path']}", timeout=5) as response:
                status: int = response.status
        except HTTPError as error:
            return error.code
        except OSError:
            return None
        return status

    def files(self, folder: str) -> list[str]:
        """The names in a folder of its server."""
        return self._execute("ls", folder).stdout.split()

    def _execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        return podman("exec", f"{self.name}-server", *command, within=self._inside, check=False)

    @property
    def _inside(self) -> tuple[str, ...]:
        """A pod of podman's has the network of whoever plays it, and its commands that of whoever executes them."""
        return ("nsenter", f"--net=/run/netns/{self.namespace}")

    def logs(self) -> str:
        done = podman("logs", f"{self.name}-server", check=False)
        return done.stdout + done.stderr


@contextmanager
def pods(base: Path, replicas: Mapping[str, int], volumes: Volumes, folder: Path) -> Iterator[dict[str, list[Pod]]]:
    """The pods of a kustomize base, by the name of their workload; none is played yet. All are removed at the end.

    Args:
        base: what `tbe-export manifests` wrote.
        replicas: how many pods of each workload; one where it is not named.
        volumes: what they mount.
        folder: for what podman is given.
    """
    rules = subprocess.run(["ip", "-json", "route"], capture_output=True, text=True, check=True).stdout
    assert json.loads(rules or "[]") == [], "expected a network of its own: make kube"
    names = yaml.safe_load((base / "kustomization.yaml").read_text())["resources"]
    manifests = [document for name in names for document in yaml.safe_load_all((base / name).read_text())]
    pods_by_name: dict[str, list[Pod]] = {}
    with ExitStack() as stack:
        stack.enter_context(_bridge())
        for manifest in manifests:
            if manifest["kind"] in ("Deployment", "StatefulSet"):
                name = manifest["metadata"]["name"]
                for number in range(replicas.get(name, 1)):
                    address = f"{_NETWORK}.{11 + sum(map(len, pods_by_name.values()))}"
                    pod = _pod(f"{name}-{number}", address, manifest["spec"]["template"], volumes, folder)
                    pods_by_name.setdefault(name, []).append(pod)
                    stack.enter_context(_namespace(pod))
                    stack.callback(pod.remove)
        lines = [f"{pod.address} {name}" for name, every in pods_by_name.items() for pod in every]
        (FOLDER / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        yield pods_by_name


def _pod(name: str, address: str, template: Any, volumes: Volumes, folder: Path) -> Pod:
    (server,) = template["spec"]["containers"]
    spec = copy.deepcopy(template["spec"]) | {"hostNetwork": True, "restartPolicy": "Never"}
    del spec["containers"][0]["ports"]  # podman would have them be the machine's
    spec["volumes"] = [_folder_of(volume, volumes, folder / name) for volume in spec["volumes"]]
    # podman knows no subPath: the folder in the folder is a volume of its own, which is there already.
    for container in [*spec["initContainers"], *spec["containers"]]:
        for mount in container["volumeMounts"]:
            if sub := mount.pop("subPath", None):
                (volume,) = [volume for volume in spec["volumes"] if volume["name"] == mount["name"]]
                path = Path(volume["hostPath"]["path"])
                for part in Path(sub).parts:  # what fills the volume may write to it
                    path /= part
                    if not path.exists():
                        path.mkdir()
                        path.chmod(0o777)
                mount["name"] = f"{mount['name']}-{container['name']}"
                spec["volumes"].append({"name": mount["name"], "hostPath": {"path": str(path)}})
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    return Pod(name, address, server, manifest, folder / f"{name}.yaml")


def _folder_of(volume: Any, volumes: Volumes, folder: Path) -> Any:
    """A volume as a folder of this machine; `own` has those that are the pod's alone."""
    name = volume["name"]
    match volume:
        case {"emptyDir": _}:
            path = folder / name
            path.mkdir(parents=True)
            path.chmod(0o777)  # as the kubelet makes them
        case {"persistentVolumeClaim": {"claimName": claim}}:
            path = volumes.claims[claim]
        case {"secret": {"secretName": secret}} | {"configMap": {"name": secret}}:
            path = volumes.secrets[secret]
        case _:
            raise AssertionError(volume)
    return {"name": name, "hostPath": {"path": str(path)}}


@contextmanager
def _bridge() -> Iterator[None]:
    """A bridge in this process's network, with an address for whoever looks up."""
    _ip("link", "set", "lo", "up")
    _ip("link", "add", _PREFIX, "type", "bridge")
    try:
        _ip("address", "add", f"{BRIDGE}/24", "dev", _PREFIX)
        _ip("link", "set", _PREFIX, "up")
        yield
    finally:
        _ip("link", "delete", _PREFIX)


@contextmanager
def _namespace(pod: Pod) -> Iterator[None]:
    """A network namespace on the bridge, with the pod's address."""
    name = pod.namespace
    _ip("netns", "add", name)
    try:
        _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", name, "master", _PREFIX, "up")
        for words in (
            ("address", "add", f"{pod.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-netns", name, *words)
        yield
    finally:
        _ip("netns", "delete", name)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
